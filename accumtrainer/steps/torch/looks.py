"""What a model is made of on PyTorch: all that Python code of its layers reads.

Keras runs that code in every step there; what is recorded runs it once. So
whatever has changed since, in layers, losses, optimizers or a Trainer, has to
be noticed before the next call.
"""

import argparse
import array
import collections
import contextlib
import functools
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from accumtrainer.keras_api import keras
from accumtrainer.steps.looks import PLAIN

OF_MODELS = {
    "history",
    *(f"stop_{name}" for name in ("training", "evaluating", "predicting")),
    *(f"{name}_function" for name in ("train", "test", "predict")),
    "_eval_epoch_iterator",
    *("_nodes", "_nodes_by_depth"),
}
"""Attributes of models that say how they run or were written, not what they
are."""

OF_ALL = {
    "training",
    *("_losses", "_loss_ids", "_losses_override"),
    *("_inbound_nodes", "_outbound_nodes"),
    *("_tracker", "_auto_config"),
}
"""Such attributes of layers, and of what they keep."""

LEAVES = (
    *(types.ModuleType, torch.Tensor),
    *(keras.initializers.Initializer, keras.KerasTensor, keras.InputSpec),
)
"""Into these nobody looks: what matters is which one it is."""

EMPTY_CELL = types.CellType()
EMPTY = {list, dict, set, collections.OrderedDict}
"""Where these are empty, it is as if they were not there."""

NOT_OF_USERS = ("accumtrainer", "builtins", "keras", "torch")
"""Packages whose classes nobody changes."""

MOST_BYTES = 2**24
"""How large an array is at most whose numbers are looked at."""

CLOSED = {
    *sys.stdlib_module_names,
    *("numpy", "tensorflow", "jax", "jaxlib"),
    *("wandb", "mlflow", "tensorboard", "tensorboardX", "trackio"),
}
"""Packages whose objects take no part in a step, as those that log, or change
without that it matters, as caches and locks; `OPENED` has those that do."""


def attributes_of(owners: list[Any]) -> list[Any]:
    """List what objects keep as attributes, what that keeps, and so on.

    Hooks of modules, regularizers of variables and what a model was compiled
    with are among it, what users' classes say, and what their functions read.

    Args:
        owners: layers, for the most part.

    Returns:
        List whose order stays while nothing changes. What is `None` or `False`
        is left out of layers, as Keras adds such attributes to them at times.
    """
    kinds: dict[type, Any] = {}
    found: list[Any] = []
    known: set[int] = set()
    left: list[Any] = [owners]
    while left:
        value = left.pop()
        kind = type(value)
        if kind not in kinds:
            kinds[kind] = _how_to_open(kind)
        if kinds[kind] is None or id(value) in known:
            found.append(value)
        else:
            known.add(id(value))
            itself, parts = kinds[kind](value)
            found += itself
            left += parts
    return found


Opened = tuple[list[Any], Iterable[Any]]
"""What stands for an object, and the parts to go on with."""


def _how_to_open(kind: type) -> Callable[[Any], Opened] | None:
    """Choose how to open objects of a class.

    Returns:
        Function, or `None` where the object is all there is.
    """
    if issubclass(kind, LEAVES) or kind in PLAIN:
        return None
    for parent, opened in OPENED.items():
        if issubclass(kind, parent):
            return opened if _is_known(kind) else _with_attributes(opened)
    names = {_package(one) for one in kind.__mro__}
    # A Trainer, or what watches one, tells what is under way.
    is_ours = "accumtrainer" in names and not issubclass(kind, torch.nn.Module)
    is_closed = is_ours or _package(kind) in CLOSED
    return None if is_closed else _open_object


def _with_attributes(opened: Callable[[Any], Opened]) -> Callable:
    """Open also what an object of a subclass keeps as attributes."""

    def open_both(value: Any) -> Opened:
        one, other = opened(value), _open_object(value)
        return [*one[0], *other[0]], [*one[1], *other[1]]

    return open_both


def _package(one: Any) -> str:
    """Return the package of a class or a function."""
    return (one.__module__ or "").partition(".")[0]


def _open_object(owner: Any) -> Opened:
    itself, parts = [owner], [type(owner)]
    is_layer = isinstance(owner, torch.nn.Module)
    hidden = OF_MODELS if isinstance(owner, keras.Model) else ()
    for name, value in _attributes(owner):
        if name in OF_ALL or name in hidden:
            continue
        if is_layer and (value is None or value is False):
            continue
        if type(value) in PLAIN or value is None or isinstance(value, bool):
            itself += (name, value)
        elif type(value) not in EMPTY or value:
            itself.append(name)
            parts.append(value)
    return itself, parts


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """List an object's attributes, also those that have slots."""
    yield from list(getattr(owner, "__dict__", {}).items())
    kind: Any = type(owner)
    for name in _slots(kind):
        with contextlib.suppress(AttributeError):
            yield name, getattr(owner, name)


@functools.lru_cache(maxsize=1000)
def _slots(kind: type) -> list[str]:
    return [
        name
        for one in kind.__mro__
        for name, value in vars(one).items()
        if isinstance(value, types.MemberDescriptorType)
    ]


def _open_class(owner: type) -> Opened:
    """List what a class says, if users have written it."""
    if _is_known(owner):
        return [owner], []
    return [owner], [*owner.__bases__, *vars(owner).values()]


def _open_function(function: types.FunctionType) -> Opened:
    """List what a function reads from outside, if users have written it."""
    code = function.__code__
    if _is_known(function):
        return [function, code], []
    known = function.__globals__
    read = [known[name] for name in _names(code) if name in known]
    cells = function.__closure__ or ()
    return [function, code], [
        *(function.__defaults__, function.__kwdefaults__, vars(function)),
        *(cell.cell_contents for cell in cells if cell != EMPTY_CELL),
        *(value for value in read if not isinstance(value, type)),
    ]


def _is_known(one: Any) -> bool:
    """Whether nobody changes a class or function, or what it reads."""
    package = _package(one)
    return package in NOT_OF_USERS or package in CLOSED


@functools.lru_cache(maxsize=10_000)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """List the names of globals in a function and in those within it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple(
        dict.fromkeys([*code.co_names, *(n for c in inner for n in _names(c))])
    )


def _open_array(value: np.ndarray) -> Opened:
    """Look at an array's numbers: it may be written to, as a mask."""
    if value.nbytes > MOST_BYTES:
        return [value], []
    parts = value.ravel().tolist() if value.dtype.hasobject else []
    return [value, zlib.crc32(value.tobytes())], parts


OPENED: dict[type, Callable[[Any], Opened]] = {
    # Keras makes this of a layer's parameters anew.
    torch.nn.ParameterDict: lambda value: ([], list(value.values())),
    np.ndarray: _open_array,
    **dict.fromkeys(
        (bytearray, array.array),
        lambda value: ([value, zlib.crc32(value)], []),
    ),
    dict: lambda value: (list(dict.keys(value)), list(dict.values(value))),
    **dict.fromkeys(
        (list, tuple, set, frozenset, collections.deque),
        lambda value: ([len(value)], value),
    ),
    keras.Variable: lambda v: ([v], [v.regularizer, v.constraint]),
    types.FunctionType: _open_function,
    types.MethodType: lambda value: ([], [value.__self__, value.__func__]),
    functools.partial: lambda value: (
        [value],
        [value.func, value.args, value.keywords],
    ),
    type: _open_class,
    **dict.fromkeys(
        (
            *(types.SimpleNamespace, argparse.Namespace, collections.ChainMap),
            *(collections.UserDict, collections.UserList),
        ),
        _open_object,
    ),
}
"""What opens objects, by their class, also of packages that are closed."""
