"""Finds losses that have other values than one or more for each example.

Such a loss reduces by itself, as over the axis of examples, or pairs them. The
number of its values says nothing about what it was averaged over.
"""

import contextlib
import math
from typing import Any

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
