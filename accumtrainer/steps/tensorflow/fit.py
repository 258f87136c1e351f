"""How batches are taken from what `Model.fit` of TensorFlow trains on."""

import contextlib
import functools
from typing import Any

import tensorflow as tf

from accumtrainer.keras_api import tree
from accumtrainer.keras_api.types import Nest, Tensor


def next_batch(iterator: Any) -> Nest:
    """Return the next batch that `Model.fit` would train on.

    A part that a generator leaves out arrives as an empty optional.
    """
    return tree.map_structure(
        lambda leaf: (
            None if isinstance(leaf, tf.experimental.Optional) else leaf
        ),
        next(iterator),
    )


def next_batches(iterator: Any, count: int) -> tuple[list[Nest] | None, Nest]:
    """Take the next batches that `Model.fit` would train on.

    Where only their sizes can differ, one compiled call takes them all.

    Args:
        iterator: what `fit` hands over.
        count: how many to take if there are as many.

    Returns:
        Pair: list of at least one batch, and `None`; or `None`, and a
        nest of tensors `[count, m, ...]` where all have the same size.

    Raises:
        StopIteration: there is none.
    """
    if not _can_join(iterator.element_spec):
        return _take_one_by_one(iterator, count), None
    joined, sizes = _take_joined(iterator, tf.constant(count))
    sizes = sizes.numpy().tolist()
    if not sizes:
        raise StopIteration
    if len(sizes) == count and len(set(sizes)) == 1:
        shape = [count, sizes[0]]
        return None, tree.map_structure(
            lambda leaf: tf.reshape(leaf, shape + leaf.shape[1:]), joined
        )
    parts = tree.map_structure(lambda leaf: tf.split(leaf, sizes), joined)
    return [
        tree.map_structure_up_to(joined, lambda p, i=i: p[i], parts)
        for i in range(len(sizes))
    ], None


def _can_join(spec: Any) -> bool:
    """Whether the batches of an iterator differ in nothing but their sizes."""
    return all(
        isinstance(leaf, tf.TensorSpec)
        and leaf.shape.rank
        and leaf.shape[1:].is_fully_defined()
        for leaf in tree.flatten(spec)
    )


def _take_one_by_one(iterator: Any, count: int) -> list[Nest]:
    batches = [next_batch(iterator)]
    with contextlib.suppress(StopIteration):
        while len(batches) < count:
            batches.append(next_batch(iterator))
    return batches


@functools.partial(tf.function, autograph=False, reduce_retracing=True)
def _take_joined(iterator: Any, count: Tensor) -> tuple[Tensor, Nest]:
    """Join up to `count` batches row by row, and return their sizes."""
    spec = iterator.element_spec
    leaf_specs = tf.nest.flatten(spec)

    def step(index: Tensor, optional: Any, arrays: Any, sizes: Any) -> tuple:
        leaves = tf.nest.flatten(optional.get_value())
        arrays = [
            a.write(index, v) for a, v in zip(arrays, leaves, strict=True)
        ]
        sizes = sizes.write(index, tf.shape(leaves[0])[0])
        optional = tf.cond(
            index + 1 < count,
            iterator.get_next_as_optional,
            lambda: tf.experimental.Optional.empty(spec),
        )
        return index + 1, optional, arrays, sizes

    arrays = [
        tf.TensorArray(
            leaf.dtype,
            size=0,
            dynamic_size=True,
            infer_shape=False,
            element_shape=tf.TensorShape([None]).concatenate(leaf.shape[1:]),
        )
        for leaf in leaf_specs
    ]
    sizes = tf.TensorArray(tf.int32, size=0, dynamic_size=True)
    *_, arrays, sizes = tf.while_loop(
        lambda index, optional, arrays, sizes: optional.has_value(),
        step,
        [tf.constant(0), iterator.get_next_as_optional(), arrays, sizes],
        parallel_iterations=1,
    )
    joined = tf.nest.pack_sequence_as(spec, [a.concat() for a in arrays])
    return joined, sizes.stack()
