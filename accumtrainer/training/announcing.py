"""What is announced of a fit before it begins, in a line."""

import functools
from collections.abc import Callable
from typing import Any

from accumtrainer.config import Accumulation, updates_per_epoch
from accumtrainer.data.batches import Window
from accumtrainer.data.source import Source

NOTHING_LEFT = "the saved run has reached its end; nothing is left to train"

FIRST_OF_A_SIZE = "after the first update of this size: {plan}"


def updates_in_epoch(
    source: Source, accumulation: Accumulation, epoch: int
) -> int | None:
    """Count the updates of an epoch, `None` where it cannot be known."""
    batches = source.batches_per_epoch
    if batches is None or accumulation.micro_batch_size is not None:
        return batches
    if callable(accumulation.steps):
        return None
    steps = accumulation.steps_at(epoch, 0)
    return updates_per_epoch(batches, steps, accumulation.tail)


def describe(
    first: Window, plan: Any, *, replicas: int, updates: int | None
) -> str:
    """Say in one line what will happen.

    Args:
        first: the first window.
        plan: `Plan` of the windows.
        replicas: how many share a window out.
        updates: how many an epoch has, `None` where it cannot be known.

    Examples:
        >>> from accumtrainer.data.batches import Batch, window_of_rows
        >>> import numpy as np
        >>> window = window_of_rows(Batch(np.zeros([8, 2])), [4, 4])
        >>> describe(window, "fused, XLA", replicas=1, updates=12)
        '8 samples per update = 2 micro-batches x 4; 12 updates per epoch; ...'
    """
    sizes = sorted(set(first.sizes), reverse=True)
    shape = f"{first.micro_batches} micro-batches x {sizes[0]}"
    if first.micro_batches == 1:
        shape = "1 micro-batch"
    elif len(sizes) > 1:
        shape = f"{first.micro_batches} micro-batches of {sizes[-1]} to "
        shape += str(sizes[0])
    if replicas > 1:
        shape += f", shared out among {replicas} replicas"
    epoch = f"; {updates:,} updates per epoch" if updates else ""
    return f"{first.samples} samples per update = {shape}{epoch}; {plan}"


def announcer(*, is_heard: bool) -> Callable[[str], None]:
    """Return what prints a line, into a file too, as training begins."""
    return functools.partial(print, flush=True) if is_heard else _say_nothing


def _say_nothing(line: str) -> None:
    del line
