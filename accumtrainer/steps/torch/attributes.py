"""What layers keep as attributes, of which recording would keep the tensors.

While a function is recorded its tensors have no numbers. A layer that puts one
into an attribute, a table it has made or what it shows others, would find it
there later.
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
    before = [(layer, dict(vars(layer)), _contents(layer)) for layer in layers]
    keeping: list[str] = []
    try:
        yield
    finally:
        for layer, attributes, contents in before:
            keeping += _put_back(layer, attributes, contents)
    if keeping:
        raise ValueError(f"{keeping[0]} keeps what a layer has computed")


def _contents(layer: Any) -> dict[str, Any]:
    """Copy the lists and dicts among a layer's attributes."""
    return {
        name: dict(value) if isinstance(value, dict) else list(value)
        for name, value in vars(layer).items()
        if isinstance(value, (list, dict))
    }


def _put_back(
    layer: Any, attributes: dict[str, Any], contents: dict[str, Any]
) -> Iterator[str]:
    """Put attributes back that hold such tensors, and name them."""
    for name, value in list(vars(layer).items()):
        if not _holds_fakes(value):
            continue
        yield f"{layer.name}.{name}"
        old = attributes.get(name, MISSING)
        if old is MISSING:
            del vars(layer)[name]
            continue
        vars(layer)[name] = old
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
    return isinstance(value, torch.Tensor) and hasattr(value, "fake_mode")
