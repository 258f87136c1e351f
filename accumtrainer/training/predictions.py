"""Gathers the predictions of batches, without waiting for each."""

from collections import deque
from collections.abc import Callable

from accumtrainer.keras_api import tree
from accumtrainer.keras_api.arrays import to_array
from accumtrainer.keras_api.types import Nest

MOST = 32
"""Batches that may be in flight, as many as JAX itself takes."""

LIMIT_BYTES = 64 * 2**20
"""What they and their predictions may take of the device."""


class Predictions:
    """Predictions of batches, read from the device some batches late.

    To read those of a batch at once would leave the device idle until the
    next one is there. They do not stay there either, where many would fill it.

    Args:
        check: is given the first predictions and each that follow, on the
            host.
    """

    def __init__(self, check: Callable[[Nest, Nest], None]):
        self._check = check
        self._read: list[Nest] = []
        self._waiting: deque[Nest] = deque()
        self._bytes = 0  # of the predictions of a batch, and of the batch

    def __bool__(self) -> bool:
        return bool(self._read)

    def add(self, predicted: Nest, size_bytes: int) -> None:
        """Take the predictions of a batch.

        Args:
            predicted: nest of tensors.
            size_bytes: what the batch itself takes.
        """
        self._waiting.append(predicted)
        if not self._read:
            self._read_next()
            self._bytes = size_bytes + sum(
                leaf.nbytes for leaf in tree.flatten(self._read[0])
            )
        # One that is at work while the host reads is always there.
        most = min(MOST, LIMIT_BYTES // max(1, self._bytes))
        while len(self._waiting) > max(1, most):
            self._read_next()

    def read(self) -> list[Nest]:
        """Read all that is left, and return nests of arrays by batch."""
        while self._waiting:
            self._read_next()
        return self._read

    def _read_next(self) -> None:
        predicted = self._waiting.popleft()
        arrays = tree.map_structure(to_array, predicted)
        self._read.append(arrays)
        self._check(self._read[0], arrays)
