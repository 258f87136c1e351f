"""What of a model is trained, which compiled windows do not look at again."""

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
        self._layers = [(v, v.trainable) for v in flatten_layers(model)]

    def difference(self, model: Model) -> str | None:
        """Say how a model differs from what it was, `None` if it does not."""
        now, before = model.trainable_variables, self._variables
        if list(map(id, now)) != list(map(id, before)):
            return (
                f"{len(now)} trainable variables where there were "
                f"{len(before)}, or other ones"
            )
        for layer, was_trainable in self._layers:
            if layer.trainable != was_trainable:
                return (
                    f"trainable={layer.trainable} of layer {layer.name!r}, "
                    f"where it was {was_trainable}"
                )
        return None


def warn_of_nothing_to_train(model: Model) -> None:
    """Warn where a model has no weights that training would move."""
    if not model.trainable_variables:
        message = errors.NOTHING_TO_TRAIN.format(model=model.name)
        warnings.warn(message, stacklevel=2)
