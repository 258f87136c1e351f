"""What a learning rate range test has shown."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from accumtrainer import notebook
from accumtrainer.diagnosis.range_picture import draw_range

End = Literal["updates", "divergence", "not finite", "data"]

ENDS: dict[End, str] = {
    "updates": "after all of them",
    "divergence": "where the loss had risen far above its lowest",
    "not finite": "where it was not finite any more",
    "data": "with the data",
}
"""Why a test ended, as its report says it."""

MOST_ROWS = 16
"""Rates that a notebook shows."""

LEFT_OUT = 0.1
"""Part of the updates at the beginning that suggest nothing.

There the rate is too low to show anything but noise.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeTest:
    """The losses of a model whose learning rate grew with every update.

    Printing it shows a short report.

    Args:
        learning_rates: rate of each update, evenly spaced in its logarithm.
            Of several optimizers it is the largest of their rates.
        losses: loss of each update alone, before it was made.
        smoothing: at least 0 and below 1: by how much a loss counts less than
            the next in their moving average.
        ended_by: `"updates"`, when all were made; `"divergence"`, when the
            average had risen far above its lowest; `"not finite"`, when an
            update was not; or `"data"`, when there were no more.
        shares: dict from the name of an optimizer to its part of the rate,
            where there are several.

    Examples:
        >>> test = RangeTest(learning_rates=(0.001, 0.01, 0.1, 1.0),
        ...                  losses=(2.0, 1.5, 0.5, 9.0),
        ...                  smoothing=0.1, ended_by="divergence")
        >>> print(test)
        4 updates with learning rates from 1.0e-03 to 1.0e+00, ended where ...
          steepest fall of the loss  1.0e-02  suggested
          lowest loss, 0.604         1.0e-01
    """

    learning_rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothing: float
    ended_by: End
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The moving average of the losses at each of the rates."""
        return smooth(self.losses, self.smoothing)

    @property
    def suggestion(self) -> float | None:
        """The rate at which the loss fell most steeply, or `None`.

        Looked for between the first tenth of the updates and the lowest
        average; `None` where the loss has not fallen there.
        """
        index = steepest(self.smoothed)
        return None if index is None else self.learning_rates[index]

    def plot(self, path: str | os.PathLike) -> None:
        """Draw losses over rates, with the suggestion, into a file.

        Needs matplotlib: `pip install 'accumtrainer[plot]'`.

        Args:
            path: file to write; its suffix says the format: `.png`, `.pdf`,
                `.svg` or what else matplotlib can write.

        Raises:
            ImportError: matplotlib is not installed.
        """
        draw_range(
            path,
            self.learning_rates,
            self.losses,
            self.smoothed,
            suggestion=self.suggestion,
        )

    def __str__(self) -> str:
        count = len(self.losses)
        updates = f"{count} update" + ("" if count == 1 else "s")
        if not count:
            return f"{updates}, ended {ENDS[self.ended_by]}. No suggestion."
        low, high = self.learning_rates[0], self.learning_rates[-1]
        lines = [
            f"{updates} with learning rates from {low:.1e} to {high:.1e}, "
            f"ended {ENDS[self.ended_by]}."
        ]
        suggestion = self.suggestion
        if suggestion is None:
            lines.append("No suggestion: the loss has not fallen.")
            return "\n".join(lines)
        best = int(np.argmin(self.smoothed))
        lowest = f"lowest loss, {self.smoothed[best]:.3g}"
        width = max(len(lowest), len(STEEPEST))
        lines += [
            f"  {STEEPEST:<{width}}  {suggestion:.1e}  suggested",
            f"  {lowest:<{width}}  {self.learning_rates[best]:.1e}",
        ]
        lines += [
            f"  of {name}, {suggestion * share:.1e}"
            for name, share in self.shares.items()
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        columns = (self.learning_rates, self.losses, self.smoothed)
        rows = list(zip(*columns, strict=True))
        return notebook.paragraph(self) + notebook.table(
            ["learning rate", "loss", "average"], rows, MOST_ROWS
        )


STEEPEST = "steepest fall of the loss"


def smooth(losses: Sequence[float], smoothing: float) -> tuple[float, ...]:
    """Average losses exponentially, without the lag of such an average.

    It is one of the losses so far, in which the first ones weigh more the
    fewer there are, and is behind a loss that falls by the mean age of what
    it averages. So each value is given to an update that many before; what
    then lacks one at the end has the last.

    Examples:
        >>> smooth([4.0, 1.0, 1.0], 0.5)
        (2.0, 1.4285714285714286, 1.4285714285714286)
    """
    averages, average = [], 0.0
    for count, loss in enumerate(losses, start=1):
        average = smoothing * average + (1 - smoothing) * loss
        averages.append(average / (1 - smoothing**count))
    lag = min(round(smoothing / (1 - smoothing)), len(averages) - 1)
    return tuple(averages[lag:] + averages[-1:] * lag)


def steepest(smoothed: Sequence[float]) -> int | None:
    """Find where an average falls most steeply on its way to the lowest.

    Examples:
        >>> steepest([4.0, 3.0, 1.0, 0.9, 4.0]), steepest([1.0, 2.0, 3.0])
        (1, None)
    """
    first = int(LEFT_OUT * len(smoothed))
    past_lowest = int(np.argmin(smoothed)) + 1 if smoothed else 0
    if past_lowest - first < 2:
        return None
    slopes = np.gradient(np.asarray(smoothed))[first:past_lowest]
    index = int(np.argmin(slopes))
    return first + index if slopes[index] < 0 else None
