"""Saves a run so that it can go on as if it had never stopped."""

import os
import signal
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from accumtrainer import Callback, CheckpointDirectory, Every, Progress, Score
from accumtrainer.callbacks.arguments import require_every, require_whole

LARGER_IS_BETTER = (
    *("acc", "auc", "f1", "fbeta", "precision", "recall", "score", "iou"),
    *("io_u", "similarity", "sensitivity", "specificity", "r2", "psnr"),
    *("true_positives", "true_negatives"),
)
"""Parts of names of numbers that are good when they are large."""

SAVES_ALWAYS = ("stop", "interruption", "error", "end")


class Checkpoint(Callback):
    """Save everything that training changes, in the background.

    The state is copied to the host, then a thread writes it; at most one
    writes at a time. A checkpoint is there whole or not at all. When training
    ends, on errors between two updates, and at the signals named, a last one
    is written before `fit` returns. `fit(resume_from="auto")` goes on from
    the newest good one. A trial (`fast_dev_run`) writes nothing.

    A checkpoint that could not be written leaves the older ones as they were.
    The next one warns of it; the last one raises.

    Args:
        directory: where the checkpoints are, one directory each; made when
            the first is written.
        every: how often; default every epoch.
        keep: how many of the newest to keep, at least 1.
        keep_best: name of a number in the logs, such as `"val_loss"`; the
            checkpoint where it was best is kept too. A new best one is saved
            at once.
        mode: `"min"`, `"max"`, or `"auto"`: what is best. `"auto"` goes by
            the name.
        signals: names of signals at which training ends in good order: the
            running update is finished, a checkpoint is written, and `fit`
            raises `Preempted`. Ctrl-C is always treated so, and raises
            `KeyboardInterrupt`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument breaks its rule.

    Examples:
        >>> checkpoint = Checkpoint("runs/a", every=Every(500, "updates"))
        >>> checkpoint.checkpoints.names()
        []
    """

    looks_at_model = False
    needs_trainer = True
    has_state = True

    def __init__(
        self,
        directory: str | os.PathLike,
        every: Every | None = None,
        keep: int = 3,
        keep_best: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        signals: Iterable[str] = ("SIGTERM",),
    ):
        super().__init__()
        every = Every(1, "epochs") if every is None else every
        _check(directory, every, keep, keep_best, mode, signals)
        self.checkpoints = CheckpointDirectory(
            directory, keep=keep, keep_best=keep_best is not None
        )
        self.every = every
        self.signals = tuple(signals)
        self._monitored = keep_best
        self._mode = _mode(keep_best) if mode == "auto" else mode
        self._best: Score | None = None
        self._score: Score | None = None
        self._is_new_best = False
        self._since: Any = None
        self._saved_at: Any = None
        self._writer: Any = None
        self._writing: Any = None
        self._was_restored = False

    @property
    def last_saved(self) -> Path | None:
        """`Path` of the newest checkpoint written in full, or `None`."""
        names = self.checkpoints.names()
        return self.checkpoints.path / names[-1] if names else None

    def on_train_begin(self, logs: Any = None) -> None:
        if not (self._was_restored and self.params.get("resumes")):
            self._best = self._score = self._saved_at = None
            self._since = self.trainer.progress
        self._was_restored = False
        self._is_new_best = False
        if self.params.get("fast_dev_run", False):
            return
        if self.trainer.is_chief:
            self.checkpoints.clean()
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    def on_validation_end(self, update: int, logs: Any = None) -> None:
        self._judge(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # Of a validation these logs may tell long after it was made.
        if not (self._monitored or "").startswith("val_"):
            self._judge(logs)

    def on_safe_point(self, reason: str, logs: Any = None) -> None:
        if self._writer is None:
            return
        is_due = (
            reason in SAVES_ALWAYS
            or self._is_new_best
            or self.trainer.is_due(self.every, self._since)
        )
        if is_due:
            self._save()
        if reason in SAVES_ALWAYS:
            self._wait(is_last=True)

    def on_train_end(self, logs: Any = None) -> None:
        self._was_restored = False
        if self._writer is None:
            return
        try:
            self._wait(is_last=True)
            self._rate_last()
        finally:
            self._writer.shutdown()
            self._writer = None

    def get_state(self) -> dict[str, Any]:
        best = self._best
        return {
            "best": None if best is None else best.value,
            "keep_best": self._monitored,
            "since": (self._since or Progress()).as_dict(),
            "saved_at": self._saved_at,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        best = state["best"]
        if state.get("keep_best", self._monitored) != self._monitored:
            best = None  # of another number
        self._best = None if best is None else self._score_of(best)
        self._since = Progress.from_dict(state["since"])
        self._saved_at = state["saved_at"]
        self._was_restored = True

    def _judge(self, logs: Any) -> None:
        """Note the number by which checkpoints are compared."""
        value = (logs or {}).get(self._monitored)
        if value is None:
            return
        self._score = self._score_of(value)
        if self._best is None or self._score.is_better_than(self._best):
            self._best, self._is_new_best = self._score, True

    def _rate_last(self) -> None:
        """Give the last checkpoint the score of what was judged after it.

        Where training stops amid an epoch, it is saved before the epoch ends
        and is validated, so that it can go on there.
        """
        if not self._is_new_best or self._saved_at is None:
            return
        if self._saved_at[0] != self.trainer.progress.micro_batches:
            return
        self._is_new_best = False
        if self.trainer.is_chief:
            self.checkpoints.rate(self._best)

    def _score_of(self, value: Any) -> Score:
        assert self._monitored is not None
        return Score(name=self._monitored, value=float(value), mode=self._mode)

    def _save(self) -> None:
        progress = self.trainer.progress
        moment = [progress.micro_batches, progress.epochs]
        self._since = progress
        if moment == self._saved_at:
            return
        self._saved_at = moment
        self._wait(is_last=False)
        score, self._score, self._is_new_best = self._score, None, False
        # Taken in every process, since they may have to do it together.
        snapshot = self.trainer.snapshot()
        if self.trainer.is_chief:
            self._writing = self._writer.submit(
                self.checkpoints.write, snapshot, score
            )

    def _wait(self, *, is_last: bool) -> None:
        """Wait for the write under way, and say how it ended."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        failure = writing.exception()
        if failure is None:
            return
        if is_last:
            self._saved_at = None
            raise failure
        warnings.warn(
            f"The last checkpoint could not be written: {failure!r}. Older "
            f"ones in {self.checkpoints.path} are as they were; training goes "
            "on and tries again.",
            stacklevel=2,
        )


def _mode(name: str | None) -> Literal["min", "max"]:
    name = (name or "").lower()
    is_larger_better = any(part in name for part in LARGER_IS_BETTER)
    # An output may have a name of these.
    is_loss = name.endswith("loss")
    return "max" if is_larger_better and not is_loss else "min"


def _check(
    directory: Any,
    every: Any,
    keep: Any,
    keep_best: Any,
    mode: Any,
    signals: Any,
) -> None:
    if not isinstance(directory, str | os.PathLike) or directory == "auto":
        raise TypeError(
            "directory must be a path. Received: "
            f"directory={directory!r}. Use for example 'runs/a'."
        )
    require_every("every", every, "Use for example Every(500, 'updates').")
    require_whole("keep", keep, "Use 1 to keep the newest alone.")
    if not isinstance(keep_best, str | None):
        raise TypeError(
            "keep_best must be the name of a number in the logs, or None. "
            f"Received: keep_best={keep_best!r}. Use for example 'val_loss'."
        )
    if mode not in ("auto", "min", "max"):
        raise ValueError(
            "mode must be one of 'auto', 'min', 'max'. Received: "
            f"mode={mode!r}. Use 'max' for numbers that are good when large."
        )
    known = {s.name for s in signal.Signals}
    if isinstance(signals, str) or not set(signals) <= known:
        raise ValueError(
            "signals must be a tuple of names of signals. Received: "
            f"signals={signals!r}. Use for example ('SIGTERM', 'SIGUSR1')."
        )
