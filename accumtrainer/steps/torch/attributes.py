"""What layers keep as attributes, which a trial is to leave as it was.

A layer may replace a tensor by the next one. While a function is recorded its
tensors have no numbers: one that a layer puts into an attribute, a table it has
made or what it shows others, it would find there later.
"""

import array
import collections
import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch

from accumtrainer.keras_api import keras, tree
from accumtrainer.steps.torch.looks import (
    MOST_BYTES,
    MOST_ITEMS,
    OF_LAYERS,
    kept_in,
    read_from_outside,
)

MISSING = object()
COLLECTIONS = (list, dict, set, collections.deque)
ARRAYS = (np.ndarray, bytearray, array.array)
CONTAINERS = (*COLLECTIONS, *ARRAYS)
COUNTED = (int, float, np.number, *ARRAYS)
ALL = "all"
"""Under which name the numbers of an array are its items."""


@dataclass(frozen=True, slots=True)
class Before:
    """What an object kept as an attribute before code ran.

    Args:
        owner: the object.
        name: of the attribute.
        value: what it was; `MISSING` if there was none.
        items: pairs of a container in it and its items, the outermost first.
        may_count: whether code may count in it, beside keeping tensors.
    """

    owner: Any
    name: str
    value: Any
    items: list[tuple[Any, dict]]
    may_count: bool

    def is_other(self, now: Any, *, may_be_made: bool) -> bool:
        """Whether a tensor, number or array is another, or one in a container.

        Args:
            now: what is kept by now.
            may_be_made: whether what is new is no other, as what a layer has
                built or made for a shape.
        """
        old = self.value
        if old is MISSING:
            # Where an object has no number yet, that of its class counts.
            old = getattr(type(self.owner), self.name, MISSING)
        kinds = (torch.Tensor, *(COUNTED if self.may_count else ()))
        if old is MISSING and not may_be_made:
            return _is_one_of(now, (*kinds, *CONTAINERS))
        is_kind = _is_one_of(old, kinds)
        is_kind = is_kind or (not may_be_made and _is_one_of(now, kinds))
        if is_kind and old is not now:
            # A longer table is made once for each length.
            is_array = may_be_made and isinstance(old, np.ndarray)
            is_made = is_array and np.shape(old) != np.shape(now)
            return not is_made and _differ(old, now)
        # What stands in the place of a container is compared with it.
        others = [now, *(container for container, _ in self.items[1:])]
        return any(
            _are_changed(before, one, kinds, may_be_made)
            for (_, before), one in zip(self.items, others, strict=False)
        )

    def put_back(self, now: Any) -> None:
        """Give the object back what it kept, with the items in there."""
        if now is not self.value:  # else it may be one that cannot be set
            put_back(self.owner, self.name, self.value)
        for container, items in self.items:
            _refill(container, items)


Made = dict[tuple[int, str], Before]
"""What was before something was made, by the owner's id and the name."""


@contextlib.contextmanager
def attributes_put_back(
    owners: Iterable[Any], made: Made | None
) -> Iterator[dict[str, Any]]:
    """Look at what objects keep in here, and put back what they had before.

    What may be made once, as a table for each shape, stays. If the same code
    then runs in a second scope, what is new there again counts instead, and is
    put back to what it was before the first.

    Args:
        owners: what has attributes.
        made: gets what was new in here, and has that of a scope before;
            `None` where all is made by now, and whatever is new counts.

    Returns:
        What was put back, by its name, once the scope has ended.

    Raises:
        ValueError: one keeps a tensor that has no numbers.
    """
    kept = [(one, kept_by(one), _contents(one)) for one in owners]
    changed: dict[str, Any] = {}
    keeping: list[str] = []
    try:
        yield changed
    finally:
        for before, now in _pairs(kept):
            key = id(before.owner), before.name
            is_made = made is None or key in made
            may_be_made = not (before.may_count and is_made)
            has_fakes = _holds_fakes(now)
            if has_fakes or before.is_other(now, may_be_made=may_be_made):
                (made or {}).pop(key, before).put_back(now)
                owner = before.owner
                whose = getattr(owner, "name", type(owner).__name__)
                changed[f"{whose}.{before.name}"] = before.value
                keeping += [f"{whose}.{before.name}"] if has_fakes else []
            elif made is not None and before.may_count:
                if before.is_other(now, may_be_made=False):
                    made[key] = before
    if keeping:
        raise ValueError(f"{keeping[0]} keeps what a layer has computed")


def _pairs(kept: list[tuple[Any, dict, dict]]) -> Iterator[tuple[Before, Any]]:
    """List what objects keep by now, each with what it was before."""
    for owner, attributes, contents in kept:
        # Keras itself numbers the losses that a layer adds.
        is_built = bool(attributes.get("built", True))
        for name, now in kept_by(owner).items():
            old, items = attributes.get(name, MISSING), contents.get(name, [])
            may_count = is_built and name not in OF_LAYERS
            yield Before(owner, name, old, items, may_count), now


def modules_of(layers: Iterable[Any]) -> list[Any]:
    """List layers, which are modules of PyTorch, and the modules in them."""
    modules = {id(m): m for layer in layers for m in layer.modules()}
    return list(modules.values())


def all_metrics(model: Any) -> list[Any]:
    """List the metrics of a model, and those that they are made of."""
    found: dict[int, Any] = {}
    left = list(model.metrics)
    while left:
        metric = left.pop()
        found[id(metric)] = metric
        left += [
            part
            for part in tree.flatten(list(vars(metric).values()))
            if isinstance(part, keras.metrics.Metric) and id(part) not in found
        ]
    return list(found.values())


def kept_by(owner: Any) -> dict[str, Any]:
    """Copy an object's attributes, and what a function reads from outside."""
    if isinstance(owner, FunctionType):
        return {**read_from_outside(owner), **vars(owner)}
    # What `type` itself says of a class nobody has written there.
    return dict(vars(owner) if isinstance(owner, type) else kept_in(owner))


def _contents(owner: Any) -> dict[str, list[tuple[Any, dict]]]:
    """Look into containers among an object's attributes, and into theirs.

    Returns:
        Pairs of a container and its items, the outermost first, by attribute.
    """
    return {
        name: [(one, _items(one)) for one in _containers_in(value)]
        for name, value in kept_by(owner).items()
    }


def _containers_in(value: Any, depth: int = 3) -> Iterator[Any]:
    if depth and isinstance(value, CONTAINERS):
        yield value
        if isinstance(value, COLLECTIONS) and len(value) <= MOST_ITEMS:
            for item in _items(value).values():
                yield from _containers_in(item, depth - 1)


def _items(value: Any) -> dict:
    """Look at a container's items, also where Keras tracks who looks."""
    if isinstance(value, dict):
        return dict(_kind_of(value).items(value))
    if isinstance(value, set):
        return {item: item for item in value}
    if isinstance(value, (list, collections.deque)):
        return dict(enumerate(value))
    is_array = isinstance(value, ARRAYS)
    is_small = is_array and np.asarray(value).nbytes <= MOST_BYTES
    return {ALL: copy.copy(value)} if is_small else {}


def _are_changed(
    old: dict, container: Any, kinds: Any, may_be_made: bool
) -> bool:
    """Whether items of some kinds in a container are others than before."""
    now = _items(container)
    is_keyed = isinstance(container, (dict, set))
    if not may_be_made and list(map(hash, old)) != list(map(hash, now)):
        return True  # also where they stand in another order
    for key in {**old, **now}:
        one, other = old.get(key, MISSING), now.get(key, MISSING)
        # For each shape there may be a table, or a number.
        if one is MISSING and (is_keyed or isinstance(other, ARRAYS)):
            continue
        is_kind = _is_one_of(one, kinds) or _is_one_of(other, kinds)
        if is_kind and _differ(one, other):
            return True
    return False


def _is_one_of(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _differ(one: Any, other: Any) -> bool:
    """Whether two are not the same tensor, or the same numbers."""
    if one is other:
        return False
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return True
    return np.asarray(one).tobytes() != np.asarray(other).tobytes()


def put_back(owner: Any, name: str, old: Any) -> None:
    """Give an object the attribute back that it had."""
    if isinstance(owner, type):
        _set_attribute(owner, name, old)
    elif isinstance(owner, FunctionType) and name not in vars(owner):
        _set_outside(owner, name, old)
    elif name not in getattr(owner, "__dict__", {}):
        _set_slot(owner, name, old)
    elif old is MISSING:
        del vars(owner)[name]
    else:
        vars(owner)[name] = old


def _refill(container: Any, items: dict) -> None:
    """Put the items back that were in a container."""
    # Keras's own lists and dicts would track what is put back anew.
    if isinstance(container, dict):
        kind = _kind_of(container)
        kind.clear(container)
        for key, item in items.items():
            kind.__setitem__(container, key, item)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, items)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), items.values())
    elif isinstance(container, collections.deque):
        container.clear()
        container.extend(items.values())
    elif items and _differ(container, items[ALL]):
        _overwrite(container, items[ALL])


def _overwrite(container: Any, numbers: Any) -> None:
    """Put numbers back into an array, also where it is locked by now."""
    if not isinstance(container, np.ndarray):
        container[:] = numbers
        return
    is_locked = not container.flags.writeable
    if is_locked:
        container.flags.writeable = True
    container[...] = numbers
    if is_locked:
        container.flags.writeable = False


def _kind_of(container: dict) -> Any:
    """Return the class by which a dict is read and written behind Keras."""
    is_ordered = isinstance(container, collections.OrderedDict)
    return collections.OrderedDict if is_ordered else dict


def _set_attribute(owner: type, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _set_slot(owner: Any, name: str, value: Any) -> None:
    """Set what has a slot, also where an object is frozen."""
    if value is MISSING:
        object.__delattr__(owner, name)
    else:
        object.__setattr__(owner, name, value)


def _set_outside(function: FunctionType, name: str, value: Any) -> None:
    """Give a function what it reads from outside; what is new may stay."""
    names = function.__code__.co_freevars
    if value is MISSING:
        return
    if name in names:
        assert function.__closure__ is not None
        function.__closure__[names.index(name)].cell_contents = value
    else:
        function.__globals__[name] = value


def has_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a list, dict or the like of some."""
    return any(isinstance(t, torch.Tensor) for t in _flatten(value))


def _holds_fakes(value: Any) -> bool:
    return any(is_fake(part) for part in _flatten(value))


def _flatten(value: Any, depth: int = 3) -> Iterator[Any]:
    """List what is in lists, dicts and the like, which may be in others.

    An optimizer of PyTorch, also a scheduler's, stands for what it optimizes.
    """
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        value = value.optimizer
    if isinstance(value, torch.optim.Optimizer):
        value, depth = [group["params"] for group in value.param_groups], 2
    if depth and isinstance(value, (*COLLECTIONS, tuple)):
        items = dict.values(value) if isinstance(value, dict) else value
        for item in items:
            yield from _flatten(item, depth - 1)
    else:
        yield value


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without numbers."""
    return isinstance(value, torch.Tensor) and hasattr(value, "fake_mode")
