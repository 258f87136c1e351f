"""Loaders where several processes train together.

In training every process's loader yields its shard of each micro-batch; in
evaluation all yield the same. A process that could not go on while others did
would leave them waiting for ever. So before a window runs, or a batch is
evaluated, the processes tell each other what they have; where that does not
go together, the same error is raised in all of them.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from accumtrainer import errors
from accumtrainer.data.arrays import ArraySource
from accumtrainer.data.batches import Window, leaves, named_arrays
from accumtrainer.data.position import Position, fingerprint
from accumtrainer.data.source import Source

# What a process says instead of how many micro-batches it has.
NO_MORE, FAILED = 0, -1


class Processes(Protocol):
    """Who knows of the processes that train together.

    Attributes:
        processes: how many there are.
        count: on how many devices, of all of them.
        is_chief: whether this is the one that writes.
    """

    @property
    def processes(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def is_chief(self) -> bool: ...

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """Let all know some numbers of all, `[processes, n]`, float32."""


class ShardSource(Source):
    """Loader batches of one process, its shard of those of all processes.

    Every shard has as many batches, of the same shapes. Where a run goes on,
    each loader goes to its place by the number of batches; that they come in
    the same order is known of the chief's alone.

    Args:
        source: this process's batches.
        processes: knows of the others.
    """

    def __init__(self, source: Source, processes: Processes):
        self._source = source
        self._is_chief = processes.is_chief
        self._agreement = Agreement(processes.gather)
        self._devices = processes.count // processes.processes
        self._epoch = self._taken = 0
        self.processes = processes.processes
        self.batches_per_epoch = source.batches_per_epoch
        self.is_one_shot = source.is_one_shot
        self.is_endless = source.is_endless
        self.orders_epochs = source.orders_epochs
        self.begins_again = source.begins_again

    def iterate(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the items of one epoch, which ends for all at once."""
        self._epoch, self._taken = epoch, start
        items = self._source.iterate(epoch, start)
        nothing_left = None
        while True:
            with self._agreement.failing_together():
                try:
                    item = next(items, None)
                except errors.NothingLeftError as error:
                    item, nothing_left = None, error
            if item is None:
                break
            self._taken += 1
            yield item
        self._agree(NO_MORE, 0, fingerprint(()))
        if nothing_left is not None:
            raise nothing_left

    def get_state(self) -> dict[str, Any]:
        """Return what holds for the loader of every process."""
        state = dict(self._source.get_state())
        # Where the chief's iterator is says nothing of the others'.
        for name in ("iterator", "begun_from", "generators"):
            state.pop(name, None)
        return {"processes": self.processes, **state}

    def go_to(
        self, position: Position, state: dict[str, Any], *, fast_forward: bool
    ) -> None:
        """Have the loader of each process go to its place."""
        if position.carried:
            raise errors.DataError(
                errors.CARRIED_SHARD.format(epoch=position.epoch)
            )
        if not self._is_chief:
            # The fingerprints are those of the chief's batches.
            position = dataclasses.replace(position, first=None, last=None)
        state = {k: v for k, v in state.items() if k != "processes"}
        with self.together():
            self._source.go_to(position, state, fast_forward=fast_forward)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Make a context that fails everywhere if it fails in one process."""
        return self._agreement.together()

    def window(
        self, items: Sequence[Any], micro_batch_size: int | None
    ) -> Window:
        """Make a window of which the other processes have as much.

        Raises:
            DataError: they have not, or it does not divide by the devices.
        """
        if micro_batch_size is not None:
            micro_batch_size //= self.processes
        window = self._source.window(items, micro_batch_size)
        self._agree(window.micro_batches, window.samples, _outline(window))
        for size in window.sizes:
            if size % self._devices:
                raise errors.DataError(
                    errors.UNDIVIDED_SHARD.format(
                        devices=self._devices,
                        size=size,
                        batch=self._taken,
                        epoch=self._epoch,
                    )
                )
        return window.as_shard(self.processes)

    def _agree(self, micro_batches: int, samples: int, digest: str) -> None:
        self._agreement.require(
            micro_batches,
            samples,
            digest,
            lambda received: errors.UNEQUAL_SHARDS.format(
                received=received, batch=self._taken, epoch=self._epoch
            ),
        )


def check_processes(source: Source, state: dict[str, Any]) -> None:
    """Refuse to go on with shards of another size than a saved run had.

    Args:
        source: the training data.
        state: what its `get_state` returned when the run was saved.

    Raises:
        DataError: the data were shared out among other processes.
    """
    before = state.get("processes", 1)
    if before != source.processes:
        raise errors.DataError(
            errors.OTHER_PROCESSES.format(before=before, now=source.processes)
        )


class Agreement:
    """Lets processes find out together whether they can go on together.

    Args:
        gather: see `Processes`.
    """

    def __init__(self, gather: Callable[[Sequence[float]], np.ndarray]):
        self._gather = gather

    def require(
        self,
        micro_batches: int,
        samples: int,
        digest: str,
        explain: Callable[[str], str],
    ) -> None:
        """Raise an error in all processes unless all say the same.

        Args:
            micro_batches: how many this process has, or `NO_MORE`.
            samples: how many they hold.
            digest: 16 hexadecimal digits, of what must be the same.
            explain: makes a message of what two processes have.

        Raises:
            DataError: one has something else, or has failed.
        """
        # In pieces, which float32 holds exactly.
        words = [int(digest[i : i + 4], 16) for i in range(0, 16, 4)]
        rows = self._gather([micro_batches, samples, *words])
        differs = (rows != rows[0]).any(axis=1)
        has_failed = rows[:, 0] == FAILED
        if has_failed.any():
            raise errors.DataError(
                errors.FAILED_ELSEWHERE.format(process=has_failed.argmax())
            )
        if differs.any():
            raise errors.DataError(explain(_difference(rows, differs.argmax())))

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let others know of an error, where they ask the next time."""
        try:
            yield
        except Exception:
            self._gather([FAILED, 0, 0, 0, 0, 0])
            raise

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Wait at the end until all processes have come there.

        Raises:
            DataError: another one has failed.
        """
        with self.failing_together():
            yield
        self.require(NO_MORE, 0, fingerprint(()), str)


def items_of_all(source: Source, processes: Processes) -> Iterator[Any]:
    """Yield the items to evaluate, which are the same in every process.

    They are what `source.iterate(0)` yields.

    Raises:
        DataError: another process has another item.
    """
    items = source.iterate(0)
    if processes.processes == 1 or isinstance(source, ArraySource):
        yield from items
        return
    agreement = Agreement(processes.gather)
    batch = 0
    while True:
        with agreement.failing_together():
            item = next(items, None)
        agreement.require(
            NO_MORE if item is None else 1,
            0 if item is None else len(leaves(item)[0]),
            fingerprint(item),
            functools.partial(_other_evaluation, batch),
        )
        if item is None:
            return
        yield item
        batch += 1


def _other_evaluation(batch: int, received: str) -> str:
    return errors.OTHER_EVALUATION.format(received=received, batch=batch)


def _outline(window: Window) -> str:
    """Condense the names, shapes and types of the arrays of a window."""
    batches = [window.stacked] if window.parts is None else window.parts
    arrays = [
        (path, array.shape, array.dtype.name)
        for batch in batches
        for path, array in named_arrays(batch)
    ]
    return xxhash.xxh3_64(repr(arrays).encode()).hexdigest()


def _difference(rows: np.ndarray, other: int) -> str:
    """Say what two processes have, the chief and another."""
    here, there = (_describe(*rows[i, :2].astype(int)) for i in (0, other))
    if here == there:
        there += " that differ"
    return f"{here} in process 0, {there} in process {other}"


def _describe(micro_batches: int, samples: int) -> str:
    if micro_batches == NO_MORE:
        return "nothing more"
    noun = "micro-batch" if micro_batches == 1 else "micro-batches"
    return f"{micro_batches} {noun} of {samples} samples"
