"""What layers add to a loss: by `add_loss`, and by regularizers.

Keras adds it all up. A scalar given to `add_loss` says nothing about what it
was averaged over. Several values may be those of each example, which add up
over micro-batches, or others, as a mean by features; twice the data tell which.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from accumtrainer.keras_api import (
    ACTIVITY_LOSSES_ARE_MEANS,
    flatten_layers,
    keras,
    losses_of_layers,
    ops,
)
from accumtrainer.keras_api.types import Model, Tensor
from accumtrainer.layers import describe_layer
from accumtrainer.window.losses import BareLoss, WeightedLoss

SUMS_OF_SAMPLES = (
    keras.regularizers.L1,
    keras.regularizers.L2,
    keras.regularizers.L1L2,
)
"""Activity regularizers that add up over samples, as all of them should."""

ASSUMED = "the activity regularizer of "
"""How the origin of a loss begins that may be no such sum."""

_Shapes = Sequence[tuple[Any, ...]]


class AddedLosses:
    """Collects what the layers of a model have added in its last call.

    Args:
        model: `keras.Model`.
    """

    def __init__(self, model: Model):
        self._model = model
        self._shapes: _Shapes | None = None
        self._are_sums: list[bool] | None = None

    @property
    def is_unsure(self) -> bool:
        """Whether some were collected that may add up, or not."""
        return self._shapes is not None and self._are_sums is None

    def forget(self) -> None:
        """Forget which losses add up, where they have several values."""
        self._shapes = self._are_sums = None

    @property
    def shapes(self) -> _Shapes | None:
        """Shapes of what was collected last, if that may have added up."""
        return self._shapes

    def learn(self, once: _Shapes | None) -> None:
        """Learn which losses add up, after a call with twice the data.

        Args:
            once: the `shapes` before.
        """
        if once is not None and self._shapes is not None:
            self._are_sums = grow(once, self._shapes)

    def collect(
        self,
        of_activity: Iterable[Tensor] = (),
        samples: int | None = None,
        expected: Sequence[WeightedLoss] | None = None,
    ) -> tuple[list[tuple[str, Any]], Tensor | None]:
        """Collect them, after a call of the model.

        Activity regularizers are means over samples where Keras divides them by
        the batch size, if they are sums; of Keras's L1 and L2 that is known.

        Args:
            of_activity: those that activity regularizers added.
            samples: how many examples it was called with, if that is known.
            expected: what there must be, of which only the kind counts; `None`
                where that is being found out.

        Returns:
            Pair: list of `(kind, scalar tensor)` with kind `"activity"` or
            `"sum"`, or of `(kind, BareLoss)` where that is a guess or kind is
            `"bare"`; and the weight regularization, a scalar tensor, or `None`
            where there is none.
        """
        added, penalties = losses_of_layers(self._model)
        activity, kinds = set(map(id, of_activity)), []
        are_sums = self._which_are_sums(added, samples, expected)
        for loss, is_sum in zip(added, are_sums, strict=True):
            value = _as_scalar(loss)
            owner = _owner_of(loss, self._model)
            if id(loss) in activity:
                kind = "activity" if ACTIVITY_LOSSES_ARE_MEANS else "sum"
                if type(owner.activity_regularizer) not in SUMS_OF_SAMPLES:
                    value = BareLoss(value, ASSUMED + describe_layer(owner))
            elif is_sum:
                kind = "sum"
            else:
                kind = "bare"
                value = BareLoss(value, f"add_loss of {describe_layer(owner)}")
            kinds.append((kind, value))
        total = (
            sum(map(_as_scalar, penalties[1:]), _as_scalar(penalties[0]))
            if penalties
            else None
        )
        return kinds, total

    def _which_are_sums(
        self,
        added: list[Tensor],
        samples: int | None,
        expected: Sequence[WeightedLoss] | None,
    ) -> list[bool]:
        """Say of each whether its values are those of examples."""
        shapes = [tuple(loss.shape) for loss in added]
        if not any(shapes):
            return [False] * len(added)
        if expected is not None:
            known = [loss.is_sum for loss in expected]
            are_sums = [*known, *[False] * len(added)][: len(added)]
        else:
            self._shapes = shapes
            by_length = [shape[:1] == (samples,) for shape in shapes]
            are_sums = self._are_sums or by_length
        pairs = zip(shapes, are_sums, strict=True)
        return [bool(shape) and is_sum for shape, is_sum in pairs]


def grow(once: _Shapes, twice: _Shapes) -> list[bool]:
    """Say of each loss whether it has twice as many values of twice the data.

    Args:
        once: shapes; `None` stands for a length that the data have.
        twice: the same of twice the data.

    Raises:
        ValueError: there are others of them.

    Examples:
        >>> grow([(3,), (4,), (2, 3)], [(6,), (4,), (2, 6)])
        [True, False, True]
    """
    return [
        None in shape or math.prod(more) == 2 * math.prod(shape)
        for shape, more in zip(once, twice, strict=True)
    ]


def _owner_of(loss: Tensor, model: Model) -> Any:
    """Find the layer that has added a loss, of those Keras lists it for."""
    owners = [
        layer
        for layer in flatten_layers(model)  # parents first
        if any(added is loss for added in layer.losses)
    ]
    return owners[-1] if owners else model


def _as_scalar(loss: Tensor) -> Tensor:
    return ops.sum(ops.cast(loss, "float32"))
