"""What layers keep as attributes, which a trial is to leave as it was.

A layer may replace a tensor by the next one. While a function is recorded its
tensors have no numbers: one that a layer puts into an attribute, a table it has
made or what it shows others, it would find there later.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

MISSING = object()


@contextlib.contextmanager
def attributes_put_back(layers: Iterable[Any]) -> Iterator[None]:
    """Look at what layers keep in here, and put back what they had before.

    Raises:
        ValueError: a layer keeps a tensor that has no numbers.
    """
    modules = {id(m): m for layer in layers for m in layer.modules()}
    before = [(m, dict(vars(m)), _contents(m)) for m in modules.values()]
    keeping: list[str] = []
    try:
        yield
    finally:
        for module, attributes, contents in before:
            keeping += _put_back(module, attributes, contents)
    if keeping:
        raise ValueError(f"{keeping[0]} keeps what a layer has computed")


def _contents(module: Any) -> dict[str, Any]:
    """Copy the lists and dicts among a module's attributes."""
    return {
        name: dict(value) if isinstance(value, dict) else list(value)
        for name, value in vars(module).items()
        if isinstance(value, (list, dict))
    }


def _put_back(
    module: Any, attributes: dict[str, Any], contents: dict[str, Any]
) -> Iterator[str]:
    """Put tensors back that were replaced, and name those without numbers."""
    for name, value in list(vars(module).items()):
        old = attributes.get(name, MISSING)
        if _holds_fakes(value):
            owner = getattr(module, "name", type(module).__name__)
            yield f"{owner}.{name}"
        elif not isinstance(old, torch.Tensor):
            continue  # made once, or no tensor
        if old is MISSING:
            del vars(module)[name]
            continue
        vars(module)[name] = old
        # Keras's own lists and dicts would track what is put back anew.
        if isinstance(old, list):
            list.__setitem__(old, slice(None), contents[name])
        elif isinstance(old, dict):
            dict.clear(old)
            dict.update(old, contents[name])


def _holds_fakes(value: Any, depth: int = 3) -> bool:
    """Whether a value is a tensor without numbers, or such a list or dict."""
    if depth and isinstance(value, (list, tuple, dict)):
        items = dict.values(value) if isinstance(value, dict) else value
        return any(_holds_fakes(item, depth - 1) for item in items)
    return is_fake(value)


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without numbers."""
    return isinstance(value, torch.Tensor) and hasattr(value, "fake_mode")
