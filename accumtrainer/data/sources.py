"""The door of the data: finds out what users give, and makes sources of it.

What comes in is recognised once, as arrays or as a loader, and read; from here
it goes down, and nobody asks again. A source knows nothing about updates;
`groups` in `source.py` groups what it yields.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np

from accumtrainer import errors
from accumtrainer.data.arrays import ArraySource
from accumtrainer.data.batches import (
    Batch,
    Window,
    count_samples,
    leaves,
    map_leaves,
)
from accumtrainer.data.loaders import IterableSource, PyDatasetSource
from accumtrainer.data.position import Position
from accumtrainer.data.preprocessing import Preprocessing, as_columns
from accumtrainer.data.reading import as_arrays, refuse_sparse
from accumtrainer.data.source import Source, SourceOptions
from accumtrainer.keras_api import keras, refuse_other_keras


@runtime_checkable
class SupportsArray(Protocol):
    """What NumPy can read: arrays, tensors of any backend, pandas objects."""

    def __array__(self) -> np.ndarray:
        """Return the values as a NumPy array."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """Data that are there as a whole.

    Args:
        batch: all of them, NumPy arrays, of the user's memory and types.
        preprocessing: what makes of them what the model takes.
    """

    batch: Batch
    preprocessing: Preprocessing | None = None

    def source(self, options: SourceOptions) -> Source:
        """Make the source that cuts batches from them."""
        return ArraySource(self.batch, options, self.preprocessing)

    def split(self, fraction: float) -> tuple["Arrays", "Arrays"]:
        """Split them so that the last part, in given order, is for validation.

        Stands for: `(leaf[:split], leaf[split:])` for every leaf.

        Args:
            fraction: part of the samples kept for validation, between 0 and 1.

        Raises:
            ValueError: it is not between 0 and 1, or leaves one part empty.

        Examples:
            >>> train, held = recognize(np.arange(5)).split(0.4)
            >>> train.batch.x, held.batch.x
            (array([0, 1, 2]), array([3, 4]))
        """
        is_number = isinstance(fraction, Real) and not isinstance(
            fraction, bool
        )
        if not is_number or not 0 < fraction < 1:
            raise ValueError(
                "validation_split must be between 0 and 1. Received: "
                f"validation_split={fraction!r}. Use 0.2 to hold back the "
                "last fifth."
            )
        samples = count_samples(self.batch)
        split = math.floor(samples * (1.0 - fraction))
        if not 0 < split < samples:
            raise ValueError(
                "validation_split must leave samples on both sides. Received: "
                f"validation_split={fraction!r} of {samples} samples. Give "
                "more data or another fraction."
            )
        return (
            self._of(lambda leaf: leaf[:split]),
            self._of(lambda leaf: leaf[split:]),
        )

    def _of(self, part: Callable[[np.ndarray], np.ndarray]) -> "Arrays":
        return Arrays(map_leaves(part, self.batch), self.preprocessing)


@dataclass(frozen=True, slots=True)
class Loader:
    """Data that yield batches by themselves.

    Args:
        batches: a `keras.utils.PyDataset` or any iterable.
        preprocessing: what makes of them what the model takes.
    """

    batches: Any
    preprocessing: Preprocessing | None = None

    def source(self, options: SourceOptions) -> Source:
        """Make the source that takes batches from it."""
        if isinstance(self.batches, keras.utils.PyDataset):
            return PyDatasetSource(self.batches, options, self.preprocessing)
        return IterableSource(self.batches, options, self.preprocessing)

    def split(self, fraction: float) -> tuple[Arrays, Arrays]:
        """Refuse what can be split only when it is read."""
        raise TypeError(
            "validation_split must come with arrays as x. Received: x of type "
            f"{type(self.batches).__name__}. Give validation_data instead."
        )


def recognize(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    preprocessing: Preprocessing | None = None,
) -> Arrays | Loader:
    """Find out what data are, and read what is there of them.

    Arrays, tensors, pandas objects and nests of them are `Arrays`. What can be
    iterated is a `Loader`. A list of tuples without y is a list of batches;
    any other nest of arrays is one set of inputs, as in Keras.

    Args:
        x: the data.
        y: targets, with arrays only.
        sample_weight: weights of samples, with arrays only.
        preprocessing: the model's own, if it has one, which takes lists too.

    Raises:
        TypeError: x is nothing batches can be taken from.
        ValueError: something was given that does not go with it.
    """
    if preprocessing is not None:
        x, y = as_columns(x, "x"), as_columns(y, "y")
        sample_weight = as_columns(sample_weight, "sample_weight")
    is_list = isinstance(x, list) and all(isinstance(v, tuple) for v in x)
    if not is_list:
        refuse_sparse("x", x)
    arrays = [] if is_list and y is None else leaves(x)
    if arrays and all(isinstance(leaf, SupportsArray) for leaf in arrays):
        return Arrays(
            Batch(
                as_arrays(x, "x"),
                as_arrays(y, "y"),
                as_arrays(sample_weight, "sample_weight"),
            ),
            preprocessing,
        )
    _check_iterable(x)
    _refuse_beside_loader(x, "y", y)
    _refuse_beside_loader(x, "sample_weight", sample_weight)
    return Loader(x, preprocessing)


def recognize_sets(
    data: Any, x: Any, preprocessing: Preprocessing | None = None
) -> dict[str, Arrays | Loader]:
    """Find out what `validation_data` are, one set of them or several.

    Args:
        data: `None`; what `recognize` takes, or `(x, y)` or
            `(x, y, sample_weight)`; or a dict of these by name.
        x: the training data. Of a dict with the same keys `data` is one set.
        preprocessing: see `recognize`.

    Returns:
        The sets by name, which is `""` for a single one.
    """
    is_dict = isinstance(data, dict)
    is_input = is_dict and isinstance(x, dict) and data.keys() == x.keys()
    named = data if is_dict and not is_input else {"": data}
    return {
        name: _recognize_set(given, preprocessing)
        for name, given in named.items()
        if given is not None
    }


def _recognize_set(
    data: Any, preprocessing: Preprocessing | None
) -> Arrays | Loader:
    if isinstance(data, list) and not all(isinstance(v, tuple) for v in data):
        data = tuple(data)  # [x, y], as in Keras; else a list of batches
    parts = data if isinstance(data, tuple) else (data,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(
            "validation_data must be (x, y), (x, y, sample_weight), what "
            "yields such batches, or a dict of these by name. Received: "
            f"a tuple of {len(parts)}. Put several inputs into one tuple."
        )
    x, y, sample_weight = (*parts, None, None)[:3]
    return recognize(x, y, sample_weight, preprocessing)


def _check_iterable(x: Any) -> None:
    """Refuse what is neither array data nor a loader, saying what to give."""
    refuse_other_keras("x", x)
    is_loader = isinstance(x, (Iterable, keras.utils.PyDataset))
    if callable(x) and not is_loader:
        raise TypeError(
            "x must be data, or an iterable of batches. Received: the "
            f"function {x!r}. Call it first: fit(make_batches())."
        )
    is_nest = isinstance(x, (tuple, dict)) or (
        isinstance(x, list) and x and not isinstance(x[0], (tuple, dict))
    )
    if is_nest or isinstance(x, (str, bytes)) or not is_loader:
        raise TypeError(
            errors.NOT_AN_ARRAY.format(name="x", received=repr(x)[:80])
        )


def _refuse_beside_loader(x: Any, name: str, value: Any) -> None:
    if value is None:
        return
    raise ValueError(
        f"{name} must be left out when x is no array but yields batches. "
        f"Received: x of type {type(x).__name__} and {name} of type "
        f"{type(value).__name__}. Let the loader yield (x, y) or "
        "(x, y, sample_weight) in batches of the size wanted."
    )


def make_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    preprocessing: Preprocessing | None = None,
    **options: Any,
) -> Source:
    """Make the source for what `recognize` takes, by `SourceOptions`.

    Examples:
        >>> make_source(np.zeros([100, 2]), batch_size=8).batches_per_epoch
        13
    """
    data = recognize(x, y, sample_weight, preprocessing)
    return data.source(SourceOptions(**options))


class OnePiece:
    """Arrays that make one loader batch, such as `train_on_batch` is given.

    Args:
        x: array or nest of arrays.
        y: targets.
        sample_weight: weights of the samples.
        class_weight: by class.
        preprocessing: see `recognize`.
        seed: of what the preprocessing draws.
        pieces_before: how many pieces have drawn by this seed before.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        preprocessing: Preprocessing | None = None,
        *,
        seed: int = 0,
        pieces_before: int = 0,
    ):
        self._source = make_source(
            x,
            y,
            sample_weight,
            preprocessing,
            batch_size=np.iinfo(np.int32).max,
            shuffle=False,
            class_weight=class_weight,
            seed=seed,
            epochs_before=pieces_before,
        )
        (self._item,) = self._source.iterate(0)

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return self._source.samples_per_epoch or 0

    def window(self, micro_batch_size: int | None = None) -> Window:
        """Cut it into micro-batches of a size, or into a single one."""
        return self._source.window([self._item], micro_batch_size)


class FirstBatches(Source):
    """The first few loader batches of another source, again every epoch.

    Args:
        source: where they come from.
        count: how many to keep, at least 1.
    """

    def __init__(self, source: Source, count: int):
        self._source = source
        self._items = list(islice(source.iterate(0), count))
        self.batches_per_epoch = len(self._items)
        self.batch_size = source.batch_size
        self.begins_again = source.begins_again

    def iterate(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the kept items."""
        del epoch
        return iter(self._items[start:])

    def get_state(self) -> dict[str, Any]:
        return {}

    def go_to(
        self, position: Position, state: dict[str, Any], *, fast_forward: bool
    ) -> None:
        """Nothing to do: every place is an index."""

    def window(
        self, items: Sequence[Any], micro_batch_size: int | None
    ) -> Window:
        """Make a window as the other source would."""
        return self._source.window(items, micro_batch_size)
