"""Counts what has run, and stops after too many windows that were not finite.

Which windows were skipped only the device knows, and to ask it is to wait. So
that is put off until somebody wants to know, or until so many have run since
that too many of them could be bad.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accumtrainer import errors
from accumtrainer.config import Every
from accumtrainer.progress import Progress


class Counting:
    """The counters of a training, of which the device keeps some.

    Args:
        read_counters: returns those of the device, which it waits for:
            `updates`, `skipped_updates` and `consecutive_skips`.
        max_consecutive_skips: windows in a row that may be skipped, `None`
            for any number.
    """

    def __init__(
        self,
        read_counters: Callable[[], Mapping[str, Any]],
        max_consecutive_skips: int | None,
    ):
        self._read_counters = read_counters
        self._limit = max_consecutive_skips
        self._progress = Progress()
        self._shown: Progress | None = None
        self._unread_windows = 0
        self._known_skips = 0

    @property
    def progress(self) -> Progress:
        """A copy of the counters; reading it waits for the device."""
        return self.reached if self._shown is None else self._shown.copy()

    @property
    def reached(self) -> Progress:
        """A copy of the counters, also where others are shown."""
        self._read()
        return self._progress.copy()

    @property
    def progress_at_most(self) -> Progress:
        """A copy of the counters if no window since then was skipped."""
        at_most = self._progress.copy()
        at_most.updates += self._unread_windows
        return at_most

    @contextlib.contextmanager
    def showing(self, progress: Progress) -> Iterator[None]:
        """Show other counters as `progress`, to tell of a window's middle."""
        self._shown = progress
        try:
            yield
        finally:
            self._shown = None

    def is_due(self, every: Every, since: Progress) -> bool:
        """Say whether an occasion has come since some earlier progress.

        It waits for the device only where enough windows have run that the
        occasion could be there.
        """
        return every.is_due(since, self.progress_at_most) and every.is_due(
            since, self.progress
        )

    def has_made(self, updates: float) -> bool:
        """Whether so many updates have been made; waits as `is_due` does."""
        if self.progress_at_most.updates < updates:
            return False
        return self.progress.updates >= updates

    def add(self, micro_batches: int, samples: int) -> None:
        """Count micro-batches, and the samples in them."""
        self._progress.micro_batches += micro_batches
        self._progress.samples += samples

    def add_window(self) -> None:
        """Count a window, which the device may yet run, or skip."""
        self._unread_windows += 1

    def add_epoch(self) -> None:
        """Count an epoch."""
        self._progress.epochs += 1

    def set_seconds(self, seconds: float) -> None:
        """Note for how long training has gone on, over all calls."""
        self._progress.seconds = seconds

    def restore(self, progress: Progress, consecutive_skips: int) -> None:
        """Go on from other counters, which the device has by now."""
        self._progress = progress
        self._known_skips = consecutive_skips
        self._unread_windows = 0

    def move_updates(self, number: int) -> None:
        """Count more updates or fewer, as the device does by now."""
        self._progress.updates = self.reached.updates + number

    def check_skips_if_many(self) -> None:
        """Stop after too many bad windows in a row, if that could be.

        Raises:
            NonFiniteError: there are too many.
        """
        if self._limit is None or not self._unread_windows:
            return
        if self._known_skips + self._unread_windows > self._limit:
            self.check_skips()

    def check_skips(self) -> None:
        """Stop after too many bad windows in a row; waits for the device.

        Raises:
            NonFiniteError: there are too many.
        """
        self._read()
        if self._limit is not None and self._known_skips > self._limit:
            raise errors.NonFiniteError(
                errors.NON_FINITE.format(
                    count=self._known_skips,
                    update=self._progress.updates,
                    limit=self._limit,
                )
            )

    def _read(self) -> None:
        """Learn from the device which windows were applied."""
        if self._unread_windows:
            counters = self._read_counters()
            self._progress.updates = counters["updates"]
            self._progress.skipped_updates = counters["skipped_updates"]
            self._known_skips = counters["consecutive_skips"]
            self._unread_windows = 0
