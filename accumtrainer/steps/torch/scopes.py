"""Scopes in which Keras variables have tensors of PyTorch as their values.

A variable of Keras on PyTorch is a parameter, whose memory is written to. What
was read from it before is then another number, in a tensor as in its views. In
these scopes a variable that is assigned gets another tensor instead, and its
memory is written to when all has been computed. An optimizer alone may change
tensors in place, those of what it optimizes.

Variables may be the same parameter, as those of two layers with one module of
PyTorch in them. In these scopes they have one value under one *key*.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from accumtrainer.keras_api import keras, ops
from accumtrainer.keras_api.types import Optimizer, Tensor, Variable


class Memory:
    """The memory of variables, as tensors that have no gradient.

    Args:
        variables: all that a program reads or changes.
        tensors: in their place, while a program is recorded.

    Attributes:
        tensors: in the order of the variables.
        missing: further variables that were read while a program is recorded,
            by id.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        tensors: Iterable[Tensor] | None = None,
    ):
        self._is_recording = tensors is not None
        self.missing: dict[int, Variable] = {}
        values = [variable.value for variable in variables]
        keys = list(map(id, values))
        self._keys = dict(zip(map(id, variables), keys, strict=True))
        self._parameters = dict(zip(keys, values, strict=True))
        if tensors is None:
            tensors = (value.detach() for value in values)
        self.tensors = list(tensors)
        self._tensors = dict(zip(keys, self.tensors, strict=True))
        self._storages = {t.untyped_storage() for t in self.tensors}
        if self._is_recording:
            _of_values.update(self._storages)

    def key(self, variable: Variable) -> int:
        """Return what a variable shares with all of the same parameter."""
        return self._keys.get(id(variable), id(variable))

    def get_current_value(self, variable: Variable) -> Tensor | None:
        """Return a variable's memory, if it is known."""
        key = self.key(variable)
        known = self._tensors.get(key)
        if known is None and self._is_recording:
            self.missing[id(variable)] = variable
            # What has no numbers while it is recorded will do.
            return ops.zeros(variable.shape, variable.dtype)
        parameter = self.parameter(variable)
        if known is None or parameter is None:
            return known
        if known.data_ptr() != parameter.data_ptr():
            # A layer has given it other memory.
            known = self._tensors[key] = parameter.detach()
            self._storages.add(known.untyped_storage())
        return known

    def parameter(self, variable: Variable) -> Tensor | None:
        """Return the parameter of PyTorch that a variable is, if it is known.

        A module of PyTorch computes with it, whatever values scopes give.
        """
        return None if self._is_recording else self.original(variable)

    def original(self, variable: Variable) -> Tensor | None:
        """Return the same, also while something else is recorded for it."""
        return self._parameters.get(self.key(variable))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a variable's memory, or a part of it."""
        return tensor.untyped_storage() in self._storages


class ToldRate:
    """A learning rate that a function tells, in the place of a variable.

    Its value is asked for before each run of what is recorded.

    Args:
        optimizer: has the function.
    """

    shape = ()

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self.dtype = keras.config.floatx()

    @property
    def value(self) -> Tensor:
        """What the function tells by now, a scalar."""
        rate = ops.convert_to_tensor(self._optimizer.learning_rate)
        return ops.cast(rate, self.dtype)


class Values(Protocol):
    """Where the values of variables come from: memory, or another scope."""

    def get_current_value(self, variable: Variable) -> Tensor | None:
        """Return the value of a variable, if it is known."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory that may be written to."""


class Pending(keras.StatelessScope):
    """A scope in which variables that are assigned get other tensors.

    Args:
        before: where the values are that they have before; `None` for those
            of the scope around this one.
        given: pairs of a variable and its value in here.
    """

    def __init__(
        self,
        before: Values | None,
        given: Iterable[tuple[Variable, Tensor]] = (),
    ):
        super().__init__(collect_losses=True)
        self._before = before
        self._pairs = list(given)
        self._given: dict[int, Tensor] = {}
        self._updates: dict[int, tuple[Variable, Tensor]] = {}

    def __enter__(self) -> "Pending":
        super().__enter__()
        if self._before is None:
            self._before = self.original_scope
        self._given = {self.key(v): tensor for v, tensor in self._pairs}
        _open.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _open.pop()
        super().__exit__(*error)

    def key(self, variable: Variable) -> int:
        """Return what a variable shares with all of the same parameter."""
        before = self._before
        if isinstance(before, (Memory, Pending)):
            return before.key(variable)
        return id(variable)

    def get_current_value(self, variable: Variable) -> Tensor | None:
        """Return the value a variable has in here, if it is known."""
        key = self.key(variable)
        if key in self._updates:
            return self._updates[key][1]
        if key in self._given:
            return self._given[key]
        before = self._before
        return None if before is None else before.get_current_value(variable)

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        """Give a variable, the first of a pair, another value."""
        variable, value = update
        key = self.key(variable)
        # Keras writes numbers to memory that is the variable's own.
        value = value.detach().clone(memory_format=torch.contiguous_format)
        leaf = self._given.get(key)
        if leaf is not None and leaf.requires_grad:
            value = value + (leaf - leaf.detach())
        self._give(key, variable, value)

    def _give(self, key: int, variable: Variable, value: Tensor) -> None:
        with contextlib.suppress(RuntimeError):  # a wrapper has no memory
            _of_values.add(value.untyped_storage())
        self._updates[key] = variable, value

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory that may be written to."""
        storage = tensor.untyped_storage()
        values = (value for _, value in self._updates.values())
        if any(value.untyped_storage() is storage for value in values):
            return True
        return self._before is not None and self._before.holds(tensor)

    def parameter(self, variable: Variable) -> Tensor | None:
        """Return the parameter that a variable is, unless it was assigned."""
        key = self.key(variable)
        if key in self._updates or key in self._given:
            return None
        before = self._before
        if not isinstance(before, (Memory, Pending)):
            return None
        return before.parameter(variable)

    def original(self, variable: Variable) -> Tensor | None:
        """Return the parameter that a variable is, whatever is assigned."""
        before = self._before
        if not isinstance(before, (Memory, Pending)):
            return None
        return before.original(variable)

    def updates(self) -> Iterator[tuple[Variable, Tensor]]:
        """List the variables that were assigned, and their new values."""
        return iter(self._updates.values())

    def renew(self) -> None:
        """Copy given and new values, so that nobody has a hold of them."""
        self._given = {k: value.clone() for k, value in self._given.items()}
        for key, (variable, value) in self._updates.items():
            self._give(key, variable, value.clone())

    def assign(self) -> None:
        """Assign the new values to the variables; the scope has ended."""
        for variable, value in self.updates():
            variable.assign(value.detach())

    def write(self) -> list[tuple[Variable, Tensor]]:
        """Write the new values to where they were read from.

        Returns:
            Pairs of variables whose memory is not known, and their values.
        """
        unknown = []
        for variable, value in self.updates():
            before = self._before
            target = (
                None if before is None else before.get_current_value(variable)
            )
            if target is None:
                unknown.append((variable, value))
            elif target is not value:
                target.copy_(value)
        return unknown


class Repeating(Pending):
    """A scope in which variables keep the values they have, whoever assigns.

    A layer that runs again in here, however often, draws what it has drawn.
    """

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        """Leave a variable as it is."""


class Copied(Pending):
    """A scope in which variables have copies of their values.

    Whatever is changed in place, the values before are still there.
    """

    def get_current_value(self, variable: Variable) -> Tensor | None:
        """Return the value a variable has in here, if it is known."""
        value = super().get_current_value(variable)
        key = self.key(variable)
        if value is None or key in self._updates:
            return value
        self._give(key, variable, value.clone())
        return self._updates[key][1]


def innermost() -> Pending:
    """Return the scope that is open, the last of several, or an empty one."""
    return _open[-1] if _open else Pending(None)


def was_given(tensor: Tensor) -> bool:
    """Whether a scope, open or not, has had a tensor as a variable's value."""
    return tensor.untyped_storage() in _of_values


_open: list[Pending] = []

_of_values: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""The memory of all values that variables have had in scopes, as far as
somebody keeps it: code may keep a value that is no longer the variable's."""
