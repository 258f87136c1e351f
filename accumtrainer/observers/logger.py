"""What every logger shares: when to write a point, and what is in it."""

import abc
import functools
import time
import warnings
from typing import Any

import numpy as np

from accumtrainer import errors
from accumtrainer.config import Every
from accumtrainer.observers.callback import Callback
from accumtrainer.observers.logs import Logs, is_learning_rate, to_number
from accumtrainer.observers.media import check_media
from accumtrainer.progress import Progress

LATEST = ("loss_scale", "updates", "skipped_updates")
"""Numbers of which a point holds the last, not the mean; so of the rates."""

NOT_AVERAGED = frozenset({*LATEST, "applied", "weight"})
"""Those, and numbers of a window that serve to average the others."""

MOST_UNREAD = 64
"""Windows whose numbers may stay on the device."""


class Logger(Callback, abc.ABC):
    """Receive points, each of them what happened since the last one.

    A subclass says what to do with a point; when it is due and what is in it
    is settled here. A point that was due is made when the next window is on its
    way, so that the device never waits for a logger: it comes one update later,
    or with the end of the epoch. A last point is always written. A trial
    (`fast_dev_run`) writes nothing: none of the methods is called.

    A point of training holds the means since the last one of the losses, the
    gradient norms and what hooks logged, each update by its weight; learning
    rate, loss scale and counters as they are now; metrics as the running
    means over the epoch that Keras shows, but for one that is named like a
    number of these; whatever other callbacks wrote into the logs; `epoch`, its
    index; and `samples_per_second`, validation left out. A point of validation
    holds its `val_` numbers. What other callbacks write into the logs only when
    an epoch ends makes a point of its own.

    Args:
        every: how often to write a point; default every 10 updates, and once
            an epoch at least.

    Raises:
        TypeError: `every` is no `Every`.

    Examples:
        >>> class Printer(Logger):
        ...     def write(self, updates, numbers):
        ...         print(updates, numbers["loss"])
        >>> printer = Printer(every=Every(100, "updates"))
    """

    looks_at_model = False
    is_logger = True
    needs_trainer = True
    has_state = True

    def __init__(self, every: Every | None = None):
        super().__init__()
        self._is_due_each_epoch = every is None
        every = Every(10, "updates") if every is None else every
        if not isinstance(every, Every):
            raise TypeError(
                "every must be an Every. Received: "
                f"every={every!r}. Use for example Every(10, 'updates')."
            )
        self.every = every
        self._is_open = False
        self._point = _Point()
        self._unread: list[Logs] = []
        self._since = Progress()
        self._due = None
        self._updates_to_wait = 0
        self._epoch = 0
        self._has_point_of_epoch = False
        self._running = Logs()
        self._names_before: frozenset[str] = frozenset()
        self._validated: frozenset[str] = frozenset()
        self._speed = _Speed()
        # What is logged before it is settled at which update: that of a
        # resume is known when its state comes, for the second time.
        self._held: list[tuple[str, Any]] | None = None
        self._awaits_state = False

    # What a subclass fills in.

    def open(self) -> None:
        """Get ready to write; called when a training begins."""

    @abc.abstractmethod
    def write(self, updates: int, numbers: dict[str, Any]) -> None:
        """Write one point.

        Args:
            updates: number of updates made so far, never less than before.
            numbers: dict by name of Python numbers, of lists of them where
                a metric has several values, and of what other callbacks put
                in. For a point of training it is no plain dict, but one that
                reads from the device when somebody looks at it, here or
                later, in whatever thread.
        """

    def write_media(self, updates: int, name: str, value: Any) -> None:
        """Write an image, a histogram, a text or a table.

        A logger that does not override it leaves them out.

        Args:
            updates: number of updates made so far, never less than before.
            name: what it is called.
            value: an `Image`, `Histogram`, `Text` or `Table`, all on the
                host.
        """

    def close(self) -> None:
        """Finish writing; called when a training ends, however it ends."""

    # What callbacks may ask of it.

    def log_media(self, name: str, value: Any) -> None:
        """Log what is no number, at the updates made so far.

        Does nothing in a trial. `Trainer.log_media` asks every logger.

        Args:
            name: what it is called.
            value: an `Image`, `Histogram`, `Text` or `Table`.

        Raises:
            RuntimeError: no training is running.
            TypeError: the value is of another kind.
        """
        check_media(name, value)
        if self._is_open and self._held is not None:
            self._held.append((name, value))
        elif self._is_open:
            self._write_what_was_due()
            self.write_media(self.trainer.progress.updates, name, value)
        elif self.trainer is None or self.may_write:
            raise RuntimeError(errors.MEDIA_OUTSIDE.format(name=name))

    # The story of a training, as told to callbacks.

    def on_train_begin(self, logs: Any = None) -> None:
        self._unread, self._point = [], _Point()
        self._running = Logs()
        self._names_before = self._validated = frozenset()
        self._due = None
        self._updates_to_wait = 0
        self._since = self.trainer.progress
        self._speed = _Speed()
        self._is_open = self.may_write
        self._held = []
        if self._is_open:
            self.open()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._has_point_of_epoch = False
        if not self._awaits_state:
            self._write_what_was_held()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # After most updates nothing else is done: it is time that training
        # does not get.
        if not self._is_open:
            return
        if self._held is not None:
            self._write_what_was_held()
        if self._due is not None:
            self._write_what_was_due()
        self._unread.append(self.trainer.window_logs)
        self._running = logs
        if len(self._unread) > MOST_UNREAD:
            self._read(self._unread[: MOST_UNREAD // 2])
        self._speed.count(self.trainer)
        self._updates_to_wait -= 1
        if self._updates_to_wait <= 0:
            self._find_out_whether_due()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._is_open:
            return
        names = self._names_of_updates()
        self._write_what_was_due()
        lacks_one = self._is_due_each_epoch and not self._has_point_of_epoch
        if lacks_one or self.trainer.is_due(self.every, self._since):
            self._write_point(self.trainer.progress)
        known = names | self._validated
        written = {k: v for k, v in logs.items() if k not in known}
        # Who knows no update's names, as after a resume from a checkpoint
        # made without this logger, cannot tell what others have written.
        if names and written:
            self._write(self.trainer.progress.updates, written)
        self._validated = frozenset()

    def on_test_begin(self, logs: Any = None) -> None:
        self._speed.pause()

    def on_test_end(self, logs: Any = None) -> None:
        self._speed.go_on()

    def on_validation_end(self, update: int, logs: Any = None) -> None:
        if self._is_open:
            self._validated |= set(logs)
            self._write_what_was_due()
            self._write(update, logs)

    def on_train_end(self, logs: Any = None) -> None:
        if not self._is_open:
            return
        self._is_open = self._awaits_state = False
        # What other callbacks have done at the end is no training.
        self._speed.stop()
        try:
            self._write_what_was_held()
            self._write_point(self.trainer.progress)
        finally:
            self.close()

    def get_state(self) -> dict[str, Any]:
        names = self._names_of_updates()
        self._write_what_was_due()
        self._read(self._unread)
        return {
            "since": self._since.as_dict(),
            "point": self._point.get_state(),
            "names": sorted(names),
            "validated": sorted(self._validated),
            "has_point_of_epoch": self._has_point_of_epoch,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._since = Progress.from_dict(state["since"])
        self._updates_to_wait = 0
        self._point = _Point.of_state(state["point"])
        self._names_before = frozenset(state.get("names", ()))
        self._validated = frozenset(state.get("validated", ()))
        self._has_point_of_epoch = state.get("has_point_of_epoch", False)
        self._awaits_state = not self._is_open
        self._write_what_was_held()

    def _names_of_updates(self) -> frozenset[str]:
        """Name what the last update's logs held, even before a resume."""
        return frozenset(self._running) or self._names_before

    def _write_what_was_held(self) -> None:
        """Write what was logged before it was settled at which update."""
        held, self._held = self._held, None
        for name, value in held or ():
            self.write_media(self.trainer.progress.updates, name, value)

    def _find_out_whether_due(self) -> None:
        progress = self.trainer.progress_at_most
        if self.every.is_due(self._since, progress):
            self._due = progress
        else:
            self._updates_to_wait = self.every.least_updates(progress)

    def _write_what_was_due(self) -> None:
        """Write the point of the last window, unless a skip has put it off."""
        due, self._due = self._due, None
        if due is None:
            return
        last = self._unread[-1]
        due.updates = last["updates"]
        due.skipped_updates = last["skipped_updates"]
        if self.every.is_due(self._since, due):
            self._write_point(due)

    def _write_point(self, progress: Progress) -> None:
        """Write what has happened until some progress, if anything has."""
        unread, self._unread = self._unread, []
        point, self._point = self._point, _Point()
        running = self._running.lazy_copy()
        self._since, self._due = progress, None
        self._updates_to_wait = self.every.least_updates(progress)
        if not unread and point.is_empty:
            return
        self._has_point_of_epoch = True
        read = functools.partial(_read_point, point, unread, running)
        known = self._speed.measure(self.trainer.samples_seen)
        self.write(progress.updates, Logs(read, known | {"epoch": self._epoch}))

    def _write(self, updates: int, numbers: dict[str, Any]) -> None:
        plain = {name: _as_plain(value) for name, value in numbers.items()}
        self.write(updates, plain | {"epoch": self._epoch})

    def _read(self, windows: list[Logs]) -> None:
        for window in windows:
            self._point.add(window)
        self._unread = self._unread[len(windows) :]


def _read_point(
    point: "_Point", unread: list[Logs], running: Logs
) -> dict[str, Any]:
    """Read a point of training, in whatever thread looks at it."""
    for window in unread:
        point.add(window)
    numbers = dict(running.items()) | point.numbers()
    return {name: _as_plain(value) for name, value in numbers.items()}


def _as_plain(value: Any) -> Any:
    """Turn scalars into Python numbers and arrays into lists of them."""
    value = to_number(value)
    return value.tolist() if isinstance(value, np.ndarray) else value


class _Point:
    """Sums of what some windows logged."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._latest: dict[str, Any] = {}
        self._has_applied = False

    @property
    def is_empty(self) -> bool:
        """Whether no window has been added."""
        return not self._latest

    def add(self, window: dict[str, Any]) -> None:
        """Add the numbers of a window.

        Windows that were skipped are averaged only until one is applied, which
        has their sums forgotten.
        """
        window = dict(window.items())  # not key by key, as `dict(window)` is
        is_applied, more = window["applied"], window["weight"]
        if is_applied and not self._has_applied:
            self._sums = {}
        self._has_applied |= is_applied
        self._latest = window
        if self._has_applied and not is_applied:
            return
        for name, value in window.items():
            if name not in NOT_AVERAGED and not is_learning_rate(name):
                total, weight = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (total + more * value, weight + more)

    def numbers(self) -> dict[str, Any]:
        """Return the means and the latest numbers by name."""
        means = {
            name: total / weight if weight else 0.0
            for name, (total, weight) in self._sums.items()
        }
        return means | self._latest_numbers()

    def _latest_numbers(self) -> dict[str, Any]:
        rates = filter(is_learning_rate, self._latest)
        return {name: self._latest[name] for name in (*rates, *LATEST)}

    def get_state(self) -> dict[str, Any]:
        """Return what `of_state` needs, a dict ready for JSON."""
        return {
            "sums": self._sums,
            "latest": {} if self.is_empty else self._latest_numbers(),
            "has_applied": self._has_applied,
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "_Point":
        """Make a point of what `get_state` returned."""
        point = cls()
        point._sums = {k: tuple(v) for k, v in state["sums"].items()}
        point._latest = dict(state["latest"])
        point._has_applied = state["has_applied"]
        return point


class _Speed:
    """Samples per second of training, the first update not counted."""

    def __init__(self) -> None:
        self._samples: int | None = None
        self._begun: float | None = None
        self._paused = 0.0
        self._pause: float | None = None
        self._last: float | None = None
        self._end: float | None = None

    def count(self, trainer: Any) -> None:
        """Note an update; the first one compiles everything, and begins."""
        self._last = time.monotonic()
        if self._begun is None:
            self._samples, self._begun = trainer.samples_seen, self._last

    def stop(self) -> None:
        """Leave out what has come after the last update, or its validation."""
        self._end = self._last

    def pause(self) -> None:
        """Leave the time from here on out."""
        self._pause = time.monotonic()

    def go_on(self) -> None:
        """Count the time from here on again."""
        now = self._last = time.monotonic()
        if self._pause is not None:
            self._paused += now - self._pause
        self._pause = None

    def measure(self, samples: int) -> dict[str, float]:
        """Return `{"samples_per_second": float}` and begin anew."""
        now = time.monotonic() if self._end is None else self._end
        seconds = 0.0
        if self._begun is not None:
            seconds = now - self._begun - self._paused
        seen = samples - (self._samples or 0)
        self._samples, self._begun, self._paused = samples, now, 0.0
        has_measured = seconds > 0 and seen > 0
        return {"samples_per_second": seen / seconds} if has_measured else {}


def send_media(loggers: tuple[Logger, ...], name: str, value: Any) -> None:
    """Have every logger log what is no number; warn if none of them can.

    Args:
        loggers: those of the running fit.
        name: what it is called.
        value: an `Image`, `Histogram`, `Text` or `Table`.
    """
    check_media(name, value)
    able = [x for x in loggers if type(x).write_media is not Logger.write_media]
    if not able:
        names = [type(logger).__name__ for logger in loggers]
        warnings.warn(
            errors.NO_MEDIA.format(
                name=name,
                kind=type(value).__name__,
                loggers=", ".join(names) or "none",
            ),
            RuntimeWarning,
            stacklevel=3,
        )
    for logger in able:
        logger.log_media(name, value)
