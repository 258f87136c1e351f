"""What the package asks of Keras, answered by Keras Core 0.1.7.

`__init__.py` is the only reader. Keras Core is Keras 3 before its first
release: most names are there, some are missing, and a few things are computed
wrongly. What is missing is made here of what there is; what would be wrong is
computed rightly here, or refused. `tests/keras_api/test_keras_core.py` holds
each of these statements to the installed Keras Core.
"""

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import keras_core as keras
import optree
from keras_core.src import backend

from accumtrainer import errors
from accumtrainer.keras_api.types import (
    Layer,
    Model,
    Nest,
    Optimizer,
    PairedLoss,
    Tensor,
)

IS_JAX = keras.backend.backend() == "jax"

ACTIVITY_LOSSES_ARE_MEANS = False
"""Whether activity regularizers are divided by the batch size."""


# The operations that are missing.


def _divide_no_nan(x1: Tensor, x2: Tensor) -> Tensor:
    """Divide, with zero where the divisor is zero, also in the gradient."""
    is_zero = keras.ops.equal(x2, 0)
    safe = keras.ops.where(is_zero, keras.ops.ones_like(x2), x2)
    quotient = keras.ops.divide(x1, safe)
    return keras.ops.where(is_zero, keras.ops.zeros_like(quotient), quotient)


ops = SimpleNamespace(
    **vars(keras.ops)
    | {"divide_no_nan": _divide_no_nan, "is_tensor": backend.is_tensor}
)
"""`keras_core.ops`, with the operations Keras 3 has and Keras Core lacks."""


# `keras.tree`, as far as it is needed, on the library that Keras 3 uses.


def _is_nested(structure: Nest) -> bool:
    return not optree.tree_is_leaf(structure, none_is_leaf=True)


def _flatten(structure: Nest) -> list[Any]:
    return optree.tree_leaves(structure, none_is_leaf=True)


def _flatten_with_path(structure: Nest) -> list[tuple[tuple, Any]]:
    flattened = optree.tree_flatten_with_path(structure, none_is_leaf=True)
    paths, leaves, _ = flattened
    return list(zip(paths, leaves, strict=True))


def _map_structure(
    function: Callable[..., Any], *structures: Nest, none_is_leaf: bool = True
) -> Nest:
    def of_leaves(*leaves: Any) -> Any:
        if any(
            not optree.tree_is_leaf(leaf, none_is_leaf=none_is_leaf)
            for leaf in leaves
        ):
            raise ValueError("Structures must have the same nesting.")
        return function(*leaves)

    return optree.tree_map(of_leaves, *structures, none_is_leaf=none_is_leaf)


def _assert_same_structure(a: Nest, b: Nest) -> None:
    _map_structure(lambda *leaves: None, a, b)


def _pack_sequence_as(structure: Nest, flat_sequence: list[Any]) -> Nest:
    treedef = optree.tree_structure(structure, none_is_leaf=True)
    return optree.tree_unflatten(treedef, flat_sequence)


tree = SimpleNamespace(
    assert_same_structure=_assert_same_structure,
    flatten=_flatten,
    flatten_with_path=_flatten_with_path,
    is_nested=_is_nested,
    map_structure=_map_structure,
    pack_sequence_as=_pack_sequence_as,
)
"""The functions of `keras.tree` that the package uses."""


def looking_up_anything() -> contextlib.AbstractContextManager[None]:
    """Make a scope that Keras Core does without, as PyTorch alone needs it."""
    return contextlib.nullcontext()


# Masks.


def keras_mask(tensor: Tensor) -> Tensor | None:
    """Return the mask Keras attached to a tensor, or `None`."""
    return getattr(tensor, "_keras_mask", None)


def set_keras_mask(tensor: Tensor, mask: Tensor) -> None:
    """Attach a mask to a tensor; see `check_support` for JAX."""
    tensor._keras_mask = mask


# Losses.


def losses_of_layers(model: Model) -> tuple[list[Tensor], list[Tensor]]:
    """List what the layers of a model added to its loss in its last call.

    `Layer.losses` is no help. In a stateless scope, and so always on JAX, it
    leaves the penalties of weights out, because it looks for the regularizer
    on the weight's value. It also leaves out the layers of a nested model.

    Args:
        model: `keras_core.Model` that has just been called.

    Returns:
        Pair: the list of what layers added; and that of weight penalties.
    """
    added: dict[int, Tensor] = {}
    for layer in model._flatten_layers():
        added |= {id(loss): loss for loss in layer._get_own_losses()}
    penalties = [
        weight.regularizer(weight.value)
        for weight in model.trainable_weights
        if weight.regularizer is not None
    ]
    return list(added.values()), penalties


def make_metrics_of_losses(model: Model, y: Nest, y_pred: Nest) -> None:
    """Leave a model alone, as Keras Core has no metrics of single losses."""
    del model, y, y_pred


def losses_weighed_by(model: Model, samples: Tensor) -> Any:
    """Leave a model alone, as Keras Core has no metrics of single losses."""
    del model, samples
    return contextlib.nullcontext()


def compile_losses(
    model: Model, loss: Nest, loss_weights: Nest
) -> Callable[[Nest, Nest, Nest], list[PairedLoss]]:
    """Compile a model, and return what computes its losses one by one.

    Keras Core pairs targets with outputs by their place after leaving out
    what is missing, and so computes some losses of the wrong output. Of
    weights it takes fewer kinds than Keras 3, so that they are paired here.

    Args:
        loss: nest of `keras_core.losses.Loss` and `None`.
        loss_weights: nest of numbers or variables, or `None`.

    Returns:
        Function of `y`, `y_pred` and `sample_weight` that calls the losses
        and returns a list of `PairedLoss` in the order of the calls. It
        raises `ValueError` if losses, targets, weights and outputs would be
        mispaired.
    """
    model.compile(optimizer=None, loss=loss, jit_compile=False)
    leaves = _flatten(loss)
    weights = [None] * len(leaves)
    if loss_weights is not None:
        weights = _flatten(loss_weights)
    weight_of = dict(zip(map(id, leaves), weights, strict=True))

    def compute(y: Nest, y_pred: Nest, sample_weight: Nest) -> list[PairedLoss]:
        compiled = model._compile_loss
        outputs = compiled._flatten_y(y_pred)
        _check_pairing(compiled, outputs, y, sample_weight)
        model.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        names = compiled.output_names or _output_names(y_pred)
        return [
            PairedLoss(f"{name}_loss", weight_of[id(loss)], True)
            for name, loss in zip(names, compiled.flat_losses, strict=False)
            if loss is not None
        ]

    return compute


def _check_pairing(
    compiled: Any, outputs: list[Tensor], y: Nest, sample_weight: Nest
) -> None:
    counts = {"outputs": len(outputs), "y": len(compiled._flatten_y(y))}
    weights = compiled._flatten_y(sample_weight)
    if sample_weight is not None and len(weights) > 1:
        counts["sample_weight"] = len(weights)
    losses = compiled._user_loss
    if isinstance(losses, list | tuple):
        counts["loss"] = sum(loss is not None for loss in losses)
    if len(set(counts.values())) > 1 or not outputs:
        raise ValueError(errors.KERAS_CORE_PAIRING.format(counts=counts))


def _output_names(y_pred: Nest) -> list[str]:
    if isinstance(y_pred, dict):
        return sorted(y_pred)
    return [f"output_{position}" for position in range(len(_flatten(y_pred)))]


# Metrics.


def metric_names(model: Model, of_losses: list[str] | None = None) -> list[str]:
    """Name what `evaluate` returns: in the order of the logs, but the loss."""
    del model, of_losses
    return ["loss"]


# What cannot be made right is refused.


def check_support(model: Model, optimizer: Optimizer) -> None:
    """Refuse what Keras Core computes wrongly.

    Constraints: a Dense layer takes them and never hands them on.

    Masks: Keras Core keeps them as attributes of tensors, which JAX's tracers
    do not take, so that every mask is silently lost in a compiled step.

    Weight regularizers: `losses_of_layers` counts them, but what a model's own
    `compute_loss` reads from `model.losses` lacks them on JAX.

    `use_ema`: on JAX the averages are never updated, and zeros overwrite the
    weights when training ends; on TensorFlow a compiled update assigns the
    current weights to the averages every time, because a Python flag says
    that it is the first.

    Raises:
        ValueError: the optimizer averages weights, or a layer of the model
            ignores its constraint, or, on JAX, makes masks or has a penalty
            that would be forgotten.
    """
    if getattr(optimizer, "use_ema", False):
        raise ValueError(errors.KERAS_CORE_EMA)
    has_own_loss = type(model).compute_loss is not keras.Model.compute_loss
    for layer in model._flatten_layers():
        received = f"layer {layer.name!r} of type {type(layer).__name__}"
        if _ignores_constraint(layer):
            raise ValueError(
                errors.KERAS_CORE_CONSTRAINT.format(received=received)
            )
        if IS_JAX and _makes_masks(layer):
            raise ValueError(errors.KERAS_CORE_MASK.format(received=received))
        if IS_JAX and has_own_loss and _has_penalty(layer):
            raise ValueError(
                errors.KERAS_CORE_PENALTY.format(received=received)
            )


REFUSED_FEATURES = {
    # What `fit` hands to the train function, and when, is not as in Keras 3.
    "fit": errors.KERAS_CORE_FIT,
    # Sums of batch statistics must stay float32, and `add_weight` has no
    # `autocast` for that.
    "statistics": errors.KERAS_CORE_STATISTICS,
}
if IS_JAX:
    # `Model.evaluate` builds metrics with the first batch that a generator
    # yields, and then leaves it out.
    REFUSED_FEATURES["evaluation"] = errors.KERAS_CORE_EVALUATION


def check_feature(name: str) -> None:
    """Refuse what cannot be done with Keras Core.

    Args:
        name: `"fit"`, to work inside `Model.fit`; `"evaluation"`, of models
            that evaluate themselves; or `"statistics"`, layers that pool those
            of batches.

    Raises:
        ValueError: it is one of `REFUSED_FEATURES`.
    """
    if name in REFUSED_FEATURES:
        raise ValueError(REFUSED_FEATURES[name])


def check_replica_support(replicas: int) -> NoReturn:
    """Refuse models of several replicas, which nobody has tried."""
    raise ValueError(
        errors.NOT_WITH_REPLICAS.format(
            replicas=replicas, received="a model of Keras Core"
        )
    )


def check_loss_support(loss: Any) -> None:
    """Refuse a loss that Keras Core computes wrongly.

    A loss with `ignore_class` marks what it ignores by a mask.

    Raises:
        ValueError: the loss makes a mask on JAX.
    """
    if IS_JAX and getattr(loss, "ignore_class", None) is not None:
        raise ValueError(
            errors.KERAS_CORE_MASK.format(
                received=f"a loss with ignore_class={loss.ignore_class}"
            )
        )


def _ignores_constraint(layer: Layer) -> bool:
    if not isinstance(layer, keras.layers.Dense):
        return False
    constraints = (layer.kernel_constraint, layer.bias_constraint)
    return any(constraint is not None for constraint in constraints)


def _has_penalty(layer: Layer) -> bool:
    return any(
        name.endswith("_regularizer")
        and name != "activity_regularizer"
        and value is not None
        for name, value in vars(layer).items()
    )


def _makes_masks(layer: Layer) -> bool:
    if isinstance(layer, keras.layers.Embedding):
        return layer.mask_zero
    if isinstance(layer, keras.layers.Lambda):
        return layer.mask is not None
    is_own = not type(layer).compute_mask.__module__.startswith("keras_core.")
    return is_own or isinstance(layer, keras.layers.Masking)
