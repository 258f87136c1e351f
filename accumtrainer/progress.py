"""The only counters of a training run."""

import dataclasses
from typing import Any


@dataclasses.dataclass(slots=True)
class Progress:
    """Counts of finished things over the life of a Trainer.

    The loop changes it; everybody else reads it or keeps a copy.

    Args:
        updates: applications of the optimizer.
        micro_batches: forward and backward passes in training.
        samples: samples those passes saw.
        skipped_updates: windows forgotten because they were not finite.
        epochs: times through the data.
        seconds: time spent training, in seconds.

    Examples:
        >>> progress = Progress(updates=2)
        >>> progress.updates += 1
        >>> progress.as_dict()["updates"]
        3
    """

    updates: int = 0
    micro_batches: int = 0
    samples: int = 0
    skipped_updates: int = 0
    epochs: int = 0
    seconds: float = 0.0

    def copy(self) -> "Progress":
        """Return the counts as they stand now, in a `Progress` of its own."""
        return Progress(
            self.updates,
            self.micro_batches,
            self.samples,
            self.skipped_updates,
            self.epochs,
            self.seconds,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as a plain dict, ready to be saved."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, counts: dict[str, Any]) -> "Progress":
        """Make a `Progress` of what `as_dict` returned.

        Raises:
            TypeError: the dict has a key that is no counter.

        Examples:
            >>> Progress.from_dict({"updates": 3}).updates
            3
        """
        return cls(**counts)
