"""The interface of everything that batches are taken from, in groups."""

import abc
import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from accumtrainer import errors
from accumtrainer.checks import require_count
from accumtrainer.data.batches import (
    Batch,
    Window,
    arrays_of,
    name_of,
    window_of_batches,
)
from accumtrainer.data.position import Position

DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """How batches are taken from data, as far as it can be chosen.

    Args:
        batch_size: samples in a loader batch. `None` means 32 or, with
            `steps`, the data divided by them. What yields batches does not heed
            it, but to warn where they have others.
        shuffle: whether every round has an order of its own; with arrays
            `"batch"` for one within every batch, whose samples stay together.
            What can only be iterated comes in its own order.
        seed: whole number of at least 0. The order of a round depends only on
            it and on the index of the round.
        class_weight: by class.
        steps: loader batches in an epoch (`steps_per_epoch`); `None` for one
            round over the data.
        first_epoch: index of the epoch that begins with the first batch.
        epochs_before: epochs before that one, whose orders do not come again.
    """

    batch_size: int | None = None
    shuffle: bool | Literal["batch"] = True
    seed: int = 0
    class_weight: dict[int, float] | None = None
    steps: int | None = None
    first_epoch: int = 0
    epochs_before: int = 0

    def check_sizes(self) -> None:
        """Refuse sizes that are no numbers."""
        if self.batch_size is not None:
            require_count(
                "batch_size",
                self.batch_size,
                "Give the samples of a loader batch.",
            )
        if self.steps is not None:
            require_count(
                "steps_per_epoch",
                self.steps,
                "Leave it out for one round of the data per epoch.",
            )

    def check_order(self) -> None:
        """Refuse sizes that are no numbers and an unknown `shuffle`."""
        self.check_sizes()
        shuffle: Any = self.shuffle
        is_batch = isinstance(shuffle, str) and shuffle == "batch"
        if not is_batch and not isinstance(shuffle, (bool, np.bool_)):
            raise TypeError(
                "shuffle must be True, False or 'batch'. Received: "
                f"shuffle={shuffle!r}. Use True to shuffle samples before they "
                "are batched."
            )


class Source(abc.ABC):
    """Where loader batches come from, epoch by epoch.

    Attributes:
        batches_per_epoch: loader batches in an epoch, `None` if unknown.
        samples_per_epoch: samples in an epoch, `None` if unknown.
        batch_size: samples in a loader batch, `None` if unknown.
        is_one_shot: whether the data can be iterated only once, so that
            epochs share it and several need `steps_per_epoch`.
        is_endless: whether an epoch is known never to end.
        orders_epochs: whether any epoch can be begun at any time, each with an
            order of its own.
        begins_again: whether an epoch of which nothing has been trained on
            begins once more, as callbacks may have changed the data.
        processes: how many processes have a shard each of the batches; 1
            where all are given the same.
    """

    batches_per_epoch: int | None = None
    samples_per_epoch: int | None = None
    batch_size: int | None = None
    is_one_shot: bool = False
    is_endless: bool = False
    orders_epochs: bool = False
    begins_again: bool = False
    processes: int = 1

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Make a context that fails everywhere if it fails in one process."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def iterate(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the loader items of one epoch, in order.

        Epoch 0 begins with the first item again whenever it is asked for,
        but for data that can be iterated only once.

        Args:
            epoch: index of the epoch, from zero.
            start: loader batches to leave out at the beginning; above 0 only
                after `go_to` has been asked to go there.

        Yields:
            Items to hand to `window`, one for every loader batch.
        """

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Return what a saved position needs besides itself: plain values."""

    @abc.abstractmethod
    def go_to(
        self, position: Position, state: dict[str, Any], *, fast_forward: bool
    ) -> None:
        """Get ready to go on from a saved position, before anything is taken.

        Args:
            position: where to; `batches` is changed where the loader's
                batches have another size now.
            state: what `get_state` returned when the position was saved.
            fast_forward: whether to run through past data where there is no
                better way.

        Raises:
            DataError: the data do not lead there, or not again.
        """

    def window(
        self, items: Sequence[Any], micro_batch_size: int | None
    ) -> Window:
        """Make a window of loader items: stack `Batch`es, or slice one.

        A source whose items are something else overrides it.

        Args:
            items: what `iterate` yielded, each of them one micro-batch;
                exactly one with `micro_batch_size`.
            micro_batch_size: samples per micro-batch when the one item is
                sliced, the last slice possibly shorter.
        """
        return window_of_batches(items, micro_batch_size)


def groups(
    source: Source,
    position: Position,
    *,
    steps_at: Callable[[], int],
    tail: Literal["flush", "drop", "carry"],
) -> Iterator[tuple[Any, ...]]:
    """Yield the loader items of each window of the rest of an epoch.

    Stands for:
        ```
        for item in carried + list(source.iterate(epoch, batches)):
            group.append(item)
            if len(group) == steps_at_its_start:
                yield group
                group = []
        ```

    Args:
        source: where they come from.
        position: changed in place with every item taken. It carries a window's
            items until they are taken from it, when that window is made, or
            until the next one is asked for. With `tail="carry"` the left-over
            items of an epoch stay in it.
        steps_at: returns the loader batches of the window about to begin;
            asked once per window, when its first batch has arrived.
        tail: what becomes of what is left at the end.

    Raises:
        DataError: a batch has other parts than the first one of its window.
        NothingLeftError: the source yields nothing, or `tail="drop"` drops it
            all.
    """
    carried, steps = position.carried, 0
    waiting = tuple(carried)
    carried.clear()
    for item in chain(waiting, _take(source, position)):
        if not carried:
            steps = steps_at()
        elif isinstance(item, Batch):
            _require_same_parts(carried[0], item, position)
        carried.append(item)
        if len(carried) >= steps:
            yield from _made_of(position)
    if tail == "drop":
        dropped = len(carried)
        carried.clear()
        if not position.windows:
            raise errors.NothingLeftError(
                errors.EVERYTHING_DROPPED.format(
                    epoch=position.epoch, batches=dropped, steps=steps
                )
            )
    if carried and tail == "flush":
        yield from _made_of(position)


def _made_of(position: Position) -> Iterator[tuple[Any, ...]]:
    """Yield the window of the carried items, and see that they are taken."""
    yield tuple(position.carried)
    if position.carried:
        position.take_group()


def _require_same_parts(first: Batch, batch: Batch, position: Position) -> None:
    """Refuse a batch, taken last, that no window has beside its first one."""
    had, has = (
        {key: array.ndim for key, array in arrays_of(one).items()}
        for one in (first, batch)
    )
    if has == had:
        return
    key = next(k for k in [*has, *had] if had.get(k) != has.get(k))
    now, before = (
        f"{axes[key]} axes" if key in axes else "nothing" for axes in (has, had)
    )
    raise errors.DataError(
        errors.OTHER_PARTS.format(
            name=name_of(*key),
            now=now,
            before=before,
            batch=position.batches - 1,
            epoch=position.epoch,
        )
    )


def _take(source: Source, position: Position) -> Iterator[Any]:
    for item in source.iterate(position.epoch, position.batches):
        position.take(item)
        yield item


def part_of_round(
    epoch: int,
    steps: int | None,
    batches: int,
    skipped: int,
    epochs_before: int,
) -> tuple[int, int, int]:
    """Find out which part of which round over the data an epoch is.

    Without `steps` an epoch is one round. With it, a round is cut into epochs
    of `steps` batches, of which the last takes what is left; so does the only
    one where `steps` is more than there are. As in Keras, no epoch goes on
    with the next round.

    Args:
        epoch: how many epochs after the first one.
        steps: loader batches in an epoch.
        batches: loader batches in a round.
        skipped: first batches of the epoch to leave out.
        epochs_before: epochs before the first one, whose rounds are counted
            too.

    Returns:
        `(round_index, start, stop)`.

    Examples:
        >>> [part_of_round(epoch, 3, 5, 0, 0) for epoch in range(3)]
        [(0, 0, 3), (0, 3, 5), (1, 0, 3)]
    """
    if steps is None:
        return epochs_before + epoch, skipped, batches
    epochs_per_round = math.ceil(batches / steps)
    index, part = divmod(epoch, epochs_per_round)
    start, stop = part * steps, min(batches, (part + 1) * steps)
    rounds_before = math.ceil(epochs_before / epochs_per_round)
    return rounds_before + index, min(stop, start + skipped), stop


def warn_of_the_end(batches: int, steps: int | None) -> None:
    """Warn if the data have ended before an epoch of some steps has."""
    if steps is not None and batches < steps:
        warnings.warn(
            errors.RAN_OUT.format(batches=batches, steps=steps), stacklevel=2
        )


def permutation(size: int, seed: int, round_index: int) -> np.ndarray:
    """Return the order of one round, which depends on nothing else."""
    order = np.random.default_rng((seed, round_index)).permutation(size)
    return order.astype(np.intp, copy=False)


def require_same(
    names: Iterable[str],
    position: Position,
    before: dict[str, Any],
    now: dict[str, Any],
    message: str = errors.OTHER_DATA,
) -> None:
    """Refuse to go on with a source that differs from the one of a saved run.

    Args:
        names: which parts of the states have to be the same.
        position: the one that was saved.
        before: what `get_state` returned then.
        now: what it returns now.
        message: why they have to.

    Raises:
        DataError: one is not the same.
    """
    for name in names:
        if before.get(name) != now[name]:
            raise errors.DataError(
                message.format(
                    what=name,
                    before=before.get(name),
                    now=now[name],
                    epoch=position.epoch,
                    batches=position.batches,
                )
            )


def require_same_epochs(
    names: Iterable[str],
    position: Position,
    before: dict[str, Any],
    now: dict[str, Any],
) -> None:
    """Refuse epochs of some steps that would begin elsewhere in the data.

    See `require_same`; nothing has to be the same at the very beginning, nor
    where epochs are rounds over the data.
    """
    is_begun = position.epoch or position.is_amid_epoch
    if is_begun and (before.get("has_steps") or now["has_steps"]):
        require_same(names, position, now | before, now, errors.OTHER_STEPS)


def check_ends(source: Source, argument: str, others: str = "") -> None:
    """Refuse a source whose epochs are known never to end.

    Args:
        source: the data.
        argument: name of the argument that would end them.
        others: what else would.

    Raises:
        ValueError: it has no end.
    """
    if source.is_endless:
        raise ValueError(
            errors.ENDLESS.format(argument=argument, others=others)
        )
