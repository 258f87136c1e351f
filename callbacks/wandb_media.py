"""What W&B calls images, histograms, text and tables."""

import html
from typing import Any

from accumtrainer import Histogram, Image, Table, Text
from accumtrainer.callbacks.wandb_rows import import_wandb


def as_wandb(value: Any) -> Any:
    """Make W&B's object of a value of ours; others stay as they are.

    Args:
        value: `Image`, `Histogram`, `Text` or `Table`, or a number.
    """
    wandb = import_wandb()
    if isinstance(value, Image):
        return wandb.Image(_picture(value), caption=value.caption or None)
    if isinstance(value, Histogram):
        return wandb.Histogram(value.values)
    if isinstance(value, Text):
        # W&B shows a plain string in a run's summary alone.
        return wandb.Html(f"<pre>{html.escape(value.text)}</pre>")
    if isinstance(value, Table):
        return wandb.Table(
            columns=list(value.columns),
            data=[[as_wandb(cell) for cell in row] for row in value.rows],
            allow_mixed_types=True,
        )
    return value


def _picture(image: Image) -> Any:
    """Make a picture of Pillow, as W&B mistakes the shape of some arrays.

    It drops every dimension of size 1, a width of one pixel too.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise ImportError(
            "Images in W&B need Pillow, which is not installed. "
            "Run: pip install 'accumtrainer[wandb]'"
        ) from error
    pixels = image.pixels
    is_gray = pixels.shape[-1] == 1
    return PIL.Image.fromarray(pixels[..., 0] if is_gray else pixels)
