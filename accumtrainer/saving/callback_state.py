"""What a checkpoint keeps of callbacks, those of Keras included."""

import hashlib
from typing import Any

import numpy as np

from accumtrainer.observers.callback import Callback
from accumtrainer.saving.snapshot import encode

GIVEN = ("params", "model", "_model", "trainer", "validation_data")
"""Attributes that whoever calls a callback has put there."""


class CallbackStates:
    """Reads and restores the state of the callbacks of one run.

    A callback with `has_state` says itself what to keep. Of any other the
    attributes are kept that are plain values or arrays, and have changed since
    training began: the patience that `EarlyStopping` has left, not the
    patience it was given.

    Args:
        callbacks: callbacks for which `on_train_begin` has been called.
    """

    def __init__(self, callbacks: Any):
        self._callbacks = _keyed(callbacks)
        self._begun = {
            key: _plain_attributes(callback)
            for key, callback in self._callbacks.items()
            if not _has_state(callback)
        }

    def get(self) -> dict[str, dict[str, Any]]:
        """Return the states, dict from a callback's key to a dict.

        Callbacks may go on while it is written.
        """
        states = {}
        for key, callback in self._callbacks.items():
            if _has_state(callback):
                states[key] = _copied(callback.get_state())
            else:
                states[key] = self._changed(key, callback)
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
            now = _plain_attributes(callback)
            begun = {k: v for k, v in self._begun[key].items() if k in now}
            for name, (_, value) in begun.items():
                _put_back(callback, name, _copied(value))
            for name, value in states.get(key, {}).items():
                _put_back(callback, name, value)

    def _changed(self, key: str, callback: Any) -> dict[str, Any]:
        begun = self._begun[key]
        return {
            name: value
            for name, (written, value) in _plain_attributes(callback).items()
            if name not in begun or begun[name][0] != written
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


def _plain_attributes(callback: Any) -> dict[str, Any]:
    """Collect `{name: (as written, value)}` of what can be saved."""
    plain = {}
    for name, value in vars(callback).items():
        if name in GIVEN:
            continue
        arrays: dict[str, np.ndarray] = {}
        try:
            written = encode(value, arrays, name)
        except TypeError:
            continue
        content = {k: (v.shape, _digest(v)) for k, v in arrays.items()}
        plain[name] = ((written, content), _copied(value))
    return plain


def _put_back(callback: Any, name: str, value: Any) -> None:
    """Set an attribute; a list or dict that is there keeps being it.

    Whoever has given it to the callback looks there, and a dict may be of a
    kind that makes what is missing.
    """
    there = getattr(callback, name, None)
    if isinstance(there, list) and isinstance(value, list):
        there[:] = value
    elif isinstance(there, dict) and isinstance(value, dict):
        there.clear()
        there.update(value)
    elif isinstance(there, tuple) and hasattr(there, "_make"):
        setattr(callback, name, there._make(value))
    else:
        setattr(callback, name, value)


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(array.tobytes()).digest()


def _copied(value: Any) -> Any:
    """Copy arrays, and lists, tuples and dicts of them; leave all else.

    A list may be Keras's own, of a model: copied as what it is, it would take
    the model with it. What cannot be saved is refused where it is written.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copied(v) for v in value]
    if type(value) is tuple:
        return tuple(_copied(v) for v in value)
    return value
