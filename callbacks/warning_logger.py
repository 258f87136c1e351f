"""What loggers have in common that may fail to write."""

import warnings
from typing import Any

from accumtrainer import Every, Logger


class WarningLogger(Logger):
    """Warn of what is missing, once in a training, which goes on.

    Loggers of others have no use for it, and may use its names otherwise.
    """

    def __init__(self, every: Every | None = None):
        super().__init__(every)
        self._has_warned = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._has_warned = False
        super().on_train_begin(logs)

    def _warn_once(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=2)
