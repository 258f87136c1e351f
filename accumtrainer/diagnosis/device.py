"""What can be learnt about the device while training runs."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from accumtrainer.steps import make_backend


def peak_memory_bytes() -> int | None:
    """Return the most memory that has been in use so far.

    That of the fullest device, where devices say it; otherwise, as on a CPU,
    that of this process, data and everything else included.

    Returns:
        Bytes; `None` where nobody says it.

    Examples:
        >>> peak_memory_bytes() > 1_000_000
        True
    """
    peak, _ = measure_peak_memory()
    return peak


def measure_peak_memory() -> tuple[int | None, str | None]:
    """Tell the most memory that has been in use so far, and of what.

    Returns:
        Pair: int, bytes; and `"device"` or `"process"`, see
        `peak_memory_bytes`. Both are `None` where nobody says it.
    """
    peak = make_backend().peak_memory_bytes()
    if peak is not None:
        return peak, "device"
    peak = _peak_of_process()
    return peak, None if peak is None else "process"


@contextlib.contextmanager
def record_trace(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Record what host and device do inside the `with` block.

    The backend's own profiler writes the trace when the block is left, in
    the form that TensorBoard's profiler reads.

    Args:
        directory: where to write, a path; what TensorBoard is given.
    """
    backend = make_backend()
    backend.start_trace(str(directory))
    try:
        yield
    finally:
        backend.stop_trace()


def mark_update(number: int) -> AbstractContextManager:
    """Make a context manager that names an update in a trace.

    Args:
        number: shown as the step's number.
    """
    return make_backend().mark_step("update", number)


def _peak_of_process() -> int | None:
    # Linux counts for a program that another one started what that one had in
    # use, except here.
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if found:
            return 1024 * int(found[1])
    try:
        import resource
    except ImportError:  # Windows has none.
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
