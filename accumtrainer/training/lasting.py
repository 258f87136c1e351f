"""What lasts from one window to the next: captured, checked and put back."""

import warnings
from collections.abc import Callable, Hashable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from accumtrainer import errors
from accumtrainer.config import LossScale
from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import keras, ops
from accumtrainer.keras_api.rebuild import (
    begin_averages,
    build,
    put_back_of_frozen,
    slots_of_frozen,
)
from accumtrainer.keras_api.types import Variable
from accumtrainer.saving.snapshot import (
    Snapshot,
    blank,
    copy_to_host,
    find_difference,
    find_variables,
    put_back,
)
from accumtrainer.window.hooks import context_of
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.program import WindowProgram
from accumtrainer.window.state import TrainingState

PARTS_OF_EPOCH = ("metrics", "means")
"""What an epoch begins anew, of the parts of a snapshot."""


class LastingState:
    """The variables that a snapshot has, which are current when it is asked.

    Args:
        parts: whose windows run, and on what.
        scope: makes a context in which variables are made for the devices.
        before: the one before, which may know saved states that nothing
            has asked for yet.
    """

    def __init__(
        self,
        parts: WindowParts,
        scope: Callable[[], AbstractContextManager],
        before: "LastingState | None" = None,
    ):
        self._window_parts = parts
        self._scope = scope
        self._program: WindowProgram | None = None
        self._examples: dict[Hashable, Batch] = {}
        self._streams: list[np.ndarray] = []
        self._settled_streams: int = 0
        if parts.loss_scale is not None:
            saved = SavedScale(parts.state, parts.loss_scale)
            parts.hooks.optimizer.loss_scale_of_windows = saved
        if before is not None:
            self._examples = before._examples
            self._streams = before._streams
            self._settled_streams = before._settled_streams

    def begin(self, program: WindowProgram) -> None:
        """Learn what windows have besides, when they are known."""
        self._program = program

    def note(self, micro_batch: Batch) -> None:
        """Note what micro-batches are like of which the program has learnt."""
        assert self._program is not None
        signature = self._program.survey.signature
        self._examples.setdefault(signature, blank(micro_batch))
        self.settle_streams()

    def build_optimizer(self) -> None:
        """Build the optimizer of a built model, if it is not yet."""
        optimizer = self._window_parts.hooks.optimizer
        if not optimizer.built:
            with self._scope():
                build(optimizer, self._window_parts.model)

    def begin_averages(self) -> None:
        """Begin averages and copies of weights, where no update is made."""
        with self._scope():
            begin_averages(self._window_parts.hooks.optimizer)

    @property
    def iterations(self) -> int:
        """Those of the optimizer, which waits for the device."""
        # A copy, as replicas may hold the clock in parts.
        return int(ops.copy(self._window_parts.hooks.optimizer.iterations))

    def move_updates(self, number: int) -> None:
        """Count more updates or fewer on the device."""
        updates = self._window_parts.state.updates
        updates.assign(ops.convert_to_numpy(updates) + number)

    @property
    def examples_of_epoch(self) -> list[Batch]:
        """A micro-batch of each kind that the epoch had so far, blank."""
        if self._program is None:
            return []
        kinds = self._program.variables.kinds_of_epoch
        return [self._examples[kind] for kind in kinds]

    def capture(self) -> dict[str, dict[str, np.ndarray]]:
        """Copy all of them to the host, by part and path."""
        parts = {k: copy_to_host(v) for k, v in self._parts().items()}
        optimizer = self._window_parts.hooks.optimizer
        parts["frozen"] = slots_of_frozen(optimizer, self._of_model())
        return parts

    def check_fits(
        self,
        saved: Snapshot,
        *,
        is_amid_epoch: bool,
        weights_only: bool = False,
    ) -> None:
        """Refuse saved values that are not this training's.

        Args:
            saved: what was captured.
            is_amid_epoch: whether the running means of the epoch matter.
            weights_only: whether the model's variables alone matter.

        Raises:
            CheckpointError: a part differs; the difference is named.
        """
        if is_amid_epoch:
            self._learn_epoch(saved)
        for part, variables in self._wanted(saved, weights_only).items():
            if _must_fit(part, is_amid_epoch):
                difference = find_difference(variables, saved.variables[part])
                if difference is not None:
                    raise errors.CheckpointError(
                        errors.OTHER_VARIABLES.format(part=part, **difference)
                    )

    def restore(
        self,
        saved: Snapshot,
        *,
        is_amid_epoch: bool,
        weights_only: bool = False,
    ) -> None:
        """Put captured values back, which fit; see `check_fits`.

        Running means that do not matter are put back only where they fit:
        metrics may be others now.
        """
        if is_amid_epoch:
            self._learn_epoch(saved)
        for part, variables in self._wanted(saved, weights_only).items():
            values = saved.variables.get(part, {})
            difference = find_difference(variables, values)
            if difference is None or _must_fit(part, is_amid_epoch):
                put_back(variables, values)
            elif part == "losses":
                message = errors.OTHER_VARIABLES_OF_LOSSES.format(**difference)
                warnings.warn(message, stacklevel=2)
        if weights_only:
            return
        put_back_of_frozen(
            self._window_parts.hooks.optimizer,
            self._of_model(),
            saved.variables.get("frozen", {}),
        )
        self._window_parts.state.settle_loss_scale(
            self._window_parts.loss_scale, was_scaled=saved.scales_loss
        )
        self._streams = list(saved.variables.get("streams", {}).values())
        self._settled_streams = 0
        self.settle_streams()

    def _learn_epoch(self, saved: Snapshot) -> None:
        # Older checkpoints do not say.
        examples = (saved.run or {}).get("examples_of_epoch", [])
        if examples and self._program is not None:
            with self._scope():
                self._program.learn_epoch(examples)
            kinds = self._program.variables.kinds_of_epoch
            self._examples |= zip(kinds, map(blank, examples), strict=True)

    def settle_streams(self) -> None:
        """Put saved random states back that nobody knew when it was asked."""
        if self._program is None:
            return
        streams = self._program.variables.parts["streams"]
        begun = self._settled_streams
        pairs = zip(streams[begun:], self._streams[begun:], strict=False)
        for variable, value in pairs:
            variable.assign(value)
        self._settled_streams = len(streams)

    def _wanted(
        self, saved: Snapshot, weights_only: bool
    ) -> dict[str, list[Variable]]:
        """List by part what to put back at once.

        Which streams there are shows only as they are drawn from. Losses may
        be others now, and older checkpoints have nothing of them.
        """
        if weights_only:
            # An optimizer may begin at the weights, so they come first.
            return {"model": self._of_model()}
        parts, left = self._parts(), {"streams"}
        if not (parts["losses"] and saved.variables.get("losses")):
            left.add("losses")
        return {k: v for k, v in parts.items() if k not in left}

    def _of_model(self) -> list[Variable]:
        model = self._window_parts.model
        if not model.built:
            raise ValueError(errors.NOT_BUILT.format(model=model.name))
        others = self._window_parts.non_trainable_variables
        return [*model.trainable_variables, *others]

    def list_variables(self) -> list[Variable]:
        """List what a snapshot has, as far as it is known."""
        return [v for part in self._parts().values() for v in part]

    def _parts(self) -> dict[str, list[Variable]]:
        parts = self._parts_of_windows()
        known = {id(v) for part in parts.values() for v in part}
        found = find_variables(context_of(self._window_parts.hooks).losses)
        return parts | {"losses": [v for _, v in found if id(v) not in known]}

    def _parts_of_windows(self) -> dict[str, list[Variable]]:
        if self._program is not None:
            return self._program.variables.parts
        of_model = self._of_model()
        self.build_optimizer()
        return {
            "model": of_model,
            "optimizer": list(self._window_parts.hooks.optimizer.variables),
            "state": self._window_parts.state.variables,
            "tracked": list(self._window_parts.tracked),
        }


class SavedScale(keras.losses.Loss):
    """The loss scale, as Keras saves and loads it with an optimizer.

    `save_weights` and `BackupAndRestore` find it among the optimizer's
    attributes, where Keras looks for layers, metrics, optimizers and losses. Of
    these a loss is what does nothing else there.

    Args:
        state: holds the scale, and how many windows were good with it.
        options: how it moves.
    """

    def __init__(self, state: TrainingState, options: LossScale):
        super().__init__(name="loss_scale_of_windows")
        self._state = state
        self._options = options
        self._saved = [state.loss_scale, state.good_windows]

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Write values for Keras, which are current when it saves."""
        for i, value in enumerate(copy_to_host(self._saved).values()):
            store[str(i)] = value

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Take saved values; files of what scales no loss have none."""
        if not store.keys():
            return
        for i, variable in enumerate(self._saved):
            variable.assign(np.array(store[str(i)]))
        self._state.settle_loss_scale(self._options, was_scaled=True)


def _must_fit(part: str, is_amid_epoch: bool) -> bool:
    """Whether a part of a checkpoint has to be that of this training.

    Losses may be others now, and an epoch that begins has no means yet.
    """
    return part != "losses" and (is_amid_epoch or part not in PARTS_OF_EPOCH)
