"""Whose train function a model has while `Model.fit` runs."""

from collections.abc import Callable
from typing import Any

from accumtrainer import errors
from accumtrainer.keras_api import check_feature, keras, overrides
from accumtrainer.keras_api.types import Model
from accumtrainer.steps import should_run_eagerly
from accumtrainer.steps.backend import Backend
from accumtrainer.training.train_steps import hands_on


class Takeover:
    """Puts a train function in the place of Keras's own, and that back.

    Whoever asks for Keras's gets it, and `fit` trains by it from then on: the
    next `fit`, where this one has failed; `train_on_batch`; or a callback that
    has changed the model and wants it compiled again. Where `fit` still runs,
    its callbacks are called again, and `begin` is to follow.

    Args:
        model: compiled `keras.Model`.
        step_aside: called before somebody else trains the model.

    Attributes:
        is_aside: whether somebody else does.
    """

    def __init__(self, model: Model, step_aside: Callable[[], None]):
        self._model: Any = model
        self._step_aside = step_aside
        self._function: Any = None
        self._before: Any = None
        self._metrics: list[Any] = []
        self._is_forced = False
        self.is_aside = False

    def begin(self, function: Callable[..., Any]) -> None:
        """Take over.

        Args:
            function: what `fit` is to call for every group of batches.

        Raises:
            ValueError: somebody else has done so.
        """
        model = self._model
        if "make_train_function" in vars(model):
            raise ValueError(errors.OWN_TRAIN_FUNCTION.format(model=model.name))
        self._function, self._before = function, model.train_function
        self._metrics = list(model.metrics)
        self._is_forced = self.is_aside = False
        model.train_function = function
        model.make_train_function = self._make_train_function

    def end(self) -> None:
        """Put back what `begin` has changed, unless others have since."""
        model = self._model
        if model.train_function is self._function:
            model.train_function = self._before
        vars(model).pop("make_train_function", None)

    @property
    def has_put_back(self) -> bool:
        """Whether the model has the function again that it had before."""
        return self._model.train_function is self._before

    @property
    def is_outdated(self) -> bool:
        """Whether the model is to be compiled again, or was, since `begin`."""
        return self._is_forced or any(
            all(new is not old for old in self._metrics)
            for new in self._model.metrics
        )

    def _make_train_function(self, force: bool = False) -> Callable[..., Any]:
        self._step_aside()
        self.end()
        self.is_aside = True
        self._is_forced = self._is_forced or force
        return self._model.make_train_function(force)


def check_fit(model: Model, backend: Backend) -> None:
    """Refuse what cannot be done exactly inside `fit`.

    Raises:
        ValueError: the model trains in a way of its own.
    """
    check_feature("fit")
    # `begin` looks for a train function that was put into the place of Keras's.
    own = {"train_step": model, "make_train_function": type(model)}
    for name, owner in own.items():
        if overrides(owner, name):
            is_idle = name == "train_step" and hands_on(model)
            raise ValueError(
                errors.MODEL_WITH_OWN_TRAINING.format(
                    model=type(model).__name__,
                    name=name,
                    remedy=errors.REPLACED_BY_KERAS
                    if is_idle
                    else errors.MOVED_INTO_COMPUTE_LOSS,
                )
            )
    if backend.is_distributed(model) or keras.distribution.distribution():
        raise ValueError(errors.DISTRIBUTED_FIT)


def compiled_as(model: Model) -> tuple:
    """Return what stays as long as compiled functions can be used again."""
    return (id(model.optimizer), should_run_eagerly(model), model.jit_compile)
