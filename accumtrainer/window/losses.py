"""What a loss is worth: its value, and the denominator it was divided by.

Keras reduces a loss to one number before anybody can ask what it was averaged
over. Exact accumulation needs that denominator: samples, unmasked tokens, or
the sum of sample weights. The classes here let Keras do the whole computation
(structure of the outputs, masks, weights, reduction) and only measure it.
"""

from dataclasses import dataclass
from typing import Any

from accumtrainer import errors
from accumtrainer.keras_api import (
    ACTIVITY_LOSSES_ARE_MEANS,
    compute_compiled_losses,
    copy_mask,
    keras,
    keras_mask,
    losses_of_layers,
    ops,
    tree,
)

MEAN_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@dataclass(frozen=True)
class WeightedLoss:
    """A loss averaged over part of a window, and what it was averaged over.

    Args:
        mean: scalar tensor, the mean loss of one micro-batch.
        denominator: scalar tensor, what `mean` was divided by (samples,
            tokens, sum of weights), at least 0. `None` says that `mean` is
            not a mean but a sum, which adds up over a window undivided.
        outputs: what the compiled metrics are given as predictions, or
            `None` to leave them alone.
        coefficient: Python float by which this loss counts in the total.
        is_uniform: whether the denominator depends on shapes alone, so that
            equally shaped micro-batches count alike. Never wrong as `False`.

    Example:
        >>> loss = WeightedLoss(0.5, denominator=12.0)
        >>> loss.mean * loss.denominator
        6.0
    """

    mean: Any
    denominator: Any
    outputs: Any = None
    coefficient: float = 1.0
    is_uniform: bool = False

    @property
    def is_sum(self):
        """Whether this loss adds up over a window instead of averaging."""
        return self.denominator is None


class CompiledLoss:
    """The `loss` and `loss_weights` of a model, measured output by output.

    Args:
        loss: what `Model.compile` takes as `loss`.
        loss_weights: what `Model.compile` takes as `loss_weights`.
        output_names: list of str, or `None` where the model has no names.
    """

    def __init__(self, loss, loss_weights=None, output_names=None):
        self._measured = []
        self._names = None
        self._board = _LossBoard(output_names)
        self._board.compile(
            optimizer=None,
            loss=_pair_losses(loss, loss_weights, self._measured),
            jit_compile=False,
        )

    @property
    def variables(self):
        """Variables in which Keras tracks the losses, read by nobody."""
        return [v for metric in self._board.metrics for v in metric.variables]

    def __call__(self, y, y_pred, sample_weight=None):
        """Evaluate every output's loss with its denominator.

        Args:
            y: nest of tensors, the targets.
            y_pred: nest of tensors, the predictions, masks attached.
            sample_weight: nest of tensors, or `None`.

        Returns:
            Dict from output name to `WeightedLoss`, or to a bare scalar where
            a loss reduced by itself. A single loss is named `"loss"`.
        """
        self._measured.clear()
        names = compute_compiled_losses(self._board, y, y_pred, sample_weight)
        measured = list(self._measured)
        self._measured.clear()
        names = names if len(measured) > 1 else ["loss"]
        return dict(zip(names, measured, strict=True))


class _LossBoard(keras.Model):
    """A model without layers that lends `compile` and `compute_loss`."""

    def __init__(self, output_names):
        super().__init__()
        if output_names is not None:
            self.output_names = list(output_names)


class _Measuring(keras.losses.Loss):
    """A loss that reduces as Keras does and keeps what it has seen."""

    def __init__(self, identifier, coefficient, measured):
        super().__init__(name=_loss_name(identifier))
        self._identifier = identifier
        self._coefficient = 1.0 if coefficient is None else float(coefficient)
        self._measured = measured

    def __call__(self, y_true, y_pred, sample_weight=None):
        loss = _resolve_loss(self._identifier, y_true, y_pred)
        result = measure(loss, y_true, y_pred, sample_weight)
        if isinstance(result, WeightedLoss):
            result = _with_coefficient(result, self._coefficient)
        else:
            result = result * self._coefficient
        self._measured.append(result)
        return ops.zeros(())  # the sum is not Keras's to make


class _KeptValues(keras.losses.Loss):
    """Another loss, which keeps its values before they are reduced."""

    def __init__(self, loss):
        super().__init__(
            name=loss.name, reduction=loss.reduction, dtype=loss.dtype
        )
        self._loss = loss
        self.values = None

    def call(self, y_true, y_pred):
        self.values = self._loss.call(y_true, y_pred)
        return self.values


class _CountedValues(keras.losses.Loss):
    """Ones in the shape of some loss's values, summed under the same mask."""

    def __init__(self, values, dtype):
        super().__init__(name="count", reduction="sum", dtype=dtype)
        self._values = values

    def call(self, y_true, y_pred):
        ones = ops.ones(ops.shape(self._values), dtype=self.dtype)
        return copy_mask(self._values, ones)


def measure(loss, y_true, y_pred, sample_weight=None):
    """Evaluate a Keras loss together with what it was divided by.

    Args:
        loss: `keras.losses.Loss`.
        y_true: tensor of targets.
        y_pred: tensor of predictions, mask attached if it has one.
        sample_weight: tensor that broadcasts against the values, or `None`.

    Returns:
        `WeightedLoss`; or the scalar tensor alone where the loss reduced by
        itself, so that nobody can know its denominator.

    Raises:
        ValueError: the loss has no reduction, or there are no targets.
    """
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return loss(y_true, y_pred, sample_weight)
    if loss.reduction in (None, "none"):
        raise ValueError(errors.LOSS_WITHOUT_REDUCTION.format(loss=loss.name))
    if y_true is None:
        raise ValueError(errors.NO_TARGETS.format(loss=loss.name))
    kept = _KeptValues(loss)
    value = kept(y_true, y_pred, sample_weight)
    if len(kept.values.shape) == 0:
        return value
    if loss.reduction == "sum":
        return WeightedLoss(value, None, is_uniform=True)
    counts_weights = loss.reduction == "mean_with_sample_weight"
    counted_weight = sample_weight if counts_weights else None
    count = _CountedValues(kept.values, loss.dtype)
    is_masked = (
        keras_mask(y_pred) is not None or keras_mask(kept.values) is not None
    )
    return WeightedLoss(
        value,
        count(y_true, y_pred, counted_weight),
        is_uniform=counted_weight is None and not is_masked,
    )


def count_samples(nest):
    """Count the samples of a batch, the length of its first axis.

    Args:
        nest: nest of tensors or arrays that share their first axis.

    Returns:
        Scalar tensor, float32.
    """
    leaf = next(v for v in tree.flatten(nest) if v is not None)
    return ops.cast(ops.shape(leaf)[0], "float32")


def added_losses(model):
    """Collect what layers added to the loss in the last call of a model.

    Activity regularizers are means over samples where Keras divides them by
    the batch size. A vector given to `add_loss` is summed by Keras. A scalar
    given to `add_loss` says nothing about what it was averaged over.

    Args:
        model: `keras.Model` that has just been called.

    Returns:
        Pair: list of `(kind, scalar tensor)` with kind `"activity"`, `"sum"`
        or `"bare"`; and the weight regularization, a scalar tensor, or `None`
        where there is none.
    """
    added, penalties = losses_of_layers(model)
    kinds = [
        (_added_kind(loss, is_activity), _as_scalar(loss))
        for loss, is_activity in added
    ]
    return kinds, _sum_scalars([_as_scalar(v) for v in penalties])


def _added_kind(loss, is_activity):
    if is_activity:
        return "activity" if ACTIVITY_LOSSES_ARE_MEANS else "sum"
    return "bare" if len(loss.shape) == 0 else "sum"


def _as_scalar(loss):
    return ops.sum(ops.cast(loss, "float32"))


def _sum_scalars(scalars):
    return sum(scalars[1:], start=scalars[0]) if scalars else None


def _with_coefficient(loss, coefficient):
    return WeightedLoss(
        loss.mean,
        loss.denominator,
        loss.outputs,
        loss.coefficient * coefficient,
        loss.is_uniform,
    )


def _pair_losses(loss, loss_weights, measured):
    """Wrap every leaf of `loss`, each with its own `loss_weights` entry."""

    def wrap(leaf, coefficient=None):
        return None if leaf is None else _Measuring(leaf, coefficient, measured)

    if loss_weights is None:
        return tree.map_structure(wrap, loss)
    if isinstance(loss, dict) and isinstance(loss_weights, dict):
        unknown = sorted(set(loss_weights) - set(loss))
        if unknown:
            raise ValueError(
                "loss_weights must name outputs that have a loss. Received: "
                f"loss_weights for {unknown}, losses for {sorted(loss)}. "
                "Remove the extra names or give them a loss."
            )
        return {k: wrap(v, loss_weights.get(k)) for k, v in loss.items()}
    leaves, weights = tree.flatten(loss), tree.flatten(loss_weights)
    if len(leaves) != len(weights):
        raise ValueError(
            "loss_weights must have one entry per loss. Received: "
            f"{len(weights)} weights for {len(leaves)} losses. Give one "
            "weight per loss, in the same order."
        )
    return tree.pack_sequence_as(loss, [*map(wrap, leaves, weights)])


def _loss_name(identifier):
    if isinstance(identifier, str):
        return identifier
    name = getattr(identifier, "name", None)
    name = name or getattr(identifier, "__name__", type(identifier).__name__)
    return name.strip("<>")  # a scope name, which "<lambda>" is not


def find_loss(identifier, y_true, y_pred):
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


def _resolve_loss(identifier, y_true, y_pred):
    """Turn what `compile` accepts into a `keras.losses.Loss`."""
    loss = find_loss(identifier, y_true, y_pred)
    return loss if isinstance(loss, keras.losses.Loss) else _FunctionLoss(loss)


def _crossentropy_name(y_true, y_pred):
    """Tell which crossentropy fits, by the rule `Model.compile` states."""
    if y_pred.shape[-1] == 1:
        return "binary_crossentropy"
    is_sparse = len(y_true.shape) < len(y_pred.shape) or y_true.shape[-1] == 1
    kind = "sparse_categorical" if is_sparse else "categorical"
    return f"{kind}_crossentropy"


class _FunctionLoss(keras.losses.Loss):
    """A function `(y_true, y_pred) -> values`, reduced as Keras reduces it."""

    def __init__(self, loss_fn):
        super().__init__(name=_loss_name(loss_fn))
        self._loss_fn = loss_fn

    def call(self, y_true, y_pred):
        if tree.is_nested(y_true) or tree.is_nested(y_pred):
            return self._loss_fn(y_true, y_pred)
        return self._loss_fn(*_match_ranks(y_true, y_pred))


def _match_ranks(y_true, y_pred):
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
