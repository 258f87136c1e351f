"""What of a model is trained, for which windows were compiled."""

import warnings

from accumtrainer import errors
from accumtrainer.keras_api import flatten_layers
from accumtrainer.keras_api.types import Model


class Trainable:
    """Which variables and layers of a model were trainable at one moment.

    A layer may behave otherwise when it is frozen, although it has nothing to
    train: `BatchNormalization` leaves its statistics alone.

    Args:
        model: `keras.Model`, built.
    """

    def __init__(self, model: Model):
        self._variables = list(model.trainable_variables)
        self._ids = list(map(id, self._variables))
        self._layers = [(v, v.trainable) for v in flatten_layers(model)]

    def differs_from(self, model: Model) -> bool:
        """Whether other variables are trainable, or a layer has changed."""
        if list(map(id, model.trainable_variables)) != self._ids:
            return True
        return any(layer.trainable is not was for layer, was in self._layers)


def warn_of_nothing_to_train(model: Model) -> None:
    """Warn where a model has no weights that training would move."""
    if not model.trainable_variables:
        message = errors.NOTHING_TO_TRAIN.format(model=model.name)
        warnings.warn(message, stacklevel=2)
