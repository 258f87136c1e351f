"""What a model is made of on PyTorch: all that Python code of its layers reads.

Keras runs that code in every step there; what is recorded runs it once. So
whatever has changed since, in layers, losses, optimizers or a Trainer, has to
be noticed before the next call.
"""

import argparse
import collections
import types
import zlib
from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np
import torch

from accumtrainer.keras_api import keras
from accumtrainer.steps.looks import PLAIN

OF_RUNNING = {
    "training",
    "history",
    *(f"stop_{name}" for name in ("training", "evaluating", "predicting")),
    *(f"{name}_function" for name in ("train", "test", "predict")),
    "_eval_epoch_iterator",
    *("_losses", "_loss_ids", "_losses_override"),
    *("_inbound_nodes", "_outbound_nodes", "_nodes", "_nodes_by_depth"),
    *("_tracker", "_auto_config"),
}
"""Attributes that say how a model runs or was written, not what it is."""

LEAVES = (
    *(types.ModuleType, torch.Tensor),
    *(keras.initializers.Initializer, keras.KerasTensor, keras.InputSpec),
)
"""Into these nobody looks: what matters is which one it is."""

EMPTY = {list, dict, set, collections.OrderedDict}
"""Where these are empty, it is as if they were not there."""

NOT_OF_USERS = ("accumtrainer", "builtins", "keras", "torch")
"""Packages whose classes nobody changes."""


def attributes_of(owners: list[Any]) -> list[Any]:
    """List what objects keep as attributes, what that keeps, and so on.

    Hooks of modules, regularizers of variables and what a model was compiled
    with are among it, and what users' classes say.

    Args:
        owners: layers, for the most part.

    Returns:
        List whose order stays while nothing changes. What is `None` or `False`
        is left out, as Keras adds such attributes to layers at times.
    """
    classes = [o if isinstance(o, type) else type(o) for o in owners]
    packages = {_package(kind) for one in classes for kind in one.__mro__}
    kinds: dict[type, Any] = {}
    found: list[Any] = []
    known: set[int] = set()
    left: list[Any] = [owners]
    while left:
        value = left.pop()
        kind = type(value)
        if kind not in kinds:
            kinds[kind] = _how_to_open(kind, packages)
        if kinds[kind] is None or id(value) in known:
            found.append(value)
        else:
            known.add(id(value))
            itself, parts = kinds[kind](value)
            found += itself
            left += parts
    return found


def _how_to_open(
    kind: type, packages: Container[str]
) -> Callable[[Any], tuple[list[Any], Iterable[Any]]] | None:
    """Choose what tells what stands for an object, and which parts it has.

    Args:
        kind: its class.
        packages: those whose classes matter, beside Python's own.

    Returns:
        Function, or `None` where the object is all there is.
    """
    if issubclass(kind, LEAVES) or kind in PLAIN:
        return None
    for parent, opened in OPENED.items():
        if issubclass(kind, parent):
            return opened
    is_open = kind.__dictoffset__ and _package(kind) in packages
    return _open_object if is_open else None


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _open_object(owner: Any) -> tuple[list[Any], list[Any]]:
    itself, parts = [owner], [type(owner)]
    for name, value in vars(owner).items():
        if value is None or value is False or name in OF_RUNNING:
            continue
        if type(value) in PLAIN or value is True:
            itself += (name, value)
        elif type(value) not in EMPTY or value:
            itself.append(name)
            parts.append(value)
    return itself, parts


def _open_class(owner: type) -> tuple[list[Any], list[Any]]:
    """List what a class says, if users have written it."""
    if _package(owner) in NOT_OF_USERS:
        return [owner], []
    return [owner], [*owner.__bases__, *vars(owner).values()]


OPENED = {
    # Keras makes this of a layer's parameters anew.
    torch.nn.ParameterDict: lambda value: ([], list(value.values())),
    # As a mask or a table that a layer has made: it may be written to.
    np.ndarray: lambda value: ([value, zlib.crc32(value.tobytes())], []),
    dict: lambda value: (list(dict.keys(value)), list(dict.values(value))),
    **dict.fromkeys(
        (list, tuple, set, frozenset, collections.deque),
        lambda value: ([len(value)], value),
    ),
    keras.Variable: lambda v: ([v], [v.regularizer, v.constraint]),
    types.FunctionType: lambda value: ([value, value.__code__], []),
    type: _open_class,
    **dict.fromkeys((types.SimpleNamespace, argparse.Namespace), _open_object),
}
"""What stands for an object, and the parts to go on with, by its class."""
