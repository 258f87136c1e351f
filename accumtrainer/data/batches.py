"""What hooks receive: batches, and windows of micro-batches.

Pure NumPy: the compiled steps turn the arrays into their own tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from accumtrainer import errors
from accumtrainer.keras_api import keras, tree

ALIGNMENT = 64
"""Bytes, at a multiple of which the processor's devices want arrays begin."""

WORTH_ALIGNING = 1 << 17
"""Bytes of an array from which on a copy takes longer than to avoid it."""


class Batch(NamedTuple):
    """One batch of training data; each field an array or a nest of arrays.

    Args:
        x: inputs; every leaf has one row per sample.
        y: targets, or `None`.
        sample_weight: weight of every sample (or of every element of `y`),
            or `None`.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None


@dataclass(frozen=True, slots=True)
class Window:
    """The micro-batches that feed one optimizer update.

    Exactly one of `stacked` and `parts` is there. Their arrays are the window's
    own: whoever makes it leaves them alone from then on, as devices may share
    their memory.

    Args:
        stacked: `Batch` with leaves of shape `[k, m, ...]`, when all k
            micro-batches have the same shapes.
        parts: tuple of k `Batch`es otherwise, leaves of shape `[m_i, ...]`.
        sizes: samples in each of the k micro-batches, of all processes.
        processes: how many processes have a share of the samples, of equal
            shapes; the arrays hold this one's. 1 where they hold all.
    """

    stacked: Batch | None
    parts: tuple[Batch, ...] | None
    sizes: tuple[int, ...]
    processes: int = 1

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches, k."""
        return len(self.sizes)

    @property
    def samples(self) -> int:
        """Number of samples in all micro-batches together."""
        return sum(self.sizes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays together."""
        batches = self.parts or (self.stacked,)
        return sum(
            leaf.nbytes
            for batch in batches
            for part in batch
            for leaf in leaves(part)
        )

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches have the same shapes."""
        return self.stacked is not None

    def split(self) -> Sequence[Batch]:
        """Return the micro-batches one by one, without copying.

        Stands for: `[[leaf[i] for leaf in stacked] for i in range(k)]`

        Returns:
            Tuple of k `Batch`es.
        """
        if self.parts is not None:
            return self.parts
        return tuple(
            map_leaves(lambda leaf, i=i: leaf[i], self.stacked)
            for i in range(self.micro_batches)
        )

    def as_share(self, processes: int) -> "Window":
        """Say that each of several processes has a window like this one.

        Returns:
            `Window` of them all.

        Example:
            >>> window_of_rows(Batch(np.arange(6)), (4, 2)).as_share(2).sizes
            (8, 4)
        """
        sizes = tuple(size * processes for size in self.sizes)
        return replace(self, sizes=sizes, processes=processes)

    def recut(self, micro_batch_size: int) -> "Window":
        """Cut the same samples into micro-batches of another size.

        Returns:
            `Window`; this one if its micro-batches are no larger than that.

        Example:
            >>> window = window_of_rows(Batch(np.arange(6)), (6,))
            >>> window.recut(4).sizes
            (4, 2)
        """
        if max(self.sizes) <= micro_batch_size:
            return self
        joined, *others = self.split()
        if others:
            joined = map_leaves(
                lambda *rows: np.concatenate(rows), joined, *others
            )
        count = self.processes
        sizes = slice_sizes(self.samples // count, micro_batch_size // count)
        return window_of_rows(joined, sizes).as_share(count)


def empty_for_device(shape, dtype):
    """Make an array that a device of the host can use where it is.

    Devices want memory that begins at a multiple of 64 bytes, and copy other.
    Whoever fills the array must leave it alone afterwards.

    Args:
        shape: tuple.
        dtype: NumPy dtype, of numbers or text of fixed length.

    Returns:
        Array, its contents arbitrary.

    Example:
        >>> array = empty_for_device((3, 5), np.dtype("float32"))
        >>> array.shape, array.ctypes.data % ALIGNMENT
        ((3, 5), 0)
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(size_bytes + ALIGNMENT, "uint8")
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % ALIGNMENT)


def _empty(shape, dtype):
    """Make an array for a window, `empty_for_device` if that is worth it."""
    size_bytes = math.prod(shape) * dtype.itemsize
    is_small = size_bytes < WORTH_ALIGNING
    make = np.empty if is_small or dtype.hasobject else empty_for_device
    return make(shape, dtype)


def take_rows(array, rows):
    """Gather rows of an array, as `array[rows]` does.

    Args:
        array: array of any shape but `()`.
        rows: array of int, each from 0 to `len(array) - 1`.

    Returns:
        Array, shaped like `rows` and then like a row.

    Example:
        >>> take_rows(np.array([5, 6, 7]), np.array([[2, 0]]))
        array([[7, 5]])
    """
    gathered = _empty(rows.shape + array.shape[1:], array.dtype)
    # NumPy would write through a buffer first where it has to look for rows
    # that are not there.
    return array.take(rows, axis=0, out=gathered, mode="clip")


def stack(*arrays):
    """Stack arrays of one shape and type, as `np.stack` does."""
    first = arrays[0]
    shape = (len(arrays), *first.shape)
    return np.stack(arrays, out=_empty(shape, first.dtype))


def map_leaves(function, *nests):
    """Apply a function to every leaf of a nest; `None` stays `None`."""
    first = nests[0]
    if type(first) is Batch and all(map(_is_leaf, first)):
        # Most batches are flat, and a walk through a nest takes its time.
        return Batch(
            *(
                None if leaves[0] is None else function(*leaves)
                for leaves in zip(*nests, strict=True)
            )
        )
    return tree.map_structure(function, *nests, none_is_leaf=False)


def _is_leaf(part):
    return part is None or isinstance(part, np.ndarray)


def leaves(nest):
    """List the leaves of a nest that are not `None`."""
    if _is_leaf(nest):
        return [] if nest is None else [nest]
    return [leaf for leaf in tree.flatten(nest) if leaf is not None]


def named_arrays(nest, path=()):
    """Yield the arrays of a nest, each with its path.

    Args:
        nest: array, or nest of arrays in dicts, lists and tuples.
        path: tuple, the path of the nest itself.

    Yields:
        Pairs of a tuple of keys and indices, and a NumPy array.

    Example:
        >>> [path for path, _ in named_arrays({"a": [np.zeros(2)]})]
        [('a', 0)]
    """
    if isinstance(nest, np.ndarray):
        yield path, nest
    elif isinstance(nest, Mapping):
        for key, value in nest.items():
            yield from named_arrays(value, (*path, key))
    elif isinstance(nest, (list, tuple)):
        for index, value in enumerate(nest):
            yield from named_arrays(value, (*path, index))


def name_of(field, path):
    """Write the path of an array as one would in Python.

    Example:
        >>> name_of("x", ("image", 0))
        "x['image'][0]"
    """
    return field + "".join(f"[{key!r}]" for key in path)


def refuse_sparse(name, nest):
    """Refuse sparse and ragged tensors, saying how to make them dense.

    They are known by their names, of modules that need not be there.

    Args:
        name: what the user calls the nest, for the message.
        nest: anything.

    Raises:
        TypeError: a leaf is sparse or ragged.
    """
    for leaf in leaves(nest):
        kind = type(leaf)
        is_sparse = kind.__name__ in ("RaggedTensor", "SparseTensor")
        module = kind.__module__
        if is_sparse or module.startswith(("scipy.sparse", "jax.experimental")):
            raise TypeError(
                errors.SPARSE.format(
                    name=name, received=f"{module}.{kind.__name__}"
                )
            )


def as_arrays(nest, name, *, copy=False):
    """Turn every leaf of a nest into a NumPy array.

    Floats are cast to `keras.config.floatx()` as `keras.Model.fit` does; other
    dtypes stay. A pandas Series of shape `[n]` becomes `[n, 1]`, as in Keras.

    Args:
        nest: arrays, tensors of any backend, pandas objects, or nests of them.
        name: what the user calls the nest, for the message.
        copy: whether the arrays have to have memory of their own. Nothing
            tells that nobody writes to what a leaf looks at: a view that is
            read-only, an array whose owner may lift that again, a tensor made
            of a NumPy array or by DLPack.

    Returns:
        The same nest of arrays of rank 1 or more; `None` stays `None`.

    Raises:
        TypeError: a leaf is no dense array with one row per sample.
    """
    refuse_sparse(name, nest)
    return map_leaves(lambda leaf: _as_array(leaf, name, copy), nest)


def _as_array(leaf, name, copy):
    array = np.asarray(_readable(leaf))
    if array.ndim == 0 or (array.dtype == object and not is_text(array)):
        raise TypeError(
            errors.NOT_AN_ARRAY.format(name=name, received=_describe(leaf))
        )
    if type(leaf).__module__.startswith("pandas") and array.ndim == 1:
        array = array[:, None]
    # By name, because bfloat16 is no float to NumPy.
    is_float = "float" in array.dtype.name
    dtype = keras.config.floatx() if is_float else array.dtype
    return array.astype(dtype, order="C" if copy else "K", copy=copy)


def _readable(leaf):
    """Make of a torch tensor one that NumPy can read; leave others alone."""
    kind = type(leaf)
    if not any(c.__module__ == "torch" for c in kind.__mro__):
        return leaf
    tensor = leaf.detach().cpu()
    # NumPy has neither bfloat16 nor the float8 types, of which float32 holds
    # every number.
    is_short = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.float() if is_short else tensor


def is_text(array):
    """Say whether an array holds nothing but text: strings or bytes.

    Example:
        >>> is_text(np.array(["a"])), is_text(np.array(["a", None]))
        (True, False)
    """
    return array.dtype.kind in "OSU" and all(
        isinstance(value, (str, bytes)) for value in array.flat
    )


def _describe(leaf):
    """Name a leaf by type, shape and dtype, as far as it has them."""
    kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
    if isinstance(leaf, np.ndarray):
        return f"{kind} of shape {leaf.shape} and dtype {leaf.dtype}"
    return kind.removeprefix("builtins.")


def unpack(item):
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

    Example:
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
    return Batch(*(as_arrays(part, name, copy=True) for name, part in named))


def count_samples(batch):
    """Return the number of samples that all leaves of a batch agree on.

    Args:
        batch: `Batch` of arrays.

    Returns:
        Length of the first axis.

    Raises:
        ValueError: there is no array, no sample, or the lengths differ.

    Example:
        >>> count_samples(Batch(np.zeros([4, 2]), np.zeros([4])))
        4
    """
    distinct = {len(leaf) for part in batch for leaf in leaves(part)}
    if len(distinct) == 1 and distinct != {0}:
        return distinct.pop()
    lengths = {
        name: [len(leaf) for leaf in leaves(part)]
        for name, part in zip(Batch._fields, batch, strict=True)
    }
    received = ", ".join(
        f"{name}: {' and '.join(map(str, some))}"
        for name, some in lengths.items()
        if some
    )
    raise ValueError(
        "x, y and sample_weight must hold the same number of samples, at "
        f"least 1, in every array. Received: {received or 'no array'} "
        "samples. Check how the arrays were sliced or joined."
    )


def weigh_classes(batch, class_weight):
    """Turn class weights into the sample weights of a batch.

    Args:
        batch: `Batch` without sample weights, whose y is one array of class
            numbers `[n]` or `[n, 1]`, or of one-hot rows `[n, classes]`.
        class_weight: dict `{class: weight}`; classes left out weigh 1.

    Returns:
        `Batch` with `sample_weight` of shape `[n]`, `keras.config.floatx()`.

    Raises:
        TypeError: `class_weight` is no dict.
        ValueError: the batch has sample weights, or y is not one array of
            class labels.

    Example:
        >>> weigh_classes(Batch(np.zeros([2]), np.array([0, 1])), {1: 3.0})[2]
        array([1., 3.], dtype=float32)
    """
    _check_class_weight(batch, class_weight)
    labels, positions = np.unique(_class_labels(batch.y), return_inverse=True)
    weights = np.asarray(
        [class_weight.get(int(label), 1.0) for label in labels],
        dtype=keras.config.floatx(),
    )
    return batch._replace(sample_weight=weights[positions])


def _check_class_weight(batch, class_weight):
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


def _class_labels(y):
    """Return the class numbers `[n]`, int32, of numbers or one-hot rows."""
    is_label = y.ndim == 1 or (y.ndim == 2 and y.shape[1] == 1)
    is_one_hot = y.ndim == 2 and y.shape[1] > 1
    if is_one_hot and not np.issubdtype(y.dtype, np.floating):
        is_one_hot = y.max() <= 1
    if is_one_hot:
        return np.argmax(y, axis=-1)
    if is_label and y.dtype.kind in "buif":
        return np.round(y.reshape(-1)).astype("int32")
    raise ValueError(
        "class_weight must come with y of class numbers, [n] or [n, 1], or of "
        f"one-hot rows, [n, classes]. Received: y of shape {y.shape} and dtype "
        f"{y.dtype}. Give sample_weight in the shape of y instead."
    )


def slice_sizes(samples, micro_batch_size):
    """List the sizes of the micro-batches a loader batch is sliced into.

    Example:
        >>> slice_sizes(10, 4)
        (4, 4, 2)
    """
    full, rest = divmod(samples, micro_batch_size)
    return (micro_batch_size,) * full + ((rest,) if rest else ())


def window_of_rows(batch, sizes):
    """Make a window of a batch whose rows are already in window order.

    Stands for: `np.split(leaf, np.cumsum(sizes)[:-1])` for every leaf.

    Args:
        batch: `Batch` with `sum(sizes)` rows in every leaf.
        sizes: samples in each micro-batch, tuple.

    Returns:
        `Window` of views of the batch, stacked when all sizes are equal.
    """
    if len(set(sizes)) == 1:
        shape = (len(sizes), sizes[0])
        stacked = map_leaves(
            lambda leaf: leaf.reshape(shape + leaf.shape[1:]), batch
        )
        return Window(stacked, None, sizes)
    stops = np.cumsum(sizes).tolist()
    parts = tuple(
        map_leaves(
            lambda leaf, rows=slice(stop - size, stop): leaf[rows], batch
        )
        for stop, size in zip(stops, sizes, strict=True)
    )
    return Window(None, parts, sizes)


def window_of_batches(batches, micro_batch_size):
    """Make a window of whole batches, or of the slices of a single one.

    Args:
        batches: sequence of `Batch`es of NumPy arrays, one micro-batch each;
            exactly one with `micro_batch_size`.
        micro_batch_size: samples per slice, or `None`.

    Returns:
        `Window`, stacked when all micro-batches have the same shapes.
    """
    sizes = tuple(count_samples(batch) for batch in batches)
    if micro_batch_size is not None:
        (batch,) = batches
        return window_of_rows(batch, slice_sizes(sizes[0], micro_batch_size))
    if len(batches) == 1:
        return window_of_rows(batches[0], sizes)
    if len({_signature(batch) for batch in batches}) > 1:
        return Window(None, tuple(batches), sizes)
    return Window(map_leaves(stack, *batches), None, sizes)


def _signature(batch):
    """Return what must be equal for batches to be stacked."""
    return tuple((leaf.shape, leaf.dtype.str) for leaf in leaves(batch))
