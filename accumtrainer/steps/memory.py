"""Micro-batches as large as the memory of a device allows.

How much an update takes is known before it runs: on JAX the compiler says so,
on TensorFlow the gradients of a batch are tried out. A device that runs out of
memory all the same gives the window back, and smaller micro-batches are tried.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from accumtrainer import errors, notebook
from accumtrainer.data.batches import Window
from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Variable

# Beyond a prediction from two smaller sizes, by how much memory may be less.
SLACK = 1.1

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """What updates of one size of micro-batches take.

    Args:
        micro_batch_size: samples on each device at a time.
        micro_batches: how many make the update.
        peak_bytes: most memory of a device that an update takes: model,
            optimizer, batch, gradients and activations.
    """

    micro_batch_size: int
    micro_batches: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A table of what micro-batches of several sizes would take.

    Args:
        rows: by size.

    Examples:
        >>> row = MemoryRow(
        ...     micro_batch_size=8, micro_batches=4, peak_bytes=3 * 2**29)
        >>> print(MemoryPlan((row,)))
        micro-batch size  micro-batches  peak memory
                       8              4     1.50 GiB
    """

    rows: tuple[MemoryRow, ...]

    def __str__(self) -> str:
        lines = ["micro-batch size  micro-batches  peak memory"]
        lines += [
            f"{row.micro_batch_size:>16}  {row.micro_batches:>13}  "
            f"{describe_bytes(row.peak_bytes):>11}"
            for row in self.rows
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return notebook.table(
            ["micro-batch size", "micro-batches", "peak memory"],
            [
                [
                    row.micro_batch_size,
                    row.micro_batches,
                    describe_bytes(row.peak_bytes),
                ]
                for row in self.rows
            ],
        )


def describe_bytes(count: int) -> str:
    """Say how much memory that is.

    Examples:
        >>> describe_bytes(3 * 2**29), describe_bytes(5 * 2**18)
        ('1.50 GiB', '1.25 MiB')
    """
    if count < GIB:
        return f"{count / MIB:.2f} MiB"
    return f"{count / GIB:.2f} GiB"


def smaller_size(size: int, samples: int) -> int:
    """Choose the size to try after one that is too large: about the half.

    Micro-batches of equal size run in one compiled call where that is faster,
    so a size that divides the samples is preferred: the next from the half
    upwards, or else the next below the half, if it is more than a quarter.
    Without one it is the half, rounded up, and the last micro-batch differs.

    Args:
        size: at least 2.
        samples: those of a window that one device runs.

    Examples:
        >>> smaller_size(125, 1000), smaller_size(25, 300), smaller_size(8, 22)
        (100, 15, 4)
        >>> smaller_size(125, 1009)
        63
    """
    half = -(-size // 2)
    for candidate in (*range(half, size), *range(half - 1, size // 4, -1)):
        if samples % candidate == 0:
            return candidate
    return half


def sizes_of(samples: int) -> list[int]:
    """List the sizes of micro-batches that are tried, the largest first.

    Examples:
        >>> sizes_of(12)
        [12, 6, 3, 2, 1]
        >>> sizes_of(1000)
        [1000, 500, 250, 125, 100, 50, 25, 20, 10, 5, 4, 2, 1]
    """
    sizes = [samples]
    while sizes[-1] > 1:
        sizes.append(smaller_size(sizes[-1], samples))
    return sizes


def make_memory_plan(
    window: Window,
    sizes: Sequence[int] | None,
    *,
    replicas: int,
    predict: Callable[[Window], int],
) -> MemoryPlan:
    """Predict what micro-batches of several sizes take.

    Args:
        sizes: `None` for those of `sizes_of`.
        replicas: how many share the window out.
        predict: function from a `Window` to bytes.
    """
    rows = []
    for size in sorted(sizes or sizes_of(-(-window.samples // replicas))):
        cut = window.recut(size * replicas)
        rows.append(
            MemoryRow(
                micro_batch_size=size,
                micro_batches=cut.micro_batches,
                peak_bytes=predict(cut),
            )
        )
    return MemoryPlan(tuple(rows))


def largest_that_fits(
    sizes: list[int], limit: int, predict: Callable[[int], int]
) -> tuple[int, int]:
    """Find the largest micro-batches whose updates stay below a limit.

    Predicting takes seconds, a line through two predictions nothing: sizes
    that are far beyond the limit by that line are not looked at.

    Args:
        sizes: the largest first.
        limit: bytes.
        predict: function from a size to bytes.

    Returns:
        Pair: the size, and the bytes predicted for it.

    Raises:
        MemoryError: none stays below the limit.

    Examples:
        >>> largest_that_fits([8, 4, 2, 1], 500, lambda size: 100 + 90 * size)
        (4, 460)
    """
    known = {size: predict(size) for size in dict.fromkeys(sizes[-2:])}
    (one, first), (other, second) = (*known.items(), *known.items())[:2]
    slope = max(0.0, (first - second) / max(1, one - other))
    for size in sizes:
        if size not in known and first + slope * (size - one) > limit * SLACK:
            continue
        peak = known.get(size) or predict(size)
        if peak <= limit:
            return size, peak
    smallest = sizes[-1]
    raise MemoryError(
        errors.NOTHING_FITS.format(
            size=smallest,
            peak=describe_bytes(known[smallest]),
            limit=describe_bytes(limit),
        )
    )


class Backup:
    """Copies of variables on the host, for a window that may not fit.

    Args:
        variables: list of Keras variables, current.
    """

    def __init__(self, variables: Iterable[Variable]):
        self._copies = [
            (variable, np.array(ops.convert_to_numpy(variable)))
            for variable in variables
        ]

    def put_back(self) -> None:
        """Assign the copies."""
        for variable, copy in self._copies:
            variable.assign(copy)
