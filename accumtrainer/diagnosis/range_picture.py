"""The picture of a learning rate range test."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

SIZE_INCHES = (6.5, 3.2)
DOTS_PER_INCH = 160

BLUE, ORANGE, GRAY = "#0072b2", "#d55e00", "#666666"

HEADROOM = 0.4
"""How far the picture goes on above the losses on the way to the lowest."""


def draw_range(
    path: str | os.PathLike,
    learning_rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    *,
    suggestion: float | None,
) -> None:
    """Draw losses over the rates they were seen at.

    Args:
        path: file to write.
        learning_rates: rate of each update.
        losses: loss of each.
        smoothed: their moving average.
        suggestion: the rate to mark.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "RangeTest.plot needs matplotlib. Install it with "
            "pip install 'accumtrainer[plot]'."
        ) from error
    # A figure by itself leaves pyplot and its backend alone.
    figure = Figure(SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.plot(
        learning_rates, losses, ".", color=GRAY, markersize=3, label="update"
    )
    axis.plot(
        learning_rates, smoothed, color=BLUE, linewidth=1.4, label="average"
    )
    if suggestion is not None:
        label = f"suggested {suggestion:.1e}"
        axis.axvline(suggestion, color=ORANGE, linewidth=1.2, label=label)
    _style(axis)
    _show_what_matters(axis, losses, smoothed)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _style(axis: Any) -> None:
    axis.set_xscale("log")
    axis.set_xlabel("learning rate", fontsize=8)
    axis.set_ylabel("loss", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="#e6e6e6", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=7)
    axis.legend(fontsize=7, frameon=False, loc="upper left", ncols=3)


def _show_what_matters(
    axis: Any, losses: Sequence[float], smoothed: Sequence[float]
) -> None:
    """Leave the last losses out of the picture where they went far up."""
    if not smoothed:
        return
    best = int(np.argmin(smoothed))
    low, high = min(losses), max(losses[: best + 1])
    height = (high - low) or abs(low) or 1.0
    if max(losses) > high + height:
        axis.set_ylim(low - 0.05 * height, high + HEADROOM * height)
