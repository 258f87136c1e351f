"""Freezes or unfreezes layers amid a run."""

from collections.abc import Sequence
from typing import Any

from accumtrainer import Callback, Every
from accumtrainer.callbacks.arguments import require_every


class Unfreeze(Callback):
    """Make layers trainable once so much of the training is done.

    The optimizer keeps what it has of variables that were trained before; for
    new ones it begins. Nothing else moves, and windows are compiled once more.
    A run that goes on from a checkpoint of later has the layers unfrozen, made
    as they were at its beginning.

    Args:
        at: when: before the first update after so many epochs, updates,
            micro-batches, samples or seconds, counted over the Trainer's life.
        layers: layers, or their names as `model.get_layer` knows them; a model
            is a layer with all of its own.
        trainable: `False` to freeze them instead.

    Raises:
        TypeError: `at` is no `Every`.
        ValueError: `layers` is empty, or at the beginning of training, a name
            is that of no layer.

    Examples:
        >>> unfreeze = Unfreeze(at=Every(3, "epochs"), layers=["backbone"])
    """

    has_state = True
    looks_at_model = False
    needs_trainer = True

    def __init__(
        self,
        at: Every,
        layers: Sequence[Any],
        *,
        trainable: bool = True,
    ):
        super().__init__()
        require_every("at", at, "Write for example at=Every(3, 'epochs').")
        if isinstance(layers, str):
            layers = [layers]
        if not layers:
            raise ValueError(
                "layers must name at least one layer. Received: "
                f"layers={layers!r}. Give layers or their names."
            )
        self.at = at
        self.layers = list(layers)
        self.trainable = trainable
        self._is_done = False
        self._trained_by: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trained_by": None}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._trained_by is not self.trainer:  # it may serve several
            self._trained_by, self._is_done = self.trainer, False
        self._find()

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self._act_if_due()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        self._act_if_due()

    def get_state(self) -> dict[str, Any]:
        return {"is_done": self._is_done}

    def set_state(self, state: dict[str, Any]) -> None:
        self._is_done = state["is_done"]
        if self._is_done:
            self._act()

    def _act_if_due(self) -> None:
        if self._is_done or not self._has_come():
            return
        self._act()

    def _has_come(self) -> bool:
        unit = self.at.unit
        progress = self.trainer.progress_at_most
        if unit == "updates" and progress.updates >= self.at.n:
            progress = self.trainer.progress  # without what was skipped
        return bool(getattr(progress, unit) >= self.at.n)

    def _act(self) -> None:
        for layer in self._find():
            layer.trainable = self.trainable
        self._is_done = True

    def _find(self) -> list[Any]:
        return [
            self.model.get_layer(layer) if isinstance(layer, str) else layer
            for layer in self.layers
        ]
