"""Finds losses that have other values than one or more for each example.

Such a loss reduces by itself, as over the axis of examples, or pairs them, or
divides each value by what all of them come to. The number of its values says
nothing about what it was averaged over.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from accumtrainer.keras_api import keras, ops, tree
from accumtrainer.keras_api.types import Nest, Tensor
from accumtrainer.window.state import Scratch


def reduces_examples(loss: Any, y_true: Nest, y_pred: Nest) -> bool:
    """Whether a loss has other than twice as many values of twice the data.

    Args:
        loss: `keras.losses.Loss`.
        y_true: tensor of targets, or nest of such.
        y_pred: the same of predictions.
    """
    # Whether it can be computed is found out where it is used; what it draws or
    # assigns here does not count.
    with contextlib.suppress(Exception), Scratch([]), _changing_copies(loss):
        # Copies, as a loss may change what it is given in place.
        once = tree.map_structure(
            lambda tensor: ops.copy(ops.cast(tensor, loss.dtype)),
            [y_true, y_pred],
        )
        twice = tree.map_structure(lambda t: ops.concatenate([t, t]), once)
        shapes = [tuple(loss.call(*given).shape) for given in (once, twice)]
        if None not in (*shapes[0], *shapes[1]):
            count, count_of_twice = map(math.prod, shapes)
            return bool(count_of_twice != 2 * count)
    return False


MOST_NUMBERS = 2**18
"""With more of them in an example a trial would take a second or more."""


def fails_to_add_up(loss: Any, y_true: Nest, y_pred: Nest) -> bool:
    """Whether a loss makes another value of an example in another batch.

    That is beside other examples, at another place, or among more of them. It
    is tried with numbers made up, in a thread of its own: a program may be
    traced here, which is so for one thread. Where an example has more than
    `MOST_NUMBERS` it is not tried.

    Args:
        loss: `keras.losses.Loss`.
        y_true: tensor of targets, of which the shape counts, or nest of such.
        y_pred: the same of predictions.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_differs, loss, y_true, y_pred).result()


def _differs(loss: Any, y_true: Nest, y_pred: Nest) -> bool:
    """Whether f(A, B) + f(C, D) is not f(A, D) + f(C, B), or f(A, B, C, D)."""
    rng = np.random.default_rng(0)

    def rows_like(nest: Nest, digits: int) -> Nest:
        return tree.map_structure(
            lambda tensor: np.round(
                rng.uniform(0.05, 0.95, [2, *_lengths(tensor)]), digits
            ),
            nest,
        )

    with contextlib.suppress(Exception), Scratch([]), _changing_copies(loss):
        tensors = tree.flatten([y_true, y_pred])
        if max(math.prod(_lengths(t)) for t in tensors) > MOST_NUMBERS:
            return False
        for digits in (9, 0):  # targets are probabilities; labels or a mask
            a, b, c, d = (
                [rows_like(y_true, digits), rows_like(y_pred, 9)]
                for _ in range(4)
            )
            batches = [(a, b), (c, d), (a, d), (c, b), (a, b, c, d)]
            totals = [_total(loss, *batch) for batch in batches]
            one, other, third, fourth, together = totals
            difference = max(
                abs(one + other - total) for total in (third + fourth, together)
            )
            # Where it draws, they are others again.
            if difference > 1e-4 * max(abs(one), abs(other)) and totals == [
                _total(loss, *batch) for batch in batches
            ]:
                return True
    return False


@contextlib.contextmanager
def _changing_copies(loss: Any) -> Iterator[None]:
    """Make a scope in which a loss changes copies of the numbers it keeps.

    Those in variables of Keras stay the same ones: what is written to them in a
    `Scratch` is forgotten.
    """
    kept = [(one, dict(vars(one))) for one in _losses_in(loss, {})]
    for one, attributes in kept:
        for name, value in attributes.items():
            with contextlib.suppress(Exception):  # what cannot be copied stays
                vars(one)[name] = tree.map_structure(_copy_of_leaf, value)
    try:
        yield
    finally:
        for one, attributes in kept:
            vars(one).clear()
            vars(one).update(attributes)


def _losses_in(loss: Any, known: dict[int, Any]) -> list[Any]:
    """List a loss, and those that it keeps."""
    known[id(loss)] = loss
    for value in vars(loss).values():
        with contextlib.suppress(Exception):
            for leaf in tree.flatten(value):
                is_loss = isinstance(leaf, keras.losses.Loss)
                if is_loss and id(leaf) not in known:
                    _losses_in(leaf, known)
    return list(known.values())


def _copy_of_leaf(leaf: Any) -> Any:
    is_ours = isinstance(leaf, keras.Variable) or not hasattr(leaf, "__array__")
    return leaf if is_ours else copy.deepcopy(leaf)


def _total(loss: Any, *rows: list[Nest]) -> float:
    """Add up the values of some rows beside others."""
    given = tree.map_structure(
        lambda *parts: ops.convert_to_tensor(
            np.concatenate(parts), dtype=loss.dtype
        ),
        *rows,
    )
    values = ops.convert_to_numpy(ops.cast(loss.call(*given), "float32"))
    return float(np.sum(values, dtype="float64"))


def _lengths(tensor: Tensor) -> list[int]:
    """List the sizes of the axes of an example, 3 where one is open."""
    return [3 if length is None else length for length in tensor.shape[1:]]
