"""Finds losses that have other values than one or more for each example.

Such a loss reduces by itself, as over the axis of examples, or pairs them, or
divides each value by what all of them come to. The number of its values says
nothing about what it was averaged over.
"""

import contextlib
import copy
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from accumtrainer.keras_api import keras, ops, tree
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
    traced here, which is so for one thread. Where an example has more than
    `MOST_NUMBERS` it is not tried.

    Args:
        loss: `keras.losses.Loss`.
        y_true: tensor of targets, of which the shape counts.
        y_pred: the same of predictions.
    """
    shapes = [
        [_length(length) for length in tensor.shape[1:]]
        for tensor in (y_true, y_pred)
    ]
    if max(map(math.prod, shapes)) > MOST_NUMBERS:
        return False
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_is_coupled, loss, shapes).result()


MOST_NUMBERS = 2**18
"""With more of them in an example a trial would take a second or more."""


def _is_coupled(loss: Any, shapes: list[list[int]]) -> bool:
    """Whether f(A, B) + f(C, D) is not f(A, D) + f(C, B), as for a sum."""
    rng = np.random.default_rng(0)
    with contextlib.suppress(Exception), Scratch([]):
        loss = _copy_of(loss)
        for digits in (9, 0):  # targets are probabilities; labels or a mask
            a, b, c, d = (
                [
                    np.round(rng.uniform(0.05, 0.95, [2, *shape]), decimals)
                    for shape, decimals in zip(shapes, (digits, 9), strict=True)
                ]
                for _ in range(4)
            )
            pairs = (a, b), (c, d), (a, d), (c, b)
            one, other, crossed, too = (_total(loss, *pair) for pair in pairs)
            difference = abs(one + other - crossed - too)
            size = max(map(abs, (one, other, crossed, too)))
            # Where it draws, it is another one again.
            if difference > 1e-4 * size and one == _total(loss, a, b):
                return True
    return False


def _copy_of(loss: Any) -> Any:
    """Copy a loss with the numbers that it keeps, for others to change.

    Those in variables of Keras stay the same ones: what is written to them in a
    `Scratch` is forgotten.
    """
    copied = object.__new__(type(loss))
    vars(copied).update(tree.map_structure(_copy_of_leaf, vars(loss)))
    return copied


def _copy_of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, keras.losses.Loss):
        return _copy_of(leaf)
    is_ours = isinstance(leaf, keras.Variable) or not hasattr(leaf, "__array__")
    return leaf if is_ours else copy.deepcopy(leaf)


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
