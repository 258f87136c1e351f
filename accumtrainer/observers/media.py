"""What can be logged besides numbers: images, histograms, text and tables.

They are plain values of NumPy arrays, which know no tool that shows them.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accumtrainer.keras_api import keras

LARGE_FLOATS = (
    "pixels must be from 0 to 1 where they are floats. Received: values up to "
    "{high:.4g}; they are clipped. Divide them by 255 if that is their range, "
    "or cast them to uint8."
)


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A picture.

    Args:
        pixels: array `[height, width]` or `[height, width, channels]` with 1,
            3 or 4 channels; whole numbers from 0 to 255, or floats from 0 to
            1, beyond which they are clipped: above 2 with a warning, as
            these may well be from 0 to 255. It is copied to the host.
        caption: what to write below it.

    Raises:
        ValueError: the array has another shape.

    Examples:
        >>> Image(np.full([2, 2], 0.5)).pixels[0].tolist()
        [[128], [128]]
    """

    pixels: Any
    caption: str = ""

    def __post_init__(self) -> None:
        pixels = to_host(self.pixels)
        if pixels.ndim == 2:
            pixels = pixels[..., None]
        is_picture = pixels.ndim == 3 and pixels.shape[-1] in (1, 3, 4)
        if not is_picture or not pixels.size:
            raise ValueError(
                "pixels must have the shape [height, width] or [height, "
                "width, channels] with 1, 3 or 4 channels. Received: shape "
                f"{list(pixels.shape)}. Log one image of a batch at a time."
            )
        if not np.issubdtype(pixels.dtype, np.integer):
            known = np.nan_to_num(pixels.astype("float32"), posinf=1.0)
            if known.max() > 2:
                warnings.warn(
                    LARGE_FLOATS.format(high=known.max()),
                    RuntimeWarning,
                    stacklevel=3,
                )
            pixels = np.round(known.clip(0, 1) * 255)
        object.__setattr__(self, "pixels", pixels.clip(0, 255).astype("uint8"))


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """How numbers are distributed; those that are not finite are left out.

    Args:
        values: array of any shape. It is copied to the host.

    Examples:
        >>> Histogram([[1.0, float("nan")], [3.0, 2.0]]).values.tolist()
        [1.0, 3.0, 2.0]
    """

    values: Any

    def __post_init__(self) -> None:
        values = to_host(self.values).astype("float32")
        object.__setattr__(self, "values", values[np.isfinite(values)])


@dataclass(frozen=True, slots=True)
class Text:
    """Words, shown as they are, line breaks included.

    Args:
        text: the words.

    Raises:
        TypeError: it is no text.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(
                f"text must be a str. Received: text={self.text!r}. Write "
                "str(...) around it."
            )


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows under names.

    Args:
        columns: names of the columns.
        rows: one sequence per row, with a cell for each column: a number, a
            string, a bool, `None`, a small array or an `Image`; bytes are
            taken for UTF-8.

    Raises:
        ValueError: a row has not as many cells as there are columns.

    Examples:
        >>> Table(["label", "guess"], [[3, 5], [1, 1]]).rows
        [[3, 5], [1, 1]]
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        columns = [str(name) for name in self.columns]
        rows = [[_as_cell(cell) for cell in row] for row in self.rows]
        for index, row in enumerate(rows):
            if len(row) != len(columns):
                raise ValueError(
                    "rows must have a cell for each column. Received: "
                    f"rows[{index}] with {len(row)} cells for the columns "
                    f"{columns}. Use None where a cell is empty."
                )
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "rows", rows)


MEDIA = (Image, Histogram, Text, Table)


def check_media(name: Any, value: Any) -> None:
    """Refuse what is no name, or nothing that loggers show.

    Raises:
        TypeError: one of them is.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"name must be a str. Received: name={name!r}. Use for example "
            "'val/examples'."
        )
    if not isinstance(value, MEDIA):
        kinds = ", ".join(kind.__name__ for kind in MEDIA)
        raise TypeError(
            f"value must be one of {kinds}. Received: {name!r} of type "
            f"{type(value).__name__}. Wrap it: for example "
            "accumtrainer.Image(pixels). A number goes into a callback's logs."
        )


def to_host(values: Any) -> np.ndarray:
    """Copy a tensor of the backend, or what NumPy knows, to the host."""
    return np.array(keras.ops.convert_to_numpy(values))


def _as_cell(cell: Any) -> Any:
    """Turn tensors and arrays into numbers and lists of them."""
    if cell is None or isinstance(cell, bool | int | float | str | Image):
        return cell
    if isinstance(cell, bytes):  # text of tf.data
        return cell.decode(errors="replace")
    return to_host(cell).tolist()
