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
    """Whether f(A, B) + f(C, D) is not f(A, D) + f(C, B), as for a sum."""
    rng = np.random.default_rng(0)
    with contextlib.suppress(Exception), Scratch([]):
        for make in (np.asarray, np.round):  # probabilities; labels or a mask
            groups = [
                [
                    make(rng.uniform(0.05, 0.95, [2, *map(_length, shape[1:])]))
                    for shape in shapes
                ]
                for _ in range(4)
            ]
            a, b, c, d = groups
            pairs = ((a, b), (c, d), (a, d), (c, b), (a, b))
            one, other, crossed, too, again = (
                _total(loss, *pair) for pair in pairs
            )
            difference = abs(one + other - crossed - too)
            size = max(map(abs, (one, other, crossed, too)))
            # Where it draws, it is another one again.
            if one == again and difference > 1e-4 * size:
                return True
    return False


def _total(
    loss: Any, rows: list[np.ndarray], beside: list[np.ndarray]
) -> float:
    """Add up the values of some rows beside others."""
    given = [
        ops.convert_to_tensor(np.concatenate(pair), dtype=loss.dtype)
        for pair in zip(rows, beside, strict=True)
    ]
    values = ops.convert_to_numpy(ops.cast(loss.call(*given), "float32"))
    return float(np.sum(values, dtype="float64"))


def _length(length: int | None) -> int:
    return 3 if length is None else length
