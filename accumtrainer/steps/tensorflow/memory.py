"""How much memory TensorFlow uses on its devices."""

from typing import Any

import tensorflow as tf


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


class DevicePeak:
    """Measures by how much memory in use grows inside of it, at most.

    Args:
        devices: list of their names.

    Attributes:
        bytes: int, known at the end.
    """

    def __init__(self, devices: list[str]):
        self._devices = devices
        self.bytes = 0

    def __enter__(self) -> "DevicePeak":
        for device in self._devices:
            tf.config.experimental.reset_memory_stats(device)
        self._before = self._read("current")
        return self

    def __exit__(self, *_: Any) -> None:
        growth = zip(self._read("peak"), self._before, strict=True)
        self.bytes = max(late - early for late, early in growth)

    def _read(self, name: str) -> list[int]:
        read = tf.config.experimental.get_memory_info
        return [read(device)[name] for device in self._devices]
