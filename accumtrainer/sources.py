"""Where loader batches come from: arrays, PyDatasets, and other iterables.

`make_source` chooses. A source knows nothing about updates; `windows` in
`batches.py` groups what it yields.
"""

import abc
import math
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np

from accumtrainer import errors
from accumtrainer.batches import (
    Batch,
    as_arrays,
    count_samples,
    leaves,
    map_leaves,
    slice_sizes,
    unpack,
    weigh_classes,
    window_of_batches,
    window_of_rows,
)
from accumtrainer.config import require_count
from accumtrainer.keras_api import keras, tree

DEFAULT_BATCH_SIZE = 32
SPARSE_TYPES = ("RaggedTensor", "SparseTensor")


@runtime_checkable
class SupportsArray(Protocol):
    """What NumPy can read: arrays, tensors of any backend, pandas objects."""

    def __array__(self):
        """Return the values as a NumPy array."""


class Source(abc.ABC):
    """Where loader batches come from, epoch by epoch.

    Attributes:
        batches_per_epoch: loader batches in an epoch, `None` if unknown.
        samples_per_epoch: samples in an epoch, `None` if unknown.
        batch_size: samples in a loader batch, `None` if unknown.
        is_one_shot: whether the data can be iterated only once, so that
            epochs share it and several need `steps_per_epoch`.
    """

    batches_per_epoch: Any = None  # a property where it can change
    samples_per_epoch: int | None = None
    batch_size: int | None = None
    is_one_shot: bool = False

    @abc.abstractmethod
    def iterate(self, epoch):
        """Yield the loader items of one epoch, in order.

        Args:
            epoch: index of the epoch, from zero.

        Yields:
            Items to hand to `window`, one for every loader batch.
        """

    @abc.abstractmethod
    def window(self, items, micro_batch_size):
        """Make a window of loader items.

        Args:
            items: sequence of items that `iterate` yielded, each of them one
                micro-batch; exactly one with `micro_batch_size`.
            micro_batch_size: samples per micro-batch when the one item is
                sliced, the last slice possibly shorter; else `None`.

        Returns:
            `Window`.
        """


def _passes(epoch, steps, batches):
    """Yield `(pass_index, start, stop)` for the batches of one epoch.

    Without `steps` an epoch is one pass over the data. With it, epochs cut
    an endless row of passes into pieces of `steps` batches.
    """
    if steps is None:
        yield epoch, 0, batches
        return
    position, end = epoch * steps, (epoch + 1) * steps
    while position < end:
        pass_index, start = divmod(position, batches)
        stop = min(batches, start + end - position)
        yield pass_index, start, stop
        position += stop - start


def _permutation(size, seed, pass_index):
    """Return the order of one pass, which depends on nothing else."""
    order = np.random.default_rng((seed, pass_index)).permutation(size)
    return order.astype(np.intp, copy=False)


class ArraySource(Source):
    """Loader batches cut from arrays in memory; items are row indices.

    A last short batch is kept. With `steps` every epoch has exactly that many
    batches, and the next one goes on where it stopped; at the end of the data
    the next pass begins at once. (Keras would end that epoch early and warn.)

    Args:
        x: array or nest of arrays; every leaf has one row per sample.
        y: the same for targets, or `None`.
        sample_weight: weights for y, or `None`. A single array beside several
            outputs holds for each of them.
        batch_size: samples in a loader batch. `None` means 32 or, with
            `steps`, the data divided by them.
        shuffle: whether every pass has an order of its own.
        seed: whole number of at least 0. The order of a pass depends only on
            it and on the index of the pass.
        class_weight: dict `{class: weight}`, or `None`.
        steps: loader batches in an epoch, or `None` for one pass.

    Raises:
        TypeError: a leaf is no dense array, or an option has the wrong type.
        ValueError: lengths differ, the data are empty, or an option has a
            value that is not allowed.
    """

    def __init__(
        self,
        x,
        y=None,
        sample_weight=None,
        *,
        batch_size=None,
        shuffle=True,
        seed=0,
        class_weight=None,
        steps=None,
    ):
        _check_sizes(batch_size, shuffle, steps)
        data = Batch(
            as_arrays(x, "x"),
            as_arrays(y, "y"),
            as_arrays(sample_weight, "sample_weight"),
        )
        samples = count_samples(data)
        if class_weight is not None:
            data = weigh_classes(data, class_weight)
        self._data = _spread_sample_weight(data)
        self._samples = samples
        self._shuffle = shuffle
        self._seed = seed
        self._steps = steps
        if batch_size is None:
            batch_size = (
                math.ceil(samples / steps) if steps else DEFAULT_BATCH_SIZE
            )
        self.batch_size = batch_size
        self.batches_per_epoch = steps or math.ceil(samples / batch_size)
        self.samples_per_epoch = None if steps else samples

    def iterate(self, epoch):
        """Yield the row indices of every loader batch, shape `[<= b]`."""
        batches = math.ceil(self._samples / self.batch_size)
        for pass_index, start, stop in _passes(epoch, self._steps, batches):
            order = self._order(pass_index)
            for batch in range(start, stop):
                row = batch * self.batch_size
                yield order[row : row + self.batch_size]

    def window(self, items, micro_batch_size):
        """Gather all rows of a window at once, or slice neighbouring ones."""
        sizes = tuple(len(item) for item in items)
        if micro_batch_size is not None:
            (size,) = sizes
            sizes = slice_sizes(size, micro_batch_size)
        rows = items[0] if len(items) == 1 else np.concatenate(items)
        if not self._shuffle and _are_neighbours(rows):
            rows = slice(rows[0], rows[-1] + 1)
            gathered = map_leaves(lambda leaf: leaf[rows], self._data)
        else:
            gathered = map_leaves(
                lambda leaf: np.take(leaf, rows, axis=0), self._data
            )
        return window_of_rows(gathered, sizes)

    def _order(self, pass_index):
        if not self._shuffle:
            return np.arange(self._samples, dtype=np.intp)
        return _permutation(self._samples, self._seed, pass_index)


def _are_neighbours(rows):
    return bool(np.all(np.diff(rows) == 1))


def _check_sizes(batch_size, shuffle, steps):
    if batch_size is not None:
        require_count(
            "batch_size", batch_size, "Give the samples of a loader batch."
        )
    if steps is not None:
        require_count(
            "steps_per_epoch", steps, "Leave it out for one pass per epoch."
        )
    if not isinstance(shuffle, (bool, np.bool_)):
        raise TypeError(
            "shuffle must be True or False. Received: "
            f"shuffle={shuffle!r}. Use True to shuffle samples before they "
            "are batched."
        )


def _spread_sample_weight(data):
    """Give every output its weights when one array was given for all."""
    y, sample_weight = data.y, data.sample_weight
    if sample_weight is None or not tree.is_nested(y):
        return data
    if tree.is_nested(sample_weight):
        try:
            tree.assert_same_structure(y, sample_weight)
        except ValueError as error:
            raise ValueError(
                "sample_weight must be nested as y is, or be one array for "
                "all outputs. Received: "
                f"{_outline(sample_weight)} beside y of {_outline(y)}. Give "
                "one array per output, under the same keys."
            ) from error
        return data
    if sample_weight.ndim > 1 and sample_weight.shape[1:] != (1,):
        raise ValueError(
            "sample_weight must have one number per sample when one array "
            "serves several outputs. Received: shape "
            f"{sample_weight.shape}. Give one array per output."
        )
    spread = map_leaves(lambda _: sample_weight, y)
    return data._replace(sample_weight=spread)


def _outline(nest):
    """Describe a nest by its shapes."""
    return str(map_leaves(lambda leaf: f"array{list(leaf.shape)}", nest))


class PyDatasetSource(Source):
    """Loader batches of a `keras.utils.PyDataset`; items are `Batch`es.

    `shuffle` permutes the order of batches. With more than one worker, that
    many threads load ahead, at most `max_queue_size` batches, in order. The
    dataset's `on_epoch_begin` and `on_epoch_end` are called. With `steps`
    epochs go on where the last one stopped, as for arrays.

    Args:
        dataset: the `keras.utils.PyDataset`; infinite when it has no length.
        shuffle: whether every pass has an order of its own; an infinite
            dataset is never shuffled.
        seed: whole number of at least 0, as for arrays.
        class_weight: dict `{class: weight}`, or `None`.
        steps: loader batches in an epoch, or `None` for one pass.

    Raises:
        ValueError: the dataset asks for processes, or is empty.
    """

    def __init__(
        self, dataset, *, shuffle=True, seed=0, class_weight=None, steps=None
    ):
        _check_sizes(None, shuffle, steps)
        if dataset.use_multiprocessing:
            raise ValueError(
                "use_multiprocessing must be False in a PyDataset, because "
                "processes cannot share a device safely. Received: "
                "use_multiprocessing=True. Use workers=n, which loads ahead "
                "in n threads."
            )
        if _num_batches(dataset) == 0:
            raise ValueError(
                "A PyDataset must hold at least one batch. Received: a "
                "dataset of length 0. Check how it was made."
            )
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._class_weight = class_weight
        self._steps = steps
        self.batches_per_epoch = steps or _num_batches(dataset)

    def iterate(self, epoch):
        """Yield the `Batch`es of one epoch, loading ahead with threads."""
        self._dataset.on_epoch_begin()
        made = 0
        for item in self._load(self._indices(epoch)):
            made += 1
            yield _read(item, self._class_weight)
        self._dataset.on_epoch_end()
        if not made:
            raise errors.DataError(errors.NO_BATCHES.format(epoch=epoch))

    def window(self, items, micro_batch_size):
        """Stack batches, or slice the single one."""
        return window_of_batches(items, micro_batch_size)

    def _indices(self, epoch):
        batches = _num_batches(self._dataset)
        if batches is None:
            start = epoch * (self._steps or 0)
            yield from islice(count(start), self._steps)
            return
        if batches == 0:
            return
        for pass_index, start, stop in _passes(epoch, self._steps, batches):
            order = np.arange(batches)
            if self._shuffle:
                order = _permutation(batches, self._seed, pass_index)
            yield from order[start:stop].tolist()

    def _load(self, indices):
        workers = self._dataset.workers
        if workers > 1:
            ahead = self._dataset.max_queue_size or workers
            return _load_ahead(self._dataset, indices, workers, ahead)
        return (self._dataset[index] for index in indices)


def _num_batches(dataset):
    """Return the length of a PyDataset, `None` when it is infinite."""
    try:
        return dataset.num_batches
    except (NotImplementedError, TypeError):
        # PyDataset raises the first when there is no length at all, and
        # `len` the second when `__len__` returned None.
        return None


def _load_ahead(dataset, indices, workers, ahead):
    """Yield `dataset[index]` in order, loaded by threads up to a limit."""
    with ThreadPoolExecutor(workers) as pool:
        loading = deque()
        try:
            for index in indices:
                loading.append(pool.submit(dataset.__getitem__, index))
                if len(loading) >= ahead:
                    yield loading.popleft().result()
            while loading:
                yield loading.popleft().result()
        finally:
            for future in loading:
                future.cancel()


class IterableSource(Source):
    """Loader batches of any iterable; items are `Batch`es.

    It is iterated afresh for every epoch. With `steps` every epoch has that
    many batches and goes on where the last one stopped; an iterable that ends
    is begun again at once. An iterator that can be used only once serves all
    epochs: without `steps` the first epoch uses it up, and with `steps` its
    last epoch may be shorter.

    Args:
        iterable: yields batches: a `tf.data.Dataset`, a torch `DataLoader`, a
            list of tuples, a generator.
        class_weight: dict `{class: weight}`, or `None`.
        steps: loader batches in an epoch, or `None`.

    Raises:
        ValueError: the iterable has length 0.
    """

    def __init__(self, iterable, *, class_weight=None, steps=None):
        _check_sizes(None, False, steps)
        length = _length(iterable)
        if length == 0:
            raise ValueError(
                "x must hold at least one batch. Received: "
                f"{type(iterable).__name__} of length 0. Check how it was made."
            )
        self._iterable = iterable
        self._class_weight = class_weight
        self._steps = steps
        self._running = None
        self.is_one_shot = isinstance(iterable, Iterator)
        self.batches_per_epoch = steps or length

    def iterate(self, epoch):
        """Yield the `Batch`es of one epoch."""
        made = 0
        for item in self._items():
            made += 1
            yield _read(item, self._class_weight)
        if not made:
            raise errors.DataError(errors.NO_BATCHES.format(epoch=epoch))

    def window(self, items, micro_batch_size):
        """Stack batches, or slice the single one."""
        return window_of_batches(items, micro_batch_size)

    def _items(self):
        if self.is_one_shot or self._steps is None:
            return islice(iter(self._iterable), self._steps)
        if self._running is None:
            self._running = _repeat(self._iterable)
        return islice(self._running, self._steps)


def _repeat(iterable):
    """Yield the items of an iterable over and over, until it has none."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for item in iterable:
            is_empty = False
            yield item


def _length(iterable):
    """Return `len(iterable)`, or `None` where it has none or is infinite."""
    try:
        return len(iterable)
    except TypeError:
        return None


def _read(item, class_weight):
    """Read a loader item, whose class labels may weigh its samples."""
    batch = unpack(item)
    if class_weight is None:
        return batch
    return weigh_classes(batch, class_weight)


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

    Returns:
        `Source`.

    Raises:
        TypeError: x is nothing batches can be taken from.
        ValueError: x is empty, or something was given that does not go with
            it.

    Example:
        >>> make_source(np.zeros([100, 2]), batch_size=8).batches_per_epoch
        13
    """
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
        )
    return IterableSource(x, class_weight=class_weight, steps=steps)


def _is_array_data(x):
    arrays = leaves(x)
    return bool(arrays) and all(isinstance(a, SupportsArray) for a in arrays)


def _is_list_of_batches(x):
    return isinstance(x, list) and all(isinstance(item, tuple) for item in x)


def _check_iterable(x):
    """Refuse what is neither array data nor a loader, saying what to give."""
    kind = type(x)
    if kind.__name__ in SPARSE_TYPES or kind.__module__.startswith("scipy."):
        raise TypeError(
            errors.NOT_AN_ARRAY.format(name="x", received=kind.__name__)
        )
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
        >>> train, held = train_validation_split(np.arange(5), None, None, 0.4)
        >>> train.x, held.x
        (array([0, 1, 2]), array([3, 4]))
    """
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

    def iterate(self, epoch):
        """Yield the kept items."""
        del epoch
        return iter(self._items)

    def window(self, items, micro_batch_size):
        """Make a window as the other source would."""
        return self._source.window(items, micro_batch_size)
