"""A thread that does one thing after the other, and never holds anyone up."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

MOST_WAITING = 10_000
"""Tasks that may wait; later ones are refused."""


class Background:
    """Run functions in a thread, in the order they were given.

    What a function raises ends only that function.

    Args:
        name: the thread's name.
        most_waiting: functions that may wait to be run.
        gather_secs: seconds to gather functions before they are run, one right
            after the other; for those that are cheaper so.

    Attributes:
        failures: list of the exceptions raised so far.

    Examples:
        >>> background = Background("letters")
        >>> said = []
        >>> background.do(said.append, "a")
        True
        >>> background.finish(10, said.append, "b"), said
        (True, ['a', 'b'])
    """

    def __init__(
        self,
        name: str,
        most_waiting: int = MOST_WAITING,
        gather_secs: float = 0.0,
    ):
        self.failures: list[BaseException] = []
        self._gather_secs = gather_secs
        self._is_hurried = threading.Event()
        self._tasks: queue.Queue = queue.Queue(most_waiting)
        self._is_given_up = False
        self._thread = threading.Thread(
            target=self._run, name=name, daemon=True
        )
        self._thread.start()

    def do(self, function: Callable[..., Any], *arguments: Any) -> bool:
        """Run a function later; return `False` if too many are waiting."""
        try:
            self._tasks.put_nowait((function, arguments))
        except queue.Full:
            return False
        return True

    @property
    def waiting(self) -> int:
        """How many functions wait to be run, about."""
        return self._tasks.qsize()

    def hurry(self) -> None:
        """Gather no longer: run what is waiting."""
        self._is_hurried.set()

    def wait(self, timeout_secs: float) -> bool:
        """Wait until everything given so far is done.

        Returns:
            Whether it was done in time.
        """
        is_done = threading.Event()
        end = time.monotonic() + timeout_secs
        while not self.do(is_done.set):
            self.hurry()
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        self.hurry()
        return is_done.wait(max(0.0, end - time.monotonic()))

    def finish(
        self, timeout_secs: float, function: Callable[..., Any], *arguments: Any
    ) -> bool:
        """Do what is left, one last thing after it, then end the thread.

        Returns:
            Whether it was done in time. Otherwise the function that runs goes
            on to its end, and those that wait are forgotten.
        """
        end = time.monotonic() + timeout_secs
        is_done = self.wait(timeout_secs) and self.do(function, *arguments)
        is_done = is_done and self.wait(max(0.0, end - time.monotonic()))
        self._is_given_up = True
        self.do(_do_nothing)  # wakes the thread where it waits for a task
        self.hurry()
        return is_done

    def _run(self) -> None:
        while not self._is_given_up:
            first = self._tasks.get()
            self._is_hurried.wait(self._gather_secs)
            # Cleared before the queue is emptied: who hurries has put his
            # task there already.
            self._is_hurried.clear()
            self._run_all(first)

    def _run_all(self, task: Any) -> None:
        """Run a task, and those that wait behind it."""
        while not self._is_given_up:
            function, arguments = task
            try:
                function(*arguments)
            except Exception as failure:
                self.failures.append(failure)
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return


def _do_nothing() -> None:
    pass
