"""Numbers by name, fetched from the device when somebody looks."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from accumtrainer.keras_api import keras, ops
from accumtrainer.keras_api.arrays import to_array

# A read-only dictionary in C may look at the size of a `Logs` without asking
# it: this entry keeps that size above zero until the numbers are fetched.
_UNREAD = object()
_OF_THE_HOST = (bool, int, float, str, type(None))


def _reading(name: str) -> Callable[..., Any]:
    """Make a method that fetches the numbers, then does what `dict` does."""
    method = getattr(dict, name)

    @functools.wraps(method)
    def read_first(self: "Logs", *args: Any) -> Any:
        self._read()
        return method(self, *args)

    return read_first


class Logs(dict):
    """Numbers by name, fetched from the device when somebody looks.

    Writing does not count as looking. What was written stays written when
    the other numbers arrive. Names known from the start, or written, are
    answered without fetching. After the fetch this is an ordinary dict, which
    belongs to whoever holds it.

    Args:
        fetch: function without arguments that returns a dict of scalars or
            arrays by name. Called at most once. Scalar tensors become Python
            numbers, others NumPy arrays. `None` if nothing has to be fetched.
        extra: dict of numbers the host knows already.

    Examples:
        >>> logs = Logs(lambda: {"loss": np.float32(0.5)}, {"updates": 3})
        >>> logs["lr"] = 0.1
        >>> dict(logs)
        {'loss': 0.5, 'updates': 3, 'lr': 0.1}
    """

    __slots__ = ("_fetch",)

    def __init__(
        self,
        fetch: Callable[[], dict[str, Any]] | None = None,
        extra: Any = None,
    ):
        super().__init__(extra or {})
        self._fetch = fetch
        if fetch is not None:
            super().__setitem__(_UNREAD, None)

    def _read(self) -> None:
        if self._fetch is None:
            return
        fetched = self._fetch()
        numbers = {name: to_number(value) for name, value in fetched.items()}
        self._fetch = None
        super().__delitem__(_UNREAD)
        numbers.update(super().items())
        super().clear()
        super().update(numbers)

    # CPython copies a dict without calling any method, except where a
    # subclass has an `__iter__` of its own: `dict(logs)` and `{**logs}` are
    # right because of it.
    __iter__ = _reading("__iter__")
    __reversed__ = _reading("__reversed__")
    __len__ = _reading("__len__")
    __repr__ = _reading("__repr__")
    __delitem__ = _reading("__delitem__")
    keys = _reading("keys")
    values = _reading("values")
    items = _reading("items")
    pop = _reading("pop")
    popitem = _reading("popitem")
    setdefault = _reading("setdefault")

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.keys()

    def __getitem__(self, name: str) -> Any:
        if not super().__contains__(name):
            self._read()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __eq__(self, other: object) -> bool:
        return dict(self) == (dict(other) if type(other) is Logs else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def lazy_copy(self) -> "Logs":
        """Return a copy that fetches for itself, for another thread."""
        copy = Logs(self._fetch)
        super(Logs, copy).update(super().items())
        return copy

    def clear(self) -> None:
        self._fetch = None
        super().clear()

    def __reduce__(self) -> tuple[type, tuple]:
        return dict, (dict(self),)


def to_number(value: Any) -> Any:
    """Bring one logged value to the host.

    Args:
        value: tensor, array, or a value of the host.

    Returns:
        A Python number for a scalar tensor, a NumPy array for any other
        tensor, everything else unchanged.

    Examples:
        >>> to_number(np.float32(0.25)), to_number(np.int64(3))
        (0.25, 3)
    """
    # TensorFlow takes 45 us to say that a float is no tensor.
    if isinstance(value, _OF_THE_HOST):
        return value
    if not (ops.is_tensor(value) or isinstance(value, np.ndarray | np.generic)):
        return value
    if len(value.shape):
        return to_array(value)
    dtype = keras.backend.standardize_dtype(value.dtype)
    if dtype == "bool":
        return bool(value)
    return int(value) if keras.backend.is_int_dtype(dtype) else float(value)


def in_order_of_keras(
    trained: dict[str, Any], validated: dict[str, Any]
) -> dict[str, Any]:
    """Join the logs of an epoch in the order in which Keras tells them.

    It sorts them all, but leaves the results of a metric with several together,
    in the place that the metric's own name has.

    Args:
        trained: the epoch's numbers by name, in order, and then those of ours.
        validated: those of its validation, `val_loss` and so on.

    Examples:
        >>> logs = in_order_of_keras({"loss": 1, "z_loss": 2}, {"val_loss": 3})
        >>> list(logs)
        ['loss', 'val_loss', 'z_loss']
    """
    names = list(trained)
    first = min(validated, default="")
    # A metric may be named like a number of ours, and is validated then.
    before = [
        place
        for place, name in enumerate(names, start=1)
        if name < first
        and (not is_of_windows(name) or f"val_{name}" in validated)
    ]
    place = max(before, default=0)
    names[place:place] = sorted(validated)
    logs = trained | validated
    return {name: logs[name] for name in names}


def is_learning_rate(name: str) -> bool:
    """Say whether a name in the logs is that of a learning rate.

    Where there are several optimizers, each has one.

    Examples:
        >>> is_learning_rate("learning_rate_adam"), is_learning_rate("loss")
        (True, False)
    """
    return name == "learning_rate" or name.startswith("learning_rate_")


OF_WINDOWS = (
    "applied",
    "clipped_gradient_norm",
    "gradient_norm",
    "loss_scale",
    "skipped_updates",
    "updates",
    "weight",
)
"""What the logs say of a window beside losses, metrics and learning rates."""


def is_of_windows(name: str) -> bool:
    """Say whether a name in the logs is that of what a window is told by.

    Examples:
        >>> is_of_windows("gradient_norm"), is_of_windows("accuracy")
        (True, False)
    """
    return name in OF_WINDOWS or is_learning_rate(name)
