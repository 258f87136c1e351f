"""What weights a model has, and which are trained, when windows compile."""

import warnings

from accumtrainer import errors
from accumtrainer.keras_api import flatten_layers
from accumtrainer.keras_api.types import Model


class Trainable:
    """Which weights and layers of a model were trainable at one moment.

    A layer may behave otherwise when it is frozen, although it has nothing to
    train: `BatchNormalization` leaves its statistics alone. Quantizing gives a
    layer other weights, which need not be trained.

    Args:
        model: `keras.Model`, built.
    """

    def __init__(self, model: Model):
        self._weights = [(v, v.trainable) for v in model.weights]
        self._layers = [(v, v.trainable) for v in flatten_layers(model)]

    def differs_from(self, model: Model) -> bool:
        """Whether there are other weights, or what is trainable has changed."""
        weights = model.weights
        return (
            len(weights) != len(self._weights)
            or any(
                one is not other
                for one, (other, _) in zip(weights, self._weights, strict=True)
            )
            or self.is_outdated
        )

    @property
    def is_outdated(self) -> bool:
        """Whether of those that there were something has changed."""
        then = (*self._weights, *self._layers)
        return any(one.trainable is not was for one, was in then)


class Trained(Trainable):
    """The same, and by which function Keras trains the model.

    Who has Keras make that anew (`make_train_function(force=True)`), wants all
    that has changed to count: also what is no weight, as an activation.

    Args:
        model: as there.
    """

    def __init__(self, model: Model):
        super().__init__(model)
        self._function = model.train_function

    def differs_from(self, model: Model) -> bool:
        is_other = model.train_function is not self._function
        return is_other or super().differs_from(model)


def warn_of_nothing_to_train(model: Model) -> None:
    """Warn where a model has no weights that training would move."""
    if not model.trainable_variables:
        message = errors.NOTHING_TO_TRAIN.format(model=model.name)
        warnings.warn(message, stacklevel=2)
