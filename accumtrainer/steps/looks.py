"""What a model is made of at one moment, to tell whether that has changed."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from accumtrainer import errors

PLAIN = (int, float, str, np.generic)
"""Of what is equal nobody can tell which one it is."""

MANY_CHANGES = 4
"""After so many in a row, each after few windows, nothing is recorded."""

FEW_WINDOWS = 20
"""For so few it takes longer to record a window than that then saves."""


class Looks:
    """What a model is made of at one moment.

    Args:
        things: list of all, which is kept so that none of them can go and
            another be taken for it.
        describe: function from the index of one of them to what it is part of.

    Attributes:
        things: the list.
    """

    def __init__(
        self,
        things: Sequence[Any],
        describe: Callable[[int], str] = lambda position: "the model",
    ):
        self.things = things
        self._describe = describe

    def change_since(self, before: "Looks") -> str | None:
        """Describe what of it is another than at another moment.

        Returns:
            Of several the first one; `None` if all are the same.
        """
        # What is missing equals nothing, not even `None`.
        pairs = itertools.zip_longest(
            self.things, before.things, fillvalue=object()
        )
        for position, (one, other) in enumerate(pairs):
            is_equal = (
                isinstance(one, PLAIN)
                and type(one) is type(other)
                and one == other
            )
            if one is not other and not is_equal:
                return self._describe(min(position, len(self.things) - 1))
        return None


class Followed:
    """Tells whether programs are still those of what they were made from.

    Code of layers and losses may change that too, as it runs. Then nobody can
    tell what others, as callbacks, have changed since it was recorded.

    Args:
        look: notes what programs are made from by now.
        pace: how often that has changed.

    Attributes:
        changed_by_code: what code has changed as it ran in the last scope, if
            anything.
    """

    def __init__(self, look: Callable[[], Looks], pace: "Pace | None" = None):
        self._look = look
        self.pace = pace or Pace()
        self._last: Looks | None = None
        self._is_recorded = False
        self._outdated_by: str | None = None
        self._has_run = False
        self._is_expecting = False
        self.changed_by_code: str | None = None

    def anew(self) -> "Followed":
        """Make one for programs that are yet to be made."""
        return Followed(self._look, self.pace)

    @contextlib.contextmanager
    def trying(self) -> Iterator[Looks]:
        """Make a scope in which code runs to learn what it does.

        Returns:
            `Looks` as there are before it runs.
        """
        before = self._look()
        self._compare(before)
        try:
            yield before
        finally:
            self._last = self._look()
            self.changed_by_code = self._last.change_since(before)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Looks]:
        """Make such a scope in which code runs to be recorded."""
        with self.trying() as before:
            yield before
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
        """Whether programs were made from something else.

        Or run operation by operation, which they need not any more.
        """
        return self.pace.note(self._change(), is_recorded=self._is_recorded)

    def expect_changes(self) -> None:
        """Note what there is, as others may change that next."""
        if self._has_run:
            self.settle()
        self._is_expecting = True

    def has_been_changed(self) -> bool:
        """Whether others have changed that, where they could."""
        is_expecting, self._is_expecting = self._is_expecting, False
        return is_expecting and self.has_changed()

    def _change(self) -> str | None:
        """Describe what has changed since programs were made, if anything."""
        if self._outdated_by is None and self._last is not None:
            return self._look().change_since(self._last)
        return self._outdated_by

    def _compare(self, now: Looks) -> None:
        """Note whether an earlier program lacks what has changed since."""
        if self._last is None or self._outdated_by is not None:
            return
        if self._is_recorded and not self._has_run:
            self._outdated_by = now.change_since(self._last)


class Pace:
    """How often what programs are made from changes.

    Attributes:
        is_fast: whether it changes so often that recording takes longer than
            to run operation by operation, as Keras does.
    """

    def __init__(self) -> None:
        self.is_fast = False
        self._windows = 0
        self._was_change = False
        self._in_a_row = 0

    def note_window(self) -> None:
        """Note that a window runs."""
        self._windows += 1

    def note(self, change: str | None, *, is_recorded: bool) -> bool:
        """Note a change, or that there is none.

        Where they come again and again, a warning says what it is, unless
        nothing was recorded that they could slow down.

        Returns:
            Whether programs are to be made anew.
        """
        is_change = change is not None
        is_early = self._windows <= FEW_WINDOWS
        if is_change:
            self._windows = 0
        goes_on = is_change is self._was_change and (is_early or not is_change)
        self._in_a_row = self._in_a_row + 1 if goes_on else 1
        self._was_change = is_change
        if self._in_a_row < MANY_CHANGES or self.is_fast is is_change:
            return is_change
        self.is_fast = is_change
        if is_change and is_recorded:
            message = errors.MANY_CHANGES.format(what=change)
            warnings.warn(message, stacklevel=3)
        return True
