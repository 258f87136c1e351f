"""Loader batches of PyDatasets and of everything else that yields batches."""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from typing import Any, Protocol, runtime_checkable

import numpy as np

from accumtrainer import errors
from accumtrainer.data.batch_reader import BatchReader
from accumtrainer.data.batches import Batch
from accumtrainer.data.closing import begin
from accumtrainer.data.position import Position, fingerprint
from accumtrainer.data.preprocessing import Preprocessing
from accumtrainer.data.source import (
    Source,
    SourceOptions,
    part_of_round,
    permutation,
    require_same,
    require_same_epochs,
    warn_of_the_end,
)

# Datasets of Grain that repeat forever are a part of `sys.maxsize` long.
ENDLESS = 2**40


@runtime_checkable
class KnowsItsPlace(Protocol):
    """An iterator that can say where it is and go there, as Grain's can."""

    def get_state(self) -> Any:
        """Return where the iterator is."""

    def set_state(self, state: Any) -> None:
        """Go to where another iterator of the same data was."""


class PyDatasetSource(Source):
    """Loader batches of a `keras.utils.PyDataset`; items are `Batch`es.

    `shuffle` permutes the order of batches. With more than one worker, that
    many threads load ahead, at most `max_queue_size` batches, in order. The
    dataset's `on_epoch_begin` and `on_epoch_end` are called. With `steps`
    epochs go on where the last one stopped, and end with the data, as for
    arrays.

    Args:
        dataset: the `keras.utils.PyDataset`; infinite when it has no length,
            and then never shuffled.
        options: how batches are taken.
        preprocessing: what makes of them what the model takes, if anything.

    Raises:
        ValueError: the dataset asks for processes, or is empty.
    """

    orders_epochs = True

    def __init__(
        self,
        dataset: Any,
        options: SourceOptions,
        preprocessing: Preprocessing | None = None,
    ):
        options.check_order()
        if dataset.use_multiprocessing:
            raise ValueError(
                "use_multiprocessing must be False in a PyDataset, because "
                "processes cannot share a device safely. Received: "
                "use_multiprocessing=True. Use workers=n, which loads ahead "
                "in n threads."
            )
        batches, steps = _num_batches(dataset), options.steps
        if batches == 0:
            raise ValueError(
                "A PyDataset must hold at least one batch. Received: a "
                "dataset of length 0. Check how it was made."
            )
        self._dataset = dataset
        self._options = options
        self._reader = BatchReader(options, preprocessing)
        self._steps = steps
        self._epochs_begun = self._epochs_told = 0
        self._is_within_epoch = False
        self.is_endless = steps is None and batches is None
        self.begins_again = preprocessing is None  # which takes its time
        self.batches_per_epoch = _least(steps, batches)

    def iterate(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the `Batch`es of one epoch, loading ahead with threads."""
        if not start:
            self._begin_epoch()
        made = start
        for item in self._load(self._indices(epoch, start)):
            batch = self._reader.read(item, epoch, made)
            if not made:  # an epoch that has failed before is to be told again
                self._epochs_begun += 1
            made += 1
            yield batch
        self._end_epoch()
        if not made:
            raise errors.NothingLeftError(errors.NO_BATCHES.format(epoch=epoch))
        warn_of_the_end(made, self._steps)

    def get_state(self) -> dict[str, Any]:
        return {
            "batches": self.batches_per_epoch,
            "shuffle": self._options.shuffle,
            **self._reader.get_state(),
            "has_steps": self._steps is not None,
            "epochs_begun": max(self._epochs_begun, self._epochs_told),
        }

    def go_to(
        self, position: Position, state: dict[str, Any], *, fast_forward: bool
    ) -> None:
        """Go to a batch by its index, past the ends of earlier epochs.

        The dataset is told again of the epochs it has been told of, in case
        it keeps an order of its own. A batch that has changed since is warned
        about.
        """
        del fast_forward
        self._reader.set_state(state)
        now = self.get_state()
        if position.is_amid_epoch:
            require_same(["batches", "shuffle"], position, state, now)
        require_same_epochs(["batches"], position, state, now)
        # A source of another kind has told no dataset of anything.
        self._epochs_told = state.get("epochs_begun", 0)
        # One more is begun here, or to take a window before training begins.
        is_begun_next = position.is_amid_epoch or self.begins_again
        for _ in range(self._epochs_told - is_begun_next):
            self._begin_epoch()
            self._end_epoch()
            self._epochs_begun += 1
        if not position.is_amid_epoch:
            return
        self._begin_epoch()
        self._epochs_begun += 1
        last = (position.epoch, position.batches - 1)
        index = next(self._indices(*last))
        item = self._reader.batch_of(self._dataset[index], *last)
        if position.last not in (None, fingerprint(item)):
            warnings.warn(errors.BATCH_HAS_CHANGED, stacklevel=2)

    def _begin_epoch(self) -> None:
        self._end_epoch()  # one that was left early
        self._dataset.on_epoch_begin()
        self._is_within_epoch = True

    def _end_epoch(self) -> None:
        if self._is_within_epoch:
            self._dataset.on_epoch_end()
        self._is_within_epoch = False

    def _indices(self, epoch: int, start: int) -> Iterator[int]:
        batches = _num_batches(self._dataset)
        nth = epoch - self._reader.first_epoch
        if batches is None:
            begin = nth * (self._steps or 0)
            end = None if self._steps is None else begin + self._steps
            yield from islice(count(), begin + start, end)
            return
        if batches == 0:
            return
        round_index, first, stop = part_of_round(
            nth, self._steps, batches, start, self._reader.epochs_before
        )
        order = np.arange(batches)
        if self._options.shuffle:
            order = permutation(batches, self._options.seed, round_index)
        yield from order[first:stop].tolist()

    def _load(self, indices: Iterator[int]) -> Iterator[Any]:
        workers = self._dataset.workers
        if workers > 1:
            ahead = self._dataset.max_queue_size or workers
            return _load_ahead(self._dataset, indices, workers, ahead)
        return (self._dataset[index] for index in indices)


def _num_batches(dataset: Any) -> int | None:
    """Return the length of a PyDataset, `None` when it is infinite."""
    try:
        return dataset.num_batches
    except (NotImplementedError, TypeError):
        # PyDataset raises the first when there is no length at all, and
        # `len` the second when `__len__` returned None.
        return None


def _least(*numbers: int | None) -> int | None:
    """Return the smallest of some numbers, leaving out `None`."""
    return min((n for n in numbers if n is not None), default=None)


def _load_ahead(
    dataset: Any, indices: Iterator[int], workers: int, ahead: int
) -> Iterator[Any]:
    """Yield `dataset[index]` in order, loaded by threads up to a limit."""
    with ThreadPoolExecutor(workers) as pool:
        loading: deque[Future] = deque()
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
    many batches and goes on where the last one stopped; where the iterable
    ends, so does the epoch, with a warning, and the next one begins it again.
    An iterator that can be used only once serves all epochs: without `steps`
    the first epoch uses it up, unless it begins again once it has ended.

    Args:
        iterable: yields batches: a `tf.data.Dataset`, a torch `DataLoader`, a
            list of tuples, a generator.
        options: how batches are taken.
        preprocessing: what makes of them what the model takes, if anything.

    Raises:
        ValueError: the iterable has length 0.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        options: SourceOptions,
        preprocessing: Preprocessing | None = None,
    ):
        options.check_sizes()
        length, steps = _length(iterable), options.steps
        if length == 0:
            raise ValueError(
                "x must hold at least one batch. Received: "
                f"{type(iterable).__name__} of length 0. Check how it was made."
            )
        self._iterable = iterable
        self._reader = BatchReader(options, preprocessing)
        self._steps = steps
        self.is_endless = steps is None and _is_endless(iterable)
        self._iterator: Iterator[Any] | None = None
        self._generators = _generators_of(iterable)
        self._begun_from: list[str] = []
        self._taken = self._times_begun = 0
        self._last = (0, 0)  # epoch and index of the batch taken last
        self.is_one_shot = isinstance(iterable, Iterator)
        self.batches_per_epoch = _least(steps, length)

    def iterate(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the `Batch`es of one epoch, as many as its length says."""
        made = start
        most = self.batches_per_epoch if self._steps is None else self._steps
        remaining = None if most is None else most - start
        items = self._round(epoch) if not start else self._begin(is_new=False)
        for item in islice(items, remaining):
            batch = self._reader.read(item, epoch, made)
            self._last = (epoch, made)
            made += 1
            self._taken += 1
            yield batch
        if not made:
            raise errors.NothingLeftError(errors.NO_BATCHES.format(epoch=epoch))
        warn_of_the_end(made, self._steps)

    def get_state(self) -> dict[str, Any]:
        """Return how much was taken, and what the iterator says of itself."""
        state: dict[str, Any] = {
            "taken": self._taken,
            "times_begun": self._times_begun,
            "last": list(self._last),
            **self._reader.get_state(),
        }
        if isinstance(self._iterator, KnowsItsPlace):
            state["iterator"] = self._iterator.get_state()
        if self._generators:
            state["begun_from"] = self._begun_from
            state["generators"] = [_written(g) for g in self._generators]
        return state

    def go_to(
        self, position: Position, state: dict[str, Any], *, fast_forward: bool
    ) -> None:
        """Have the iterator go there, or run through what it yielded before.

        Without `fast_forward` earlier epochs are begun, not run through, but
        for the last one; the batches seen on the way show whether that leads to
        the same place.
        """
        self._taken = state["taken"]
        self._reader.set_state(state)
        # Older checkpoints tell no place of the batch taken last.
        epoch, index = state.get("last", (position.epoch, position.batches - 1))
        self._last = (epoch, index)
        # Older checkpoints tell of runs that began every epoch so far.
        epochs = position.epoch + position.is_amid_epoch
        times_begun = state.get("times_begun", epochs)
        if "iterator" in state:
            is_begun = position.is_amid_epoch or self._steps is not None
            if is_begun or self.is_one_shot:
                iterator: Any = self._begin(is_new=True)
                iterator.set_state(state["iterator"])
            self._times_begun = times_begun
            return
        if not self._taken:
            return
        if self.is_one_shot and not fast_forward:
            raise errors.DataError(
                errors.CANNOT_GO_BACK.format(kind=type(self._iterable).__name__)
            )
        if self.is_one_shot or self._steps is not None:
            item = self._run_through(self._taken)
            self._check_same(item, position.last or None, position, self._last)
            return
        # With what generators were in, only the last epoch is begun again.
        is_known = bool(state.get("begun_from")) and not fast_forward
        if is_known:
            self._times_begun = times_begun - 1
            self._put_generators(state["begun_from"])
        most = self.batches_per_epoch
        for _ in range(0 if is_known else times_begun - 1):
            items = self._begin(is_new=True)
            _last(islice(items, most if fast_forward else 1))
        items = islice(self._begin(is_new=True), most)
        if position.is_amid_epoch:
            item = _last(islice(items, position.batches))
            self._check_same(item, position.last, position, self._last)
            return
        place = (position.epoch - 1, 0)
        self._check_same(next(items, None), position.first, position, place)
        if is_known:
            self._put_generators(state["generators"])
        elif fast_forward or _may_draw_late(self._iterable):
            _last(items)

    def _put_generators(self, states: list[str]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            numbers = list(bytes.fromhex(state))
            generator.set_state(generator.get_state().new_tensor(numbers))

    def _run_through(self, count: int) -> Any:
        """Take so many items, round after round; return the last, or `None`."""
        last = None
        while count:
            items = islice(self._round(epoch=0), count)
            passed = deque(enumerate(items, 1), maxlen=1)
            if not passed:
                return None
            taken, last = passed[0]
            count -= taken
        return last

    def _check_same(
        self,
        item: Any,
        expected: str | None,
        position: Position,
        place: tuple[int, int],
    ) -> None:
        """Refuse data that come in another order than when they were saved."""
        if expected is None:
            return
        if item is not None:
            item = fingerprint(self._reader.batch_of(item, *place))
        if item != expected:
            raise errors.DataError(
                errors.OTHER_ORDER.format(
                    epoch=position.epoch, batches=position.batches
                )
            )

    def _round(self, epoch: int) -> Iterator[Any]:
        """Yield items from the beginning of an epoch to the end of a round.

        Epochs of some steps go on with the round that was begun; where nothing
        is left of it, the next one begins. So does an iterator that tells of
        its end and then begins again.
        """
        is_new = self._steps is None or epoch == 0
        is_empty = True
        for _ in range(1 if is_new and not self.is_one_shot else 2):
            # No `yield from`, which would close the iterator with this epoch.
            for item in self._begin(is_new=is_new):
                is_empty = False
                yield item
            if not is_empty:
                return
            is_new = True

    def _begin(self, *, is_new: bool) -> Iterator[Any]:
        """Return the iterator to take from, a new one if there can be one."""
        if isinstance(self._iterable, Iterator):
            self._iterator = self._iterable
        elif is_new or self._iterator is None:
            self._times_begun += 1
            self._begun_from = [_written(g) for g in self._generators]
            self._iterator = begin(self._iterable)
        return self._iterator


def _generators_of(loader: Any) -> list[Any]:
    """List the generators by which a torch `DataLoader` draws its order."""
    owners = [loader, getattr(loader, "batch_sampler", None)]
    owners += [getattr(owner, "sampler", None) for owner in owners]
    found = [getattr(owner, "generator", None) for owner in owners]
    return [
        generator
        for place, generator in enumerate(found)
        if type(generator).__module__.partition(".")[0] == "torch"
        and all(generator is not other for other in found[:place])
    ]


def _written(generator: Any) -> str:
    """Write down the state of a `torch.Generator`, which is bytes."""
    return bytes(generator.get_state().tolist()).hex()


def _may_draw_late(iterable: Any) -> bool:
    """Whether the next epoch may depend on how far this one was run through.

    A `tf.data.Dataset` and a torch `DataLoader` draw as an epoch begins.
    """
    is_drawn_first = hasattr(iterable, "element_spec") or hasattr(
        iterable, "batch_sampler"
    )
    return not is_drawn_first and not isinstance(iterable, Sequence)


def _last(items: Iterable[Any]) -> Any:
    """Run through items, return the last one, or `None`."""
    last = deque(items, maxlen=1)
    return last[0] if last else None


def _length(iterable: Any) -> int | None:
    """Return `len(iterable)`, or `None` where it has none or is infinite."""
    try:
        length = len(iterable)
    except TypeError:
        return None
    return length if length < ENDLESS else None


def _is_endless(iterable: Any) -> bool:
    """Whether an iterable says of itself that it never ends."""
    try:
        return len(iterable) >= ENDLESS
    except TypeError as error:
        return "infinite" in str(error)  # so tf.data tells it from unknown
