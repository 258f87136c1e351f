"""How much memory PyTorch uses, on its devices or for its tensors."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OUT_ON_CPU = "DefaultCPUAllocator: "


def devices() -> list[int]:
    """List the numbers of the devices that tell what is in use."""
    return list(range(torch.cuda.device_count()))


def limit_bytes() -> int | None:
    """Nine tenths of the smallest device's memory, `None` on a processor."""
    totals = [torch.cuda.mem_get_info(d)[1] for d in devices()]
    return 9 * min(totals) // 10 if totals else None


def peak_bytes() -> int | None:
    """Most bytes in use so far on the fullest device."""
    peaks = map(torch.cuda.max_memory_allocated, devices())
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
            torch.cuda.reset_peak_memory_stats(device)
            self._before[device] = torch.cuda.memory_allocated(device)
        return self

    def __exit__(self, *_: Any) -> None:
        self.bytes = max(
            torch.cuda.max_memory_allocated(device) - before
            for device, before in self._before.items()
        )


class TensorPeak(TorchDispatchMode):
    """Measures how many bytes the tensors take that are made inside of it.

    On a processor PyTorch does not tell what is in use, and keeps what it has
    had.

    Attributes:
        bytes: int, at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._now = 0
        self._known: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        result = function(*args, **(kwargs or {}))
        results = result if isinstance(result, (list, tuple)) else [result]
        for tensor in results:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self._now += storage.nbytes()
        self.bytes = max(self.bytes, self._now)
        weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, count: int) -> None:
        self._now -= count
