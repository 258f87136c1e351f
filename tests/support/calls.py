"""Counts how often Python runs code that may be recorded or compiled."""

import os
import tempfile
import weakref


class Calls:
    """Counts in a file, which the code writes to.

    What Python itself counts, as an iterator does, would be seen: it has to go
    on in every step.
    """

    def __init__(self):
        self._file, name = tempfile.mkstemp()
        os.unlink(name)
        weakref.finalize(self, os.close, self._file)

    def note(self):
        """Count one more."""
        os.write(self._file, b".")

    @property
    def count(self):
        """How many there were, int."""
        return os.fstat(self._file).st_size
