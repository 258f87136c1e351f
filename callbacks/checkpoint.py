"""Saves a run so that it can go on as if it had never stopped."""

import math
import os
import signal
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from accumtrainer import Callback, CheckpointDirectory, Every, Progress, Score
from accumtrainer.callbacks.arguments import require_every, require_whole
from accumtrainer.callbacks.best_values import (
    Direction,
    direction_by_metric,
    direction_by_name,
)

UNCLEAR = (
    "mode must say what is best where neither a metric of the model nor the "
    "name does. Received: keep_best={name!r}, mode='auto'. Give mode='max' or "
    "mode='min'."
)

SEVERAL = (
    "keep_best must name a single number. Received: keep_best={name!r}, whose "
    "value has the shape {shape}. Log one number of it, such as the mean."
)

MISSING = (
    "keep_best must name a number in the logs. Received: keep_best={name!r}, "
    "which never came; available are: {names}. No checkpoint was kept as the "
    "best."
)

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
            what the metric of that name says of itself, as in Keras, or else
            by the last word of the name that is known, such as `"error"` or
            `"accuracy"`.
        signals: names of signals at which training ends in good order: the
            running update is finished, a checkpoint is written, and `fit`
            raises `Preempted`. Ctrl-C is always treated so, and raises
            `KeyboardInterrupt`, if the program handles it in no other way.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument breaks its rule. With the first update,
            `mode="auto"` cannot tell what is best. Later, what `keep_best`
            names is no single number.

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
        self._given_mode = mode
        self._mode: Direction | None = None  # until the model has metrics
        self._best: float | None = None
        self._score: Score | None = None
        self._is_new_best = False
        self._is_validated = False
        self._names: list[str] = []
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
            self._is_validated = False
            self._since = self.trainer.progress
        self._was_restored = False
        self._is_new_best = False
        self._mode, self._names = None, []
        if self.params.get("fast_dev_run", False):
            return
        if self.trainer.is_chief:
            self.checkpoints.clean()
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    def on_validation_end(self, update: int, logs: Any = None) -> None:
        if self._monitored in (logs or {}):
            self._is_validated = True
            self._judge(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._monitored is None:
            return
        self._names = list(logs or {})
        # Of a validation these logs may tell long after it was made.
        if self._monitored in self._names and not self._is_validated:
            self._judge(logs)

    def on_safe_point(self, reason: str, logs: Any = None) -> None:
        if reason == "update":  # better now than at the end of the epoch
            self._find_mode()
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
        if self._writer is not None:
            try:
                self._wait(is_last=True)
                self._rate_last()
            finally:
                self._writer.shutdown()
                self._writer = None
        if self._names and self._best is None:
            names = ", ".join(self._names)
            warnings.warn(
                MISSING.format(name=self._monitored, names=names), stacklevel=2
            )

    def get_state(self) -> dict[str, Any]:
        return {
            "best": self._best,
            "is_validated": self._is_validated,
            "keep_best": self._monitored,
            "since": (self._since or Progress()).as_dict(),
            "saved_at": self._saved_at,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._best = state["best"]
        self._is_validated = state.get("is_validated", False)
        if state.get("keep_best", self._monitored) != self._monitored:
            self._best, self._is_validated = None, False  # of another number
        self._since = Progress.from_dict(state["since"])
        self._saved_at = state["saved_at"]
        self._was_restored = True

    def _judge(self, logs: Any) -> None:
        """Note the number by which checkpoints are compared."""
        value = logs[self._monitored]
        if value is None:
            return
        shape = np.shape(value)
        if math.prod(shape) != 1:
            raise ValueError(SEVERAL.format(name=self._monitored, shape=shape))
        number = float(np.ravel(value)[0] if shape else value)
        self._score = self._score_of(number)
        best = self._best
        if best is None or self._score.is_better_than(self._score_of(best)):
            self._best, self._is_new_best = number, True

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
            self.checkpoints.rate(self._score_of(self._best))

    def _find_mode(self) -> None:
        """Find out what is best, as soon as the model has its metrics."""
        if self._monitored is None or self._mode is not None:
            return
        if self._given_mode != "auto":
            self._mode = self._given_mode
            return
        name = self._monitored
        self._mode = direction_by_metric(name, self.model)
        self._mode = self._mode or direction_by_name(name)
        if self._mode is None:
            raise ValueError(UNCLEAR.format(name=name))

    def _score_of(self, value: Any) -> Score:
        self._find_mode()
        assert self._monitored is not None and self._mode is not None
        return Score(name=self._monitored, value=value, mode=self._mode)

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
