"""What `Model.fit` trains on, kept where its arrays are."""

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from accumtrainer.data.batches import (
    Batch,
    Window,
    count_samples,
    kind_of,
    leaves,
    map_leaves,
    stack,
)
from accumtrainer.data.reading import refuse_sparse
from accumtrainer.keras_api import keras, ops
from accumtrainer.keras_api.types import Nest, Tensor
from accumtrainer.steps.backend import Backend


class Group:
    """Some batches in a row, one by one or stacked already.

    Args:
        batches: list of `Batch`es of arrays or tensors.
        stacked: `Batch` of arrays or tensors `[n, m, ...]` instead.
    """

    def __init__(
        self, batches: Iterable[Batch] = (), stacked: Batch | None = None
    ):
        self._batches = list(batches)
        self._stacked = stacked
        if stacked is None:
            self._sizes = [count_samples(batch) for batch in self._batches]
        else:
            count, size = leaves(stacked)[0].shape[:2]
            self._sizes = [size] * count

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def samples(self) -> int:
        """Number of samples in all batches together."""
        return sum(self._sizes)

    @property
    def is_even(self) -> bool:
        """Whether all batches have the same shapes and types."""
        return (
            self._stacked is not None
            or len({_signature(batch) for batch in self._batches}) == 1
        )

    @functools.cached_property
    def kinds(self) -> list[Hashable]:
        """Which kinds of batches there are, see `kind_of`, list in order."""
        if self._stacked is not None:
            return [kind_of(self._stacked, stacked_axes=1)]
        return list(dict.fromkeys(map(kind_of, self._batches)))

    def first_of(self, kind: Hashable) -> Batch:
        """Return the first batch of a kind."""
        return next(b for b in self.batches() if kind_of(b) == kind)

    def cut(self, count: int) -> "tuple[Group, Group]":
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

    def batches(self) -> Sequence[Batch]:
        """Return the batches one by one."""
        if self._stacked is None:
            return self._batches
        return list(self.window().split())

    def window(self) -> Window:
        """Return the batches as a `Window`, stacked if they can be."""
        sizes = tuple(self._sizes)
        if self._stacked is not None:
            return Window(self._stacked, None, sizes)
        if not self.is_even:
            return Window(None, tuple(self._batches), sizes)
        return Window(map_leaves(_stack, *self._batches), None, sizes)


class Groups:
    """The groups of batches that one epoch of `Model.fit` trains on.

    `tf.data` makes batches ahead of those who ask for one at a time. One who
    asks for a group finds hardly more than one ready, and the pipeline stands
    still while the group is trained on. So a thread asks for the next group
    then. Iterators of Python belong to the thread of `fit`.

    Args:
        size: most batches in a group, `steps_per_execution`.
        count: groups in the epoch, or `None` where that is not known.
    """

    def __init__(self, backend: Backend, size: int, count: int | None):
        self._backend = backend
        self._size = size
        self._left = count
        self._next: Any = None  # the future of a group
        self._pool: ThreadPoolExecutor | None = None
        if size > 1 and backend.has_own_pipeline:
            self._pool = ThreadPoolExecutor(1, "accumtrainer-batches")

    def take(self, iterator: Iterator[Any]) -> Group:
        """Return the next `Group`.

        Args:
            iterator: what `fit` hands over.

        Raises:
            StopIteration: there is none.
        """
        begun, self._next = self._next, None
        group = begun.result() if begun else self._read(iterator)
        if self._left is not None:
            self._left -= 1
        if len(group) < self._size:
            self._left = 0
        looks_ahead = self._pool if self._left else self._left is None
        if looks_ahead and not self._backend.fit_hands_batches:
            self._next = self._begin(iterator)
        return group

    def is_last(self) -> bool:
        """Whether the epoch ends with the group taken last.

        Where that is not known, it waits until the next one is there. What
        goes wrong with that one is for the next `take` to raise. If nobody
        can ask for the next one, none is known to be the last.
        """
        if self._left is not None:
            return not self._left
        if self._next is None:
            return False
        return isinstance(self._next.exception(), StopIteration)

    def _begin(self, iterator: Iterator[Any]) -> Future[Group]:
        if self._pool:
            return self._pool.submit(self._read, iterator)
        begun: Future[Group] = Future()
        try:
            begun.set_result(self._read(iterator))
        except Exception as failure:
            begun.set_exception(failure)
        return begun

    def _read(self, iterator: Iterator[Any]) -> Group:
        if self._size == 1:
            return Group([as_batch(self._backend.next_batch(iterator))])
        items, stacked = self._backend.next_batches(iterator, self._size)
        if stacked is not None:
            return Group(stacked=as_batch(stacked))
        return Group(map(as_batch, items or ()))


def as_batch(item: Any) -> Batch:
    """Read what `fit` trains on as a `Batch`.

    Args:
        item: x, or a tuple or list of x, y and sample_weight, or of the first
            of them; arrays or tensors.

    Returns:
        Floats cast to `keras.config.floatx()` as a Trainer does; arrays have
        memory of their own, as a generator may fill what it yielded again for
        its next item.

    Raises:
        TypeError: an array is sparse or ragged, which cannot be stacked.
    """
    parts = item if isinstance(item, (tuple, list)) else (item,)
    for name, part in zip(Batch._fields, parts, strict=False):
        refuse_sparse(name, part)  # of which nobody could count the rows
    return Batch(*map(_as_floatx, parts))


def _as_floatx(part: Nest) -> Nest:
    if isinstance(part, np.ndarray):
        return _cast(part)
    return map_leaves(_cast, part)


def _cast(leaf: Any) -> Any:
    floatx = keras.config.floatx()
    if _differs(leaf.dtype, floatx):
        return ops.cast(leaf, floatx)
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


@functools.cache
def _differs(dtype: Any, floatx: str) -> bool:
    """Tell floats of another type; by name, as NumPy knows no bfloat16."""
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    return "float" in name and name != floatx


def _signature(batch: Batch) -> tuple:
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves(batch))


def _stack(*rows: Tensor) -> Tensor:
    is_on_host = isinstance(rows[0], np.ndarray)
    return stack(*rows) if is_on_host else ops.stack(rows)
