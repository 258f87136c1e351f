"""What the package asks of Keras beyond its public names, answered by Keras 3.

`__init__.py` is the only reader. `keras_core.py` answers the same
questions for Keras Core. Each private name stands here with its reason;
`tests/keras_api/test_keras_api.py` notices when one of them changes.
"""

from typing import Any, NamedTuple

import keras
from keras import ops, tree
from keras.src.backend.common import masking

from accumtrainer import errors

__all__ = [
    "ACTIVITY_LOSSES_ARE_MEANS",
    "check_fit_support",
    "check_loss_support",
    "check_replica_support",
    "check_statistics_support",
    "check_support",
    "compile_losses",
    "keras",
    "keras_mask",
    "losses_of_layers",
    "metric_names",
    "ops",
    "read_metrics",
    "set_keras_mask",
    "take_initial_epoch",
    "tree",
]

IS_JAX = keras.backend.backend() == "jax"

ACTIVITY_LOSSES_ARE_MEANS = True
"""Whether activity regularizers are divided by the batch size."""


def keras_mask(tensor):
    """Return the mask Keras attached to a tensor, or `None`.

    Keras passes masks to losses and metrics beside the tensor, in a place
    that depends on the backend, and has no public way to ask for it. The
    losses here need to know only whether there is one; the mask itself is
    always applied by Keras.
    """
    return masking.get_keras_mask(tensor)


def set_keras_mask(tensor, mask):
    """Attach a mask to a tensor, for which Keras has no public way."""
    masking.set_keras_mask(tensor, mask)


def losses_of_layers(model):
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


class PairedLoss(NamedTuple):
    """How a compiled model uses one of its losses.

    Attributes:
        name: str, under which it is logged where there are several.
        weight: its entry of `loss_weights`, `None` where there is none.
        counts: bool, whether it is a part of the sum.
    """

    name: str
    weight: Any
    counts: bool


def compile_losses(model, loss, loss_weights):
    """Compile a model, and return what computes its losses one by one.

    Keras pairs losses, weights, targets and outputs by rules of its own, and
    keeps what it has paired under a private name. Of several losses for a
    model's only output, which is no nest, it adds up none but the first.

    Args:
        model: `keras.Model`.
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

    def compute(y, y_pred, sample_weight):
        if IS_JAX:
            y_pred = _sort_dicts(y_pred)
        model.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        adds_up = tree.is_nested(y) or tree.is_nested(y_pred)
        return [
            PairedLoss(f"{part.name}_loss", part.loss_weights, adds_up or not i)
            for i, part in enumerate(model._compile_loss._flat_losses)
        ]

    return compute


def _sort_dicts(nest):
    """Sort dicts as JAX does, by which Keras sends a model's outputs."""
    if type(nest) is dict:
        return {key: _sort_dicts(nest[key]) for key in sorted(nest)}
    if type(nest) in (list, tuple):
        return type(nest)(map(_sort_dicts, nest))
    return nest


def read_metrics(model, leaving_out):
    """Read the metrics of a model as `Model.get_metrics_result` does.

    That fails where what was given to `compile` has not seen any data, and
    has a private name.

    Args:
        model: `keras.Model`.
        leaving_out: list of metrics not to read.

    Returns:
        Dict from name to tensor, or to a dict of such.
    """
    if type(model).get_metrics_result is not keras.Model.get_metrics_result:
        names = [metric.name for metric in leaving_out]
        results = model.get_metrics_result()
        return {k: v for k, v in results.items() if k not in names}
    compiled, results = model._compile_metrics, {}
    for metric in model.metrics:
        is_empty = metric is compiled and not metric.built
        if is_empty or any(metric is other for other in leaving_out):
            continue
        result = metric.result()
        is_dict = isinstance(result, dict)
        results |= result if is_dict else {metric.name: result}
    return results


def metric_names(model, of_losses):
    """Name the metrics of a model in the order of what Keras returns.

    Keras expands what was given to `compile`, and has metrics of several
    losses after it; a model that Keras has not trained has none yet.

    Args:
        model: `keras.Model`.
        of_losses: list of str, the names of several losses.

    Returns:
        List of str.
    """
    compiled, known = model._compile_metrics, model._compile_loss
    trackers = [] if known is None else known.metrics
    names = []
    for metric in model.metrics:
        if metric is compiled:
            names += [part.name for part in metric.metrics]
        elif not any(metric is tracker for tracker in trackers):
            names.append(metric.name)
        if metric is (compiled or model._loss_tracker):
            names += of_losses
    return names


def take_initial_epoch(model):
    """Return the epoch at which a callback wants training to begin, if any.

    `BackupAndRestore` leaves it in a private attribute of the model, where
    `Model.fit` reads it. There it stays, and a later `fit` of the same model
    would leave out as many epochs; so here it is taken out.

    Returns:
        int, above 0, or `None`.
    """
    epoch = getattr(model, "_initial_epoch", None)
    if epoch:
        model._initial_epoch = None
    return epoch or None


def check_support(model, optimizer):
    """Refuse an optimizer that has no learning rate of its own.

    Older versions of Keras 3 have no such class.
    """
    del model
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise ValueError(errors.SEVERAL_OPTIMIZERS)


def check_fit_support():
    """Refuse to work inside `Model.fit`: not in Keras 3."""


def check_loss_support(loss):
    """Refuse a loss that this Keras computes wrongly: none, in Keras 3."""


def check_replica_support(replicas):
    """Refuse models of several replicas: not in Keras 3."""
    del replicas


def check_statistics_support():
    """Refuse layers that pool batch statistics: not in Keras 3."""
