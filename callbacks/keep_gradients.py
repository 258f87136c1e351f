"""Trainers that keep the last update's gradients where one can look."""

from typing import Any

from accumtrainer import Trainer
from accumtrainer.keras_api import by_path, keras


class KeepGradients(Trainer):
    """Keep a copy of the gradients of the last applied update.

    They are those that `on_apply` gets: of the whole update, before the
    optimizer clips them. They take as much memory as the trainable weights.

    Attributes:
        kept_gradients: dict from the path of each variable that is trainable
            when the Trainer is made to a `keras.Variable` with its gradient.

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
        _check_built(model)
        named = by_path(model.trainable_variables)
        self.kept_gradients = {
            path: self.track(
                keras.Variable(
                    keras.ops.zeros(variable.shape, dtype="float32"),
                    trainable=False,
                    name="kept_gradient",
                )
            )
            for path, variable in named.items()
        }
        self._paths = {id(v): path for path, v in named.items()}

    def on_apply(self, gradients: list[Any], info: Any) -> list[Any]:
        """Keep the gradients, as they are."""
        variables = self.model.trainable_variables
        found = {
            self._paths.get(id(variable)): gradient
            for variable, gradient in zip(variables, gradients, strict=True)
        }
        for path, kept in self.kept_gradients.items():
            # One that has been frozen since has none.
            nothing = keras.ops.zeros(kept.shape, dtype="float32")
            kept.assign(found.get(path, nothing))
        return gradients

    def kept_norms(self) -> dict[str, Any]:
        """Return the norm of each kept gradient by its variable's path.

        They are scalars on the device, for which this does not wait.
        """
        kept = self.kept_gradients.items()
        return {path: norm(gradient) for path, gradient in kept}


class KeepGradientNorms(Trainer):
    """Keep the norm of each variable's gradient in the last applied update.

    They are of the gradients that `on_apply` gets, and of the variables that
    the model has when the Trainer is made. Norms take no memory to speak of,
    and are computed in the compiled step.

    Raises:
        ValueError: the model is not built.

    Examples:
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> trainer = KeepGradientNorms(model, optimizer="sgd", loss="mse")
        >>> len(trainer.kept_norms())
        2
    """

    def __init__(self, model: Any, **options: Any):
        super().__init__(model, **options)
        _check_built(model)
        # Of all weights, as those that are frozen may be trained later.
        named = by_path(model.weights)
        self._kept_norms = {
            path: self.track(
                keras.Variable(0.0, trainable=False, name="kept_norm")
            )
            for path in named
        }
        self._paths = {id(v): path for path, v in named.items()}

    def on_apply(self, gradients: list[Any], info: Any) -> list[Any]:
        """Keep the norms of the gradients."""
        variables = self.model.trainable_variables
        for variable, gradient in zip(variables, gradients, strict=True):
            # What a layer has got since, as by `enable_lora`, has none.
            if path := self._paths.get(id(variable)):
                self._kept_norms[path].assign(norm(gradient))
        return gradients

    def kept_norms(self) -> dict[str, Any]:
        """Return the norm of each variable that is trained, by its path.

        They are scalars on the device, for which this does not wait.
        """
        variables = self.model.trainable_variables
        paths = [self._paths.get(id(variable)) for variable in variables]
        return {
            path: keras.ops.convert_to_tensor(self._kept_norms[path])
            for path in paths
            if path
        }


def norm(values: Any) -> Any:
    """Return the Euclidean norm of a tensor, a float32 scalar."""
    values = keras.ops.cast(values, "float32")
    return keras.ops.sqrt(keras.ops.sum(keras.ops.square(values)))


def _check_built(model: Any) -> None:
    if not model.built:
        raise ValueError(
            "model must be built, because its gradients are kept beside "
            f"it. Received: model {model.name!r}, which is not. Begin it "
            "with keras.Input, or call model.build first."
        )
