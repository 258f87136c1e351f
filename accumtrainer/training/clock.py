"""For how long a fit has trained."""

import time


class Clock:
    """Counts seconds, without those for which a run was interrupted.

    Args:
        is_agreed: whether several processes go by it, which they do by the
            chief's, as it was when they last agreed.
    """

    def __init__(self, is_agreed: bool):
        self._is_agreed = is_agreed
        self.start(0.0)

    def start(self, seconds: float) -> None:
        """Begin to count, from the seconds that an earlier part has taken."""
        self._begun = time.monotonic() - seconds
        self._agreed = seconds

    @property
    def own_seconds(self) -> float:
        """Seconds by this process's clock."""
        return time.monotonic() - self._begun

    @property
    def seconds(self) -> float:
        """Seconds, the same in all processes."""
        return self._agreed if self._is_agreed else self.own_seconds

    def agree(self, seconds: float) -> None:
        """Go on by what the chief's clock shows."""
        self._agreed = seconds
