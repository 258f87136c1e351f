"""What layers keep as attributes, which a trial is to leave as it was.

A layer may replace a tensor by the next one. While a function is recorded its
tensors have no numbers: one that a layer puts into an attribute, a table it has
made or what it shows others, it would find there later.
"""

import collections
import contextlib
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch

from accumtrainer.keras_api import keras, tree
from accumtrainer.steps.torch.looks import read_from_outside

MISSING = object()
CONTAINERS = (list, dict, collections.deque)


@contextlib.contextmanager
def attributes_put_back(owners: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Look at what objects keep in here, and put back what they had before.

    Args:
        owners: what has attributes.

    Returns:
        What was put back, by its name, once the scope has ended.

    Raises:
        ValueError: one keeps a tensor that has no numbers.
    """
    before = [(one, _kept_by(one), _contents(one)) for one in owners]
    changed: dict[str, Any] = {}
    keeping: list[str] = []
    try:
        yield changed
    finally:
        for owner, attributes, contents in before:
            for name, value in _kept_by(owner).items():
                old, items = attributes.get(name, MISSING), contents.get(name)
                # Where an object has no number yet, that of its class counts.
                was = getattr(type(owner), name, old) if old is MISSING else old
                has_fakes = _holds_fakes(value)
                was_built = attributes.get("built", True)
                if has_fakes or _is_replaced(was, value, items, was_built):
                    _put_back(owner, name, old, items)
                    whose = getattr(owner, "name", type(owner).__name__)
                    changed[f"{whose}.{name}"] = old
                    keeping += [f"{whose}.{name}"] if has_fakes else []
    if keeping:
        raise ValueError(f"{keeping[0]} keeps what a layer has computed")


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


def _kept_by(owner: Any) -> dict[str, Any]:
    """Copy an object's attributes, and what a function reads from outside."""
    if isinstance(owner, FunctionType):
        return {**read_from_outside(owner), **vars(owner)}
    return dict(vars(owner))


def _contents(owner: Any) -> dict[str, dict]:
    """Copy the lists, queues and dicts among an object's attributes."""
    return {
        name: _items(value)
        for name, value in _kept_by(owner).items()
        if isinstance(value, CONTAINERS)
    }


def _items(value: Any) -> dict:
    """Look at a container's items, also where Keras tracks who looks."""
    pairs = dict.items(value) if isinstance(value, dict) else enumerate(value)
    return dict(pairs)


def _is_replaced(old: Any, value: Any, items: Any, was_built: bool) -> bool:
    """Whether a tensor or number is another, or one in a container.

    What is made once may stay, as what a layer has built.
    """
    kinds = (torch.Tensor, int, float) if was_built else torch.Tensor
    if items is None:
        return old is not value and _is_one_of(old, kinds)
    now = _items(value) if isinstance(value, CONTAINERS) else {}
    keys = items if isinstance(old, dict) else {**items, **now}
    pairs = [(items.get(key), now.get(key)) for key in keys]
    return any(
        one is not other
        and (_is_one_of(one, kinds) or _is_one_of(other, kinds))
        for one, other in pairs
    )


def _is_one_of(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _put_back(owner: Any, name: str, old: Any, items: Any) -> None:
    """Give an object the attribute back that it had, with what was in it."""
    if isinstance(owner, type):
        _set_attribute(owner, name, old)
    elif isinstance(owner, FunctionType) and name not in vars(owner):
        _set_outside(owner, name, old)
    elif old is MISSING:
        del vars(owner)[name]
    else:
        vars(owner)[name] = old
    # Keras's own lists and dicts would track what is put back anew.
    if isinstance(old, dict):
        dict.clear(old)
        dict.update(old, items)
    elif isinstance(old, list):
        list.__setitem__(old, slice(None), items.values())
    elif isinstance(old, collections.deque):
        old.clear()
        old.extend(items.values())


def _set_attribute(owner: type, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


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
    """List what is in lists, dicts and the like, which may be in others."""
    if depth and isinstance(value, (*CONTAINERS, tuple)):
        items = dict.values(value) if isinstance(value, dict) else value
        for item in items:
            yield from _flatten(item, depth - 1)
    else:
        yield value


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without numbers."""
    return isinstance(value, torch.Tensor) and hasattr(value, "fake_mode")
