"""A line of progress per epoch: live where it is watched, plain elsewhere."""

import math
import time
from collections.abc import Callable
from typing import Any, Literal

from accumtrainer.checks import require_choice
from accumtrainer.observers.callback import Callback
from accumtrainer.observers.progress_line import (
    Line,
    Pace,
    format_duration,
    shown_numbers,
)
from accumtrainer.observers.screens import choose_screen


class ProgressBar(Callback):
    """Show how far training is, one line per epoch.

    A live line is redrawn at most ten times a second, on a terminal or in a
    notebook. In a file there are plain lines: one as an epoch ends, and one
    whenever nothing was written for ten seconds, a time that doubles to a
    minute. Only for a line are the logs looked at, because that makes the host
    wait for the device. Lines that stay say everything once more, with the
    validation. Evaluation and prediction by themselves get a line each; inside
    training, an evaluation is part of the epoch's line.

    Args:
        mode: `"auto"` for a live bar where it is watched and plain lines
            elsewhere; 1 for the same, with a bar in the plain lines too; 2 for
            one plain line per epoch and nothing within.
        console: `rich.console.Console` to write to. Standard output if `None`.
        clock: function that returns seconds.

    Raises:
        ValueError: if `mode` is none of these.

    Examples:
        >>> bar = ProgressBar(2)
        >>> bar.set_params({"epochs": 3, "steps": 1})
        >>> bar.on_epoch_begin(0)
        >>> bar.on_train_batch_end(0, {"loss": 0.5})
        >>> bar.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.75})
        Epoch 1/3 · 1/1 updates · 0.0 s · loss 0.5 · val_loss 0.75
    """

    looks_at_model = False
    has_state = True

    def __init__(
        self,
        mode: Literal["auto", 1, 2] = "auto",
        *,
        console: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        if mode not in (1, 2, "auto"):
            raise ValueError(
                f"mode must be 1, 2 or 'auto'. Received: mode={mode!r}. Leave "
                "the progress bar out to show nothing."
            )
        self._clock = clock
        self._screen = choose_screen(mode, console, clock)
        self._is_fitting = False
        self._is_open = False
        self._drawn = 0  # lines within the epochs of this training
        self._pace = Pace(clock, samples=0)
        self._numbers: dict[str, str] = {}
        self._validation: dict[str, str] = {}

    # --- Training ---

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_fitting = True
        self._drawn = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        epochs = self.params["epochs"]
        of_epochs = "" if epochs in (None, math.inf) else f"/{epochs}"
        self._open(f"Epoch {epoch + 1}{of_epochs}", "updates")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._advance(batch + 1, logs)

    def on_validation_end(self, update: int, logs: Any = None) -> None:
        self._validation = shown_numbers(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._finish(logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._is_fitting = False
        if self._is_open:
            # Something went wrong inside the epoch. The device may be gone,
            # so what was seen last has to do.
            self._close("stopped", self._elapsed())

    # --- Evaluation and prediction ---

    def on_test_begin(self, logs: Any = None) -> None:
        if not self._is_fitting:
            self._drawn = 0
            self._open("Evaluate", "batches")
        elif self._is_open:
            # The validation would wait for the updates under way. Wait here
            # instead, so that their time is not taken for the validation's.
            if self._latest_logs is not None:
                self._look(self._latest_logs)
            self._pace.pause()
            if self._screen.is_live:
                self._draw("validating")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._is_fitting:
            self._advance(batch + 1, logs)
        elif self._is_open and not self._screen.is_live and self._is_due():
            self._draw(f"validating, {batch + 1:,} batches")

    def on_test_end(self, logs: Any = None) -> None:
        if not self._is_fitting:
            self._finish(logs)
        elif self._is_open:
            self._pace.resume()

    def on_predict_begin(self, logs: Any = None) -> None:
        self._drawn = 0
        self._open("Predict", "batches")

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        # These logs hold the predictions themselves.
        self._advance(batch + 1, {})

    def on_predict_end(self, logs: Any = None) -> None:
        self._finish({})

    # --- What a checkpoint keeps ---

    def get_state(self) -> dict[str, Any]:
        if not self._is_open:
            return {}
        return {
            "finished": self._finished,
            "numbers": self._numbers,
            "validation": self._validation,
            "elapsed_secs": self._clock() - self._began_secs,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        # Before a training it is told which state will come.
        if not self._is_open:
            return
        self._finished = state.get("finished", 0)
        self._numbers = state.get("numbers", {})
        self._validation = state.get("validation", {})
        # The clock of another process has begun at another time.
        self._began_secs = self._clock() - state.get("elapsed_secs", 0.0)
        self._pace = Pace(
            self._clock, finished=self._finished, samples=self._samples()
        )
        if self._screen.is_live:
            self._draw()

    # --- One line, from its opening to its closing ---

    def _open(self, heading: str, unit: str) -> None:
        self._heading, self._unit = heading, unit
        self._total = self.params["steps"]
        self._finished = 0
        self._latest_logs = None
        self._numbers, self._validation = {}, {}
        self._is_open = True
        self._began_secs = self._drawn_secs = self._clock()
        self._pace = Pace(self._clock, samples=self._samples())
        self._screen.open()
        if self._screen.is_live:
            self._draw()

    def _advance(self, finished: int, logs: Any) -> None:
        self._finished, self._latest_logs = finished, logs
        if self._is_due():
            self._look(logs)
            self._draw(self._speed(), self._remaining())
        else:
            self._pace.advance(finished, self._samples())

    def _is_due(self) -> bool:
        """Say whether a line is due, and count it if so."""
        now = self._clock()
        secs = self._screen.secs_to_next(self._drawn)
        if now - self._drawn_secs < secs:
            return False
        self._drawn_secs = now
        self._drawn += 1
        return True

    def _look(self, logs: Any) -> None:
        # Looking waits for the device, so it comes before taking the time.
        self._numbers = shown_numbers(logs)
        self._latest_logs = None
        self._pace.advance(self._finished, self._samples())

    def _finish(self, logs: Any) -> None:
        if self._latest_logs is not None:
            self._look(logs)
        self._numbers = shown_numbers(logs)
        if self._total is None:
            self._total = self._finished
        self._close(self._speed(), self._elapsed())

    def _draw(self, *details: Any) -> None:
        self._screen.draw(self._line(*details))

    def _close(self, *details: Any) -> None:
        self._is_open = False
        self._screen.close(self._line(*details))

    # --- What a line says ---

    def _line(self, *details: Any) -> Line:
        # The epoch's own names come first, in its order and with its values.
        numbers = {**self._numbers, **self._validation, **self._numbers}
        return Line(
            heading=self._heading,
            finished=self._finished,
            total=self._total,
            unit=self._unit,
            details=(
                *(detail for detail in details if detail is not None),
                *(f"{name} {value}" for name, value in numbers.items()),
            ),
        )

    def _samples(self) -> int:
        return 0 if self.trainer is None else self.trainer.samples_seen

    def _speed(self) -> str | None:
        speed = self._pace.samples_per_sec()
        return None if speed is None else f"{speed:,.0f} samples/s"

    def _remaining(self) -> str | None:
        secs_per_unit = self._pace.secs_per_unit()
        if secs_per_unit is None or self._total is None:
            return None
        units = max(0, self._total - self._finished)
        return f"ETA {format_duration(units * secs_per_unit)}"

    def _elapsed(self) -> str:
        return format_duration(self._clock() - self._began_secs)


def make_progress_bar(verbose: Any) -> ProgressBar | None:
    """Make the progress bar that `verbose` asks for; `None` for 0."""
    check_verbose(verbose)
    return ProgressBar(verbose) if verbose else None


def check_verbose(verbose: Any) -> None:
    """Refuse what Keras does not know as `verbose`.

    Raises:
        ValueError: it is none of 0, 1, 2 and `"auto"`.
    """
    require_choice(
        "verbose", verbose, (0, 1, 2, "auto"), "Use 0 to print nothing."
    )
