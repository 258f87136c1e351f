"""What `Model.fit` trains on, kept where its arrays are."""

import functools

import numpy as np

from accumtrainer import errors
from accumtrainer.batches import (
    Batch,
    Window,
    count_samples,
    leaves,
    map_leaves,
)
from accumtrainer.keras_api import keras, ops
from accumtrainer.sources import SPARSE_TYPES


class Group:
    """Some batches in a row, one by one or stacked already.

    Args:
        batches: list of `Batch`es of arrays or tensors.
        stacked: `Batch` of arrays or tensors `[n, m, ...]` instead.
    """

    def __init__(self, batches=(), stacked=None):
        self._batches = list(batches)
        self._stacked = stacked
        if stacked is None:
            self._sizes = [count_samples(batch) for batch in self._batches]
        else:
            count, size = leaves(stacked)[0].shape[:2]
            self._sizes = [size] * count

    def __len__(self):
        return len(self._sizes)

    @property
    def samples(self):
        """Number of samples in all batches together."""
        return sum(self._sizes)

    @property
    def is_even(self):
        """Whether all batches have the same shapes and types."""
        return (
            self._stacked is not None
            or len({_signature(batch) for batch in self._batches}) == 1
        )

    def cut(self, count):
        """Cut in two.

        Returns:
            The first `count` batches and those after them, `Group`s.
        """
        if count >= len(self):
            return self, Group()
        if self._stacked is None:
            return Group(self._batches[:count]), Group(self._batches[count:])
        first = map_leaves(lambda leaf: leaf[:count], self._stacked)
        rest = map_leaves(lambda leaf: leaf[count:], self._stacked)
        return Group(stacked=first), Group(stacked=rest)

    def batches(self):
        """Return the batches one by one."""
        if self._stacked is None:
            return self._batches
        return list(self.window().split())

    def window(self):
        """Return the batches as a `Window`, stacked if they can be."""
        sizes = tuple(self._sizes)
        if self._stacked is not None:
            return Window(self._stacked, None, sizes)
        if not self.is_even:
            return Window(None, tuple(self._batches), sizes)
        return Window(map_leaves(_stack, *self._batches), None, sizes)


def as_batch(item):
    """Read what `fit` trains on as a `Batch`.

    Args:
        item: x, or a tuple or list of x, y and sample_weight, or of the first
            of them; arrays or tensors.

    Returns:
        `Batch`, floats cast to `keras.config.floatx()` as a Trainer does.
    """
    parts = item if isinstance(item, (tuple, list)) else (item,)
    return Batch(*map(_as_floatx, parts))


def _as_floatx(part):
    if isinstance(part, np.ndarray):
        return _cast(part)
    return map_leaves(_cast, part)


def _cast(leaf):
    floatx = keras.config.floatx()
    return ops.cast(leaf, floatx) if _differs(leaf.dtype, floatx) else leaf


@functools.cache
def _differs(dtype, floatx):
    """Tell floats of another type; by name, as NumPy knows no bfloat16."""
    return "float" in dtype.name and dtype.name != floatx


def check_dense(batch):
    """Refuse what cannot be stacked.

    Args:
        batch: `Batch`.

    Raises:
        TypeError: an array is sparse or ragged.
    """
    for name, part in batch._asdict().items():
        for leaf in leaves(part):
            kind = type(leaf).__name__
            if kind in SPARSE_TYPES:
                raise TypeError(
                    errors.NOT_AN_ARRAY.format(name=name, received=kind)
                )


def _signature(batch):
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves(batch))


def _stack(*rows):
    is_on_host = isinstance(rows[0], np.ndarray)
    return np.stack(rows) if is_on_host else ops.stack(rows)
