"""A line of progress per epoch: live on a terminal, plain elsewhere."""

import dataclasses
import datetime
import time
from collections.abc import Callable
from typing import Any, Literal

from rich import console as rich_console
from rich import live, progress_bar, table, text

from accumtrainer.checks import require_choice
from accumtrainer.observers.callback import Callback
from accumtrainer.observers.logs import is_learning_rate

REDRAW_SECS = 0.1
BAR_WIDTH = 30
SMALLEST_BAR_WIDTH = 6

HIDDEN = frozenset(
    {
        "applied",
        "gradient_norm",
        "loss_scale",
        "lr",
        "micro_batches",
        "samples",
        "skipped_updates",
        "updates",
    }
)
"""Names in the logs that are left to loggers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What one line of progress says.

    Args:
        heading: what is running, such as `Epoch 1/3`.
        finished: number of units finished.
        total: number of units expected, or `None` where nobody knows.
        unit: name of the units.
        details: tuple of strings that follow.

    Examples:
        >>> line = Line(
        ...     heading="Epoch 1/3",
        ...     finished=2,
        ...     total=9,
        ...     unit="updates",
        ...     details=("loss 0.5",),
        ... )
        >>> line.body(" - ")
        '2/9 updates - loss 0.5'
    """

    heading: str
    finished: int
    total: int | None
    unit: str
    details: tuple[str, ...]

    def body(self, separator: str) -> Any:
        """Return what stands behind the heading and the bar."""
        total = "" if self.total is None else f"/{self.total:,}"
        count = f"{self.finished:,}{total} {self.unit}"
        return separator.join((count, *self.details))


class Pace:
    """How fast units and samples go by, while it is not paused.

    The first unit is left out as soon as there is a second: it may compile.

    Args:
        clock: function that returns seconds.
        samples: number of samples seen already.

    Examples:
        >>> pace = Pace(iter([0.0, 60.0, 62.0]).__next__, samples=0)
        >>> pace.advance(1, 32)
        >>> pace.advance(5, 160)
        >>> pace.secs_per_unit(), pace.samples_per_sec()
        (0.5, 64.0)
    """

    def __init__(self, clock: Callable[[], float], *, samples: int):
        self._clock = clock
        # Both are a time, the units finished and the samples seen by then.
        self._origin = self._latest = (clock(), 0, samples)
        self._has_left_out_first = False
        self._paused_at: float | None = None

    def advance(self, finished: int, samples: int) -> None:
        """Note how many units are finished and how many samples seen."""
        previous, self._latest = (
            self._latest,
            (self._clock(), finished, samples),
        )
        if not self._has_left_out_first and finished > previous[1] > 0:
            self._origin = previous
            self._has_left_out_first = True

    def pause(self) -> None:
        """Stop the time, for a validation."""
        self._paused_at = self._clock()

    def resume(self) -> None:
        """Let the time go on, as if it had stood still since `pause`."""
        assert self._paused_at is not None
        pause_secs = self._clock() - self._paused_at
        self._origin = (self._origin[0] + pause_secs, *self._origin[1:])
        self._latest = (self._latest[0] + pause_secs, *self._latest[1:])

    def secs_per_unit(self) -> float | None:
        """Return seconds per unit, or `None` before there is a speed."""
        secs, units, _ = self._since_origin()
        return secs / units if units > 0 else None

    def samples_per_sec(self) -> float | None:
        """Return samples per second, or `None` before there is a speed."""
        secs, _, samples = self._since_origin()
        return samples / secs if secs > 0 and samples > 0 else None

    def _since_origin(self) -> tuple[float, ...]:
        pairs = zip(self._latest, self._origin, strict=True)
        return tuple(now - then for now, then in pairs)


class ProgressBar(Callback):
    """Show how far training is, one line per epoch.

    A live line is redrawn at most ten times a second, and only then are the
    logs looked at, because that makes the host wait for the device. Lines
    that stay say everything once more, with the validation. Evaluation and
    prediction by themselves get a line each; inside training, an evaluation
    is part of the epoch's line.

    Args:
        mode: 1 for a live bar, 2 for plain lines, `"auto"` for a live bar on
            a terminal and plain lines elsewhere. A live bar that is sent to
            a file writes only the lines that stay.
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
        self._console = console or rich_console.Console()
        self._clock = clock
        is_watched = self._console.is_interactive
        self._has_bar = mode == 1 or (mode == "auto" and is_watched)
        self._is_live = self._has_bar and (
            is_watched or self._console.is_jupyter
        )
        self._is_fitting = False
        self._is_open = False
        self._live: live.Live | None = None
        self._pace = Pace(clock, samples=0)

    # --- Training ---

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_fitting = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        epochs = self.params["epochs"]
        of_epochs = "" if epochs is None else f"/{epochs}"
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
            self._open("Evaluate", "batches")
        elif self._is_open:
            # The validation would wait for the updates under way. Wait here
            # instead, so that their time is not taken for the validation's.
            if self._latest_logs is not None:
                self._look(self._latest_logs)
            self._pace.pause()
            self._draw("validating")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._is_fitting:
            self._advance(batch + 1, logs)

    def on_test_end(self, logs: Any = None) -> None:
        if not self._is_fitting:
            self._finish(logs)
        elif self._is_open:
            self._pace.resume()

    def on_predict_begin(self, logs: Any = None) -> None:
        self._open("Predict", "batches")

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        # These logs hold the predictions themselves.
        self._advance(batch + 1, {})

    def on_predict_end(self, logs: Any = None) -> None:
        self._finish({})

    # --- One line, from its opening to its closing ---

    def _open(self, heading: str, unit: str) -> None:
        self._heading, self._unit = heading, unit
        self._total = self.params["steps"]
        self._finished = 0
        self._latest_logs = None
        self._numbers: dict[str, str] = {}
        self._validation = {}
        self._is_open = True
        self._began_secs = self._drawn_secs = self._clock()
        self._pace = Pace(self._clock, samples=self._samples())
        self._stop_drawing()
        if self._is_live:
            self._live = live.Live(
                console=self._console, auto_refresh=False, transient=True
            )
            self._live.start()
            self._draw()

    def _advance(self, finished: int, logs: Any) -> None:
        self._finished, self._latest_logs = finished, logs
        now = self._clock()
        if self._is_live and now - self._drawn_secs >= REDRAW_SECS:
            self._drawn_secs = now
            self._look(logs)
            self._draw(self._speed(), self._remaining())
        else:
            self._pace.advance(finished, self._samples())

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
        if self._live is not None:
            self._live.update(self._grid(self._line(*details)), refresh=True)

    def _stop_drawing(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _close(self, *details: Any) -> None:
        self._stop_drawing()
        self._is_open = False
        line = self._line(*details)
        if self._has_bar and self._bar_width(line) >= SMALLEST_BAR_WIDTH:
            self._console.print(self._grid(line))
            return
        words = f"{line.heading}{self._separator}{line.body(self._separator)}"
        self._console.print(text.Text(words), soft_wrap=True)

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

    @property
    def _separator(self) -> str:
        return " - " if self._console.options.ascii_only else " · "

    # --- How it looks ---

    def _bar_width(self, line: "Line") -> int:
        words = f"{line.heading}  {line.body(self._separator)}"
        return min(BAR_WIDTH, self._console.width - len(words))

    def _grid(self, line: "Line") -> Any:
        cells = [text.Text(line.heading)]
        bar_width = self._bar_width(line)
        if bar_width >= SMALLEST_BAR_WIDTH:
            cells.append(make_bar(line, width=bar_width, clock=self._clock))
        body = text.Text(line.body(self._separator))
        body.truncate(
            max(1, self._console.width - len(line.heading) - 1),
            overflow="crop" if self._console.options.ascii_only else "ellipsis",
        )
        grid = table.Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        for _ in (*cells, body):
            grid.add_column(no_wrap=True)
        grid.add_row(*cells, body)
        return grid


def make_progress_bar(verbose: Any) -> ProgressBar | None:
    """Make the progress bar that `verbose` asks for; `None` for 0."""
    check_verbose(verbose)
    return ProgressBar(verbose) if verbose else None


def make_bar(line: "Line", *, width: int, clock: Callable[[], float]) -> Any:
    """Make the bar of a line, a moving pulse where the end is unknown.

    Args:
        width: number of characters.
        clock: function that returns seconds, which moves the pulse.

    Returns:
        Something for rich to print.
    """
    is_unknown = not line.total or line.finished > line.total
    return progress_bar.ProgressBar(
        total=None if is_unknown else line.total,
        completed=line.finished,
        width=width,
        animation_time=clock(),
    )


def shown_numbers(logs: Any) -> dict[str, str]:
    """Choose from the logs what a line shows, as short strings.

    Args:
        logs: `Logs`, dict of numbers by name, or `None`.

    Returns:
        Dict of strings with four significant digits, in the order of `logs`.

    Examples:
        >>> shown_numbers({"loss": 0.31249, "updates": 7, "mae": 1234567.0})
        {'loss': '0.3125', 'mae': '1.235e+06'}
    """
    return {
        name: f"{value:.4g}"
        for name, value in (logs or {}).items()
        if name not in HIDDEN
        and not is_learning_rate(name)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def format_duration(secs: float) -> str:
    """Write a duration the way people read it.

    Examples:
        >>> format_duration(3.21), format_duration(83.2)
        ('3.2 s', '0:01:23')
    """
    if secs < 59.95:
        return f"{secs:.1f} s"
    return str(datetime.timedelta(seconds=round(secs)))


def check_verbose(verbose: Any) -> None:
    """Refuse what Keras does not know as `verbose`.

    Raises:
        ValueError: it is none of 0, 1, 2 and `"auto"`.
    """
    require_choice(
        "verbose", verbose, (0, 1, 2, "auto"), "Use 0 to print nothing."
    )
