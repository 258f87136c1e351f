"""What layers keep as attributes, of which recording would keep the tensors.

While a function is recorded its tensors have no numbers. A layer that puts one
into an attribute, a table it has made or what it shows others, would find it
there later.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import optree


@contextlib.contextmanager
def attributes_put_back(layers: Iterable[Any]) -> Iterator[None]:
    """Look at what layers keep in here, and put back what they had before.

    Raises:
        ValueError: a layer keeps a tensor that has no numbers.
    """
    before = [(layer, dict(vars(layer)), _contents(layer)) for layer in layers]
    yield
    keeping = [name for pair in before for name in _put_back(*pair)]
    if keeping:
        raise ValueError(f"{keeping[0]} keeps what a layer has computed")


def _contents(layer: Any) -> dict[str, Any]:
    """Copy the lists and dicts among a layer's attributes."""
    return {
        name: value.copy()
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
        if name not in attributes:
            del vars(layer)[name]
            continue
        vars(layer)[name] = old = attributes[name]
        if name in contents:
            old.clear()
            add = old.extend if isinstance(old, list) else old.update
            add(contents[name])


def _holds_fakes(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        # Plain ones, as Keras's own have no order that is known.
        plain: Any = dict(value) if isinstance(value, dict) else list(value)
        return any(map(_is_fake, optree.tree_leaves(plain)))
    return _is_fake(value)


def _is_fake(value: Any) -> bool:
    return hasattr(value, "fake_mode")
