"""What a model itself makes of raw data, before it takes them.

The tasks of KerasHub do: texts become tokens, images get their size, and often
the targets and the weights of samples come of x. Whoever trains such a model
gives raw data, as to its own `fit`.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from accumtrainer import errors
from accumtrainer.data.batches import Batch
from accumtrainer.data.reading import is_text, unpack
from accumtrainer.keras_api.types import Model


class Preprocessing:
    """Makes what a model takes of raw loader batches.

    It looks at every sample by itself, so that a loader batch may be cut into
    micro-batches afterwards. What it draws at random, as which tokens of a
    masked language model are masked, depends on a batch's place alone, so that
    a run that is resumed draws what it would have drawn.

    Args:
        function: of raw x, y and sample weights; returns a tuple of what has
            become of them, or x alone.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, item: Any, *place: int) -> Batch:
        """Make a `Batch` of NumPy arrays of raw parts, as `unpack` does.

        Args:
            item: a `Batch`, a tuple of up to three parts, or x alone.
            *place: whole numbers of at least 0 that no other batch has.
        """
        parts = item if isinstance(item, tuple) else (item,)
        with _drawing_by(place):
            made = self._function(*map(_as_lists, parts))
        return unpack(made if isinstance(made, tuple) else (made,))


def preprocessing_of(model: Model) -> Preprocessing | None:
    """Return a model's own preprocessing, `None` where it has none.

    That of KerasHub is public: `preprocess_samples` of every task, which does
    nothing where its `preprocessor` is `None`.
    """
    function = getattr(model, "preprocess_samples", None)
    if function is None or getattr(model, "preprocessor", ...) is None:
        return None
    return Preprocessing(function)


@contextlib.contextmanager
def _drawing_by(numbers: tuple[int, ...]) -> Iterator[None]:
    """Seed what Python and NumPy draw from unless told, and put it back."""
    before, numpy_before = random.getstate(), np.random.get_state()
    seeds = np.random.SeedSequence(numbers).generate_state(2).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def as_columns(nest: Any, name: str) -> Any:
    """Turn the lists of raw data into arrays, one row per sample.

    Tuples and dicts are nests, as in KerasHub; a list is a column of texts,
    numbers or arrays. A list of tuples, which are loader batches, stays.

    Args:
        nest: raw data.
        name: what the user calls them.

    Raises:
        TypeError: the rows of a list have several shapes.

    Examples:
        >>> as_columns({"text": ["a", "b"]}, "x")["text"].shape
        (2,)
    """
    if type(nest) is tuple:
        return tuple(as_columns(part, name) for part in nest)
    if isinstance(nest, dict):
        return {key: as_columns(value, name) for key, value in nest.items()}
    if isinstance(nest, list) and not any(isinstance(v, tuple) for v in nest):
        return _as_column(nest, name)
    return nest


def _as_column(values: list[Any], name: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError as error:
        raise TypeError(
            errors.NOT_AN_ARRAY.format(
                name=name, received="a list with rows of several shapes"
            )
        ) from error


def _as_lists(nest: Any) -> Any:
    """Turn arrays of text into lists of it, which tokenizers take."""
    if type(nest) is tuple:
        return tuple(map(_as_lists, nest))
    if isinstance(nest, dict):
        return {key: _as_lists(value) for key, value in nest.items()}
    if not isinstance(nest, np.ndarray) or not is_text(nest):
        return nest
    decode = np.vectorize(
        lambda v: v.decode() if isinstance(v, bytes) else v, otypes=[object]
    )
    return decode(nest).tolist()
