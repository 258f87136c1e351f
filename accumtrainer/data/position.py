"""Where in the data training is, and what makes windows from there on."""

import dataclasses
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from accumtrainer import errors
from accumtrainer.data.batches import leaves


@dataclasses.dataclass(slots=True)
class Position:
    """What has been taken from a source, and what of it is left to train on.

    `groups` changes it. Between two windows it says all that is needed to go
    on from the same place.

    Args:
        epoch: index of the epoch.
        batches: loader batches taken in this epoch.
        windows: windows made in this epoch.
        carried: loader items of the window being filled.
        first: the first loader item of the last epoch begun, or its
            fingerprint; `None` before the first epoch.
        last: the last loader item taken, or its fingerprint, or `None`.

    Example:
        >>> position = Position(epoch=1, batches=7)
        >>> position.begin_next_epoch()
        >>> position.epoch, position.batches
        (2, 0)
    """

    epoch: int = 0
    batches: int = 0
    windows: int = 0
    carried: list = dataclasses.field(default_factory=list)
    first: Any = None
    last: Any = None

    @property
    def is_amid_epoch(self):
        """Whether something of this epoch has been taken."""
        return self.batches > 0

    def begin_next_epoch(self):
        """Go to the beginning of the next epoch; carried items stay."""
        self.epoch += 1
        self.batches = self.windows = 0

    def take(self, item):
        """Note that a loader item has been taken."""
        if not self.batches:
            self.first = item
        self.batches += 1
        self.last = item

    def take_group(self):
        """Begin a window of the carried items, of which there is at least one.

        Returns:
            Tuple of them.
        """
        group = tuple(self.carried)
        self.carried.clear()
        self.windows += 1
        return group

    def get_state(self):
        """Return what `of_state` needs, a dict of plain values and arrays."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "windows": self.windows,
            "carried": list(self.carried),
            "first": _condensed(self.first),
            "last": _condensed(self.last),
        }

    @classmethod
    def of_state(cls, state):
        """Make a position of what `get_state` returned."""
        return cls(**{**state, "carried": list(state["carried"])})


def groups(source, position, *, steps_at, tail):
    """Yield the loader items of each window of the rest of an epoch.

    Stands for:
        ```
        for item in carried + list(source.iterate(epoch, batches)):
            group.append(item)
            if len(group) == steps_at_its_start:
                yield group
                group = []
        ```

    Args:
        source: a `Source`.
        position: `Position`, changed in place with every item taken. With
            `tail="carry"` the left-over items of an epoch stay in it.
        steps_at: function without arguments that returns the loader batches
            of the window about to begin; asked once per window, when its
            first batch has arrived.
        tail: `"flush"`, `"drop"` or `"carry"`, for what is left at the end.

    Yields:
        Tuples of items, of one window each.

    Raises:
        DataError: the source yields nothing, or `tail="drop"` drops it all.
    """
    carried, steps = position.carried, 0
    waiting = tuple(carried)
    carried.clear()
    for item in chain(waiting, _take(source, position)):
        if not carried:
            steps = steps_at()
        carried.append(item)
        if len(carried) >= steps:
            yield position.take_group()
    if tail == "drop" and not position.windows:
        raise errors.DataError(
            errors.EVERYTHING_DROPPED.format(
                epoch=position.epoch, batches=len(carried), steps=steps
            )
        )
    if tail == "drop":
        carried.clear()
    if carried and tail == "flush":
        yield position.take_group()


def _take(source, position):
    for item in source.iterate(position.epoch, position.batches):
        position.take(item)
        yield item


def _condensed(item):
    return item if item is None or isinstance(item, str) else fingerprint(item)


def fingerprint(item):
    """Condense a loader item into a few letters that tell it from others.

    Args:
        item: array, or nest of arrays.

    Returns:
        str of 16 letters.

    Example:
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
