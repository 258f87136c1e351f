"""Records what host and device do during a few updates."""

import contextlib
import os
import pathlib
import warnings
from typing import Any

from accumtrainer import Callback, mark_update, record_trace


class Profile(Callback):
    """Write a trace of a few updates, by the backend's own profiler.

    TensorBoard shows it (`tensorboard --logdir directory`, with the plugin
    `xprof` installed), as do other viewers of XLA's traces. Every update in
    it is a step of its own, with its number. The trace is written when the
    last of its updates is done on the device, or when training ends before
    that, however it ends. A profiler that cannot start, because another one
    is running or the disk is full, is a warning; training goes on.

    Args:
        directory: where to write the trace.
        first_update: index of the first update to record, from 0, counted in
            this training. The first ones compile.
        updates: how many to record.

    Raises:
        ValueError: `first_update` is below 0, or `updates` below 1.

    Examples:
        >>> Profile("traces", first_update=10, updates=3).updates
        3
    """

    has_state = False
    looks_at_model = False
    needs_trainer = True

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        first_update: int = 10,
        updates: int = 5,
    ):
        super().__init__()
        if first_update < 0:
            raise ValueError(
                "first_update must be at least 0. Received: first_update="
                f"{first_update!r}. Use 0 to record the compilation too."
            )
        if updates < 1:
            raise ValueError(
                f"updates must be at least 1. Received: updates={updates!r}. "
                "Leave the callback out to record none."
            )
        self.directory = pathlib.Path(directory)
        self.first_update = first_update
        self.updates = updates
        self._upcoming = iter(range(0))
        self._trace = contextlib.ExitStack()
        self._step = contextlib.ExitStack()
        self._is_recording = False

    def on_train_begin(self, logs: Any = None) -> None:
        last_update = self.first_update + self.updates
        self._upcoming = iter(range(last_update + 1 if self.may_write else 0))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Runs out after the last update of interest.
        update = next(self._upcoming, None)
        if update is None:
            return
        if update == self.first_update:
            self._start()
        if update == self.first_update + self.updates:
            self._stop()
        if self._is_recording:
            self._step.enter_context(mark_update(update))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step.close()

    def on_train_end(self, logs: Any = None) -> None:
        self._step.close()
        self._stop()

    def _start(self) -> None:
        # Nothing of the updates before is to be in the trace.
        _ = self.trainer.progress
        try:
            self._trace.enter_context(record_trace(self.directory))
        except Exception as error:
            self._warn(error)
        else:
            self._is_recording = True

    def _stop(self) -> None:
        if not self._is_recording:
            return
        self._is_recording = False
        try:
            _ = self.trainer.progress
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._trace.close()
        except Exception as error:
            self._warn(error)

    def _warn(self, error: BaseException) -> None:
        warnings.warn(
            f"Profile could not write to {str(self.directory)!r}: {error}. "
            "Training goes on.",
            RuntimeWarning,
            stacklevel=2,
        )
