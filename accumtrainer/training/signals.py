"""Signals between updates, not in the middle of one."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from accumtrainer import errors
from accumtrainer.keras_api.types import Model
from accumtrainer.training.clock import Clock


class Interruption:
    """Remembers Ctrl-C and other signals until the running window is done.

    Between a compiled call and the taking over of its results nothing may
    raise, or weights would be lost that the call was given for good.

    Args:
        names: names of further signals to remember, such as `"SIGTERM"`.
        is_agreed: whether a signal waits until `agree` says that all
            processes know of it.

    Attributes:
        arrived: number of the signal that has arrived here, or `None`.
    """

    def __init__(self, names: Iterable[str] = (), *, is_agreed: bool = False):
        self._numbers = [signal.SIGINT, *(signal.Signals[n] for n in names)]
        self._at_ctrl_c: Callable[[int, Any], Any] = signal.default_int_handler
        self._is_agreed = is_agreed
        self.arrived: int | None = None
        self._pending: int | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a signal is being held back."""
        return self._pending is not None

    @contextlib.contextmanager
    def deferred(self) -> "Iterator[Interruption]":
        """Hold signals back inside this block; a second Ctrl-C acts at once.

        Does nothing outside the main thread, where no signals arrive. What
        was to be done at a signal before is put back; at Ctrl-C it is done by
        `check`, which ends the block, too. Ctrl-C that is ignored stays so.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before: dict[int, Any] = {n: signal.getsignal(n) for n in self._numbers}
        if callable(before[signal.SIGINT]):
            self._at_ctrl_c = before[signal.SIGINT]
        elif before[signal.SIGINT] == signal.SIG_IGN:
            del before[signal.SIGINT]
        for number in before:
            signal.signal(number, self._remember)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.check()

    def agree(self, number: int) -> None:
        """Heed a signal that has arrived in one of the processes.

        Args:
            number: 0 for none.
        """
        self._pending = signal.Signals(number) if number else None

    def check(self) -> None:
        """Do what was held back.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed since the last check, and the
                user's program handles it in no other way.
            Preempted: another signal has arrived since.
        """
        number, self._pending = self._pending, None
        self.arrived = None if number is not None else self.arrived
        if number == signal.SIGINT:
            self._at_ctrl_c(number, None)
        elif number is not None:
            raise errors.Preempted(128 + number)

    def _remember(self, number: int, frame: Any) -> None:
        if number == self.arrived == signal.SIGINT:
            self._at_ctrl_c(number, frame)
        self.arrived = number
        if not self._is_agreed:
            self._pending = number


def agree(
    clock: Clock,
    interruption: Interruption,
    model: Model,
    gather: Callable[[Sequence[float]], np.ndarray],
) -> None:
    """Let processes agree on clock, signals and whether to stop.

    Otherwise one could stop while others wait for it.

    Args:
        clock: is that of the first process afterwards.
        interruption: has the signals of all.
        model: its `stop_training` is true if it is in one.
        gather: takes the numbers of this process, and returns those of all,
            `[processes, numbers]`.
    """
    own = [
        clock.own_seconds,
        bool(model.stop_training),
        interruption.arrived or 0,
    ]
    seconds, stops, signals = gather(own).T
    clock.agree(float(seconds[0]))
    model.stop_training = bool(stops.any())
    interruption.agree(int(signals.max()))
