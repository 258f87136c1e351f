"""A function of TensorFlow, run for all rows of tensors at once."""

import warnings
from collections.abc import Callable
from typing import Any

import optree
import tensorflow as tf

from accumtrainer import errors
from accumtrainer.keras_api.types import Nest, Tensor

LOOPS = "Loops, such as those of recurrent layers, are not vectorized."


def map_rows(function: Callable[[Nest], Nest], stacked: Nest) -> Nest:
    """Run a function on every row of tensors, vectorized where that can be.

    Args:
        function: takes a nest of tensors and returns one, with `None` where
            a part is missing.
        stacked: nest of tensors `[length, ...]`.

    Returns:
        Nest of tensors `[length, ...]`.
    """
    leaves, treedef = optree.tree_flatten(stacked)
    found: Any = None

    def run(items: list[Tensor]) -> list[Tensor]:
        nonlocal found
        result = function(optree.tree_unflatten(treedef, items))
        results, found = optree.tree_flatten(result)
        return results

    if tf.executing_eagerly():
        rows = zip(*map(tf.unstack, leaves), strict=True)
        columns = zip(*[run(list(row)) for row in rows], strict=True)
        results = list(map(tf.stack, columns))
    else:
        results = _vectorized(run, leaves)
    return optree.tree_unflatten(found, results)


def _vectorized(
    run: Callable[[list[Tensor]], list[Tensor]], leaves: list[Tensor]
) -> list[Tensor]:

    def run_vectorized(items: list[Tensor]) -> list[Tensor]:
        graph = tf.constant(0).graph
        before = len(graph.get_operations())
        results = run(items)
        operations = graph.get_operations()[before:]
        if any("While" in operation.type for operation in operations):
            # What TensorFlow cannot vectorize ends in an error too; rows then
            # run one by one, below.
            raise NotImplementedError(LOOPS)
        return results

    try:
        return tf.vectorized_map(run_vectorized, leaves)
    except Exception as error:
        # What the function itself raises comes again, as it was raised.
        results = _one_by_one(run, leaves)
        reason = str(error).strip().splitlines()[-1]
        warnings.warn(errors.NOT_VECTORIZED.format(reason=reason), stacklevel=2)
        return results


def _one_by_one(
    run: Callable[[list[Tensor]], list[Tensor]], leaves: list[Tensor]
) -> list[Tensor]:
    """Run a function row by row, in a loop."""
    first = run([leaf[0] for leaf in leaves])
    length = tf.shape(leaves[0])[0]

    def step(index: Tensor, arrays: list[Any]) -> tuple:
        row = run([leaf[index] for leaf in leaves])
        return index + 1, [
            array.write(index, value)
            for array, value in zip(arrays, row, strict=True)
        ]

    _, arrays = tf.while_loop(
        lambda index, _: index < length,
        step,
        [
            tf.constant(0),
            [
                tf.TensorArray(v.dtype, size=length, element_shape=v.shape)
                for v in first
            ],
        ],
        parallel_iterations=1,
    )
    return [array.stack() for array in arrays]
