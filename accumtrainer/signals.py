"""Ctrl-C between updates, not in the middle of one."""

import contextlib
import signal
import threading


class Interruption:
    """Remembers Ctrl-C until the running window has finished.

    Between a compiled call and the taking over of its results nothing may
    raise, or weights would be lost that the call was given for good.
    """

    def __init__(self):
        self._is_pending = False

    @contextlib.contextmanager
    def deferred(self):
        """Hold back Ctrl-C inside this block; a second one acts at once.

        Does nothing outside the main thread, where no signals arrive.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, self._remember)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    def check(self):
        """Raise what was held back.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed since the last check.
        """
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _remember(self, number, frame):
        del number, frame
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True
