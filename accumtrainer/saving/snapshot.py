"""Everything a training changes, copied to the host, and put back."""

import base64
import io
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from accumtrainer.data.batches import Batch, map_leaves
from accumtrainer.data.reading import is_text
from accumtrainer.keras_api import by_path, keras, ops
from accumtrainer.keras_api.types import Nest, Variable

PARTS = (
    "model",
    "optimizer",
    "frozen",
    "state",
    "tracked",
    "losses",
    "streams",
    "metrics",
    "means",
)
"""Groups of variables that last from one update to the next.

`frozen` is what the optimizer keeps of variables that are frozen; `state` are
the Trainer's counters, loss scale and random state; `losses` what losses and
their weights keep in variables; `streams` the random states that belong to
nobody; `means` the running means of an epoch.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Everything a training changes, as it was at one moment.

    Args:
        variables: dict from a part (one of `PARTS`) to a dict from a
            variable's path to its value, a NumPy array, in their order.
        progress: dict of the counters, see `Progress`.
        position: dict, see `Position`; `None` outside a fit.
        source: dict, what the data source knows besides; `None` outside.
        run: dict of what the loop remembers of this fit; `None` outside.
        callbacks: dict from a callback's key to its state.
        about: dict of facts that do not change: versions, names, sizes.
    """

    variables: dict[str, dict[str, np.ndarray]]
    progress: dict[str, Any]
    position: dict[str, Any] | None
    source: Any
    run: Any
    callbacks: dict[str, Any]
    about: dict[str, Any]

    @property
    def scales_loss(self) -> bool:
        """Whether the loss was scaled; older checkpoints do not say."""
        return self.about.get("scales_loss", True)

    def pack(self) -> tuple[Any, dict[str, np.ndarray]]:
        """Take the snapshot apart into what files hold.

        Returns:
            Pair: nest of what JSON knows; dict from name to NumPy array.
        """
        arrays: dict[str, np.ndarray] = {}
        for part, values in self.variables.items():
            for index, (path, value) in enumerate(values.items()):
                arrays[f"{part}/{index:05d}/{path}"] = value
        plain = {
            field.name: encode(getattr(self, field.name), arrays, field.name)
            for field in fields(self)
            if field.name != "variables"
        }
        return plain, arrays

    @classmethod
    def unpack(cls, plain: Any, arrays: dict[str, np.ndarray]) -> "Snapshot":
        """Put together what `pack` took apart."""
        variables: dict[str, dict[str, np.ndarray]]
        variables = {part: {} for part in PARTS}
        for name in sorted(arrays):
            part, _, rest = name.partition("/")
            if part in variables:
                variables[part][rest.partition("/")[2]] = arrays[name]
        values = {name: decode(value, arrays) for name, value in plain.items()}
        return cls(variables=variables, **values)


@dataclass(frozen=True, slots=True)
class Blank:
    """An array of which only shape and dtype matter; read back as zeros."""

    shape: tuple[int, ...]
    dtype: str


def blank(nest: Nest) -> Nest:
    """Forget the values in a nest of arrays."""
    return map_leaves(lambda a: Blank(np.shape(a), str(a.dtype)), nest)


def _zeros(shape: Sequence[int], dtype: str) -> np.ndarray:
    return np.zeros(shape, dtype) if dtype != "object" else np.full(shape, "")


def _text(shape: Sequence[int], dtype: str, cells: list[Any]) -> np.ndarray:
    return np.array(cells, dtype).reshape(shape)


def _is_known_to_files(dtype: np.dtype) -> bool:
    """Whether files of arrays have it: numbers up to 64 bits, or bfloat16."""
    is_added = dtype.isbuiltin == 2  # by a package, to those of NumPy
    is_number = dtype.kind in "biuf" and dtype.itemsize <= 8
    return is_added or (is_number and dtype.isnative)


def _npy(array: np.ndarray) -> np.ndarray:
    """Write an array as NumPy does, in bytes: complex numbers, dates, rows."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return np.frombuffer(file.getvalue(), np.uint8)


def copy_to_host(variables: list[Variable]) -> dict[str, np.ndarray]:
    """Copy variables, `{path: array}`; the arrays belong to nobody else.

    Returns:
        Dict of NumPy arrays in the order given; a path that comes again is
        given a number.
    """
    values = {}
    for path, variable in by_path(variables).items():
        # As a tensor first: replicas may hold a value in parts.
        tensor = ops.convert_to_tensor(variable)
        values[path] = np.array(ops.convert_to_numpy(tensor), order="C")
    return values


def find_variables(held: Any) -> Iterator[tuple[str, Variable]]:
    """Find variables in lists, tuples, dicts and losses, each once.

    Layers and metrics have places of their own in a model.

    Args:
        held: where to look.

    Yields:
        Pairs of a place and a variable, in one order however dicts are made.

    Examples:
        >>> [place for place, _ in find_variables({"w": [keras.Variable(1.0)]})]
        ['/w/0']
    """
    followed = keras.Variable | list | tuple | dict | keras.losses.Loss
    found: set[int] = set()
    left = [("", held)]
    while left:
        place, one = left.pop()
        if id(one) in found:  # it may hold itself
            continue
        found.add(id(one))
        if isinstance(one, keras.Variable):
            yield place, one
            continue
        inside = vars(one) if isinstance(one, keras.losses.Loss) else one
        parts: Iterable[tuple[Any, Any]] = enumerate(inside)
        if isinstance(inside, dict):
            parts = sorted(inside.items(), key=lambda item: str(item[0]))
        within = [(k, part) for k, part in parts if isinstance(part, followed)]
        left += [(f"{place}/{key}", part) for key, part in reversed(within)]


def find_difference(
    variables: list[Variable], values: dict[str, np.ndarray]
) -> dict[str, str] | None:
    """Compare saved values with the variables they are meant for.

    Layers that Keras has numbered may have other numbers now.

    Args:
        values: dict from path to array, saved by `copy_to_host`.

    Returns:
        `None` if they fit; else dict that says of the first difference what
        was `saved` and what is `here`.
    """
    saved = [(path, tuple(v.shape)) for path, v in values.items()]
    here = [(v.path, tuple(v.shape)) for v in variables]
    for (old, old_shape), (new, new_shape) in zip(saved, here, strict=False):
        if old_shape != new_shape or _unnumbered(old) != _unnumbered(new):
            return {
                "saved": f"{old} of shape {old_shape}",
                "here": f"{new} of shape {new_shape}",
            }
    if len(saved) == len(here):
        return None
    longer = saved if len(saved) > len(here) else here
    names = [name for name, _ in longer[min(len(saved), len(here)) :]]
    return {
        "saved": f"{len(saved)} variables",
        "here": f"{len(here)} (only on one side: {', '.join(names[:3])})",
    }


def put_back(variables: list[Variable], values: dict[str, np.ndarray]) -> None:
    """Assign saved values; see `find_difference` for whether they fit."""
    for variable, value in zip(variables, values.values(), strict=True):
        variable.assign(value)


def _unnumbered(path: str) -> str:
    return re.sub(r"(_|#)\d+", "", path)


FUNCTIONS = {"numpy": np, "keras.ops": ops}
"""Modules whose functions are saved by name."""


def on_host(value: Any) -> Any:
    """Bring a tensor to the host, as an array; leave all else.

    What can be assigned to or trained stays too: it is no number that was
    computed, and somebody goes on with it.
    """
    is_trained = getattr(value, "requires_grad", False) and value.is_leaf
    if not ops.is_tensor(value) or is_trained or hasattr(value, "assign"):
        return value
    return ops.convert_to_numpy(value)


def encode(value: Any, arrays: dict[str, np.ndarray], name: str) -> Any:
    """Write a nest of plain values in what JSON knows.

    Args:
        value: nest of dicts, lists, tuples, sets, deques, `Batch`es, numbers,
            strings, bytes, `None`, arrays, tensors, which are read back as
            arrays, and functions such as `keras.ops.less`, by which a callback
            of Keras compares.
        arrays: dict, to which the arrays of numbers found are added. They are
            not copied.
        name: how to call them.

    Returns:
        Nest of what JSON knows.

    Raises:
        TypeError: something else is in the nest.

    Examples:
        >>> arrays = {}
        >>> encode({"best": [np.zeros(2), (1, 2)]}, arrays, "x")
        {'best': [{'array': 'x/best/0'}, {'tuple': [1, 2]}]}
        >>> list(arrays)
        ['x/best/0']
    """
    try:
        value = on_host(value)
    except Exception as error:  # JAX may have given its memory to another
        raise TypeError(f"{name} cannot be read: {error}") from error
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Blank):
        return {"blank": [list(value.shape), value.dtype]}
    if callable(value):
        for place, module in FUNCTIONS.items():
            called = getattr(value, "__name__", "")
            if getattr(module, called, None) is value:
                return {"function": [place, called]}
    if isinstance(value, np.ndarray) and is_text(value):
        # Files of arrays know numbers alone.
        cells = encode(value.ravel().tolist(), arrays, name)
        return {"text": [list(value.shape), value.dtype.str, cells]}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        while name in arrays:  # {"a": {"b": 1}, "a/b": 1} have one name
            name += "'"
        is_known = _is_known_to_files(value.dtype)
        arrays[name] = np.asarray(value if is_known else _npy(value), order="C")
        return {"array" if is_known else "npy": name}
    if isinstance(value, list | tuple):
        parts = [encode(v, arrays, f"{name}/{i}") for i, v in enumerate(value)]
        kind = "batch" if isinstance(value, Batch) else "tuple"
        return parts if isinstance(value, list) else {kind: parts}
    if isinstance(value, deque):
        return {"deque": [encode(list(value), arrays, name), value.maxlen]}
    if isinstance(value, set):
        return {"set": encode(list(value), arrays, name)}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        named = {k: encode(v, arrays, f"{name}/{k}") for k, v in value.items()}
        is_clear = len(named) != 1 or not set(named) & set(DECODERS)
        return named if is_clear else {"dict": named}
    if isinstance(value, dict):
        return {"pairs": encode([list(v) for v in value.items()], arrays, name)}
    raise TypeError(
        "A saved value must be made of numbers, strings, bytes, None, arrays, "
        f"lists, tuples and dicts. Received: {name} of type "
        f"{type(value).__name__}. Save what it is made of."
    )


def decode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Read what `encode` has written."""
    if isinstance(value, list):
        return [decode(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind in DECODERS:
            return DECODERS[kind](content, arrays)
    return {k: decode(v, arrays) for k, v in value.items()}


DECODERS: dict[str, Callable[..., Any]] = {
    "array": lambda name, arrays: arrays[name],
    "npy": lambda name, arrays: np.load(io.BytesIO(arrays[name].tobytes())),
    "text": lambda parts, arrays: _text(*decode(parts, arrays)),
    "blank": lambda parts, arrays: _zeros(*parts),
    "float": lambda text, arrays: float(text),
    "bytes": lambda text, arrays: base64.b64decode(text),
    "function": lambda parts, arrays: getattr(FUNCTIONS[parts[0]], parts[1]),
    "tuple": lambda parts, arrays: tuple(decode(parts, arrays)),
    "deque": lambda parts, arrays: deque(decode(parts[0], arrays), parts[1]),
    "set": lambda parts, arrays: set(decode(parts, arrays)),
    "batch": lambda parts, arrays: Batch(*decode(parts, arrays)),
    "dict": lambda parts, arrays: {
        k: decode(v, arrays) for k, v in parts.items()
    },
    "pairs": lambda pairs, arrays: {k: v for k, v in decode(pairs, arrays)},
}
"""How to read what JSON does not know, a dict of this one key."""
