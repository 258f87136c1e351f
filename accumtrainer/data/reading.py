"""Reads what users and their loaders give as arrays."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from accumtrainer import errors
from accumtrainer.data.batches import Batch, empty, leaves, map_leaves
from accumtrainer.keras_api import keras, tree
from accumtrainer.keras_api.types import Nest


class _Traits(NamedTuple):
    """What a type of leaves is known to be, by the names of its classes."""

    is_sparse: bool
    is_torch: bool
    is_pandas: bool


@functools.lru_cache(maxsize=64)
def _traits_of(kind: type) -> _Traits:
    """Look at a type once: loaders yield the same ones batch after batch."""
    module = kind.__module__
    return _Traits(
        is_sparse=kind.__name__ in ("RaggedTensor", "SparseTensor")
        or module.startswith(("scipy.sparse", "jax.experimental")),
        is_torch=any(c.__module__ == "torch" for c in kind.__mro__),
        is_pandas=module.startswith("pandas"),
    )


def _traits(leaf: Any) -> _Traits:
    kind: Any = type(leaf)
    return _traits_of(kind)


@functools.lru_cache(maxsize=64)
def _dtype_read(dtype: np.dtype, floatx: str) -> np.dtype:
    # By name, because bfloat16 is no float to NumPy.
    return np.dtype(floatx) if "float" in dtype.name else dtype


def dtype_read(dtype: np.dtype) -> np.dtype:
    """Return the type that arrays of a type are read in.

    Floats are cast to `keras.config.floatx()` as `keras.Model.fit` does; other
    dtypes stay.
    """
    return _dtype_read(dtype, keras.config.floatx())


def refuse_sparse(name: str, nest: Any) -> None:
    """Refuse sparse and ragged tensors, saying how to make them dense.

    They are known by their names, of modules that need not be there.

    Args:
        name: what the user calls the nest.
        nest: anything.

    Raises:
        TypeError: a leaf is sparse or ragged.
    """
    for leaf in leaves(nest):
        if _traits(leaf).is_sparse:
            kind = type(leaf)
            raise TypeError(
                errors.SPARSE.format(
                    name=name, received=f"{kind.__module__}.{kind.__name__}"
                )
            )


def as_arrays(nest: Nest, name: str) -> Nest:
    """Look at every leaf of a nest as a NumPy array, the user's own if it can.

    A pandas Series of shape `[n]` becomes `[n, 1]`, as in Keras.

    Args:
        nest: arrays, tensors of any backend, pandas objects, or nests of them.
        name: what the user calls the nest.

    Returns:
        The same nest of arrays of rank 1 or more; `None` stays `None`.

    Raises:
        TypeError: a leaf is no dense array with one row per sample.
    """
    refuse_sparse(name, nest)
    return map_leaves(lambda leaf: _as_array(leaf, name), nest)


def _as_array(leaf: Any, name: str) -> np.ndarray:
    if name == "y" and isinstance(leaf, (str, bytes)):
        raise TypeError(
            errors.TEXT.format(
                name=name, rule="in arrays", remedy=errors.NUMBER_LABELS
            )
        )
    array = np.asarray(_readable(leaf))
    if array.dtype == object and _is_table_of_numbers(leaf):
        array = leaf.to_numpy(keras.config.floatx())
    if array.ndim == 0 or (array.dtype == object and not is_text(array)):
        raise TypeError(
            errors.NOT_AN_ARRAY.format(name=name, received=_describe(leaf))
        )
    if array.ndim == 1 and _traits(leaf).is_pandas:
        array = array[:, None]
    return array


def _copied(array: np.ndarray) -> np.ndarray:
    """Copy an array, in the type that it is read in.

    Nothing tells that nobody writes to what it looks at: a view that is
    read-only, an array whose owner may lift that again, a tensor made of a
    NumPy array or by DLPack.
    """
    # Where a device would copy it again, it begins as devices want it.
    copied = empty(array.shape, dtype_read(array.dtype))
    copied[...] = array
    return copied


def _readable(leaf: Any) -> Any:
    """Make an array of a torch tensor; leave others alone."""
    if not _traits(leaf).is_torch:
        return leaf
    # NumPy has neither bfloat16 nor the float8 types, of which float32 holds
    # every number.
    is_short = leaf.is_floating_point() and leaf.element_size() < 4
    tensor = leaf.float() if is_short else leaf
    # From wherever it is, with its gradient, and if only marked as negative.
    return tensor.numpy(force=True)


def _is_table_of_numbers(leaf: Any) -> bool:
    """Tell a DataFrame whose kinds of numbers pandas joins to no type."""
    is_table = _traits(leaf).is_pandas and leaf.ndim == 2
    return is_table and all(dtype.kind in "buif" for dtype in leaf.dtypes)


def is_text(array: np.ndarray) -> bool:
    """Say whether an array holds nothing but text: strings or bytes.

    Examples:
        >>> is_text(np.array(["a"])), is_text(np.array(["a", None]))
        (True, False)
    """
    return array.dtype.kind in "OSU" and all(
        isinstance(value, (str, bytes)) for value in array.flat
    )


def _describe(leaf: Any) -> str:
    """Name a leaf by type, shape and dtype, as far as it has them."""
    kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
    if isinstance(leaf, np.ndarray):
        return f"{kind} of shape {leaf.shape} and dtype {leaf.dtype}"
    return kind.removeprefix("builtins.")


def unpack(item: Any) -> Batch:
    """Read what a loader yields as a `Batch`.

    Args:
        item: a `Batch`, `(x,)`, `(x, y)` or `(x, y, sample_weight)` as a tuple
            or a list, or x alone as an array or a dict.

    Returns:
        `Batch` of NumPy arrays that nobody else can write to, as a loader may
        fill what it yielded again for its next item; floats cast to
        `keras.config.floatx()`.

    Raises:
        TypeError: a leaf is no dense array.
        ValueError: a tuple or list has no or more than three parts.

    Examples:
        >>> unpack((np.zeros([4, 2]), np.zeros([4]))).y.shape
        (4,)
    """
    parts = tuple(item) if isinstance(item, (tuple, list)) else (item,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(
            "A loader batch must be x, (x,), (x, y) or (x, y, sample_weight). "
            f"Received: {type(item).__name__} of {len(parts)} parts. Put "
            "several inputs into one tuple or dict: ((x1, x2), y)."
        )
    named = zip(Batch._fields[: len(parts)], parts, strict=True)
    return Batch(
        *(map_leaves(_copied, as_arrays(part, name)) for name, part in named)
    )


def weigh_classes(batch: Batch, class_weight: dict[int, float] | None) -> Batch:
    """Turn class weights into the sample weights of a batch.

    Args:
        batch: `Batch` without sample weights, whose y is one array of class
            numbers `[n]` or `[n, ..., 1]`, or of one-hot rows
            `[n, ..., classes]`.
        class_weight: by class; classes left out weigh 1. `None` leaves the
            batch as it is.

    Returns:
        `Batch` with `sample_weight` of shape `[n]` or `[n, ...]`,
        `keras.config.floatx()`.

    Raises:
        TypeError: `class_weight` is no dict.
        ValueError: the batch has sample weights, or y is not one array of
            class labels.

    Examples:
        >>> weigh_classes(Batch(np.zeros([2]), np.array([0, 1])), {1: 3.0})[2]
        array([1., 3.], dtype=float32)
    """
    if class_weight is None:
        return batch
    _check_class_weight(batch, class_weight)
    classes = _class_labels(batch.y)
    labels, positions = np.unique(classes, return_inverse=True)
    weights = np.asarray(
        [class_weight.get(int(label), 1.0) for label in labels],
        dtype=keras.config.floatx(),
    )
    return batch._replace(
        sample_weight=weights[positions].reshape(classes.shape)
    )


def _check_class_weight(batch: Batch, class_weight: Any) -> None:
    if not isinstance(class_weight, Mapping):
        raise TypeError(
            "class_weight must be a dict {class: weight}. Received: "
            f"class_weight={class_weight!r}. Use sample_weight for one weight "
            "per sample."
        )
    if batch.sample_weight is not None:
        raise ValueError(
            "class_weight must not be combined with sample_weight. Received: "
            "both. Multiply the class weights into sample_weight."
        )
    if batch.y is None or tree.is_nested(batch.y):
        kind = "no y" if batch.y is None else type(batch.y).__name__
        raise ValueError(
            "class_weight must come with one array of class labels as y. "
            f"Received: {kind}. Give sample_weight, with one array per output."
        )


def _class_labels(y: np.ndarray) -> np.ndarray:
    """Return class numbers, int32, `[n, ...]`, of numbers or one-hot rows."""
    y = y.astype(dtype_read(y.dtype), copy=False)  # of bfloat16, too
    is_label = y.ndim == 1 or y.shape[-1] == 1
    is_one_hot = not is_label
    if is_one_hot and not np.issubdtype(y.dtype, np.floating):
        is_one_hot = y.max() <= 1
    if is_one_hot:
        return np.argmax(y, axis=-1)
    if is_label and y.dtype.kind in "buif":
        labels = y if y.ndim == 1 else y[..., 0]
        return np.round(labels).astype("int32")
    raise ValueError(
        "class_weight must come with y of class numbers, [n] or [n, ..., 1], "
        "or of one-hot rows, [n, ..., classes]. Received: y of shape "
        f"{y.shape} and dtype {y.dtype}. Give sample_weight in the shape of y "
        "instead."
    )
