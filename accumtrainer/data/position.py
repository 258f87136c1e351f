"""Where in the data training is."""

import dataclasses
from typing import Any

import numpy as np
import xxhash

from accumtrainer.data.batches import leaves


@dataclasses.dataclass(slots=True)
class Position:
    """What has been taken from a source, and what of it is left to train on.

    `groups` changes it. It says all that is needed to go on from the same
    place, before a window and after it.

    Args:
        epoch: index of the epoch.
        batches: loader batches taken in this epoch.
        windows: windows made in this epoch.
        carried: loader items of the window being filled, or of a full one of
            which the update is yet to be made.
        first: the first loader item of the last epoch begun, or its
            fingerprint; `None` before the first epoch.
        last: the last loader item taken, or its fingerprint, or `None`.

    Examples:
        >>> position = Position(epoch=1, batches=7)
        >>> position.begin_next_epoch()
        >>> position.epoch, position.batches
        (2, 0)
    """

    epoch: int = 0
    batches: int = 0
    windows: int = 0
    carried: list[Any] = dataclasses.field(default_factory=list)
    first: Any = None
    last: Any = None

    @property
    def is_amid_epoch(self) -> bool:
        """Whether something of this epoch has been taken."""
        return self.batches > 0

    def copy(self) -> "Position":
        """Return a position that goes on without this one."""
        return dataclasses.replace(self, carried=list(self.carried))

    def begin_next_epoch(self) -> None:
        """Go to the beginning of the next epoch; carried items stay."""
        self.epoch += 1
        self.batches = self.windows = 0

    def take(self, item: Any) -> None:
        """Note that a loader item has been taken."""
        if not self.batches:
            self.first = item
        self.batches += 1
        self.last = item

    def take_group(self) -> None:
        """Note that the carried items have been made a window."""
        self.carried.clear()
        self.windows += 1

    def get_state(self) -> dict[str, Any]:
        """Return what `of_state` needs, plain values and arrays."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "windows": self.windows,
            "carried": list(self.carried),
            "first": _condensed(self.first),
            "last": _condensed(self.last),
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Position":
        """Make a position of what `get_state` returned."""
        return cls(**{**state, "carried": list(state["carried"])})


def _condensed(item: Any) -> str | None:
    return item if item is None or isinstance(item, str) else fingerprint(item)


def fingerprint(item: Any) -> str:
    """Condense a loader item into a few letters that tell it from others.

    Args:
        item: array, or nest of arrays.

    Returns:
        16 letters.

    Examples:
        >>> fingerprint(np.arange(3)) == fingerprint(np.arange(3))
        True
    """
    digest = xxhash.xxh3_64()
    for leaf in leaves(item):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.shape}{array.dtype}".encode())
        is_text = array.dtype.kind in "OU"
        content = repr(array.tolist()).encode() if is_text else array.tobytes()
        digest.update(content)
    return digest.hexdigest()
