"""A picture of the training so far, kept current on disk."""

import itertools
import math
import os
import pathlib
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from accumtrainer import Every, Logger

MOST_POINTS = 500
"""Points kept of one curve; when there are more, neighbours are merged."""

MOST_DRAWN = 150
"""Points drawn of one curve, as many as can be told apart on a page."""

MOST_MARKED = 40
"""Points up to which each is marked by a dot."""

DRAWING_SHARE = 0.02
"""Largest part of the time that goes into drawing, before the last one."""

PAGE_WIDTH_INCHES = 6.5
DOTS_PER_INCH = 160

BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#00845d"
PURPLE, RED, GRAY = "#8a5a9e", "#b2182b", "#666666"
VALIDATION_COLORS = (ORANGE, GREEN, PURPLE, RED)
DRAWN = (
    "loss",
    "learning_rate",
    "gradient_norm",
    "clipped_gradient_norm",
    "loss_scale",
    "skipped_updates",
)
"""Numbers of a point that are drawn, beside losses of validation."""


class TrainingPlot(Logger):
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
        every: `Every`, how often to take a point; default 10 updates.
        redraw_secs: seconds between drawings, while training runs.
        clock: function that returns seconds.

    Raises:
        TypeError: `every` is no `Every`.
        ValueError: matplotlib cannot write files of this suffix; raised when
            training begins.
        ImportError: matplotlib is not installed; raised when training begins.

    Example:
        >>> plot = TrainingPlot("run.png", redraw_secs=60)
        >>> plot.path.name
        'run.png'
    """

    has_state = True
    looks_at_model = False

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        every: Every | None = None,
        redraw_secs: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(every=every)
        _check(path, redraw_secs)
        self.path = pathlib.Path(path)
        self.redraw_secs = redraw_secs
        self._clock = clock
        self._curves: dict[str, _Curve] = {}
        self._trainer_drawn = None
        self._next_drawing = math.inf
        self._has_warned = False

    def open(self) -> None:
        """Check what drawing needs, before time is spent on training."""
        self._check_format()
        if self._trainer_drawn is not self.trainer:
            self._curves = {}
        self._trainer_drawn = self.trainer
        self._has_warned = False
        self._next_drawing = self._clock() + self.redraw_secs

    def write(self, updates: int, numbers: dict[str, Any]) -> None:
        """Add a point to the curves, and draw them if that is due."""
        for name, value in numbers.items():
            if name in DRAWN or _is_validation_loss(name):
                self._curves.setdefault(name, _Curve()).add(updates, value)
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
            name: _Curve(**curve) for name, curve in state["curves"].items()
        }

    def _check_format(self) -> None:
        known = _make_figure(1.0).canvas.get_supported_filetypes()
        suffix = self.path.suffix.removeprefix(".")
        if suffix not in known:
            raise ValueError(
                f"path must end in one of {', '.join(sorted(known))}. "
                f"Received: {str(self.path)!r}. Write for example "
                f"{str(self.path.with_suffix('.png'))!r}."
            )

    def _draw(self) -> None:
        if not _not_empty(self._curves):
            return
        begun = self._clock()
        title = self.trainer.model.name
        try:
            _write_figure(_draw_curves(self._curves, title), self.path)
        except OSError as error:
            self._warn_once(error)
        now = self._clock()
        rest = max(self.redraw_secs, (now - begun) / DRAWING_SHARE)
        self._next_drawing = now + rest

    def _warn_once(self, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"TrainingPlot could not write {str(self.path)!r}: {error}. "
                "Training goes on.",
                RuntimeWarning,
                stacklevel=2,
            )


class _Curve:
    """Points in order, merged with their neighbours when they grow many.

    Args:
        stride: points added for each one that is kept.
        points: list of `[updates, low, high, total, count, last]`.
    """

    def __init__(self, stride: int = 1, points: Any = ()):
        self._stride = stride
        self._points = [list(point) for point in points]

    def add(self, updates: int, value: Any) -> None:
        """Add a point, unless its value is not finite."""
        if not np.isfinite(value):
            return
        value = float(value)
        point = [int(updates), value, value, value, 1, value]
        if self._points and self._points[-1][4] < self._stride:
            self._points[-1] = _merge([self._points[-1], point])
        else:
            self._points.append(point)
        if len(self._points) > MOST_POINTS:
            self._points = _merge_runs(self._points, 2)
            self._stride *= 2

    def get_state(self) -> dict[str, Any]:
        """Return what the constructor takes, a dict ready for JSON."""
        return {"stride": self._stride, "points": self._points}

    def columns(self) -> tuple[np.ndarray, ...]:
        """Return updates, low, mean, high and last, arrays to be drawn."""
        run = -(-len(self._points) // MOST_DRAWN)
        points = _merge_runs(self._points, run) if run > 1 else self._points
        updates, low, high, total, count, last = np.array(points).T
        return updates, low, total / count, high, last


def _merge_runs(points: list[Any], length: int) -> list[list[Any]]:
    """Merge each `length` neighbours into one point."""
    starts = range(0, len(points), length)
    return [_merge(points[start : start + length]) for start in starts]


def _merge(points: list[Any]) -> list[Any]:
    updates, low, high, total, count, last = zip(*points, strict=True)
    return [updates[-1], min(low), max(high), sum(total), sum(count), last[-1]]


def _is_validation_loss(name: str) -> bool:
    return name.startswith("val_") and name.endswith("loss")


# The picture.


def _make_figure(height_inches: float) -> Any:
    """Make a figure by itself, which leaves pyplot and its backend alone."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "TrainingPlot needs matplotlib. Install it with "
            "pip install 'accumtrainer[plot]'."
        ) from error
    size = (PAGE_WIDTH_INCHES, height_inches)
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write_figure(figure: Any, path: Path) -> None:
    """Write a figure beside its place, then move it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format=path.suffix.removeprefix("."))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _draw_curves(curves: Any, title: str) -> Any:
    """Draw one panel above the other, all over the same updates.

    Args:
        curves: dict of `_Curve` by name.
        title: name of the model.

    Returns:
        matplotlib figure.
    """
    columns = {name: c.columns() for name, c in _not_empty(curves).items()}
    panels = [(_draw_losses, 2.4)]
    if "learning_rate" in columns:
        panels.append((_draw_learning_rate, 1.15))
    if "gradient_norm" in columns:
        panels.append((_draw_gradient_norm, 1.15))
    if _scales(columns) or _skips(columns):
        panels.append((_draw_scale_and_skips, 1.15))
    draw_functions, heights = zip(*panels, strict=True)
    figure = _make_figure(sum(heights) + 0.5)
    axes = figure.subplots(
        len(panels), sharex=True, squeeze=False, height_ratios=heights
    )[:, 0]
    for draw, axis in zip(draw_functions, axes, strict=True):
        _style(axis)
        draw(axis, columns)
    _style_updates(axes[-1], columns)
    figure.suptitle(_summary(columns, title), fontsize=8, color=GRAY)
    figure.align_ylabels(axes)
    return figure


def _not_empty(curves: Any) -> dict[str, Any]:
    return {name: c for name, c in curves.items() if c.get_state()["points"]}


def _draw_losses(axis: Any, columns: Any) -> None:
    names = _validation_names(columns)
    drawn = [columns[name] for name in names]
    if "loss" in columns:
        drawn.append(columns["loss"])
        _draw_line(axis, columns["loss"], BLUE, "loss")
    for name, color in zip(names, itertools.cycle(VALIDATION_COLORS)):
        best = columns[name][1].min()
        label = f"{name}, lowest {best:.4g}"
        _draw_line(axis, columns[name], color, label)
        _ring_lowest(axis, columns[name], color)
    _scale_values(axis, drawn)
    axis.set_ylabel("loss")
    if drawn:
        _add_legend(axis)
    else:
        axis.text(
            0.5,
            0.5,
            "no finite loss yet",
            ha="center",
            transform=axis.transAxes,
            fontsize=8,
            color=GRAY,
        )


def _draw_learning_rate(axis: Any, columns: Any) -> None:
    _draw_line(axis, columns["learning_rate"], GREEN, "learning rate")
    _scale_values(axis, [columns["learning_rate"]], begins_at_zero=True)
    axis.set_ylabel("learning rate")


def _draw_gradient_norm(axis: Any, columns: Any) -> None:
    drawn = [columns["gradient_norm"]]
    if "clipped_gradient_norm" in columns:
        drawn.append(columns["clipped_gradient_norm"])
        _draw_line(axis, drawn[1], GRAY, "after clipping")
    # On top, so that the other line shows only where something is clipped.
    _draw_line(axis, drawn[0], PURPLE, "gradient norm")
    if len(drawn) > 1:
        _add_legend(axis)
    _scale_values(axis, drawn, begins_at_zero=True)
    axis.set_ylabel("gradient norm")


def _draw_scale_and_skips(axis: Any, columns: Any) -> None:
    has_scale = _scales(columns)
    if has_scale:
        updates, *_, last = columns["loss_scale"]
        _draw_steps(axis, updates, last, BLUE)
        axis.set_yscale("log", base=2)
        axis.margins(y=0.15)
        axis.set_ylabel("loss scale", color=BLUE)
    if not _skips(columns):
        return
    counting = axis.twinx() if has_scale else axis
    if has_scale:
        _style(counting)
        counting.grid(False)
        counting.spines["right"].set_visible(True)
    updates, *_, last = columns["skipped_updates"]
    _draw_steps(counting, updates, last, RED)
    counting.fill_between(
        updates, last, step="post", color=RED, alpha=0.08, linewidth=0
    )
    counting.set_ylim(0, max(last) * 1.15)
    counting.set_ylabel("skipped updates", color=RED)
    counting.yaxis.set_major_locator(_whole_numbers(5))


def _draw_line(axis: Any, columns: Any, color: str, label: str) -> None:
    updates, low, mean, high, _ = columns
    marker = "o" if len(updates) <= MOST_MARKED else None
    axis.plot(
        updates,
        mean,
        color=color,
        label=label,
        linewidth=1.2,
        marker=marker,
        markersize=2.5,
    )
    if np.any(high > low):
        axis.fill_between(
            updates, low, high, color=color, alpha=0.18, linewidth=0
        )


def _draw_steps(axis: Any, updates: Any, values: Any, color: str) -> None:
    marker = "o" if len(updates) <= MOST_MARKED else None
    axis.step(
        updates,
        values,
        where="post",
        color=color,
        linewidth=1.2,
        marker=marker,
        markersize=2.5,
    )


def _ring_lowest(axis: Any, columns: Any, color: str) -> None:
    updates, low, *_ = columns
    lowest = int(np.argmin(low))
    axis.plot(
        updates[lowest],
        low[lowest],
        marker="o",
        markersize=6,
        markerfacecolor="none",
        markeredgecolor=color,
    )


def _scale_values(
    axis: Any, drawn: Any, *, begins_at_zero: bool = False
) -> None:
    """Choose a logarithmic axis where a linear one would hide the most.

    That is where everything is above zero, and half of it lies below a tenth
    of the largest value.
    """
    if not drawn:
        return
    low = np.concatenate([columns[1] for columns in drawn])
    mean = np.concatenate([columns[2] for columns in drawn])
    high = np.concatenate([columns[3] for columns in drawn])
    if low.min() > 0 and high.max() > 10 * np.median(mean):
        _scale_by_logarithm(axis, high.max() / low.min())
        return
    axis.ticklabel_format(axis="y", scilimits=(-3, 4), useMathText=True)
    if begins_at_zero and low.min() >= 0:
        axis.set_ylim(0, 1.08 * high.max() or 1)


def _scale_by_logarithm(axis: Any, ratio: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    subdivisions = (1.0, 2.0, 5.0) if ratio < 100 else (1.0,)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=subdivisions))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _style(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="#e6e6e6", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=7)
    axis.yaxis.label.set_size(8)
    axis.yaxis.get_offset_text().set_size(7)


def _style_updates(axis: Any, columns: Any) -> None:
    updates = np.concatenate([column[0] for column in columns.values()])
    first, last = updates.min(), updates.max()
    if first == last:
        axis.set_xticks([first])
    else:
        margin = 0.02 * (last - first)
        axis.set_xlim(first - margin, last + margin)
        axis.xaxis.set_major_locator(_whole_numbers(8))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel("updates", fontsize=8)


def _whole_numbers(most_ticks: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=most_ticks, integer=True, steps=[1, 2, 5, 10])


def _add_legend(axis: Any) -> None:
    axis.legend(fontsize=7, frameon=False, loc="upper right", ncols=4)


def _summary(columns: Any, title: str) -> str:
    """Say in a line how the training stands."""
    updates = int(max(column[0][-1] for column in columns.values()))
    parts = [title] if title else []
    parts.append(f"{updates:,} update" + ("" if updates == 1 else "s"))
    if "loss" in columns:
        parts.append(f"loss {columns['loss'][2][-1]:.4g}")
    for name in _validation_names(columns)[:2]:
        parts.append(f"{name} {columns[name][4][-1]:.4g}")
    skipped = _skips(columns)
    parts.append(f"{skipped:,} skipped" if skipped else "none skipped")
    return "   ·   ".join(parts)


def _validation_names(columns: Any) -> list[str]:
    """List the losses of validation to draw, their sum if there is one."""
    if "val_loss" in columns:
        return ["val_loss"]
    return [name for name in columns if _is_validation_loss(name)]


def _scales(columns: Any) -> bool:
    """Whether the loss has ever been scaled."""
    return "loss_scale" in columns and bool(
        np.any(columns["loss_scale"][3] > 1)
    )


def _skips(columns: Any) -> int:
    """Count the updates skipped."""
    if "skipped_updates" not in columns:
        return 0
    return int(columns["skipped_updates"][4][-1])


def _check(path: Any, redraw_secs: Any) -> None:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            "path must be a path. Received: "
            f"path={path!r}. Use for example 'loss.png'."
        )
    is_number = isinstance(redraw_secs, int | float)
    if not is_number or isinstance(redraw_secs, bool) or redraw_secs < 0:
        raise ValueError(
            "redraw_secs must be a number of at least 0. Received: "
            f"redraw_secs={redraw_secs!r}. Use 0 to draw every point."
        )
