"""What a checkpoint keeps of callbacks, those of Keras included."""

import copy
import enum
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import xxhash

from accumtrainer import errors
from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Variable
from accumtrainer.observers.callback import Callback
from accumtrainer.observers.dispatcher import WATCHERS
from accumtrainer.saving.snapshot import (
    copy_to_host,
    encode,
    find_variables,
    on_host,
)

GIVEN = ("params", "model", "_model", "trainer", "validation_data")
"""Attributes that whoever calls a callback has put there."""

CONTAINERS = (list, tuple, dict, set, deque, np.ndarray)
"""What holds data as a rule; other objects are tools: files, threads, plots."""


class CallbackStates:
    """Reads and restores the state of the callbacks of one run.

    A callback with `has_state` says itself what to keep. Of any other the
    attributes are kept that are plain values, arrays or tensors, and the values
    of variables in them, which have changed since training began, and a warning
    names a changed one that cannot be: the patience that `EarlyStopping` has
    left, not the patience it was given.

    Args:
        callbacks: callbacks for which `on_train_begin` has been called.
        saved: lists the variables that are saved anyway.
        will_set: whether `set` will be called; what there is now is copied
            for it.
    """

    def __init__(
        self,
        callbacks: Any,
        *,
        saved: Callable[[], Iterable[Variable]] = tuple,
        will_set: bool = True,
    ):
        self._callbacks = _keyed(callbacks)
        self._saved = saved
        self._begun = {
            key: _written(self._attributes(callback))
            for key, callback in self._callbacks.items()
            if not _has_state(callback)
        }
        self._values = {
            key: self._values_of(key, written)
            for key, written in self._begun.items()
            if will_set
        }
        self._named: set[str] = set()

    def get(self) -> dict[str, dict[str, Any]]:
        """Return the states, dict from a callback's key to a dict.

        Callbacks may go on while it is written.
        """
        states = {}
        for key, callback in self._callbacks.items():
            if _has_state(callback):
                states[key] = _copied(callback.get_state())
            else:
                changed = self._changed(key)
                self._warn_of_lost(key, changed)
                states[key] = self._values_of(key, changed)
        return {key: state for key, state in states.items() if state}

    def set(self, states: dict[str, Any]) -> None:
        """Restore states; callbacks that have none there begin anew.

        Args:
            states: what `get` returned for such callbacks.
        """
        for key, callback in self._callbacks.items():
            if _has_state(callback):
                if key in states:
                    callback.set_state(states[key])
                continue
            values = self._values[key]
            changed = self._changed(key).keys() & values.keys()
            state = {name: values[name] for name in changed}
            state |= states.get(key, {})
            variables = self._variables(callback)
            for name, value in state.items():
                variable = variables.get(name)
                if name[0] != "/":
                    _put_back(callback, name, state)
                elif variable is not None and variable.shape == value.shape:
                    variable.assign(value)
                else:
                    called = f"{type(callback).__name__}.{name[1:]}"
                    warnings.warn(
                        errors.NOT_PUT_BACK.format(name=called), stacklevel=2
                    )

    def keys_of(self, callbacks: Iterable[Any]) -> list[str]:
        """List the keys of some of the callbacks."""
        ids = set(map(id, callbacks))
        return [key for key, one in self._callbacks.items() if id(one) in ids]

    def of_keys(self, keys: Iterable[str]) -> list[Any]:
        """List the callbacks that have these keys."""
        return [self._callbacks[k] for k in keys if k in self._callbacks]

    def _changed(self, key: str) -> dict[str, Any]:
        """Write what has become another than when training began."""
        begun = self._begun[key]
        attributes = self._attributes(self._callbacks[key])
        return {
            name: written
            for name, written in _written(attributes).items()
            if name not in begun or begun[name] != written
        }

    def _values_of(self, key: str, written: dict[str, Any]) -> dict[str, Any]:
        """Copy the attributes that could be written."""
        attributes = self._attributes(self._callbacks[key])
        return {
            name: _copied(attributes[name])
            for name, content in written.items()
            if content is not None
        }

    def _attributes(self, callback: Any) -> dict[str, Any]:
        """Return its attributes, and by place the values of variables."""
        variables = self._variables(callback)
        values = copy_to_host(list(variables.values())).values()
        read = dict(zip(variables, values, strict=True))
        return _own_attributes(callback) | read

    def _variables(self, callback: Any) -> dict[str, Variable]:
        """Find variables in its attributes that are not saved anyway.

        Their places begin with a slash, as no attribute's name does.
        """
        saved = set(map(id, self._saved()))
        found = find_variables(_own_attributes(callback))
        return {place: v for place, v in found if id(v) not in saved}

    def _warn_of_lost(self, key: str, changed: dict[str, Any]) -> None:
        """Name, once, what has changed and cannot be saved."""
        callback = self._callbacks[key]
        # Those that know nothing of us, as TensorBoard's, hold files there.
        is_stock = type(callback).__module__.partition(".")[0] in WATCHERS
        for name, written in changed.items():
            value = vars(callback).get(name)
            called = f"{type(callback).__name__}.{name.lstrip('/')}"
            was_data = self._begun[key].get(name) not in (None, NOTHING)
            is_tool = is_stock and name[0] == "_"
            if called in self._named:
                continue
            if name[0] == "/":
                new = errors.NEW_NOT_SAVED.format(name=called)
                said = [] if name in self._begun[key] else [new]
            elif written is not None:
                said = [
                    errors.KIND_NOT_SAVED.format(name=called, kind=kind)
                    for kind in sorted(set(_kinds_inside(value)))
                ]
            elif not is_tool and (was_data or isinstance(value, CONTAINERS)):
                said = [errors.NOT_SAVED.format(name=called)]
            else:
                said = []
            for line in said:
                self._named.add(called)
                warnings.warn(line, stacklevel=2)


def savable(values: dict[str, Any]) -> dict[str, Any]:
    """Copy those of some values that a checkpoint can keep."""
    return {
        name: _copied(value)
        for name, value in values.items()
        if _fingerprint(value, name) is not None
    }


def announce_states(callbacks: Any, states: dict[str, Any]) -> None:
    """Tell callbacks with `has_state` what they will go on from.

    Args:
        callbacks: callbacks for which `on_train_begin` has not been called.
        states: what `CallbackStates.get` returned for such callbacks.
    """
    for key, callback in _keyed(callbacks).items():
        if _has_state(callback) and key in states:
            callback.set_state(states[key])


def _keyed(callbacks: Any) -> dict[str, Any]:
    """Give each callback a key: its class and which of that class it is."""
    keyed: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] = counts.get(name, -1) + 1
        keyed[f"{name}-{counts[name]}"] = callback
    return keyed


def _has_state(callback: Any) -> bool:
    return isinstance(callback, Callback) and callback.has_state


def _own_attributes(callback: Any) -> dict[str, Any]:
    held = getattr(callback, "__dict__", {})
    return {name: v for name, v in held.items() if name not in GIVEN}


def _written(attributes: dict[str, Any]) -> dict[str, Any]:
    """Write the attributes: `None` for one that cannot be saved."""
    return {
        name: _fingerprint(value, name) for name, value in attributes.items()
    }


def _fingerprint(value: Any, name: str) -> Any:
    arrays: dict[str, np.ndarray] = {}
    try:
        written = encode(value, arrays, name)
    except (TypeError, RecursionError):  # it may hold itself
        return None
    return written, {k: (v.shape, _digest(v)) for k, v in arrays.items()}


NOTHING = _fingerprint(None, "")
"""How an attribute is written that holds nothing yet."""


def _kinds_inside(value: Any) -> Iterator[str]:
    """Name what a container holds that is read back as something plainer."""
    if not isinstance(value, CONTAINERS) or isinstance(value, np.ndarray):
        return
    for part in value.values() if isinstance(value, dict) else value:
        is_named = hasattr(part, "_make") and not isinstance(part, Batch)
        if is_named or isinstance(part, enum.Enum | defaultdict | Counter):
            yield type(part).__name__
        yield from _kinds_inside(part)


def _put_back(callback: Any, name: str, state: dict[str, Any]) -> None:
    """Set an attribute to what was saved, in the kind of what is there.

    A list, dict, set or array is filled anew: whoever has given it to the
    callback looks there. Of one that the class holds, or another attribute that
    has become another, a copy is filled.
    """
    held, value = vars(callback), state[name]
    there = held.get(name, getattr(callback, name, None))
    is_shared = name not in held or any(
        _fingerprint(state.get(other, there), "") != _fingerprint(value, "")
        for other, known in held.items()
        if known is there and other != name
    )
    if isinstance(there, CONTAINERS) and is_shared:
        there = copy.copy(there)
    if _fill(there, value):
        value = there
    elif isinstance(there, tuple) and hasattr(there, "_make"):
        value = there._make(value)
    elif isinstance(there, enum.Enum):
        value = type(there)(value)
    elif ops.is_tensor(there) and isinstance(value, np.ndarray):
        value = ops.convert_to_tensor(value)
    setattr(callback, name, value)


def _fill(there: Any, value: Any) -> bool:
    """Give something the content of a value, if it is one to be filled."""
    if isinstance(there, list) and isinstance(value, list):
        there[:] = value
    elif isinstance(there, dict) and isinstance(value, dict):
        there.clear()
        there.update(value)
    elif isinstance(there, set) and isinstance(value, set):
        there.clear()
        there.update(value)
    elif isinstance(there, deque) and isinstance(value, deque):
        there.clear()
        there.extend(value)
    elif isinstance(there, np.ndarray) and isinstance(value, np.ndarray):
        fits = there.shape == value.shape and there.dtype == value.dtype
        if not (fits and there.flags.writeable):
            return False
        there[...] = value
    else:
        return False
    return True


def _digest(array: np.ndarray) -> bytes:
    return xxhash.xxh3_128_digest(array.reshape(-1).view(np.uint8).data)


def _copied(value: Any) -> Any:
    """Copy arrays and tensors, and what holds them; leave all else.

    A list may be Keras's own, of a model: copied as what it is, it would take
    the model with it. What cannot be saved is refused where it is written.
    """
    value = on_host(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copied(v) for v in value]
    if type(value) is tuple:
        return tuple(_copied(v) for v in value)
    if isinstance(value, set | deque):
        return copy.copy(value)
    return value
