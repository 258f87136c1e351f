"""What hooks receive: batches, and windows of micro-batches.

Pure NumPy: the compiled steps turn the arrays into their own tensors.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import optree

from accumtrainer.keras_api import tree
from accumtrainer.keras_api.types import Nest

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
        processes: how many processes have a shard of the samples, of equal
            shapes; the arrays hold this one's. 1 where they hold all.
        kind: of the micro-batches, see `kind_of`, where it may be another than
            that of other windows.
    """

    stacked: Batch | None
    parts: tuple[Batch, ...] | None
    sizes: tuple[int, ...]
    processes: int = 1
    kind: Hashable = None

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
        return sum(
            leaf.nbytes
            for batch in (self.stacked, *(self.parts or ()))
            for part in batch or ()
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

    def head(self, micro_batches: int) -> "Window":
        """Return a window of the first micro-batches, without copying.

        Examples:
            >>> window = window_of_rows(Batch(np.arange(6)), (2, 2, 2))
            >>> window.head(2).sizes
            (2, 2)
        """
        return replace(
            self,
            stacked=map_leaves(lambda leaf: leaf[:micro_batches], self.stacked),
            parts=None if self.parts is None else self.parts[:micro_batches],
            sizes=self.sizes[:micro_batches],
        )

    def as_shard(self, processes: int) -> "Window":
        """Say that each of several processes has a window like this one.

        Returns:
            `Window` of them all.

        Examples:
            >>> window_of_rows(Batch(np.arange(6)), (4, 2)).as_shard(2).sizes
            (8, 4)
        """
        sizes = tuple(size * processes for size in self.sizes)
        return replace(self, sizes=sizes, processes=processes)

    def recut(self, micro_batch_size: int) -> "Window":
        """Cut the same samples into micro-batches of another size.

        Returns:
            This one if its micro-batches are no larger than that.

        Examples:
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
        return window_of_rows(joined, sizes, self.kind).as_shard(count)


def empty_for_device(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Make an array that a device of the host can use where it is.

    Devices want memory that begins at a multiple of 64 bytes, and copy other.
    Whoever fills the array must leave it alone afterwards.

    Its contents are arbitrary: numbers, or text of fixed length.

    Examples:
        >>> array = empty_for_device((3, 5), np.dtype("float32"))
        >>> array.shape, array.ctypes.data % ALIGNMENT
        ((3, 5), 0)
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(size_bytes + ALIGNMENT, "uint8")
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % ALIGNMENT)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Make an array for a window, `empty_for_device` if that is worth it.

    Examples:
        >>> empty((2, 3), np.dtype("float32")).shape
        (2, 3)
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    is_small = size_bytes < WORTH_ALIGNING
    make = np.empty if is_small or dtype.hasobject else empty_for_device
    return make(shape, dtype)


def take_rows(
    array: np.ndarray, rows: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """Gather rows of an array, as `array[rows].astype(dtype)` does.

    Args:
        array: array of any shape but `()`.
        rows: array of int, each from 0 to `len(array) - 1`.
        dtype: of the result.

    Returns:
        Array, shaped like `rows` and then like a row.

    Examples:
        >>> take_rows(np.array([5, 6, 7]), np.array([[2, 0]]), np.dtype(int))
        array([[7, 5]])
    """
    gathered = empty(rows.shape + array.shape[1:], dtype)
    if array.dtype != dtype:
        gathered[...] = array[rows]
        return gathered
    # NumPy would write through a buffer first where it has to look for rows
    # that are not there.
    return array.take(rows, axis=0, out=gathered, mode="clip")


def stack(*arrays: np.ndarray) -> np.ndarray:
    """Stack arrays of one shape and type, as `np.stack` does."""
    first = arrays[0]
    shape = (len(arrays), *first.shape)
    return np.stack(arrays, out=empty(shape, first.dtype))


def map_leaves(function: Callable[..., Any], *nests: Nest) -> Nest:
    """Apply a function to every leaf of a nest; `None` stays `None`."""
    first = nests[0]
    # Most batches are flat, and a walk through a nest takes its time.
    if first is None or not tree.is_nested(first):
        return None if first is None else function(*nests)
    if type(first) is Batch and all(map(_is_leaf, first)):
        return Batch(
            *(
                None if leaves[0] is None else function(*leaves)
                for leaves in zip(*nests, strict=True)
            )
        )
    return tree.map_structure(function, *nests, none_is_leaf=False)


def _is_leaf(part: Nest) -> bool:
    return part is None or isinstance(part, np.ndarray)


def leaves(nest: Nest) -> list[Any]:
    """List the leaves of a nest that are not `None`."""
    if _is_leaf(nest):
        return [] if nest is None else [nest]
    return [leaf for leaf in tree.flatten(nest) if leaf is not None]


def named_arrays(
    nest: Nest, path: tuple = ()
) -> Iterator[tuple[tuple, np.ndarray]]:
    """Yield the arrays of a nest, each with its path.

    A path is a tuple of keys and indices; `path` is that of the nest itself.

    Examples:
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


def arrays_of(batch: Batch) -> dict[tuple[str, tuple], np.ndarray]:
    """Give the arrays of a batch, by field and path in it.

    Examples:
        >>> list(arrays_of(Batch([np.zeros(2)], np.zeros(2))))
        [('x', (0,)), ('y', ())]
    """
    return {
        (field, path): array
        for field, part in zip(Batch._fields, batch, strict=True)
        for path, array in named_arrays(part)
    }


def name_of(field: str, path: tuple) -> str:
    """Write the path of an array as one would in Python.

    Examples:
        >>> name_of("x", ("image", 0))
        "x['image'][0]"
    """
    return field + "".join(f"[{key!r}]" for key in path)


def kind_of(batch: Batch, stacked_axes: int = 0) -> Hashable:
    """Tell apart what a survey has to look at: parts, axes and types.

    It is the same for micro-batches that differ in their sizes alone.

    Args:
        batch: arrays or tensors, one micro-batch, or several stacked.
        stacked_axes: how many axes come before those of one.

    Examples:
        >>> kind_of(Batch(np.ones([2, 3]))) == kind_of(Batch(np.ones([5, 4])))
        True
        >>> kind_of(Batch(np.ones(2))) == kind_of(Batch(np.ones(2), np.ones(2)))
        False
    """
    leaves, structure = optree.tree_flatten(cast(Any, batch))
    return structure, *(
        (len(leaf.shape) - stacked_axes, _type_of(leaf)) for leaf in leaves
    )


def _type_of(leaf: Any) -> Any:
    """Return the type of an array's elements, the same for all text."""
    dtype = leaf.dtype
    return str if getattr(dtype, "kind", None) in ("S", "U") else dtype


def count_samples(batch: Batch) -> int:
    """Return the number of samples that all leaves of a batch agree on.

    Raises:
        ValueError: there is no array, no sample, or the lengths differ.

    Examples:
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


def slice_sizes(samples: int, micro_batch_size: int) -> tuple[int, ...]:
    """List the sizes of the micro-batches a loader batch is sliced into.

    Examples:
        >>> slice_sizes(10, 4)
        (4, 4, 2)
    """
    full, rest = divmod(samples, micro_batch_size)
    return (micro_batch_size,) * full + ((rest,) if rest else ())


def window_of_rows(
    batch: Batch, sizes: tuple[int, ...], kind: Hashable = None
) -> Window:
    """Make a window of a batch whose rows are already in window order.

    Stands for: `np.split(leaf, np.cumsum(sizes)[:-1])` for every leaf.

    Args:
        batch: `Batch` with `sum(sizes)` rows in every leaf.
        sizes: samples in each micro-batch.
        kind: of the window.

    Returns:
        Views of the batch, stacked when all sizes are equal.
    """
    if len(set(sizes)) == 1:
        shape = (len(sizes), sizes[0])
        stacked = map_leaves(
            lambda leaf: leaf.reshape(shape + leaf.shape[1:]), batch
        )
        return Window(stacked, None, sizes, kind=kind)
    stops = np.cumsum(sizes).tolist()
    parts = tuple(
        map_leaves(
            lambda leaf, rows=slice(stop - size, stop): leaf[rows], batch
        )
        for stop, size in zip(stops, sizes, strict=True)
    )
    return Window(None, parts, sizes, kind=kind)


def window_of_batches(
    batches: Sequence[Batch], micro_batch_size: int | None
) -> Window:
    """Make a window of whole batches, or of the slices of a single one.

    Args:
        batches: one micro-batch each; exactly one with `micro_batch_size`.
        micro_batch_size: samples per slice.

    Returns:
        It is stacked when all micro-batches have the same shapes.
    """
    sizes = tuple(count_samples(batch) for batch in batches)
    kind = kind_of(batches[0])
    if micro_batch_size is not None:
        sizes = slice_sizes(sizes[0], micro_batch_size)
    if len(batches) == 1:
        return window_of_rows(batches[0], sizes, kind)
    if len({_signature(batch) for batch in batches}) > 1:
        return Window(None, tuple(batches), sizes, kind=kind)
    return Window(map_leaves(stack, *batches), None, sizes, kind=kind)


def _signature(batch: Batch) -> tuple:
    """Return what must be equal for batches to be stacked."""
    return tuple((leaf.shape, leaf.dtype.str) for leaf in leaves(batch))
