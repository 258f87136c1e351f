"""Finds losses that have other values than one or more for each example.

Such a loss reduces by itself, as over the axis of examples, or pairs them. The
number of its values says nothing about what it was averaged over.
"""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Tensor

_is_examining: ContextVar[bool] = ContextVar("_is_examining", default=False)


@contextlib.contextmanager
def examining_losses() -> Iterator[None]:
    """Have compiled losses find out whether more examples give more values.

    For that they are computed again. Later they know.
    """
    token = _is_examining.set(True)
    try:
        yield
    finally:
        _is_examining.reset(token)


def are_examined() -> bool:
    """Whether losses shall find that out."""
    return _is_examining.get()


def reduces_examples(loss: Any, y_true: Tensor, y_pred: Tensor) -> bool:
    """Whether a loss has other than twice as many values of twice the data.

    Args:
        loss: `keras.losses.Loss`.
        y_true: tensor of targets.
        y_pred: tensor of predictions.
    """
    # Whether it can be computed is found out where it is used.
    with contextlib.suppress(Exception):
        # Copies, as a loss may change what it is given in place.
        once = [ops.copy(ops.cast(t, loss.dtype)) for t in (y_true, y_pred)]
        twice = [ops.concatenate([tensor, tensor]) for tensor in once]
        shapes = [tuple(loss.call(*given).shape) for given in (once, twice)]
        if None not in (*shapes[0], *shapes[1]):
            count, count_of_twice = map(math.prod, shapes)
            return bool(count_of_twice != 2 * count)
    return False
