"""Loader batches cut from arrays in memory."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from accumtrainer import errors
from accumtrainer.data.batches import (
    Batch,
    Window,
    count_samples,
    map_leaves,
    slice_sizes,
    take_rows,
    window_of_rows,
)
from accumtrainer.data.position import Position
from accumtrainer.data.preprocessing import Preprocessing
from accumtrainer.data.reading import dtype_read, weigh_classes
from accumtrainer.data.source import (
    DEFAULT_BATCH_SIZE,
    Source,
    SourceOptions,
    part_of_round,
    permutation,
    require_same,
    require_same_epochs,
    warn_of_the_end,
)
from accumtrainer.keras_api import tree
from accumtrainer.keras_api.types import Nest


class ArraySource(Source):
    """Loader batches cut from arrays in memory.

    Items are row indices, or `Batch`es where something makes them of the rows.

    A last short batch is kept. With `steps` every epoch has that many batches,
    and the next one goes on where it stopped; where the data end, so does the
    epoch, with a warning, and the next one begins with a new round.

    Args:
        data: every leaf has one row per sample. A single array of weights
            beside several outputs holds for each of them. They are the user's
            arrays, read window by window, as callbacks may change them.
        options: how batches are taken.
        preprocessing: what makes of them what the model takes, if anything.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: lengths differ, the data are empty, or an option has a
            value that is not allowed.
    """

    orders_epochs = True
    batch_size: int

    def __init__(
        self,
        data: Batch,
        options: SourceOptions,
        preprocessing: Preprocessing | None = None,
    ):
        options.check_order()
        samples = count_samples(data)
        self._samples = samples
        self._options = options
        self._preprocessing = preprocessing
        self._data = data if preprocessing else self._weighed(data)
        self.begins_again = preprocessing is None  # which takes its time
        self._first_epoch = options.first_epoch
        self._epochs_before = options.epochs_before
        steps, batch_size = options.steps, options.batch_size
        if batch_size is None:
            batch_size = DEFAULT_BATCH_SIZE
            if steps is not None:
                batch_size = math.ceil(samples / steps)
        self.batch_size = batch_size
        self._batches = math.ceil(samples / batch_size)
        self.batches_per_epoch = min(steps or self._batches, self._batches)
        self.samples_per_epoch = None if steps else samples

    def iterate(
        self, epoch: int, start: int = 0
    ) -> Iterator[np.ndarray | Batch]:
        """Yield the row indices of every loader batch, shape `[<= b]`.

        Where there is a preprocessing, yield what it has made of the rows.
        """
        steps = self._options.steps
        round_index, first, stop = part_of_round(
            epoch - self._first_epoch,
            steps,
            self._batches,
            start,
            self._epochs_before,
        )
        order = self._order(round_index)
        for batch in range(first, stop):
            row = batch * self.batch_size
            rows = order[row : row + self.batch_size]
            if self._preprocessing is None:
                yield rows
            else:
                place = (self._options.seed, round_index, batch)
                made = self._preprocessing(self._gather(rows), *place)
                yield self._weighed(made)
        warn_of_the_end(start + stop - first, steps)

    def get_state(self) -> dict[str, Any]:
        return {
            "samples": self._samples,
            "batch_size": self.batch_size,
            "shuffle": self._options.shuffle,
            "first_epoch": self._first_epoch,
            "epochs_before": self._epochs_before,
            "batches": self.batches_per_epoch,
            "has_steps": self._options.steps is not None,
        }

    def go_to(
        self, position: Position, state: dict[str, Any], *, fast_forward: bool
    ) -> None:
        """Go to a place in the same arrays, also with another batch size."""
        del fast_forward
        self._first_epoch = state.get("first_epoch", 0)
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

    def window(
        self, items: Sequence[Any], micro_batch_size: int | None
    ) -> Window:
        """Gather all rows of a window at once."""
        if self._preprocessing is not None:
            return super().window(items, micro_batch_size)
        sizes = tuple(len(item) for item in items)
        if micro_batch_size is not None:
            (size,) = sizes
            sizes = slice_sizes(size, micro_batch_size)
        rows = items[0] if len(items) == 1 else np.concatenate(items)
        if len(set(sizes)) == 1:
            table = rows.reshape(len(sizes), sizes[0])
            return Window(self._gather(table), None, sizes)
        return window_of_rows(self._gather(rows), sizes)

    def _weighed(self, data: Batch) -> Batch:
        """Give every output the weights of its samples."""
        data = weigh_classes(data, self._options.class_weight)
        return _spread_sample_weight(data)

    def _gather(self, rows: np.ndarray) -> Batch:
        return map_leaves(
            lambda leaf: take_rows(leaf, rows, dtype_read(leaf.dtype)),
            self._data,
        )

    def _order(self, round_index: int) -> np.ndarray:
        shuffle, seed = self._options.shuffle, self._options.seed
        if not shuffle:
            return np.arange(self._samples, dtype=np.intp)
        if shuffle != "batch":
            return permutation(self._samples, seed, round_index)
        keys = np.random.default_rng((seed, round_index)).random(self._samples)
        batch = np.arange(self._samples) // self.batch_size
        return np.lexsort((keys, batch)).astype(np.intp, copy=False)


def _spread_sample_weight(data: Batch) -> Batch:
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


def _outline(nest: Nest) -> str:
    """Describe a nest by its shapes."""
    return str(map_leaves(lambda leaf: f"array{list(leaf.shape)}", nest))
