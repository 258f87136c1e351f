"""What layers keep as attributes, which a trial is to leave as it was.

A layer may replace a tensor by the next one. While a function is recorded its
tensors have no numbers: one that a layer puts into an attribute, a table it has
made or what it shows others, it would find there later.
"""

import collections
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from accumtrainer.keras_api import keras, tree

MISSING = object()
CONTAINERS = (list, dict, collections.deque)

OF_RUNNING = {
    "training",
    "history",
    *(f"stop_{name}" for name in ("training", "evaluating", "predicting")),
    *(f"{name}_function" for name in ("train", "test", "predict")),
    "_eval_epoch_iterator",
}
"""Attributes that say how a model runs, not of what it is made."""


@contextlib.contextmanager
def attributes_put_back(owners: Iterable[Any]) -> Iterator[list[str]]:
    """Look at what objects keep in here, and put back what they had before.

    Args:
        owners: modules or metrics.

    Returns:
        List that has the names of what was put back, once the scope has ended.

    Raises:
        ValueError: one keeps a tensor that has no numbers.
    """
    before = [(one, dict(vars(one)), _contents(one)) for one in owners]
    changed: list[str] = []
    keeping: list[str] = []
    try:
        yield changed
    finally:
        for owner, attributes, contents in before:
            for name, value in list(vars(owner).items()):
                old, items = attributes.get(name, MISSING), contents.get(name)
                has_fakes = _holds_fakes(value)
                was_built = attributes.get("built", True)
                if has_fakes or _is_replaced(old, value, items, was_built):
                    _put_back(owner, name, old, items)
                    whose = getattr(owner, "name", type(owner).__name__)
                    changed.append(f"{whose}.{name}")
                    keeping += changed[-1:] if has_fakes else []
    if keeping:
        raise ValueError(f"{keeping[0]} keeps what a layer has computed")


def attributes_of(layers: Iterable[Any]) -> list[Any]:
    """List what the attributes of layers are, and what is in them.

    Hooks of modules and regularizers of variables are among it.

    Args:
        layers: of Keras, which are modules of PyTorch too.
    """
    found: list[Any] = []
    for module in modules_of(layers):
        found.append(module)
        for name, value in vars(module).items():
            if name in OF_RUNNING:
                continue
            found += [name, value]
            if isinstance(value, dict):
                found += [*dict.keys(value), *dict.values(value)]
            elif isinstance(value, list):
                found += value
            elif isinstance(value, keras.Variable):
                found += [value.regularizer, value.constraint]
    return found


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


def _contents(owner: Any) -> dict[str, dict]:
    """Copy the lists, queues and dicts among an object's attributes."""
    return {
        name: _items(value)
        for name, value in vars(owner).items()
        if isinstance(value, CONTAINERS)
    }


def _items(value: Any) -> dict:
    """Look at a container's items, also where Keras tracks who looks."""
    pairs = dict.items(value) if isinstance(value, dict) else enumerate(value)
    return dict(pairs)


def _is_replaced(old: Any, value: Any, items: Any, was_built: bool) -> bool:
    """Whether a tensor or number is another, or a tensor in a container.

    What is made once may stay, as what a layer has built.
    """
    if old is value and items is None:
        return False
    if items is None:
        is_count = isinstance(old, (int, float)) and not isinstance(old, bool)
        return isinstance(old, torch.Tensor) or (is_count and was_built)
    now = _items(value) if isinstance(value, CONTAINERS) else {}
    keys = items if isinstance(old, dict) else {**items, **now}
    pairs = [(items.get(key), now.get(key)) for key in keys]
    return any(
        one is not other
        and (isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor))
        for one, other in pairs
    )


def _put_back(owner: Any, name: str, old: Any, items: Any) -> None:
    """Give an object the attribute back that it had, with what was in it."""
    if old is MISSING:
        del vars(owner)[name]
        return
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


def _holds_fakes(value: Any, depth: int = 3) -> bool:
    """Whether a value is a tensor without numbers, or such a list or dict."""
    if depth and isinstance(value, (*CONTAINERS, tuple)):
        items = dict.values(value) if isinstance(value, dict) else value
        return any(_holds_fakes(item, depth - 1) for item in items)
    return is_fake(value)


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without numbers."""
    return isinstance(value, torch.Tensor) and hasattr(value, "fake_mode")
