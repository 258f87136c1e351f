"""A picture of the training so far, kept current on disk."""

import math
import os
import time
from collections.abc import Callable
from typing import Any

from accumtrainer import Every
from accumtrainer.callbacks.arguments import require_path
from accumtrainer.callbacks.curves import Curve
from accumtrainer.callbacks.scalars import as_scalars
from accumtrainer.callbacks.training_picture import (
    draw_curves,
    is_learning_rate,
    is_validation_loss,
    make_figure,
    not_empty,
    write_figure,
)
from accumtrainer.callbacks.warning_logger import WarningLogger

DRAWING_SHARE = 0.02
"""Largest part of the time that goes into drawing, before the last one."""

DRAWN = (
    "loss",
    "gradient_norm",
    "clipped_gradient_norm",
    "loss_scale",
    "skipped_updates",
)
"""Numbers of a point that are drawn, beside rates and validation losses."""


def is_drawn(name: str) -> bool:
    """Say whether a number of a point is drawn."""
    return name in DRAWN or is_learning_rate(name) or is_validation_loss(name)


class TrainingPlot(WarningLogger):
    """Draw losses, learning rate, gradient norm and skips over the updates.

    The picture is there from the first drawing on, and always whole: it is
    written beside its place and then moved there. It is drawn when training
    ends, however it ends, and in between at most every `redraw_secs` seconds,
    less often where drawing would take more than a fiftieth of the time. A
    long curve is thinned: its line shows means, its shade the range from the
    smallest to the largest value. A disk that cannot be written to is a
    warning; training goes on.

    Needs matplotlib: `pip install 'accumtrainer[plot]'`.

    Args:
        path: file to write; its suffix says the format: `.png`, `.pdf`,
            `.svg` or what else matplotlib can write.
        every: how often to take a point; default every 10 updates, and once
            an epoch at least.
        redraw_secs: seconds between drawings, while training runs.
        clock: function that returns seconds.

    Raises:
        TypeError: `every` is no `Every`.
        ValueError: matplotlib cannot write files of this suffix; raised when
            training begins.
        ImportError: matplotlib is not installed; raised when training begins.

    Examples:
        >>> plot = TrainingPlot("run.png", redraw_secs=60)
        >>> plot.path.name
        'run.png'
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        every: Every | None = None,
        redraw_secs: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(every=every)
        self.path = require_path("path", path, "loss.png")
        _check(redraw_secs)
        self.redraw_secs = redraw_secs
        self._clock = clock
        self._curves: dict[str, Curve] = {}
        self._trainer_drawn = None
        self._next_drawing = math.inf

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trainer_drawn": None}

    def open(self) -> None:
        """Check what drawing needs, before time is spent on training."""
        self._check_format()
        if self._trainer_drawn is not self.trainer:
            self._curves = {}
        self._trainer_drawn = self.trainer
        self._next_drawing = self._clock() + self.redraw_secs

    def write(self, updates: int, numbers: dict[str, Any]) -> None:
        """Add a point to the curves, and draw them if that is due."""
        for name, value in as_scalars(numbers).items():
            if is_drawn(name):
                self._curves.setdefault(name, Curve()).add(updates, value)
        if self._clock() >= self._next_drawing:
            self._draw()

    def close(self) -> None:
        """Draw the last picture."""
        self._draw()

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()  # may write a point
        curves = {name: c.get_state() for name, c in self._curves.items()}
        return state | {"curves": curves}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._curves = {
            name: Curve(**curve) for name, curve in state["curves"].items()
        }

    def _check_format(self) -> None:
        known = make_figure(1.0).canvas.get_supported_filetypes()
        suffix = self.path.suffix.removeprefix(".")
        if suffix not in known:
            raise ValueError(
                f"path must end in one of {', '.join(sorted(known))}. "
                f"Received: {str(self.path)!r}. Write for example "
                f"{str(self.path.with_suffix('.png'))!r}."
            )

    def _draw(self) -> None:
        if not not_empty(self._curves):
            return
        begun = self._clock()
        title = self.trainer.model.name
        try:
            write_figure(draw_curves(self._curves, title), self.path)
        except OSError as error:
            self._warn_once(
                f"TrainingPlot could not write {str(self.path)!r}: {error}. "
                "Training goes on."
            )
        now = self._clock()
        rest = max(self.redraw_secs, (now - begun) / DRAWING_SHARE)
        self._next_drawing = now + rest


def _check(redraw_secs: Any) -> None:
    is_number = isinstance(redraw_secs, int | float)
    if not is_number or isinstance(redraw_secs, bool) or redraw_secs < 0:
        raise ValueError(
            "redraw_secs must be a number of at least 0. Received: "
            f"redraw_secs={redraw_secs!r}. Use 0 to draw every point."
        )
