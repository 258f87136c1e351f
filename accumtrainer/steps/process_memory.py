"""How much memory this process takes, where the system tells."""

import ctypes
import re
from pathlib import Path
from typing import Any

from accumtrainer import errors

STATUS = Path("/proc/self/status")


class ProcessPeak:
    """Measures by how much the process grows inside of it, at most.

    Attributes:
        bytes: int, known at the end.

    Raises:
        RuntimeError: the system does not tell.
    """

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> "ProcessPeak":
        if not STATUS.exists():
            raise RuntimeError(errors.MEMORY_IS_SECRET)
        _give_free_memory_back()
        # The peak begins anew.
        STATUS.with_name("clear_refs").write_text("5")
        self._before = _read("VmRSS")
        return self

    def __exit__(self, *_: Any) -> None:
        self.bytes = _read("VmHWM") - self._before


def _give_free_memory_back() -> None:
    """Have the process take again what it uses again.

    C libraries keep what was freed, and to use that again is no growth.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _read(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.M)
    return 1024 * int(found[1]) if found else 0
