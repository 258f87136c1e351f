"""The one place that decides which Keras this library stands on.

Every other module imports `keras`, `ops` and `tree` from here. Private Keras
names are used only by the functions at the end of this file, each with its
reason; `tests/test_keras_api.py` notices when one of them changes.
"""

import os

from accumtrainer import errors

KERAS_NAME = os.environ.get("ACCUMTRAINER_KERAS", "keras")

if KERAS_NAME == "keras":
    import keras
    from keras import tree
    from keras.src.backend.common import masking
else:
    raise ImportError(errors.UNKNOWN_KERAS.format(name=KERAS_NAME))

ops = keras.ops

BACKEND = keras.backend.backend()

__all__ = [
    "BACKEND",
    "KERAS_NAME",
    "compiled_arguments",
    "copy_mask",
    "flatten_layers",
    "is_known_to",
    "keras",
    "keras_mask",
    "ops",
    "tree",
]


def flatten_layers(model):
    """List the model and every layer below it, parents before children.

    Keras walks its own layers this way and offers no public walk that also
    reaches the layers inside a subclassed layer.

    Args:
        model: a `keras.Layer`, usually a `keras.Model`.

    Returns:
        List of layers, the given one first.
    """
    return list(model._flatten_layers())


def is_known_to(optimizer, variable):
    """Say whether an optimizer can update a variable.

    One that is not built yet will know any variable. Keras keeps those a
    built one knows under a private name, and refuses others only when the
    update is made.
    """
    if not optimizer.built:
        return True
    return any(known is variable for known in optimizer._trainable_variables)


def keras_mask(tensor):
    """Return the mask Keras attached to a tensor, or `None`.

    Keras passes masks to losses and metrics beside the tensor, in a place
    that depends on the backend, and has no public way to ask for it. The
    losses here need to know only whether there is one; the mask itself is
    always applied by Keras.
    """
    return masking.get_keras_mask(tensor)


def copy_mask(source, target):
    """Attach to `target` the mask Keras attached to `source`, if any.

    A loss with `ignore_class` marks the values it ignored by such a mask.
    Keras reads it from the values a loss returns and has no public setter.

    Returns:
        `target`, changed in place.
    """
    mask = keras_mask(source)
    if mask is not None:
        masking.set_keras_mask(target, mask)
    return target


def compiled_arguments(model):
    """Return what the user gave to `model.compile`, as the objects given.

    `Model.get_compile_config` returns them serialized, which loses functions
    and the identity of metric objects.

    Args:
        model: a compiled `keras.Model`.

    Returns:
        Dict with the keys `loss`, `loss_weights`, `metrics` and
        `weighted_metrics`; values are `None` where nothing was given.
    """
    config = model._compile_config.config
    names = ("loss", "loss_weights", "metrics", "weighted_metrics")
    return {name: config[name] for name in names}
