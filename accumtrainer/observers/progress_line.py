"""What a line of progress says, and how fast things go by."""

import dataclasses
import datetime
import numbers
from collections.abc import Callable
from typing import Any

from accumtrainer.observers.logs import is_learning_rate

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
        finished: number of units finished already, before a resume.

    Examples:
        >>> pace = Pace(iter([0.0, 60.0, 62.0]).__next__, samples=0)
        >>> pace.advance(1, 32)
        >>> pace.advance(5, 160)
        >>> pace.secs_per_unit(), pace.samples_per_sec()
        (0.5, 64.0)
    """

    def __init__(
        self, clock: Callable[[], float], *, samples: int, finished: int = 0
    ):
        self._clock = clock
        # Both are a time, the units finished and the samples seen by then.
        self._origin = self._latest = (clock(), finished, samples)
        self._has_left_out_first = False
        self._paused_at: float | None = None

    def advance(self, finished: int, samples: int) -> None:
        """Note how many units are finished and how many samples seen."""
        previous, self._latest = (
            self._latest,
            (self._clock(), finished, samples),
        )
        has_second = finished > previous[1] > self._origin[1]
        if has_second and not self._has_left_out_first:
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
        and isinstance(value, numbers.Real)
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
