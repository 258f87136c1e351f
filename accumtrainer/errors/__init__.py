"""Error classes, and the explanations too long to stand where they arise.

The explanations are kept by subject; all are used by way of this page.
"""

from accumtrainer.errors.data import *  # noqa: F403
from accumtrainer.errors.models import *  # noqa: F403
from accumtrainer.errors.runs import *  # noqa: F403


class NonFiniteError(ArithmeticError):
    """Too many windows in a row had a gradient that was not finite."""


class DataError(RuntimeError):
    """A data source broke its promise while training was running."""


class NothingLeftError(DataError):
    """A data source has nothing for an epoch, not even a first window."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not belong to this training."""


class Preempted(SystemExit):
    """A signal asked training to stop, and it has stopped in good order.

    As a `SystemExit` it ends the program with status 128 + the signal's
    number, 143 for SIGTERM, unless somebody catches it.
    """
