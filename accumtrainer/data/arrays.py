"""Loader batches cut from arrays in memory."""

import math

import numpy as np

from accumtrainer import errors
from accumtrainer.data.batches import (
    Batch,
    Window,
    as_arrays,
    count_samples,
    map_leaves,
    slice_sizes,
    take_rows,
    weigh_classes,
    window_of_rows,
)
from accumtrainer.data.source import (
    Source,
    check_sizes,
    part_of_pass,
    permutation,
    require_same,
    require_same_epochs,
    warn_of_the_end,
)
from accumtrainer.keras_api import tree

DEFAULT_BATCH_SIZE = 32


class ArraySource(Source):
    """Loader batches cut from arrays in memory; items are row indices.

    A last short batch is kept. With `steps` every epoch has that many batches,
    and the next one goes on where it stopped; where the data end, so does the
    epoch, with a warning, and the next one begins with a new pass.

    Args:
        x: array or nest of arrays; every leaf has one row per sample.
        y: the same for targets, or `None`.
        sample_weight: weights for y, or `None`. A single array beside several
            outputs holds for each of them.
        batch_size: samples in a loader batch. `None` means 32 or, with
            `steps`, the data divided by them.
        shuffle: whether every pass has an order of its own; `"batch"` for one
            within every batch, whose samples stay together.
        seed: whole number of at least 0. The order of a pass depends only on
            it and on the index of the pass.
        class_weight: dict `{class: weight}`, or `None`.
        steps: loader batches in an epoch, or `None` for one pass.
        epochs_before: epochs before epoch 0, whose orders do not come again.

    Raises:
        TypeError: a leaf is no dense array, or an option has the wrong type.
        ValueError: lengths differ, the data are empty, or an option has a
            value that is not allowed.
    """

    orders_epochs = True

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
        epochs_before=0,
    ):
        check_sizes(batch_size, shuffle, steps)
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
        self._epochs_before = epochs_before
        if batch_size is None:
            batch_size = (
                math.ceil(samples / steps) if steps else DEFAULT_BATCH_SIZE
            )
        self.batch_size = batch_size
        self._batches = math.ceil(samples / batch_size)
        self.batches_per_epoch = min(steps or self._batches, self._batches)
        self.samples_per_epoch = None if steps else samples

    def iterate(self, epoch, start=0):
        """Yield the row indices of every loader batch, shape `[<= b]`."""
        pass_index, first, stop = part_of_pass(
            epoch, self._steps, self._batches, start, self._epochs_before
        )
        order = self._order(pass_index)
        for batch in range(first, stop):
            row = batch * self.batch_size
            yield order[row : row + self.batch_size]
        made = start + stop - first
        if self._steps is not None and made < self._steps:
            warn_of_the_end(made, self._steps)

    def get_state(self):
        return {
            "samples": self._samples,
            "batch_size": self.batch_size,
            "shuffle": self._shuffle,
            "epochs_before": self._epochs_before,
            "batches": self.batches_per_epoch,
            "has_steps": self._steps is not None,
        }

    def go_to(self, position, state, *, fast_forward):
        """Go to a place in the same arrays, also with another batch size."""
        del fast_forward
        self._epochs_before = state.get("epochs_before", 0)
        now = self.get_state()
        if position.is_amid_epoch:
            require_same(["samples", "shuffle"], position, state, now)
        require_same_epochs(["batches", "batch_size"], position, state, now)
        if not position.is_amid_epoch:
            return
        seen = position.batches * state["batch_size"]
        batches, rest = divmod(seen, self.batch_size)
        if rest:
            raise errors.DataError(
                errors.OTHER_BATCH_SIZE.format(
                    before=state["batch_size"],
                    now=self.batch_size,
                    seen=seen,
                )
            )
        position.batches = batches

    def window(self, items, micro_batch_size):
        """Gather all rows of a window at once."""
        sizes = tuple(len(item) for item in items)
        if micro_batch_size is not None:
            (size,) = sizes
            sizes = slice_sizes(size, micro_batch_size)
        rows = items[0] if len(items) == 1 else np.concatenate(items)
        if len(set(sizes)) == 1:
            table = rows.reshape(len(sizes), sizes[0])
            return Window(self._gather(table), None, sizes)
        return window_of_rows(self._gather(rows), sizes)

    def _gather(self, rows):
        return map_leaves(lambda leaf: take_rows(leaf, rows), self._data)

    def _order(self, pass_index):
        if not self._shuffle:
            return np.arange(self._samples, dtype=np.intp)
        if self._shuffle != "batch":
            return permutation(self._samples, self._seed, pass_index)
        keys = np.random.default_rng((self._seed, pass_index)).random(
            self._samples
        )
        batch = np.arange(self._samples) // self.batch_size
        return np.lexsort((keys, batch)).astype(np.intp, copy=False)


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
