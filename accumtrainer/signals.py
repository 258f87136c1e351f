"""Signals between updates, not in the middle of one."""

import contextlib
import signal
import threading

from accumtrainer import errors


class Interruption:
    """Remembers Ctrl-C and other signals until the running window is done.

    Between a compiled call and the taking over of its results nothing may
    raise, or weights would be lost that the call was given for good.

    Args:
        names: names of further signals to remember, such as `"SIGTERM"`.
    """

    def __init__(self, names=()):
        self._numbers = [signal.SIGINT, *(signal.Signals[n] for n in names)]
        self._pending = None

    @property
    def is_pending(self):
        """Whether a signal is being held back."""
        return self._pending is not None

    @contextlib.contextmanager
    def deferred(self):
        """Hold signals back inside this block; a second Ctrl-C acts at once.

        Does nothing outside the main thread, where no signals arrive. What
        was to be done at a signal before is put back.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {n: signal.getsignal(n) for n in self._numbers}
        for number in self._numbers:
            signal.signal(number, self._remember)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self):
        """Raise what was held back.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed since the last check.
            Preempted: another signal has arrived since.
        """
        number, self._pending = self._pending, None
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number is not None:
            raise errors.Preempted(128 + number)

    def _remember(self, number, frame):
        del frame
        if number == self._pending == signal.SIGINT:
            raise KeyboardInterrupt
        self._pending = number
