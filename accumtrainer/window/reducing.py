"""Finds losses that have other values than one or more for each example.

Such a loss reduces by itself, as over the axis of examples, or pairs them, or
divides each value by what all of them come to. The number of its values says
nothing about what it was averaged over.
"""

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Tensor
from accumtrainer.window.state import Scratch


def reduces_examples(loss: Any, y_true: Tensor, y_pred: Tensor) -> bool:
    """Whether a loss has other than twice as many values of twice the data.

    Args:
        loss: `keras.losses.Loss`.
        y_true: tensor of targets.
        y_pred: tensor of predictions.
    """
    # Whether it can be computed is found out where it is used; what it draws or
    # assigns here does not count.
    with contextlib.suppress(Exception), Scratch([]):
        # Copies, as a loss may change what it is given in place.
        once = [ops.copy(ops.cast(t, loss.dtype)) for t in (y_true, y_pred)]
        twice = [ops.concatenate([tensor, tensor]) for tensor in once]
        shapes = [tuple(loss.call(*given).shape) for given in (once, twice)]
        if None not in (*shapes[0], *shapes[1]):
            count, count_of_twice = map(math.prod, shapes)
            return bool(count_of_twice != 2 * count)
    return False


def couples_examples(loss: Any, y_true: Tensor, y_pred: Tensor) -> bool:
    """Whether a loss makes another value of an example beside other ones.

    That is tried with numbers made up, in a thread of its own: a program may be
    traced here, which is so for one thread.

    Args:
        loss: `keras.losses.Loss`.
        y_true: tensor of targets, of which the shape counts.
        y_pred: the same of predictions.
    """
    shapes = [tuple(tensor.shape) for tensor in (y_true, y_pred)]
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_is_coupled, loss, shapes).result()


def _is_coupled(loss: Any, shapes: list[tuple[int | None, ...]]) -> bool:
    rng = np.random.default_rng(0)
    with contextlib.suppress(Exception), Scratch([]):
        return any(
            _has_other_values(loss, *_make_up(shapes, rng, is_rounded))
            for is_rounded in (False, True)
        )
    return False


def _make_up(
    shapes: list[tuple[int | None, ...]],
    rng: np.random.Generator,
    is_rounded: bool,
) -> list[list[np.ndarray]]:
    """Make three times two rows of each shape, the last ones the largest.

    They may be values or probabilities; rounded, labels or a mask.
    """
    rows = [
        [
            rng.uniform(0.05, 0.95, [2, *(length or 3 for length in shape[1:])])
            for shape in shapes
        ]
        for _ in range(3)
    ]
    if is_rounded:
        return [[np.round(numbers) for numbers in given] for given in rows]
    return [*rows[:2], [1 + numbers for numbers in rows[2]]]


def _has_other_values(
    loss: Any,
    first: list[np.ndarray],
    last: list[np.ndarray],
    others: list[np.ndarray],
) -> bool:
    """Whether rows have other values beside others than beside the last."""
    values = []
    for beside in (last, last, others):
        given = [
            ops.convert_to_tensor(np.concatenate(rows), dtype=loss.dtype)
            for rows in zip(first, beside, strict=True)
        ]
        value = ops.convert_to_numpy(ops.cast(loss.call(*given), "float32"))
        values.append(value[: len(value) // 2])
    one, again, other = values
    size = np.max(np.abs(one))
    return bool(
        np.isfinite(size)
        and np.array_equal(one, again)  # else it draws
        and not np.allclose(one, other, rtol=1e-4, atol=1e-6 * size)
    )
