"""Curves over the updates, thinned as they grow long."""

from typing import Any

import numpy as np

MOST_POINTS = 500
"""Points kept of one curve; when there are more, neighbours are merged."""

MOST_DRAWN = 150
"""Points drawn of one curve, as many as can be told apart on a page."""


class Curve:
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
