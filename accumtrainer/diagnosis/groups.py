"""Groups of rows of a window, of which two at a time are tried."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from accumtrainer.data.batches import Batch, Window, leaves, map_leaves
from accumtrainer.keras_api import ops, tree
from accumtrainer.keras_api.types import Nest

GROUPS = 4
MOST_ROWS = 16
"""Rows of a group, which are enough to tell."""


def groups_of(window: Window) -> list[Batch] | None:
    """Take four groups of rows that are spread over a window.

    Two together are no more than a micro-batch, which memory is known to hold,
    or two samples. Groups of a small window share rows: what adds up does so
    all the same. Where all rows are alike, others are made up of one of them.

    Returns:
        List of four `Batch`es, or `None` where there are no samples.
    """
    batch = _rows_of(window)
    samples = size_of(batch)
    rows = min(samples // 2, max(1, max(window.sizes) // 2), MOST_ROWS)
    if not rows:
        return None
    # Groups that are unlike each other show more.
    order = np.lexsort((_sums(batch.x, samples), _sums(batch.y, samples)))
    places = [
        order[(i * samples // GROUPS + np.arange(rows)) % samples]
        for i in range(GROUPS)
    ]
    return _take(batch, places)


def large_groups_of(window: Window) -> list[Batch] | None:
    """Take four groups as large as a micro-batch, of rows drawn from a window.

    A loss may need as many, for the largest of them or for one that counts. Two
    together are twice a micro-batch: it is for when `groups_of` show nothing.

    Returns:
        As `groups_of`.
    """
    batch = _rows_of(window)
    if not size_of(batch):
        return None
    samples, shape = size_of(batch), (GROUPS, max(window.sizes))
    shares = samples < np.prod(shape)
    rng = np.random.default_rng(0)
    return _take(batch, rng.choice(samples, shape, replace=bool(shares)))


def _rows_of(window: Window) -> Batch:
    """Take rows of a window that have one shape, four or more if any."""
    if window.parts is not None:
        batch = join(
            [
                map_leaves(to_host, part)
                for part in window.parts
                if _shapes(part) == _shapes(window.parts[0])
            ]
        )
    else:
        batch = map_leaves(
            lambda leaf: to_host(leaf).reshape(-1, *leaf.shape[2:]),
            window.stacked,
        )
    if _repeats(batch):
        batch = map_leaves(lambda leaf: leaf[:1], batch)
    return _fill_up(batch) if 0 < size_of(batch) < GROUPS else batch


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape[1:]) for leaf in leaves(batch)]


def _take(batch: Batch, places: Iterable[np.ndarray]) -> list[Batch]:
    return [
        map_leaves(lambda leaf, rows=rows: leaf[rows], batch) for rows in places
    ]


def _repeats(batch: Batch) -> bool:
    """Whether what a model is given is the same in all rows."""
    return all(
        bool(np.all(leaf == leaf[:1]))
        for leaf in tree.flatten(batch.x)
        if leaf is not None
    )


def _fill_up(batch: Batch) -> Batch:
    """Add rows until there are four, of numbers that the first has.

    They are other ones, in other places, as often as it happens, so that means
    over some of them show too. Weights of samples are those of the first.
    """
    rng = np.random.default_rng(0)
    shares = (0.9, 0.7, 0.4)[size_of(batch) - 1 :]

    def resample(leaf: np.ndarray) -> np.ndarray:
        rows = [*leaf]
        for share in shares:
            row = leaf[0]
            if row.ndim and row.size:
                row = row[rng.integers(0, len(row), len(row))]
            is_float = row.dtype.kind == "f"
            rows.append((share * row).astype(row.dtype) if is_float else row)
        return np.stack(rows)

    def repeat(leaf: np.ndarray) -> np.ndarray:
        return np.concatenate([leaf, *[leaf[:1]] * len(shares)])

    return Batch(
        map_leaves(resample, batch.x),
        map_leaves(resample, batch.y),
        map_leaves(repeat, batch.sample_weight),
    )


def _sums(nest: Nest, samples: int) -> np.ndarray:
    """Add up the numbers of each row, array `(samples,)`."""
    sums = np.zeros(samples)
    for leaf in tree.flatten(nest):
        if leaf is not None and leaf.dtype.kind in "iufb":
            sums += np.asarray(leaf, "float64").reshape(samples, -1).sum(axis=1)
    return np.nan_to_num(sums)


def join(groups: Sequence[Batch]) -> Batch:
    """Make one batch of groups."""
    return map_leaves(lambda *leaves: np.concatenate(leaves), *groups)


def are_alike(groups: Sequence[Batch]) -> bool:
    """Whether what a model is given is the same in all groups."""
    first, *others = (tree.flatten(group.x) for group in groups)
    return all(map(np.array_equal, first * len(others), sum(others, [])))


def size_of(batch: Batch) -> int:
    """Count the rows of a batch."""
    leaves = [leaf for leaf in tree.flatten(batch) if leaf is not None]
    return int(leaves[0].shape[0])


def numbers_of(batch: Batch, rows: int) -> list[np.ndarray]:
    """List the first rows of the parts of a batch, float64."""
    return [
        np.asarray(leaf, "float64")[:rows]
        for leaf in tree.flatten(batch)
        if leaf is not None
    ]


def to_host(leaf: Any) -> np.ndarray:
    """Make a NumPy array of a tensor."""
    if isinstance(leaf, np.ndarray):
        return leaf
    return np.asarray(ops.convert_to_numpy(leaf))
