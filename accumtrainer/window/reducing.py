"""Tells losses that have values for each example from those that have others.

The latter reduce by themselves, as over the axis of examples, or pair them. The
number of their values says nothing about what they were averaged over.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import losses_of_layers, ops, tree
from accumtrainer.keras_api.types import Model, Tensor
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
        twice = list(map(_twice, once))
        shapes = [tuple(loss.call(*given).shape) for given in (once, twice)]
        if None not in (*shapes[0], *shapes[1]):
            count, count_of_twice = map(math.prod, shapes)
            return bool(count_of_twice != 2 * count)
    return False


def grow_with_examples(
    model: Model, batch: Batch, call: Callable[[Batch], Any]
) -> list[bool]:
    """Say of each loss that layers added whether twice the data have it twice.

    Args:
        model: `keras.Model` that has just been called on the batch.
        batch: `Batch` of tensors.
        call: function of a batch that calls the model.

    Returns:
        List of bools, in the order in which they were added.
    """
    once = _shapes_of_added(model)
    # What takes one size of batches only is judged by that.
    samples = next(v for v in tree.flatten(batch.x) if v is not None).shape[0]
    grow = [None in shape or shape[:1] == (samples,) for shape in once]
    with contextlib.suppress(Exception), Scratch([]):
        call(tree.map_structure(_twice, batch))
        grow = [
            None in shape or math.prod(of_twice) == 2 * math.prod(shape)
            for shape, of_twice in zip(
                once, _shapes_of_added(model), strict=True
            )
        ]
    return grow


def _twice(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else ops.concatenate([tensor, tensor])


def _shapes_of_added(model: Model) -> list[tuple[Any, ...]]:
    added, _ = losses_of_layers(model)
    return [tuple(loss.shape) for loss in added]
