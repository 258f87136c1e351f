"""The loss scale that `compile` has put into the optimizer, for one `fit`."""

from typing import Any

import numpy as np

from accumtrainer.config import LossScale
from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Model, Tensor
from accumtrainer.window.state import TrainingState


class CarriedScale:
    """Where training begins with Keras's loss scale, and leaves it its own.

    Args:
        model: compiled `keras.Model`.
        state: has the scale while windows run.
        bounds: within which it stays; `None` where Keras's optimizer has no
            scale, or the user's counts.
    """

    def __init__(
        self, model: Model, state: TrainingState, bounds: LossScale | None
    ):
        self._model = model
        self._state = state
        self._bounds = bounds
        self._optimizer: Any = None

    def take(self) -> None:
        """Begin with the optimizer's scale, unless that was done."""
        if self._bounds is None or self._optimizer is not None:
            return
        self._optimizer = optimizer = self._model.optimizer
        if optimizer.built:
            scale = as_number(optimizer.dynamic_scale)
            self._state.loss_scale.assign(
                np.clip(scale, self._bounds.minimum, self._bounds.maximum)
            )
            good_windows = as_number(optimizer.step_counter)
            self._state.good_windows.assign(good_windows)

    def give(self) -> None:
        """Leave the scale in the optimizer from which it was taken."""
        optimizer, state = self._optimizer, self._state
        if optimizer is not None and optimizer.built:
            optimizer.dynamic_scale.assign(as_number(state.loss_scale))
            optimizer.step_counter.assign(as_number(state.good_windows))

    def forget(self) -> None:
        """Let the next `take` look at the optimizer again."""
        self._optimizer = None


def as_number(tensor: Tensor) -> Any:
    """Read a scalar."""
    return ops.convert_to_numpy(tensor).item()
