"""Where a fit starts: anew, or where the run that a snapshot is of stopped."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from accumtrainer.data.batches import Batch
from accumtrainer.data.position import Position
from accumtrainer.data.processes import check_processes
from accumtrainer.data.source import Source
from accumtrainer.keras_api.types import Model
from accumtrainer.progress import Progress
from accumtrainer.saving.callback_state import CallbackStates, announce_states
from accumtrainer.saving.snapshot import Snapshot
from accumtrainer.training.ending import Ending
from accumtrainer.training.engine import Engine


@dataclass(kw_only=True, slots=True)
class Start:
    """The start of a fit that begins anew, if nothing says otherwise.

    Until `restore` nothing has changed, and a snapshot answers in place of the
    engine.

    Args:
        position: where in the data it begins.
        before: the counters from which its own updates are counted.
        validated: the counters at its last validation amid an epoch.
        iterations: those of the optimizer before callbacks begin.
        seconds: for how long it has trained before.
        validation_logs: results of the last validation of the epoch.
        last_logs: the epoch so far.
        micro_batch: a `Batch` like those to come, or `None` if none is known.
        is_amid_epoch: whether it begins amid an epoch.
        ending: how far that epoch has ended.
        snapshot: what is yet to be put back, or `None`.
    """

    position: Position
    before: Progress
    validated: Progress
    iterations: int = 0
    seconds: float = 0.0
    validation_logs: dict[str, Any] = field(default_factory=dict)
    last_logs: dict[str, Any] = field(default_factory=dict)
    micro_batch: Batch | None = None
    is_amid_epoch: bool = False
    ending: Ending = field(default_factory=Ending)
    snapshot: Snapshot | None = None

    def check(self, engine: Engine) -> None:
        """Refuse what does not fit, when the program is known."""
        if self.snapshot is not None:
            engine.lasting.check_fits(
                self.snapshot, is_amid_epoch=self.is_amid_epoch
            )

    def restore(self, engine: Engine, states: CallbackStates) -> None:
        """Put everything back, when all that begins anew has begun."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is None:
            return
        engine.restore(snapshot, is_amid_epoch=self.is_amid_epoch)
        self.is_amid_epoch = False
        if snapshot.run is not None:
            self.validation_logs = dict(snapshot.run["validation_logs"])
            # Older checkpoints do not tell.
            if "ending" in snapshot.run:
                self.ending = Ending.of_state(snapshot.run["ending"], states)
        states.set(snapshot.callbacks)

    def follow_optimizer(self, engine: Engine, *, is_trial: bool) -> None:
        """Count updates on from where a callback has put the optimizer.

        Args:
            engine: counts them.
            is_trial: whether to make as many as asked for from there, and not
                from where the run began.
        """
        moved = engine.lasting.iterations - self.iterations
        moved = max(moved, -engine.counting.progress.updates)
        engine.lasting.move_updates(moved)
        engine.counting.move_updates(moved)
        self.validated = engine.counting.progress
        updates = self.validated.updates
        if is_trial or updates < self.before.updates:
            self.before.updates = updates

    def has_made(self, updates: float, engine: Engine) -> bool:
        """Whether so many updates have been made in the Trainer's life."""
        if self.snapshot is None:
            return engine.counting.has_made(updates)
        return self.updates(engine) >= updates

    def updates(self, engine: Engine) -> int:
        """Count the updates made; waits for the device."""
        if self.snapshot is None:
            return engine.counting.progress.updates
        return self.snapshot.progress["updates"]


def start_from(
    snapshot: Snapshot,
    source: Source,
    model: Model,
    callbacks: Iterable[Any],
    *,
    fast_forward: bool,
) -> Start:
    """Go on where a snapshot was taken, or with the next epoch.

    Args:
        snapshot: what to go on from.
        source: the training data, which are brought to where they were.
        model: `keras.Model`, whose `stop_training` is as it was.
        callbacks: list of callbacks, to be told what they will be given.
        fast_forward: see `FitOptions`.
    """
    if snapshot.position is None:  # the place in the data was not saved
        validated = Progress.from_dict(snapshot.progress)
        return Start(
            position=Position(epoch=validated.epochs),
            before=Progress(),
            validated=validated,
            seconds=validated.seconds,
            snapshot=snapshot,
        )
    run, position = snapshot.run, Position.of_state(snapshot.position)
    check_processes(source, snapshot.source)
    source.go_to(position, snapshot.source, fast_forward=fast_forward)
    model.stop_training = run["has_stopped"]
    announce_states(callbacks, snapshot.callbacks)
    return Start(
        position=position,
        before=Progress.from_dict(run["before"]),
        validated=Progress.from_dict(run["validated"]),
        seconds=run["seconds"],
        last_logs=run["last_logs"],
        micro_batch=run["micro_batch"],
        is_amid_epoch=position.is_amid_epoch,
        snapshot=snapshot,
    )
