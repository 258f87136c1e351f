"""Tells by operations which losses depend on the data, whatever they are now.

Sizes are no operations. They show in operations that are others with twice the
data.
"""

import contextlib

import numpy as np

from accumtrainer.data.batches import Batch, Window, map_leaves
from accumtrainer.diagnosis.groups import to_host
from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Tensor
from accumtrainer.window.backend import UNKNOWN, Recipe
from accumtrainer.window.draws import host_drawing_again
from accumtrainer.window.hooks import collect_logs, context_of
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.passes import Passes
from accumtrainer.window.state import Scratch
from accumtrainer.window.weighing import Share


def depend_on_data(parts: WindowParts, window: Window) -> list[bool | None]:
    """Find out of each loss whether anything of a batch may go into it.

    Args:
        parts: whose windows they are.
        window: of which the first micro-batch is looked at.

    Returns:
        List of bools, or `None` for those of which nobody can tell, or which
        the size of the batch goes into; an empty one where nobody can tell of
        any.
    """
    # A model may take no other number of examples, and data be no arrays.
    with contextlib.suppress(Exception):
        once = _first_of(window)
        twice = map_leaves(lambda leaf: np.concatenate([leaf, leaf]), once)
        found = [_recipes(parts, batch) for batch in (once, twice)]
        return [_compare(*pair) for pair in zip(*found, strict=True)]
    return []


def _compare(once: Recipe, twice: Recipe) -> bool | None:
    """Tell by its recipes whether a loss depends on data."""
    if UNKNOWN in (once, twice):
        return None
    return True if once is None else None if once != twice else False


def _recipes(parts: WindowParts, batch: Batch) -> list[Recipe]:
    """Tell of each loss how it is computed; see `WindowBackend.recipes`."""
    hooks, passes = parts.hooks, Passes(parts)

    def run(batch: Batch) -> list[Tensor]:
        one = Share.whole(ops.ones((), "int32"))
        info = passes.info(ops.zeros((), "int32"), one)
        batch = hooks.on_micro_batch(batch, info)
        with passes.layers_in_window(info.index):
            measured = passes.objective.measure(batch, info)
        return [loss.mean for loss in measured.losses]

    with (
        Scratch(parts.variables),
        context_of(hooks).log_book.surveying(),
        collect_logs(hooks),
        host_drawing_again(),
    ):
        return parts.backend.recipes(run, batch)


def _first_of(window: Window) -> Batch:
    """Take the first micro-batch of a window, arrays of the host."""
    if window.parts is not None:
        return map_leaves(to_host, window.parts[0])
    return map_leaves(lambda leaf: to_host(leaf)[0], window.stacked)
