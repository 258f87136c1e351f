"""What a model is made of at one moment, to tell whether that has changed."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

PLAIN = (int, float, str, np.generic)
"""Of what is equal nobody can tell which one it is."""


class Looks:
    """What a model is made of at one moment.

    Args:
        things: list of all, which is kept so that none of them can go and
            another be taken for it.
    """

    def __init__(self, things: Sequence[Any]):
        self._things = things

    def differ_from(self, before: "Looks") -> bool:
        """Whether it was made of something else at another moment."""
        if len(self._things) != len(before._things):
            return True
        pairs = zip(self._things, before._things, strict=True)
        return not all(
            one is other
            or (isinstance(one, PLAIN) and type(one) is type(other))
            and one == other
            for one, other in pairs
        )


class Followed:
    """Tells whether programs are still those of what they were made from.

    Code of layers and losses may change that too, as it runs. Then nobody can
    tell what others, as callbacks, have changed since it was recorded.

    Args:
        look: notes what programs are made from by now.
    """

    def __init__(self, look: Callable[[], Looks]):
        self._look = look
        self._last: Looks | None = None
        self._is_recorded = False
        self._is_outdated = False
        self._has_run = False

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Make a scope in which code runs to learn what it does."""
        self._compare()
        try:
            yield
        finally:
            self._last = self._look()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Make a scope in which code runs to be recorded."""
        with self.trying():
            yield
        self._is_recorded = True

    def note_run(self) -> None:
        """Note that code runs, operation by operation."""
        self._has_run = True

    def settle(self) -> None:
        """Note what programs are made from, at the end of a call."""
        if self._has_run or not self._is_recorded:
            self._last = self._look()
        self._has_run = False

    def has_changed(self) -> bool:
        """Whether programs were made from something else."""
        if not self._is_outdated and self._last is not None:
            return self._look().differ_from(self._last)
        return self._is_outdated

    def _compare(self) -> None:
        """Note whether an earlier program lacks what has changed since."""
        if self._is_recorded and not self._has_run:
            self._is_outdated = self.has_changed()
