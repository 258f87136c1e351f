"""What a model is made of at one moment, to tell whether that has changed."""

from collections.abc import Sequence
from typing import Any

PLAIN = (int, float, str)
"""Of what is equal nobody can tell which one it is."""


class Looks:
    """What a model is made of at one moment.

    Args:
        things: list of all, which is kept so that none of them can go and
            another be taken for it.
    """

    def __init__(self, things: Sequence[Any]):
        self._things = things

    def differ_from(self, before: "Looks") -> bool:
        """Whether it was made of something else at another moment."""
        if len(self._things) != len(before._things):
            return True
        pairs = zip(self._things, before._things, strict=True)
        return not all(
            one is other or (isinstance(one, PLAIN) and one == other)
            for one, other in pairs
        )
