"""What a loader yields, read and checked one batch at a time."""

import warnings
from typing import Any

from accumtrainer import errors
from accumtrainer.data.batches import Batch, arrays_of, name_of
from accumtrainer.data.preprocessing import Preprocessing
from accumtrainer.data.reading import unpack, weigh_classes
from accumtrainer.data.source import SourceOptions


class BatchReader:
    """Reads loader items.

    Args:
        options: `class_weight`, which weighs samples by class, `seed`, which
            epochs there are, and `batch_size`, which is only compared.
        preprocessing: what makes of them what the model takes, if anything.

    Attributes:
        first_epoch: index of the first epoch.
        epochs_before: epochs before that one.
    """

    def __init__(
        self, options: SourceOptions, preprocessing: Preprocessing | None
    ):
        self._class_weight = options.class_weight
        self._seed = options.seed
        self._size = options.batch_size
        self._shorter = 0
        self.first_epoch = options.first_epoch
        self.epochs_before = options.epochs_before
        self._preprocessing = preprocessing

    def get_state(self) -> dict[str, int]:
        """Return what `set_state` needs to count epochs alike."""
        return {
            "first_epoch": self.first_epoch,
            "epochs_before": self.epochs_before,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Count epochs as in the run that saved a state."""
        self.first_epoch = state.get("first_epoch", 0)
        self.epochs_before = state.get("epochs_before", 0)

    def batch_of(self, item: Any, epoch: int, index: int) -> Batch:
        """Read an item as a `Batch`, of arrays that stay as they are.

        Args:
            item: what the loader yielded.
            epoch: index of the epoch.
            index: index of the batch in the epoch.
        """
        batch = self._unpack(item, epoch, index)
        return weigh_classes(batch, self._class_weight)

    def _compare_size(self, samples: int, index: int) -> None:
        """Warn once of batches other than somebody has said.

        One may be shorter, as where a round of the data ends, not two in turn.
        """
        if self._size is None:
            return
        if samples >= self._size or not index:
            self._shorter = 0
        self._shorter += samples < self._size
        if samples > self._size or self._shorter > 1:
            message = errors.SIZE_OF_LOADER.format(
                size=self._size, samples=samples
            )
            warnings.warn(message, stacklevel=2)
            self._size = None

    def _unpack(self, item: Any, epoch: int, index: int) -> Batch:
        if self._preprocessing is None:
            return unpack(item)
        epochs = self.epochs_before + epoch - self.first_epoch
        return self._preprocessing(item, self._seed, epochs, index)

    def read(self, item: Any, epoch: int, index: int) -> Batch:
        """Read an item as `batch_of` does, and check it.

        Args:
            item: what the loader yielded.
            epoch: index of the epoch.
            index: index of the batch in the epoch.

        Raises:
            DataError: it has no samples, or not as many in every array.
        """
        batch = self._unpack(item, epoch, index)
        arrays = arrays_of(batch)
        lengths = {len(array) for array in arrays.values()}
        if len(lengths) != 1 or lengths == {0}:
            received = ", ".join(
                f"{len(array)} samples in {name_of(*key)}"
                for key, array in arrays.items()
            )
            raise errors.DataError(
                errors.UNUSABLE_BATCH.format(
                    received=received or "no array", batch=index, epoch=epoch
                )
            )
        self._compare_size(max(lengths), index)
        return weigh_classes(batch, self._class_weight)
