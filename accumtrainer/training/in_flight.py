"""How far the host may run ahead of a device."""

from collections import deque

from accumtrainer.steps import Report

LEAST = 2
"""Windows that may always be in flight: one runs, and one waits for it."""

LIMIT_BYTES = 64 * 2**20

SMALL_BYTES = LIMIT_BYTES // 32
"""Windows so small may be as many as JAX itself takes, 32 programs."""


class InFlight:
    """The windows that were handed to a device and may not have run yet.

    Until then their samples stay in memory. Where those are many, the host
    waits for the oldest window rather than to hand over more of them: a device
    that has one to run and one to go on with is never idle.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Report, int]] = deque()
        self._bytes = 0

    def add(self, report: Report, size_bytes: int) -> None:
        """Note a window, and wait until not too many are in flight.

        Args:
            report: `Report` of the window.
            size_bytes: what its samples take.
        """
        if size_bytes <= SMALL_BYTES:
            return
        self._waiting.append((report, size_bytes))
        self._bytes += size_bytes
        while len(self._waiting) > LEAST and self._bytes > LIMIT_BYTES:
            report, size_bytes = self._waiting.popleft()
            report.wait()
            self._bytes -= size_bytes

    def clear(self) -> None:
        """Forget all of them, which may never run after an error."""
        self._waiting.clear()
        self._bytes = 0
