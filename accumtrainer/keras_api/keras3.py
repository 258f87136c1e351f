"""What the package asks of Keras beyond its public names, answered by Keras 3.

`__init__.py` is the only reader. `keras_core.py` answers the same
questions for Keras Core. Each private name stands here with its reason;
`tests/keras_api/test_keras_api.py` notices when one of them changes.
"""

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
    "compute_compiled_losses",
    "keras",
    "keras_mask",
    "losses_of_layers",
    "ops",
    "set_keras_mask",
    "take_initial_epoch",
    "tree",
]

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
        Pair: list of `(loss, is_activity)`, where `is_activity` says that it
        comes from an activity regularizer; and the list of weight penalties.
    """
    own, penalties = _split_penalties(model)
    activity = _activity_ids(model) if own else set()
    return [(loss, id(loss) in activity) for loss in own], penalties


def _split_penalties(layer):
    """Split a layer's losses, which end with one per regularized weight."""
    losses = list(layer.losses)
    penalized = [v for v in layer.trainable_weights if v.regularizer]
    split = len(losses) - len(penalized)
    return losses[:split], losses[split:]


def _activity_ids(model):
    """Identify the losses that come from activity regularizers.

    Keras lists a layer's losses together with those of the layers inside, so
    that only a walk from the innermost ones tells whose they are.
    """
    seen, activity = set(), set()
    for layer in reversed(model._flatten_layers()):
        own, _ = _split_penalties(layer)
        fresh = [id(loss) for loss in own if id(loss) not in seen]
        seen.update(fresh)
        if getattr(layer, "activity_regularizer", None) is not None:
            activity.update(fresh)
    return activity


def compute_compiled_losses(model, y, y_pred, sample_weight):
    """Have a compiled model compute its losses, output by output.

    Args:
        model: compiled `keras.Model`.
        y: nest of tensors, the targets.
        y_pred: nest of tensors, the predictions.
        sample_weight: nest of tensors, or `None`.

    Returns:
        The names of the losses in the order they were computed; none where
        there is one loss for one output.
    """
    model.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
    # Keras tracks several losses by one metric each, in their order, after
    # the tracker of their sum.
    return [metric.name for metric in model.metrics[1:]]


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
