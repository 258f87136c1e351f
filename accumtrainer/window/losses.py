"""What a loss is worth: its value, and the denominator it was divided by.

Keras reduces a loss to one number before anybody can ask what it was averaged
over. Exact accumulation needs that denominator: samples, unmasked tokens, or
the sum of sample weights. The classes here let Keras do the whole computation
(structure of the outputs, masks, weights, reduction) and only measure it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from accumtrainer import errors
from accumtrainer.keras_api import (
    DESCENDS_SUMS,
    copy_mask,
    keras,
    keras_mask,
    ops,
    tree,
)
from accumtrainer.keras_api.types import Nest, Tensor


@dataclass(frozen=True)
class WeightedLoss:
    """A loss averaged over part of a window, and what it was averaged over.

    Args:
        mean: scalar tensor, the mean loss of one micro-batch. Beside a
            denominator of `None` also a tensor of values, one or more for each
            example: it stands for their sum, as on a tape of TensorFlow, and
            their mean is logged.
        denominator: scalar tensor, what `mean` was divided by (samples,
            tokens, sum of weights), at least 0. `None` says that `mean` is
            not a mean but a sum, which adds up over a window undivided.
        outputs: what the compiled metrics are given as predictions, or
            `None` to leave them alone.
        coefficient: number by which this loss counts in the total, or a
            variable, which is read in every micro-batch.
        is_uniform: whether the denominator depends on shapes alone, so that
            equally shaped micro-batches count alike. Never wrong as `False`.
        name: under which name this loss is logged, where that is not its key
            in a dict of losses. Several may have one name; as in Keras, the
            last of them is then seen.
        origin: where a bare scalar comes from that says nothing about its
            denominator, which is then stated by others, or guessed, or an
            activity regularizer that nobody knows; `""` where it is known.

    Examples:
        >>> loss = WeightedLoss(0.5, denominator=12.0)
        >>> loss.mean * loss.denominator
        6.0
    """

    mean: Any
    denominator: Any
    outputs: Any = None
    coefficient: Any = 1.0
    is_uniform: bool = False
    name: str | None = None
    origin: str = ""

    @property
    def is_sum(self) -> bool:
        """Whether this loss adds up over a window instead of averaging."""
        return self.denominator is None


class BareLoss(NamedTuple):
    """A scalar that does not say what it was averaged over.

    Attributes:
        value: scalar tensor.
        origin: what it comes from, for messages.
    """

    value: Any
    origin: str


class _KeptValues(keras.losses.Loss):
    """Another loss, which keeps its values before they are reduced."""

    def __init__(self, loss: Any):
        super().__init__(
            name=loss.name, reduction=loss.reduction, dtype=loss.dtype
        )
        self._loss = loss
        self.values: Tensor = None

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        self.values = self._loss.call(y_true, y_pred)
        return self.values


class _CountedValues(keras.losses.Loss):
    """Ones in the shape of some loss's values, summed under the same mask."""

    def __init__(self, values: Tensor, dtype: Any):
        super().__init__(name="count", reduction="sum", dtype=dtype)
        self._values = values

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        ones = ops.ones(ops.shape(self._values), dtype=self.dtype)
        return copy_mask(self._values, ones)


COUPLING_LOSSES = tuple(
    getattr(keras.losses, name)
    for name in ("Circle",)
    if hasattr(keras.losses, name)
)
"""Losses of Keras with a value per example, each made of all examples."""


def measure(
    loss: Any,
    y_true: Tensor,
    y_pred: Tensor,
    sample_weight: Tensor | None = None,
) -> "WeightedLoss | BareLoss":
    """Evaluate a Keras loss together with what it was divided by.

    Args:
        loss: `keras.losses.Loss`.
        y_true: tensor of targets.
        y_pred: tensor of predictions, mask attached if it has one.
        sample_weight: tensor that broadcasts against the values, or `None`.

    Returns:
        `WeightedLoss`; or `BareLoss` where the loss reduced by itself or is no
        sum over examples, so that nobody can know its denominator.

    Raises:
        ValueError: the loss is no single number, nor values of examples whose
            sum Keras descends; or there are no targets.
    """
    origin = f"the loss {loss.name!r}"
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        value = loss(y_true, y_pred, sample_weight)
        return _required(loss, values_or_bare(value, origin))
    if y_true is None:
        raise ValueError(errors.NO_TARGETS.format(loss=loss.name))
    kept = _KeptValues(loss)
    value = kept(y_true, y_pred, _own_weights(sample_weight, y_pred))
    is_coupled = isinstance(loss, COUPLING_LOSSES)
    if shape_of(value):
        measured = _required(loss, values_or_bare(value, origin))
        return replace(measured, origin=origin if is_coupled else "")
    if len(kept.values.shape) == 0 or is_coupled:
        return BareLoss(value, origin)
    if loss.reduction == "sum":
        return WeightedLoss(value, None, is_uniform=True)
    counts_weights = loss.reduction == "mean_with_sample_weight"
    counted_weight = sample_weight if counts_weights else None
    counted_weight = _own_weights(counted_weight, y_pred)
    count = _CountedValues(kept.values, loss.dtype)
    is_masked = (
        keras_mask(y_pred) is not None or keras_mask(kept.values) is not None
    )
    return WeightedLoss(
        value,
        count(y_true, y_pred, counted_weight),
        is_uniform=counted_weight is None
        and not is_masked
        and None not in kept.values.shape,
    )


def sort_of(loss: WeightedLoss) -> Literal["mean", "sum", "values"]:
    """Say what is logged of a loss: values are summed, but averaged in logs."""
    if not loss.is_sum:
        return "mean"
    return "values" if shape_of(loss.mean) else "sum"


def minimized(loss: WeightedLoss) -> Tensor:
    """Return what a micro-batch differentiates of a loss, a scalar, float32."""
    value = ops.cast(loss.mean, "float32")
    return ops.sum(value) if sort_of(loss) == "values" else value


def logged(loss: WeightedLoss) -> tuple[Any, Any]:
    """Return a loss's number in logs, and how much it counts there.

    Returns:
        Pair of scalars; the second is 1 for sums.
    """
    if sort_of(loss) == "values":
        count = ops.cast(ops.size(loss.mean), "float32")  # 0 if all are masked
        return minimized(loss) / ops.maximum(count, 1.0), count
    return loss.mean, 1.0 if loss.is_sum else loss.denominator


def values_or_bare(value: Any, origin: str) -> "WeightedLoss | BareLoss":
    """Make a loss of what has reduced by itself, or was not reduced.

    Of several values Keras descends the sum, or refuses them. Whether they add
    up over examples is left to a trial, see `check_bare_losses`.

    Args:
        value: tensor.
        origin: see `BareLoss`.
    """
    if DESCENDS_SUMS and shape_of(value):
        origin += errors.OF_VALUES
        return WeightedLoss(value, None, is_uniform=True, origin=origin)
    return BareLoss(value, origin)


def _required(loss: Any, measured: Any) -> Any:
    """Refuse values that Keras makes no number of."""
    if isinstance(measured, BareLoss) and shape_of(measured.value):
        raise ValueError(
            errors.LOSS_WITHOUT_REDUCTION.format(
                loss=loss.name, shape=shape_of(measured.value)
            )
        )
    return measured


def shape_of(value: Any) -> tuple[int | None, ...]:
    """Return the shape of a tensor, `()` of a number.

    Args:
        value: tensor, array or number.
    """
    return tuple(getattr(value, "shape", ()))


def _own_weights(weights: Tensor | None, y_pred: Tensor) -> Tensor | None:
    """Copy weights, as large as the mask that Keras multiplies them by.

    On PyTorch it does so in place.
    """
    if weights is None:
        return None
    mask = keras_mask(y_pred)
    if mask is None or len(mask.shape) == 1:
        return ops.copy(weights)
    if len(weights.shape) + 1 == len(mask.shape):
        weights = ops.expand_dims(weights, -1)
    elif len(mask.shape) + 1 == len(weights.shape) and weights.shape[-1] == 1:
        weights = ops.squeeze(weights, -1)
    return ops.multiply(weights, ops.ones_like(mask, dtype=weights.dtype))


def count_samples(nest: Nest) -> Tensor:
    """Count the samples of a batch, the length of its first axis.

    Args:
        nest: nest of tensors or arrays that share their first axis.

    Returns:
        Scalar, float32.
    """
    return ops.cast(ops.shape(_first_leaf(nest))[0], "float32")


def known_length(nest: Nest) -> int | None:
    """Say how many samples a batch has, `None` where shapes do not tell.

    Args:
        nest: as for `count_samples`.
    """
    return _first_leaf(nest).shape[0]


def _first_leaf(nest: Nest) -> Tensor:
    return next(v for v in tree.flatten(nest) if v is not None)


def loss_name(identifier: Any) -> str:
    """Name a loss as Keras does where its output has no name.

    Args:
        identifier: what `compile` accepts for one output.
    """
    if isinstance(identifier, str):
        if identifier.lower() in ("crossentropy", "ce"):
            return identifier
        loss = keras.losses.get(identifier)
        return loss.name if isinstance(loss, keras.losses.Loss) else identifier
    name = getattr(identifier, "name", None)
    if name:
        return name
    name = str(getattr(identifier, "__name__", type(identifier).__name__))
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def find_loss(identifier: Any, y_true: Any, y_pred: Any) -> Any:
    """Find the loss that `compile` would use for these.

    Args:
        identifier: what `compile` accepts for one output.
        y_true: targets, of which the shape is looked at.
        y_pred: predictions, of which the shape is looked at.

    Returns:
        `keras.losses.Loss` or function.
    """
    if str(identifier).lower() in ("crossentropy", "ce"):
        identifier = _crossentropy_name(y_true, y_pred)
    return keras.losses.get(identifier)


def resolve_loss(identifier: Any, y_true: Tensor, y_pred: Nest) -> Any:
    """Turn what `compile` accepts into a `keras.losses.Loss`.

    Args:
        identifier: see `find_loss`.
        y_true: see there.
        y_pred: see there.
    """
    loss = find_loss(identifier, y_true, y_pred)
    return loss if isinstance(loss, keras.losses.Loss) else _FunctionLoss(loss)


def _crossentropy_name(y_true: Any, y_pred: Any) -> str:
    """Tell which crossentropy fits, by the rule `Model.compile` states."""
    if y_pred.shape[-1] == 1:
        return "binary_crossentropy"
    is_sparse = len(y_true.shape) < len(y_pred.shape) or y_true.shape[-1] == 1
    kind = "sparse_categorical" if is_sparse else "categorical"
    return f"{kind}_crossentropy"


class _FunctionLoss(keras.losses.Loss):
    """A function `(y_true, y_pred) -> values`, reduced as Keras reduces it."""

    def __init__(self, loss_fn: Callable[..., Tensor]):
        super().__init__(name=loss_name(loss_fn))
        self._loss_fn = loss_fn

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        if tree.is_nested(y_true) or tree.is_nested(y_pred):
            return self._loss_fn(y_true, y_pred)
        return self._loss_fn(*_match_ranks(y_true, y_pred))


def _match_ranks(y_true: Tensor, y_pred: Tensor) -> tuple[Tensor, Tensor]:
    """Drop or add a last axis of 1 where ranks differ by one, as Keras does."""
    difference = len(y_true.shape) - len(y_pred.shape)
    if difference == 1 and y_true.shape[-1] == 1:
        if len(y_pred.shape) == 1:
            return y_true, ops.expand_dims(y_pred, -1)
        return ops.squeeze(y_true, -1), y_pred
    if difference == -1 and y_pred.shape[-1] == 1:
        if len(y_true.shape) == 1:
            return ops.expand_dims(y_true, -1), y_pred
        return y_true, ops.squeeze(y_pred, -1)
    return y_true, y_pred
