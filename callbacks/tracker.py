"""What loggers have in common that feed a run of a tracker in a thread."""

import abc
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

from accumtrainer import Every
from accumtrainer.callbacks.background import Background
from accumtrainer.callbacks.description import describe_training
from accumtrainer.callbacks.warning_logger import WarningLogger

MOST_UNREAD_POINTS = 200
"""Points that may wait with their numbers on the device."""

REFUSED = "{tool} did not take everything ({reason}). Training goes on."
TOO_SLOW = (
    "{tool} takes points more slowly than they come, and some were left out. "
    "Training goes on. A larger `every` makes fewer points."
)
UNFINISHED = (
    "{tool} did not take the last points within close_secs={secs:g} seconds; "
    "they are left out. Give it more."
)
UNKNOWN_OPTIONS = (
    "{logger} must get its own options and those of {starter}. Received: "
    "{unknown}. {starter} has {known}."
)


class Tracker(WarningLogger):
    """Feed one run of a tracker, which a second `fit` and a resume continue.

    Another Trainer, or one that has been put back, begins another run. The run
    is begun with the first epoch, as a resume says only after `open` which run
    it is. What goes wrong in the thread is one warning.

    Args:
        every: how often to write a point.
        options: dict of what the function that starts a run takes.
        close_secs: seconds that the tracker may take when training ends.
    """

    tool = ""
    """What users call the tracker."""

    starter = ""
    """The function that starts a run, as users write it."""

    unfinished = UNFINISHED
    """What a warning says where the tracker takes longer than it may."""

    def __init__(
        self, every: Every | None, options: dict[str, Any], close_secs: float
    ):
        super().__init__(every)
        self.close_secs = close_secs
        self._options = options
        self._run_id: str | None = None
        self._last_updates = -1
        self._followed: Any = None  # a reference to the run's Trainer
        self._is_resumed = False
        self._background: Background | None = None
        self._outer_error: BaseException | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy follows no Trainer yet, and so begins a run of its own.
        return super().__getstate__() | {
            "_followed": None,
            "_outer_error": None,
        }

    # What a subclass fills in.

    @abc.abstractmethod
    def get_starter(self) -> Callable[..., Any]:
        """Import the tracker; return the function that starts a run."""

    @abc.abstractmethod
    def start(self) -> None:
        """Start the run, or go on with it, and make `_background`."""

    @abc.abstractmethod
    def send_point(self, updates: int, numbers: dict[str, Any]) -> None:
        """Hand a point to the thread."""

    @abc.abstractmethod
    def finish(self) -> None:
        """End the thread, and the run if it was started here."""

    # What every logger does.

    def open(self) -> None:
        known = inspect.signature(self.get_starter()).parameters
        unknown = sorted(set(self._options) - set(known))
        if unknown:
            raise TypeError(
                UNKNOWN_OPTIONS.format(
                    logger=type(self).__name__,
                    starter=self.starter,
                    unknown=", ".join(unknown),
                    known=", ".join(known),
                )
            )
        self._outer_error = sys.exc_info()[1]
        # Amid an epoch, a resume says which run it is before the counters are
        # put back.
        is_behind = self.trainer.progress.updates < self._last_updates
        followed = self._followed
        is_another = followed is None or followed() is not self.trainer
        resumes = self._is_resumed and self.params.get("resumes")
        if (is_behind or is_another) and not resumes:
            self.forget_run()
        self._followed = weakref.ref(self.trainer)

    def forget_run(self) -> None:
        """Begin another run with the next training."""
        self._run_id, self._last_updates = None, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if self._is_open:
            self._begin()

    def write(self, updates: int, numbers: dict[str, Any]) -> None:
        background = self._begin()
        self._last_updates = updates
        if background.waiting >= MOST_UNREAD_POINTS:
            numbers = dict(numbers.items())
        # Reading takes 0.2 ms, which the thread has and training has not.
        self.send_point(updates, numbers)
        self._warn_of_failures(background)

    def close(self) -> None:
        try:
            if self._background is not None:
                self.finish()
        finally:
            self._is_resumed = False  # the thread asks until it has ended

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()  # may write a point
        return state | {
            "run_id": self._run_id,
            "last_updates": self._last_updates,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._run_id = state["run_id"]
        self._last_updates = state["last_updates"]
        self._is_resumed = True

    def _description(self) -> dict[str, Any]:
        """Say what the training was configured to be, for the run."""
        description = describe_training(self.trainer, self.params)
        return description | {"every": str(self.every)}

    def _begin(self) -> Background:
        """Return the thread, and start the run if it has not been yet.

        Without an epoch there is a point too: the last one of a resumed run
        that has nothing left to do.
        """
        if self._background is None:
            self.start()
        assert self._background is not None
        return self._background

    def _send(self, function: Callable[..., Any], *arguments: Any) -> None:
        if not self._begin().do(function, *arguments):
            self._warn_once(TOO_SLOW.format(tool=self.tool))

    def _end_thread(self, last: Callable[..., Any], *arguments: Any) -> None:
        """Have the thread do what is left and one last thing, and end."""
        background, self._background = self._background, None
        assert background is not None  # points were sent
        is_done = background.finish(self.close_secs, last, *arguments)
        self._warn_of_failures(background)
        if not is_done:
            self._warn_once(
                self.unfinished.format(tool=self.tool, secs=self.close_secs)
            )

    def _failure(self) -> BaseException | None:
        """Return the error that ends this training, if one does."""
        failure = sys.exc_info()[1]
        return None if failure is self._outer_error else failure

    def _warn_of_failures(self, background: Background) -> None:
        if background.failures:
            failure = background.failures[0]
            reason = str(failure) or type(failure).__name__
            self._warn_once(REFUSED.format(tool=self.tool, reason=reason))
