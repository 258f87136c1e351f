"""What a model is made of on PyTorch: all that Python code of its layers reads.

Keras runs that code in every step there; what is recorded runs it once. So
whatever has changed since, in layers, losses, optimizers or a Trainer, has to
be noticed before the next call.
"""

import argparse
import array
import collections
import contextlib
import dis
import functools
import itertools
import reprlib
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from accumtrainer.keras_api import keras
from accumtrainer.keras_api.rebuild import FROZEN
from accumtrainer.steps.looks import PLAIN
from accumtrainer.steps.torch.gradients import hooks_of

OF_MODELS = {
    "history",
    *(f"stop_{name}" for name in ("training", "evaluating", "predicting")),
    *(f"{name}_function" for name in ("train", "test", "predict")),
    "_eval_epoch_iterator",
    *("_nodes", "_nodes_by_depth"),
}
"""Attributes of models that say how they run or were written, not what they
are."""

OF_LAYERS = {
    "training",
    *("_losses", "_loss_ids", "_losses_override"),
    *("_inbound_nodes", "_outbound_nodes"),
    *("torch_params", "_torch_params"),  # made of variables for who asks
}
"""Such attributes of layers."""

OF_ALL = {"_tracker", "_auto_config", FROZEN}
"""Such attributes of everything that is Keras's."""

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

STEPPED = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""Classes of those packages whose objects count as users' code steps them."""

READS = {"LOAD_GLOBAL", "LOAD_NAME"}
"""Instructions of Python's that read globals; `LOAD_NAME` in classes."""

MOST_BYTES = 2**24
"""How large an array is at most whose numbers are looked at."""

MOST_ITEMS = 100
"""How many items a collection has at most that are looked at one by one."""

CLOSED = {
    *sys.stdlib_module_names,
    *("numpy", "tensorflow", "jax", "jaxlib"),
    *("wandb", "mlflow", "tensorboard", "tensorboardX", "trackio", "tqdm"),
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
        List whose order stays while nothing changes. What is `None` is left
        out of layers, and what is `False` of Keras's own, as Keras adds such
        attributes at times.
    """
    return [thing for _, itself in _walk(owners) for thing in itself]


def describe_attribute(owners: list[Any], position: int) -> str:
    """Describe what one of the items of `attributes_of` says.

    Args:
        owners: as there.
        position: index of the item.

    Returns:
        The class and the attribute where they are known: `Settings.step`.
    """
    opened = list(_walk(owners))
    places = itertools.accumulate(len(itself) for _, itself in opened)
    index = next(i for i, end in enumerate(places) if position < end)
    position -= sum(len(itself) for _, itself in opened[:index])
    value, itself = opened[index]
    if value is None:
        return f"something that is {reprlib.repr(itself[0])} by now"
    if position and hasattr(value, "__dict__"):
        # Names stand before what is plain, and for what is not.
        names = [v for v in itself[1 : position + 1] if isinstance(v, str)]
        return ".".join([_name(value), *names[-1:]])
    return next(
        (
            f"{_name(owner)}.{name}"
            for owner, _ in opened
            for name, held in getattr(owner, "__dict__", {}).items()
            if held is value
        ),
        _name(value),
    )


def _name(value: Any) -> str:
    """Name a class or a function, or the class of an object."""
    return getattr(value, "__qualname__", type(value).__qualname__)


def objects_of(owners: list[Any]) -> list[Any]:
    """List what is opened and of users' code: each object and class once."""
    return [value for value, _ in _walk(owners) if _is_of_users(value)]


def opened_of(owners: list[Any], kind: type, closed: Any) -> list[Any]:
    """List what is opened and of a class, each object once.

    Args:
        owners: what is opened.
        kind: the class.
        closed: what is not opened.
    """
    walk = _walk(owners, {id(closed)})
    return [value for value, _ in walk if isinstance(value, kind)]


def _is_of_users(value: Any) -> bool:
    """Whether it has attributes that users' code changes.

    Nothing is asked of the object itself, which may be a module that loads once
    it is asked.
    """
    kind: Any = type(value)
    if isinstance(value, type):
        return not _is_known(value.__module__)
    if isinstance(value, types.FunctionType):
        return not _is_known(value.__globals__.get("__name__"))
    if OPENED.get(kind) is _open_object:
        return True
    has_attributes = kind.__dictoffset__ != 0 or bool(_slots(kind))
    is_known = _is_known(kind.__module__) and not issubclass(kind, STEPPED)
    return has_attributes and not is_known


def _walk(
    owners: list[Any], closed: Iterable[int] = ()
) -> Iterator[tuple[Any, list[Any]]]:
    """Open objects, what they keep, and so on.

    Args:
        owners: where it begins.
        closed: ids of objects that stay closed.

    Yields:
        Pairs: what is opened, or `None`, and what stands for it.
    """
    kinds: dict[type, Any] = {}
    known = set(closed)
    left: list[Any] = [owners]
    while left:
        value = left.pop()
        kind = type(value)
        if kind not in kinds:
            kinds[kind] = _how_to_open(kind)
        if kinds[kind] is None or id(value) in known:
            yield None, [value]
        else:
            known.add(id(value))
            itself, parts = kinds[kind](value)
            yield value, itself
            left += parts


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
            is_known = _is_known(kind.__module__)
            return opened if is_known else _with_attributes(opened)
    # A Trainer, or what watches one, tells what is under way.
    is_ours = _package(kind.__module__) == "accumtrainer"
    is_ours = is_ours and not issubclass(kind, torch.nn.Module)
    is_closed = is_ours or _package(kind.__module__) in CLOSED
    return None if is_closed else _open_object


def _with_attributes(opened: Callable[[Any], Opened]) -> Callable:
    """Open also what an object of a subclass keeps as attributes."""

    def open_both(value: Any) -> Opened:
        one, other = opened(value), _open_object(value)
        return [*one[0], *other[0]], [*one[1], *other[1]]

    return open_both


def _package(module: Any) -> str:
    """Return the package of a module, "" where what says so is no name.

    Of a class that Cython has made it is not.
    """
    return module.partition(".")[0] if isinstance(module, str) else ""


def _open_object(owner: Any) -> Opened:
    kind: Any = type(owner)
    itself, parts = [owner], [kind]
    is_layer = isinstance(owner, torch.nn.Module)
    hidden = OF_ALL | (OF_LAYERS if is_layer else _set_by_us(kind))
    if isinstance(owner, keras.Model):
        hidden = hidden | OF_MODELS
    is_keras = _package(type(owner).__module__) == "keras"
    for name, value in kept_in(owner):
        if name in hidden or (is_layer and value is None):
            continue
        if value is False and is_keras:
            continue
        if is_layer and name == "_modules":
            found = {k: v for k, v in value.items() if k not in hidden}
            itself += found
            parts += found.values()
            continue
        if type(value) in PLAIN or value is None or isinstance(value, bool):
            itself += (name, value)
        elif type(value) not in EMPTY or value:
            itself.append(name)
            parts.append(value)
    return itself, parts


def kept_in(owner: Any) -> Iterator[tuple[str, Any]]:
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


@functools.lru_cache(maxsize=1000)
def _set_by_us(kind: type) -> set[str]:
    """List the attributes that a class has of a Trainer or a callback."""
    return {
        instruction.argval
        for one in kind.__mro__
        for function in vars(one).values()
        if _package(one.__module__) == "accumtrainer"
        if isinstance(function, types.FunctionType)
        for instruction in dis.get_instructions(function)
        if instruction.opname == "STORE_ATTR"
    }


def _open_class(owner: type) -> Opened:
    """List what a class says, if users have written it."""
    if _is_known(owner.__module__):
        return [owner], []
    return [owner], [*owner.__bases__, *vars(owner).values()]


def _open_function(function: types.FunctionType) -> Opened:
    """List what a function reads from outside, if users have written it."""
    code = function.__code__
    if not _is_of_users(function):
        # A decorator of a library's keeps there what it was given.
        return [function, code], [vars(function)]
    return [function, code], [
        *(function.__defaults__, function.__kwdefaults__, vars(function)),
        *read_from_outside(function).values(),
    ]


def read_from_outside(function: types.FunctionType) -> dict[str, Any]:
    """Look up the globals that a function reads, and what is in its closure."""
    code, known = function.__code__, function.__globals__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {
        **{name: known[name] for name in _names(code) if name in known},
        **{n: cell.cell_contents for n, cell in cells if cell != EMPTY_CELL},
    }


def _is_known(module: Any) -> bool:
    """Whether nobody changes classes and functions of it, or what they read."""
    package = _package(module)
    return package in NOT_OF_USERS or package in CLOSED


@functools.lru_cache(maxsize=10_000)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """List the names of globals in a function and in those within it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    names = [i.argval for i in dis.get_instructions(code) if i.opname in READS]
    return tuple(
        dict.fromkeys([*names, *(n for c in inner for n in _names(c))])
    )


def _open_dict(value: dict) -> Opened:
    one, other = _summed_up(dict.values(value)), _summed_up(dict.keys(value))
    return [*one[0], *other[0], *other[1]], one[1]


def _summed_up(items: Iterable[Any]) -> Opened:
    """Let one number stand for many plain items, as for a vocabulary."""
    items = list(items)
    if len(items) > MOST_ITEMS and set(map(type, items)) <= set(PLAIN):
        # Of -1 and -2 Python's hash is the same.
        return [len(items), hash(repr(items))], []
    return [len(items)], items


def _open_array(value: np.ndarray) -> Opened:
    """Look at an array's numbers: it may be written to, as a mask."""
    if value.nbytes > MOST_BYTES:
        return [value], []
    if value.dtype.hasobject:
        return [str(value.shape)], value.ravel().tolist()
    checksum = zlib.crc32(value.tobytes())
    return [f"{value.dtype.str} {value.shape} {checksum}"], []


OPENED: dict[type, Callable[[Any], Opened]] = {
    np.ndarray: _open_array,
    **dict.fromkeys(
        (bytearray, array.array),
        lambda value: ([value, zlib.crc32(value)], []),
    ),
    dict: _open_dict,
    types.MappingProxyType: lambda value: _open_dict(dict(value)),
    **dict.fromkeys(
        (list, tuple, set, frozenset, collections.deque),
        _summed_up,
    ),
    keras.Variable: lambda v: (
        [v],
        [v.regularizer, v.constraint, *hooks_of(v.value)],
    ),
    types.FunctionType: _open_function,
    types.MethodType: lambda value: ([], [value.__self__, value.__func__]),
    types.BuiltinMethodType: lambda value: ([value], [value.__self__]),
    property: lambda value: ([value], [value.fget]),
    functools.cached_property: lambda value: ([value], [value.func]),
    weakref.ref: lambda value: ([value], [value()]),
    threading.Event: lambda value: ([value, value.is_set()], []),
    type(_slots): lambda value: ([value], [value.__wrapped__]),  # `lru_cache`
    **dict.fromkeys(
        (staticmethod, classmethod),
        lambda value: ([value], [value.__func__]),
    ),
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
