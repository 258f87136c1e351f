"""Iterators that layers and others keep, from which a trial takes nothing.

Keras runs their Python code in every step on PyTorch, and each takes the next
item. What is recorded would keep the item of one step.
"""

import collections
import contextlib
import copy
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from accumtrainer.steps.torch.attributes import kept_by, put_back

OF_PYTHON = ("builtins", "itertools")
"""Modules of iterators into which nobody can look, as generators.

Others have attributes, which are put back as those of any object."""


class Again:
    """An iterator that gives again what was taken from it in a scope.

    Once all of that is taken again, the iterator itself is back in its place.

    Args:
        source: gives the items that have not been taken yet.

    Attributes:
        places: pairs of an object and the attribute that it is.
    """

    def __init__(self, source: Iterator[Any]):
        self.source = source
        self.places: list[tuple[Any, str]] = []
        self._ahead: collections.deque = collections.deque()
        self._taken: list[Any] | None = None
        self._was_asked = False

    def __iter__(self) -> "Again":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)  # `close` and others of a generator

    def __length_hint__(self) -> int:
        return len(self._ahead) + operator.length_hint(self.source)

    def __copy__(self) -> Iterator[Any]:
        return itertools.chain(list(self._ahead), copy.copy(self.source))

    def __reduce__(self) -> Any:
        return itertools.chain, (list(self._ahead), self.source)

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Take an item, as of a generator that is sent a value."""
        self._was_asked = True
        if self._ahead:
            item = self._ahead.popleft()
        elif value is None:
            item = next(self.source)
        else:
            item = self.source.send(value)  # type: ignore[attr-defined]
        if self._taken is not None:
            self._taken.append(item)
        elif not self._ahead:
            self._give_way()
        return item

    def _give_way(self) -> None:
        for owner, name in self.places:
            if kept_by(owner).get(name) is self:
                put_back(owner, name, self.source)

    def begin(self) -> None:
        """Note from here on what is taken."""
        self._taken, self._was_asked, self.places = [], False, []

    def rewind(self) -> bool:
        """Let it be taken again, and say whether anybody has asked for it."""
        self._ahead.extendleft(reversed(self._taken or []))
        self._taken = None
        return self._was_asked


@contextlib.contextmanager
def iterators_put_back(owners: Iterable[Any]) -> Iterator[list[str]]:
    """Let others take from iterators what code has taken in here.

    Where it has, something else that gives the same stays in their place.

    Args:
        owners: what has attributes, or is a function that reads iterators.

    Returns:
        The names of those that were asked, once the scope has ended.
    """
    kept = [
        (owner, name, value)
        for owner in owners
        for name, value in kept_by(owner).items()
        if isinstance(value, Again) or _is_of_python(value)
    ]
    again = {
        id(value): value if isinstance(value, Again) else Again(value)
        for _, _, value in kept
    }
    for one in again.values():
        one.begin()
    for owner, name, value in kept:
        again[id(value)].places.append((owner, name))
        put_back(owner, name, again[id(value)])
    names: list[str] = []
    try:
        yield names
    finally:
        was_asked = {key: one.rewind() for key, one in again.items()}
        for owner, name, value in kept:
            is_other = was_asked[id(value)]
            put_back(owner, name, again[id(value)] if is_other else value)
            names += [name] if is_other else []


def _is_of_python(value: Any) -> bool:
    is_known = type(value).__module__ in OF_PYTHON
    return is_known and isinstance(value, Iterator)
