"""How fast training goes, and what it waits for."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accumtrainer import Batch, Callback, Every, peak_memory_bytes
from accumtrainer.callbacks.arguments import require_every


class Throughput(Callback):
    """Write the speed of training into the logs.

    There, loggers, the progress bar and `History` find it:

    - `samples_per_second` and `micro_batches_per_second`; with `tokens` also
      `tokens_per_second`. Skipped updates count, validation does not.
    - `data_seconds_per_update`: how long the loop waited for an update's
      data. While it does, a device may still be busy with the updates before,
      so this is the most that a faster source could save.
    - `compute_seconds_per_update`: all the rest, callbacks included.
    - `peak_memory_bytes`: the most the fullest device has used so far, or
      this process where the device is the CPU.

    The numbers cover the time since they were last taken, those of an epoch
    the whole epoch. The first update, which compiles, is left out wherever
    there is another. Taking the numbers waits for the device, because on an
    accelerator the host runs ahead of it. That happens after the first update
    and whenever `every` says so; a logger that is due at the same time waits
    for nothing more.

    Args:
        every: how often to take the numbers; default 10 updates.
        tokens: function from a `Batch` of NumPy arrays, one micro-batch as
            the source yields it, to the number of its tokens. Where
            processes have a share each, this one's are counted.

    Raises:
        TypeError: `every` is no `Every`, or `tokens` is no function.

    Examples:
        >>> by_length = Throughput(tokens=lambda batch: (batch.x != 0).sum())
        >>> by_length.every
        Every(n=10, unit='updates')
    """

    has_state = False
    looks_at_model = False
    needs_trainer = True

    def __init__(
        self,
        *,
        every: Every | None = None,
        tokens: Callable[[Batch], int] | None = None,
    ):
        super().__init__()
        every = Every(10, "updates") if every is None else every
        require_every("every", every, "Use for example Every(10, 'updates').")
        if tokens is not None and not callable(tokens):
            raise TypeError(
                "tokens must be a function from a Batch to a number. Received: "
                f"tokens={tokens!r}. Use for example "
                "tokens=lambda batch: batch.x.size."
            )
        self.every = every
        self._count_tokens = tokens
        self._meter: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._meter = _Meter(self.trainer)
        self._first: Any = None
        self._last: Any = None
        self._epoch_begun: Any = None
        self._numbers: dict[str, float] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_begun = self._meter.read()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._meter.count(self._count_tokens)
        if self._first is None:
            self._first = self._last = self._meter.wait_and_read()
            self._since = self.trainer.progress
        elif self.trainer.is_due(self.every, self._since):
            now = self._meter.wait_and_read()
            self._numbers = self._compare(self._last, now)
            self._last, self._since = now, self.trainer.progress
        logs.update(self._numbers)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        now = self._meter.wait_and_read()
        begun = self._epoch_begun
        if begun.windows < self._first_windows() < now.windows:
            begun = self._first
        logs.update(self._compare(begun, now))

    def on_test_begin(self, logs: Any = None) -> None:
        if self._meter is not None:
            self._meter.pause()

    def on_test_end(self, logs: Any = None) -> None:
        if self._meter is not None:
            self._meter.go_on()

    def on_train_end(self, logs: Any = None) -> None:
        self._meter = None

    def _first_windows(self) -> int:
        return 0 if self._first is None else self._first.windows

    def _compare(self, before: Any, after: Any) -> dict[str, float]:
        windows = after.windows - before.windows
        seconds = after.seconds - before.seconds
        if not windows or seconds <= 0:
            return {}
        waited = after.data_seconds - before.data_seconds
        samples = after.samples - before.samples
        micro_batches = after.micro_batches - before.micro_batches
        numbers = {
            "samples_per_second": samples / seconds,
            "micro_batches_per_second": micro_batches / seconds,
            "data_seconds_per_update": waited / windows,
            "compute_seconds_per_update": (seconds - waited) / windows,
        }
        if self._count_tokens is not None:
            tokens = after.tokens - before.tokens
            numbers["tokens_per_second"] = tokens / seconds
        peak = peak_memory_bytes()
        return numbers | ({} if peak is None else {"peak_memory_bytes": peak})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """What had been done by a moment of the training."""

    seconds: float
    data_seconds: float
    windows: int
    micro_batches: int
    samples: int
    tokens: int


class _Meter:
    """Counts what runs, and the time outside of validations."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._windows = self._micro_batches = self._tokens = 0
        self._paused_seconds = 0.0
        self._paused_at = 0.0

    def count(self, count_tokens: Any) -> None:
        """Count the window that has just run."""
        window = self._trainer.last_window
        self._windows += 1
        self._micro_batches += window.micro_batches
        if count_tokens is not None:
            self._tokens += sum(map(int, map(count_tokens, window.split())))

    def read(self) -> _Reading:
        """Return what the host has seen so far."""
        return _Reading(
            seconds=time.monotonic() - self._paused_seconds,
            data_seconds=self._trainer.data_seconds,
            windows=self._windows,
            micro_batches=self._micro_batches,
            samples=self._trainer.samples_seen,
            tokens=self._tokens,
        )

    def wait_and_read(self) -> _Reading:
        """Wait for the device to have done what the host has seen."""
        self._wait()
        return self.read()

    def pause(self) -> None:
        """Let the time stand still, once the updates under way are done."""
        self._wait()
        self._paused_at = time.monotonic()

    def go_on(self) -> None:
        """Let the time go on."""
        self._paused_seconds += time.monotonic() - self._paused_at

    def _wait(self) -> None:
        _ = self._trainer.progress
