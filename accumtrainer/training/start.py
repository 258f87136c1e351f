"""Where a fit starts: anew, or where the run that a snapshot is of stopped."""

from collections.abc import Iterable
from typing import Any

from accumtrainer.data.batches import Batch
from accumtrainer.data.position import Position
from accumtrainer.data.processes import check_processes
from accumtrainer.data.source import Source
from accumtrainer.progress import Progress
from accumtrainer.saving.callback_state import CallbackStates, announce_states
from accumtrainer.saving.snapshot import Snapshot
from accumtrainer.training.engine import Engine


class FreshStart:
    """A fit that begins anew.

    Args:
        epoch: index of its first epoch.
        progress: the counters when it begins.

    Attributes:
        position: where in the data it begins.
        before: the counters from which its own updates are counted.
        seconds: for how long it has trained before.
        validated: the counters at its last validation amid an epoch.
        validation_logs: results of the last validation of the epoch.
        last_logs: the epoch so far.
        micro_batch: a `Batch` like those to come, or `None` if none is known.
        is_amid_epoch: whether it begins amid an epoch.
        snapshot: what is yet to be put back, or `None`.
    """

    is_amid_epoch = False
    snapshot: Any = None

    def __init__(self, epoch: int, progress: Progress):
        self.position = Position(epoch=epoch)
        self.before = self.validated = progress
        self.seconds = 0.0
        self.validation_logs: dict[str, Any] = {}
        self.last_logs: dict[str, Any] = {}
        self.micro_batch: Batch | None = None

    def check(self, engine: Engine) -> None:
        """Refuse what does not fit, when the program is known."""

    def restore(self, engine: Engine, states: CallbackStates) -> None:
        """Put everything back, when all that begins anew has begun."""

    def has_made(self, updates: float, engine: Engine) -> bool:
        """Whether so many updates have been made in the Trainer's life."""
        return engine.counting.has_made(updates)

    def updates(self, engine: Engine) -> int:
        """Count the updates made; waits for the device."""
        return engine.counting.progress.updates


class SavedStart(FreshStart):
    """A fit that goes on where a snapshot was taken.

    Until `restore` nothing has changed, and the snapshot answers in place of
    the engine.

    Args:
        snapshot: what to go on from.
        source: the training data, which are brought to where they were.
        model: `keras.Model`, whose `stop_training` is as it was.
        callbacks: list of callbacks, to be told what they will be given.
        fast_forward: see `FitOptions`.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        source: Source,
        model: Any,
        callbacks: Iterable[Any],
        *,
        fast_forward: bool,
    ):
        self.snapshot = snapshot
        if snapshot.position is None:
            self._begin_epoch(snapshot)
            return
        run: Any = snapshot.run
        source_state: Any = snapshot.source
        super().__init__(0, Progress.from_dict(run["before"]))
        self.position = Position.of_state(snapshot.position)
        check_processes(source, source_state)
        source.go_to(self.position, source_state, fast_forward=fast_forward)
        self.seconds = run["seconds"]
        self.validated = Progress.from_dict(run["validated"])
        self.last_logs = run["last_logs"]
        self.micro_batch = run["micro_batch"]
        self.is_amid_epoch = self.position.is_amid_epoch
        model.stop_training = run["has_stopped"]
        announce_states(callbacks, snapshot.callbacks)

    def _begin_epoch(self, snapshot: Snapshot) -> None:
        """Begin the next epoch, as the place in the data was not saved."""
        super().__init__(snapshot.progress["epochs"], Progress())
        self.validated = Progress.from_dict(snapshot.progress)
        self.seconds = self.validated.seconds

    def check(self, engine: Engine) -> None:
        if self.snapshot is not None:
            engine.lasting.check_fits(
                self.snapshot, is_amid_epoch=self.is_amid_epoch
            )

    def restore(self, engine: Engine, states: CallbackStates) -> None:
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is None:
            return
        engine.restore(snapshot, is_amid_epoch=self.is_amid_epoch)
        self.is_amid_epoch = False
        if snapshot.run is not None:
            self.validation_logs = dict(snapshot.run["validation_logs"])
        states.set(snapshot.callbacks)

    def has_made(self, updates: float, engine: Engine) -> bool:
        if self.snapshot is None:
            return super().has_made(updates, engine)
        made: int = self.snapshot.progress["updates"]
        return made >= updates

    def updates(self, engine: Engine) -> int:
        if self.snapshot is None:
            return super().updates(engine)
        made: int = self.snapshot.progress["updates"]
        return made
