"""Indices that are outside of what they index, of which XLA does not tell.

Without XLA, TensorFlow on a CPU refuses an id that an embedding has no row for,
and a label that is no class. XLA takes another row, or makes a loss of NaN.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from accumtrainer import errors
from accumtrainer.keras_api.types import Tensor


class Indices:
    """Looks for indices outside while a window runs, and tells of them after.

    Of the operations that index, the number of one that was given an index
    outside is kept on the device, from 1; 0 says that none was.
    """

    def __init__(self) -> None:
        self._operations: list[tuple[str, int]] = []
        self._outside = tf.Variable(0, trainable=False, name="outside")

    def look_at(self, graph: Any) -> None:
        """Have a graph that is being traced look at its indices."""
        found = indexing(graph)
        if not found:
            return
        first = len(self._operations) + 1
        self._operations += [(op.name, size) for op, _, size in found]
        numbers = [
            tf.where(is_outside(indices, size), first + position, 0)
            for position, (_, indices, size) in enumerate(found)
        ]
        number = functools.reduce(tf.maximum, numbers)
        self._outside.assign(tf.maximum(self._outside.read_value(), number))

    def accept(self, is_finite: Tensor) -> Tensor:
        """Whether to apply a window: it is finite, and no index outside."""
        if not self._operations:
            return is_finite
        return is_finite & (self._outside.read_value() == 0)

    def check(self, was_applied: Callable[[], bool]) -> None:
        """Refuse a window with an index outside; see `Backend.check`."""
        # What is reported is read sooner or later; the variable need not be.
        if not self._operations or was_applied():
            return
        number = int(self._outside.numpy())
        if number:
            self._outside.assign(0)
            name, size = self._operations[number - 1]
            raise errors.DataError(
                errors.INDEX_OUTSIDE.format(name=name, last=size - 1)
            )


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
