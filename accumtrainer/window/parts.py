"""What all parts of the window algorithm work with, told once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accumtrainer.config import LossScale
from accumtrainer.keras_api import flatten_layers, keras, tree
from accumtrainer.keras_api.types import Model, Variable
from accumtrainer.window.backend import WindowBackend
from accumtrainer.window.hooks import Hooks
from accumtrainer.window.objective import metric_variables
from accumtrainer.window.state import TrainingState


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowParts:
    """Whose windows run, and on what.

    Args:
        hooks: usually the Trainer.
        state: its counters, loss scale and random state.
        backend: computes them.
        tracked: variables that hooks may move, undone by a skipped window.
        loss_scale: `None` to leave the loss as it is.
        combine: as in `Accumulation`.
        per_example: as in `Accumulation`.
        training: whether layers and hooks are told that this is training.
    """

    hooks: Hooks
    state: TrainingState
    backend: WindowBackend
    tracked: Sequence[Any] = ()
    loss_scale: LossScale | None = None
    combine: Literal["exact", "mean", "sum"] = "exact"
    per_example: bool = False
    training: bool = True

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self.hooks.model

    @property
    def non_trainable_variables(self) -> list[Any]:
        """The model's, and of what its layers keep beside them."""
        return [
            *self.model.non_trainable_variables,
            *_states_of_layers(self.model),
            *self.backend.variables_beside(self.model),
        ]

    @property
    def variables(self) -> list[Any]:
        """What a micro-batch may read or move, what it captures aside."""
        return [
            *self.model.trainable_variables,
            *self.non_trainable_variables,
            *metric_variables(self.model),
            *self.tracked,
            *self.state.variables,
        ]


def _states_of_layers(model: Model) -> list[Variable]:
    """List the states of stateful recurrent layers, which Keras does not."""
    known = set(map(id, model.variables))
    states = [
        state
        for layer in flatten_layers(model)
        if getattr(layer, "stateful", False)
        for state in tree.flatten(getattr(layer, "states", None))
        if isinstance(state, keras.Variable) and id(state) not in known
    ]
    return list({id(state): state for state in states}.values())
