"""Finds out what training data are, and makes the source for them.

A source knows nothing about updates; `groups` in `position.py` groups what
it yields.
"""

import math
from collections.abc import Iterable
from itertools import islice
from numbers import Real
from typing import Protocol, runtime_checkable

import numpy as np

from accumtrainer import errors
from accumtrainer.data.arrays import ArraySource
from accumtrainer.data.batches import (
    Batch,
    as_arrays,
    count_samples,
    leaves,
    map_leaves,
    refuse_sparse,
)
from accumtrainer.data.loaders import IterableSource, PyDatasetSource
from accumtrainer.data.source import Source
from accumtrainer.keras_api import keras, refuse_other_keras


@runtime_checkable
class SupportsArray(Protocol):
    """What NumPy can read: arrays, tensors of any backend, pandas objects."""

    def __array__(self):
        """Return the values as a NumPy array."""


def make_source(
    x,
    y=None,
    sample_weight=None,
    *,
    batch_size=None,
    shuffle=True,
    seed=0,
    class_weight=None,
    steps=None,
    epochs_before=0,
):
    """Find out what the training data are, and make the source for them.

    Arrays, tensors, pandas objects and nests of them become an `ArraySource`;
    a `keras.utils.PyDataset` a `PyDatasetSource`; everything else that can be
    iterated an `IterableSource`, for which `shuffle` and `seed` mean nothing.
    A list of tuples without y is a list of batches; any other nest of arrays
    is one set of inputs, as in Keras.

    Args:
        x: the data.
        y: targets, with arrays only.
        sample_weight: weights of samples, with arrays only.
        batch_size: samples in a loader batch, with arrays only; 32 if `None`.
        shuffle: whether arrays and finite PyDatasets are shuffled.
        seed: whole number of at least 0 that decides the order.
        class_weight: dict `{class: weight}`, or `None`.
        steps: loader batches in an epoch (`steps_per_epoch`), or `None`.
        epochs_before: epochs before epoch 0, whose orders do not come again.

    Returns:
        `Source`.

    Raises:
        TypeError: x is nothing batches can be taken from.
        ValueError: x is empty, or something was given that does not go with
            it.

    Example:
        >>> import numpy as np
        >>> make_source(np.zeros([100, 2]), batch_size=8).batches_per_epoch
        13
    """
    if not _is_list_of_batches(x):
        refuse_sparse("x", x)
    if _is_array_data(x) and not (y is None and _is_list_of_batches(x)):
        return ArraySource(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            class_weight=class_weight,
            steps=steps,
            epochs_before=epochs_before,
        )
    _check_iterable(x)
    _refuse_beside_loader(x, "y", y)
    _refuse_beside_loader(x, "sample_weight", sample_weight)
    _refuse_beside_loader(x, "batch_size", batch_size)
    if isinstance(x, keras.utils.PyDataset):
        return PyDatasetSource(
            x,
            shuffle=shuffle,
            seed=seed,
            class_weight=class_weight,
            steps=steps,
            epochs_before=epochs_before,
        )
    return IterableSource(x, class_weight=class_weight, steps=steps)


def make_source_of_one(x, y=None, sample_weight=None, class_weight=None):
    """Make a source that yields arrays in one piece, as one loader batch."""
    return make_source(
        x,
        y,
        sample_weight,
        batch_size=np.iinfo(np.int32).max,
        shuffle=False,
        class_weight=class_weight,
    )


def _is_array_data(x):
    arrays = leaves(x)
    return bool(arrays) and all(isinstance(a, SupportsArray) for a in arrays)


def _is_list_of_batches(x):
    return isinstance(x, list) and all(isinstance(item, tuple) for item in x)


def _check_iterable(x):
    """Refuse what is neither array data nor a loader, saying what to give."""
    refuse_other_keras("x", x)
    is_loader = isinstance(x, (Iterable, keras.utils.PyDataset))
    if callable(x) and not is_loader:
        raise TypeError(
            "x must be data, or an iterable of batches. Received: the "
            f"function {x!r}. Call it first: fit(make_batches())."
        )
    is_nest = isinstance(x, (tuple, dict)) or (
        isinstance(x, list) and x and not isinstance(x[0], (tuple, dict))
    )
    if is_nest or isinstance(x, (str, bytes)) or not is_loader:
        raise TypeError(
            errors.NOT_AN_ARRAY.format(name="x", received=repr(x)[:80])
        )


def _refuse_beside_loader(x, name, value):
    if value is None:
        return
    raise ValueError(
        f"{name} must be left out when x is no array but yields batches. "
        f"Received: x of type {type(x).__name__} and {name} of type "
        f"{type(value).__name__}. Let the loader yield (x, y) or "
        "(x, y, sample_weight) in batches of the size wanted."
    )


def train_validation_split(x, y, sample_weight, fraction):
    """Split arrays so that the last part, in given order, is for validation.

    Stands for: `(leaf[:split], leaf[split:])` for every leaf.

    Args:
        x: array or nest of arrays.
        y: the same, or `None`.
        sample_weight: the same, or `None`.
        fraction: part of the samples kept for validation, between 0 and 1.

    Returns:
        Two `Batch`es of views, for training and for validation.

    Raises:
        TypeError: the data are no arrays, or `fraction` is no number.
        ValueError: `fraction` is not between 0 and 1, or leaves one part
            empty.

    Example:
        >>> import numpy as np
        >>> train, held = train_validation_split(np.arange(5), None, None, 0.4)
        >>> train.x, held.x
        (array([0, 1, 2]), array([3, 4]))
    """
    refuse_sparse("x", x)
    if not _is_array_data(x) or (y is None and _is_list_of_batches(x)):
        raise TypeError(
            "validation_split must come with arrays as x. Received: "
            f"x of type {type(x).__name__}. Give validation_data instead."
        )
    is_number = isinstance(fraction, Real) and not isinstance(fraction, bool)
    if not is_number or not 0 < fraction < 1:
        raise ValueError(
            "validation_split must be between 0 and 1. Received: "
            f"validation_split={fraction!r}. Use 0.2 to hold back the last "
            "fifth."
        )
    data = Batch(
        as_arrays(x, "x"),
        as_arrays(y, "y"),
        as_arrays(sample_weight, "sample_weight"),
    )
    samples = count_samples(data)
    split = math.floor(samples * (1.0 - fraction))
    if not 0 < split < samples:
        raise ValueError(
            "validation_split must leave samples on both sides. Received: "
            f"validation_split={fraction!r} of {samples} samples. Give more "
            "data or another fraction."
        )
    return (
        map_leaves(lambda leaf: leaf[:split], data),
        map_leaves(lambda leaf: leaf[split:], data),
    )


class FirstBatches(Source):
    """The first few loader batches of another source, again every epoch.

    Args:
        source: `Source`.
        count: loader batches to keep, at least 1.
    """

    def __init__(self, source, count):
        self._source = source
        self._items = list(islice(source.iterate(0), count))
        self.batches_per_epoch = len(self._items)
        self.batch_size = source.batch_size

    def iterate(self, epoch, start=0):
        """Yield the kept items."""
        del epoch
        return iter(self._items[start:])

    def get_state(self):
        return {}

    def go_to(self, position, state, *, fast_forward):
        """Nothing to do: every place is an index."""

    def window(self, items, micro_batch_size):
        """Make a window as the other source would."""
        return self._source.window(items, micro_batch_size)
