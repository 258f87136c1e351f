"""How much memory PyTorch uses on its devices."""

from typing import Any

import torch

OUT_ON_CPU = "DefaultCPUAllocator: "


def devices() -> list[int]:
    """List the numbers of the devices other than the processor."""
    if not torch.accelerator.is_available():
        return []
    return list(range(torch.accelerator.device_count()))


def limit_bytes() -> int | None:
    """Nine tenths of the smallest device's memory, `None` on a processor."""
    totals = [torch.accelerator.get_memory_info(d)[1] for d in devices()]
    return 9 * min(totals) // 10 if totals else None


def peak_bytes() -> int | None:
    """Most bytes in use so far on the fullest device."""
    peaks = map(torch.accelerator.max_memory_allocated, devices())
    return max(peaks, default=None)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that a device or the host is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and OUT_ON_CPU in str(error)
    )


class DevicePeak:
    """Measures by how much memory in use grows inside of it, at most.

    Attributes:
        bytes: int, known at the end.
    """

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> "DevicePeak":
        self._before = {}
        for device in devices():
            torch.accelerator.reset_peak_memory_stats(device)
            self._before[device] = torch.accelerator.memory_allocated(device)
        return self

    def __exit__(self, *_: Any) -> None:
        self.bytes = max(
            torch.accelerator.max_memory_allocated(device) - before
            for device, before in self._before.items()
        )
