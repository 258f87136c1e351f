"""Indices that are outside of what they index, of which XLA does not tell.

Without XLA, TensorFlow on a CPU refuses an id that an embedding has no row for,
and a label that is no class. XLA takes another row, or makes a loss of NaN.
"""

from typing import Any

import tensorflow as tf

from accumtrainer.keras_api.types import Tensor


def indexing(graph: Any) -> list[tuple[Any, Tensor, int]]:
    """Find the operations of a graph that look something up by indices.

    Those of functions that the graph calls or loops over are not among them.

    Args:
        graph: `tf.Graph`.

    Returns:
        List of triples: an operation, its indices, and how many there are to
        choose from, an int.
    """
    found = []
    for operation in graph.get_operations():
        if operation.type == "GatherV2":
            table, indices, axis = operation.inputs
            axis = tf.get_static_value(axis)
            size = None if axis is None else table.shape[int(axis)]
        elif operation.type == "SparseSoftmaxCrossEntropyWithLogits":
            logits, indices = operation.inputs
            size = logits.shape[-1]
        else:
            continue
        if size is not None:
            found.append((operation, indices, size))
    return found


def is_outside(indices: Tensor, size: int) -> Tensor:
    """Tell whether any index is none of `0 .. size - 1`, scalar bool."""
    return tf.reduce_any((indices < 0) | (indices >= size))
