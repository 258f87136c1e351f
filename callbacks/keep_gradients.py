"""A Trainer that keeps the last update's gradients where one can look."""

from typing import Any

from accumtrainer import Trainer
from accumtrainer.keras_api import keras


class KeepGradients(Trainer):
    """Keep a copy of the gradients of the last applied update.

    They are those that `on_apply` gets: of the whole update, before the
    optimizer clips them. They take as much memory as the trainable weights.

    Attributes:
        kept_gradients: dict from the path of each trainable variable to a
            `keras.Variable` with its gradient.

    Raises:
        ValueError: the model is not built.

    Examples:
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> trainer = KeepGradients(model, optimizer="sgd", loss="mse")
        >>> kept = trainer.kept_gradients.values()
        >>> [tuple(gradient.shape) for gradient in kept]
        [(2, 1), (1,)]
    """

    def __init__(self, model: Any, **options: Any):
        super().__init__(model, **options)
        if not model.built:
            raise ValueError(
                "model must be built, because its gradients are kept beside "
                f"it. Received: model {model.name!r}, which is not. Begin it "
                "with keras.Input, or call model.build first."
            )
        self.kept_gradients = {
            variable.path: self.track(
                keras.Variable(
                    keras.ops.zeros(variable.shape, dtype="float32"),
                    trainable=False,
                    name="kept_gradient",
                )
            )
            for variable in model.trainable_variables
        }

    def on_apply(self, gradients: list[Any], info: Any) -> list[Any]:
        """Keep the gradients, as they are."""
        kept = self.kept_gradients.values()
        for variable, gradient in zip(kept, gradients, strict=True):
            variable.assign(gradient)
        return gradients
