"""The moments of a fit at which everything until then is done."""

import contextlib
from collections.abc import Iterator

from accumtrainer.observers.dispatcher import Dispatcher
from accumtrainer.training.signals import Interruption


class SafePoints:
    """Tells callbacks of the moments at which a run can be saved.

    Args:
        dispatcher: tells the callbacks.
        interruption: signals that wait for such a moment.

    Attributes:
        is_at_rest: whether nothing has been begun since the last one.
    """

    def __init__(self, dispatcher: Dispatcher, interruption: Interruption):
        self._dispatcher = dispatcher
        self._interruption = interruption
        self.is_at_rest = False

    def tell(self, reason: str) -> None:
        """Tell callbacks that everything until here is done."""
        self.is_at_rest = False
        self._dispatcher.call("on_safe_point", reason, {})
        self.is_at_rest = True

    def leave_if_interrupted(self) -> None:
        """Raise what a signal that has arrived is to raise."""
        if self._interruption.is_pending:
            self.tell("interruption")
        self._interruption.check()

    @contextlib.contextmanager
    def saved_on_errors(self) -> Iterator[None]:
        """Let callbacks save if an error comes between two windows."""
        try:
            yield
        except Exception as error:
            if self.is_at_rest:
                try:
                    self._dispatcher.call("on_safe_point", "error", {})
                except Exception as failure:
                    error.add_note(f"While saving: {failure!r}")
            raise
