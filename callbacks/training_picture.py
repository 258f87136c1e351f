"""The picture of a training: losses, learning rate, gradient norm and skips."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

MOST_MARKED = 40
"""Points up to which each is marked by a dot."""

PAGE_WIDTH_INCHES = 6.5
DOTS_PER_INCH = 160

BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#00845d"
PURPLE, RED, GRAY = "#8a5a9e", "#b2182b", "#666666"
VALIDATION_COLORS = (ORANGE, GREEN, PURPLE, RED)
RATE_COLORS = (GREEN, BLUE, ORANGE, PURPLE)


def make_figure(height_inches: float) -> Any:
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


def write_figure(figure: Any, path: Path) -> None:
    """Write a figure beside its place, then move it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format=path.suffix.removeprefix("."))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def draw_curves(curves: Any, title: str) -> Any:
    """Draw one panel above the other, all over the same updates.

    Args:
        curves: dict of `Curve` by name.
        title: name of the model.

    Returns:
        matplotlib figure.
    """
    columns = {name: c.columns() for name, c in not_empty(curves).items()}
    panels = [(_draw_losses, 2.4)]
    if any(map(is_learning_rate, columns)):
        panels.append((_draw_learning_rate, 1.15))
    if "gradient_norm" in columns:
        panels.append((_draw_gradient_norm, 1.15))
    if _scales(columns) or _skips(columns):
        panels.append((_draw_scale_and_skips, 1.15))
    draw_functions, heights = zip(*panels, strict=True)
    figure = make_figure(sum(heights) + 0.5)
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


def not_empty(curves: Any) -> dict[str, Any]:
    """Return those curves that have points."""
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


def is_learning_rate(name: str) -> bool:
    """Say whether a curve is that of an optimizer's learning rate."""
    return name.startswith("learning_rate")


def _draw_learning_rate(axis: Any, columns: Any) -> None:
    names = sorted(filter(is_learning_rate, columns))
    for name, color in zip(names, itertools.cycle(RATE_COLORS)):
        of_optimizer = name.removeprefix("learning_rate_")
        _draw_line(axis, columns[name], color, of_optimizer)
    if len(names) > 1:
        _add_legend(axis)
    _scale_values(axis, [columns[name] for name in names], begins_at_zero=True)
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
    axis.plot(updates, mean, label=label, **_line_style(updates, color))
    if np.any(high > low):
        axis.fill_between(
            updates, low, high, color=color, alpha=0.18, linewidth=0
        )


def _draw_steps(axis: Any, updates: Any, values: Any, color: str) -> None:
    axis.step(updates, values, where="post", **_line_style(updates, color))


def _line_style(updates: Any, color: str) -> dict[str, Any]:
    """Return the options of a line, on which a few points are marked."""
    return {
        "color": color,
        "linewidth": 1.2,
        "marker": "o" if len(updates) <= MOST_MARKED else None,
        "markersize": 2.5,
    }


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
    return [name for name in columns if is_validation_loss(name)]


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


def is_validation_loss(name: str) -> bool:
    """Whether a number is a loss of validation, by its name."""
    return name.startswith("val_") and name.endswith("loss")
