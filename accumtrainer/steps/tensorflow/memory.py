"""How much memory TensorFlow uses, on its devices or in the process."""

import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from accumtrainer import errors

STATUS = Path("/proc/self/status")


def accelerators() -> list[str]:
    """List the names of the devices other than the processor."""
    count = len(tf.config.list_logical_devices("GPU"))
    return [f"GPU:{index}" for index in range(count)]


def measured_devices() -> list[str]:
    """List the devices on which a trial runs, if they tell what is in use.

    The processor does where TensorFlow uses the allocator of oneDNN; that keeps
    what it has had, and the memory of the process does not show it.
    """
    if devices := accelerators():
        return devices
    try:
        tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:
        return []
    return ["CPU:0"]


class Peak:
    """Measures by how much memory in use grows inside of it, at most.

    Args:
        devices: list of their names; none for the process's memory.

    Attributes:
        bytes: int, known at the end.

    Raises:
        RuntimeError: the system does not tell.
    """

    def __init__(self, devices: list[str]):
        self._devices = devices
        self.bytes = 0

    def __enter__(self) -> "Peak":
        for device in self._devices:
            tf.config.experimental.reset_memory_stats(device)
        if not self._devices:
            if not STATUS.exists():
                raise RuntimeError(errors.MEMORY_IS_SECRET)
            # The peak begins anew.
            STATUS.with_name("clear_refs").write_text("5")
        self._before = self._read("current", "VmRSS")
        return self

    def __exit__(self, *_: Any) -> None:
        after = self._read("peak", "VmHWM")
        self.bytes = max(
            late - early
            for late, early in zip(after, self._before, strict=True)
        )

    def _read(self, of_device: str, of_process: str) -> list[int]:
        if self._devices:
            read = tf.config.experimental.get_memory_info
            return [read(device)[of_device] for device in self._devices]
        found = re.search(
            rf"^{of_process}:\s+(\d+) kB$", STATUS.read_text(), re.M
        )
        return [1024 * int(found[1])] if found else [0]
