"""What a backend must be asked in its own words, all in one place.

A further backend is a subclass of `Device` with four methods, an entry in
`DEVICES`, and a window by hand in `handwritten.make_window`.
"""

import os
import time
from abc import ABC, abstractmethod

import keras
import numpy as np


class Device(ABC):
    """The device that a backend computes on."""

    name: str
    """Of the card; `"CPU"` where there is none."""

    _last = None  # the product that was begun last

    @property
    def is_accelerator(self):
        """Whether it is something else than the processor."""
        return self.name != "CPU"

    @abstractmethod
    def memory_bytes(self):
        """Return how much memory it has for us, int."""

    @abstractmethod
    def wait(self):
        """Wait until all that was begun has ended."""

    @abstractmethod
    def make_product(self, array):
        """Return a function that begins `c @ array` in bfloat16, c its last.

        Args:
            array: NumPy array `[n, n]`.
        """

    @abstractmethod
    def versions(self):
        """Name what computes, beside the backend: list of str."""

    def matmul_rate(self, size, times=10, rounds=5):
        """Measure products of bfloat16 matrices, in operations per second.

        Args:
            size: int, rows and columns of the matrices.
            times: int, products in a row.
            rounds: int, of which the fastest counts.

        Returns:
            float; a product is `2 size^3` operations.
        """
        rng = np.random.default_rng(0)
        array = rng.standard_normal([size, size], "float32") / np.sqrt(size)
        multiply = self.make_product(array)
        secs = []
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            for _ in range(times):
                multiply()
            self.wait()
            secs.append(time.perf_counter() - begun)
        self.forget()
        return 2 * size**3 * times / min(secs[1:])

    def forget(self):
        """Let go of the last product, whose memory others want."""
        self._last = None


class JaxDevice(Device):
    """The first device of JAX."""

    def __init__(self):
        import jax

        self._device = jax.local_devices()[0]
        is_cpu = self._device.platform == "cpu"
        self.name = "CPU" if is_cpu else self._device.device_kind

    def memory_bytes(self):
        statistics = self._device.memory_stats()
        return statistics["bytes_limit"] if statistics else memory_of_machine()

    def wait(self):
        import jax

        # A device runs one after the other what it is given.
        jax.block_until_ready(
            self._last if self._last is not None else jax.numpy.zeros(1) + 1
        )

    def make_product(self, array):
        import jax

        array = jax.numpy.asarray(array, "bfloat16")
        product = jax.jit(jax.numpy.matmul)
        self._last = array

        def multiply():
            self._last = product(self._last, array)

        return multiply

    def versions(self):
        return [str(self._device.client.platform_version).split("\n")[0]]


class TorchDevice(Device):
    """The accelerator of PyTorch, or the processor."""

    def __init__(self):
        import torch

        self._has_cuda = torch.cuda.is_available()
        self.name = torch.cuda.get_device_name() if self._has_cuda else "CPU"

    def memory_bytes(self):
        import torch

        if not self._has_cuda:
            return memory_of_machine()
        free, _ = torch.cuda.mem_get_info()
        return free

    def wait(self):
        import torch

        if self._has_cuda:
            torch.cuda.synchronize()

    def make_product(self, array):
        import torch

        device = "cuda" if self._has_cuda else "cpu"
        array = torch.as_tensor(array).to(device, torch.bfloat16)
        self._last = array

        def multiply():
            self._last = self._last @ array

        return multiply

    def versions(self):
        import torch

        return [f"CUDA {torch.version.cuda}"] if self._has_cuda else []


DEVICES = {"jax": JaxDevice, "torch": TorchDevice}


def this_device():
    """Make the `Device` of the backend that Keras runs on."""
    return DEVICES[keras.backend.backend()]()


def memory_of_machine():
    """Return the bytes of memory that the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
