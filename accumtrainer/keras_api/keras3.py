"""What the package asks of Keras beyond its public names, answered by Keras 3.

`__init__.py` is the only reader. `keras_core.py` answers the same
questions for Keras Core. Each private name stands here with its reason;
`tests/keras_api/test_keras_api.py` notices when one of them changes.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import tree
from keras.src.backend.common import masking

from accumtrainer.keras_api.types import (
    Model,
    Nest,
    Optimizer,
    PairedLoss,
    Tensor,
)

IS_JAX = keras.backend.backend() == "jax"

ACTIVITY_LOSSES_ARE_MEANS = True
"""Whether activity regularizers are divided by the batch size."""


def looking_up_anything() -> contextlib.AbstractContextManager[None]:
    """Make a scope in which what is not in a table may be looked up.

    On PyTorch a process that has done so on a CUDA device has lost that, so
    tensors are put on the CPU there. JAX would compile anew for that.
    """
    is_torch = keras.backend.backend() == "torch"
    return keras.device("cpu") if is_torch else contextlib.nullcontext()


def keras_mask(tensor: Tensor) -> Tensor | None:
    """Return the mask Keras attached to a tensor, or `None`.

    Keras passes masks to losses and metrics beside the tensor, in a place
    that depends on the backend, and has no public way to ask for it. The
    losses here need to know only whether there is one; the mask itself is
    always applied by Keras.
    """
    return masking.get_keras_mask(tensor)


def set_keras_mask(tensor: Tensor, mask: Tensor) -> None:
    """Attach a mask to a tensor, for which Keras has no public way."""
    masking.set_keras_mask(tensor, mask)


def losses_of_layers(model: Model) -> tuple[list[Tensor], list[Tensor]]:
    """List what the layers of a model added to its loss in its last call.

    Args:
        model: `keras.Model` that has just been called.

    Returns:
        Pair: the list of what layers added; and that of weight penalties,
        one per regularized weight, with which Keras ends.
    """
    losses = list(model.losses)
    penalized = [v for v in model.trainable_weights if v.regularizer]
    split = len(losses) - len(penalized)
    return losses[:split], losses[split:]


def compile_losses(
    model: Model, loss: Nest, loss_weights: Nest
) -> Callable[[Nest, Nest, Nest], list[PairedLoss]]:
    """Compile a model, and return what computes its losses one by one.

    Keras pairs losses, weights, targets and outputs by rules of its own, and
    keeps what it has paired under a private name. Of several losses for a
    model's only output, which is no nest, it adds up none but the first. An
    array of as many samples as there are outputs it takes for a list of them.

    Args:
        loss: nest of `keras.losses.Loss` and `None`.
        loss_weights: nest of numbers or variables, or `None`.

    Returns:
        Function of `y`, `y_pred` and `sample_weight` that calls the losses
        and returns a list of `PairedLoss` in the order of the calls.
    """
    model.compile(
        optimizer=None,
        loss=loss,
        loss_weights=loss_weights,
        jit_compile=False,
    )

    def compute(y: Nest, y_pred: Nest, sample_weight: Nest) -> list[PairedLoss]:
        y, y_pred = _as_paired(y, y_pred)
        model.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        adds_up = tree.is_nested(y) or tree.is_nested(y_pred)
        return [
            PairedLoss(f"{part.name}_loss", part.loss_weights, adds_up or not i)
            for i, part in enumerate(model._compile_loss._flat_losses)
        ]

    return compute


def _as_paired(y: Nest, y_pred: Nest) -> tuple[Nest, Nest]:
    """Arrange targets and outputs as Keras gets them in its own loop."""
    if IS_JAX:
        y_pred = _sort_dicts(y_pred)
    if tree.is_nested(y_pred) and not tree.is_nested(y) and y is not None:
        y = [y]
    return y, y_pred


def make_metrics_of_losses(model: Model, y: Nest, y_pred: Nest) -> None:
    """Have a compiled model list a metric for each of its losses.

    Keras makes them as it first computes the loss. Nothing public says
    whether it has.

    Args:
        y: nest of tensors, targets.
        y_pred: nest of tensors, outputs.
    """
    compiled = model._compile_loss
    if compiled is not None and not compiled.built:
        with keras.StatelessScope():  # for those it makes are not to count
            compiled(*_as_paired(y, y_pred))


@contextlib.contextmanager
def losses_weighed_by(model: Model, samples: Tensor) -> Iterator[None]:
    """Tell the metrics of a model's losses how many samples a batch has.

    Keras weighs the mean of each loss by the length of the output, which is
    `None` while a program is traced that takes batches of any length: long and
    short ones would count alike.

    Args:
        samples: scalar tensor.
    """
    compiled = model._compile_loss
    metrics = [] if compiled is None else [*compiled.metrics]
    for metric in metrics:
        update = metric.update_state
        metric.update_state = lambda value, sample_weight, update=update: (
            update(value, samples if sample_weight is None else sample_weight)
        )
    try:
        yield
    finally:
        for metric in metrics:
            del metric.update_state


def _sort_dicts(nest: Nest) -> Nest:
    """Sort dicts as JAX does, by which Keras sends a model's outputs."""
    if type(nest) is dict:
        return {key: _sort_dicts(nest[key]) for key in sorted(nest)}
    if type(nest) in (list, tuple):
        return type(nest)(map(_sort_dicts, nest))
    return nest


def metric_names(model: Model, of_losses: list[str] | None = None) -> list[str]:
    """Name the metrics of a model in the order of what Keras returns.

    Keras expands what was given to `compile`, and has metrics of several
    losses after it; a model that Keras has not trained has none yet.

    Args:
        of_losses: the names of several losses; `None` for those that Keras
            has.
    """
    compiled, known = model._compile_metrics, model._compile_loss
    trackers = [] if known is None else known.metrics
    if of_losses is None:
        of_losses = [tracker.name for tracker in trackers]
    names: list[str] = []
    for metric in model.metrics:
        if metric is compiled:
            names += [part.name for part in metric.metrics]
        elif not any(metric is tracker for tracker in trackers):
            names.append(metric.name)
        if metric is (compiled or model._loss_tracker):
            names += of_losses
    return names


def check_support(model: Model, optimizer: Optimizer) -> None:
    """Refuse what Keras computes wrongly: nothing, in Keras 3."""


def check_feature(name: str) -> None:
    """Refuse what cannot be done with this Keras: nothing, in Keras 3."""


def check_loss_support(loss: Any) -> None:
    """Refuse a loss that this Keras computes wrongly: none, in Keras 3."""


def check_replica_support(replicas: int) -> None:
    """Refuse models of several replicas: not in Keras 3."""
