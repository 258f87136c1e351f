"""Lets go of iterators that take their time to close.

An iterator of `tf.data` has a thread that tunes it, which sleeps 10 ms, 20,
40 and so on. To let go of the iterator is to wait for that thread, which often
is not woken then: for up to as long as the iterator was in use, minutes after
an epoch of minutes.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

THREAD_NAME = "closing data"


def begin(iterable: Iterable[Any]) -> Iterator[Any]:
    """Begin to iterate; nobody waits for the end of an iterator of `tf.data`.

    Args:
        iterable: anything. An iterator of `tf.data` is known by its module's
            name, as TensorFlow need not be there.
    """
    iterator = iter(iterable)
    if type(iterator).__module__.startswith("tensorflow."):
        return ClosedElsewhere(iterator)
    return iterator


class ClosedElsewhere(Iterator[Any]):
    """Yields what an iterator does, which is let go of in a thread.

    The thread is no daemon: TensorFlow is at work in it, and must not be cut
    off where the interpreter ends.

    Args:
        iterator: of which nobody else has a reference.
    """

    def __init__(self, iterator: Iterator[Any]):
        self._held = [iterator]
        weakref.finalize(self, _let_go, self._held).atexit = False

    def __next__(self) -> Any:
        return next(self._held[0])


def _let_go(held: list[Any]) -> None:
    thread = threading.Thread(target=held.clear, name=THREAD_NAME)
    try:
        thread.start()
    except RuntimeError:
        held.clear()  # no more threads can start
