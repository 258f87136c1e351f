"""Says whose state moves in every forward pass, not once per update."""

from accumtrainer.keras_api import keras
from accumtrainer.keras_api.types import Model, Variable
from accumtrainer.layers import (
    WindowLayer,
    describe_layer,
    owners_of,
    plain_batch_normalizations,
)
from accumtrainer.window.objective import is_random_state

BATCH_STATISTICS = (
    "note: BatchNormalization takes the statistics of each micro-batch and "
    "moves its averages {count} times per update; "
    "accumtrainer.layers.AccumulatedBatchNormalization moves them once"
)

MOVING_STATE = (
    "note: what {layers} keeps is written in every forward pass in training, "
    "and so moves {count} times per update, once for each micro-batch"
)

MOST_LAYERS = 3
"""Layers that are named."""


def notes_of_state(
    model: Model, moved: list[Variable], count: int
) -> list[str]:
    """Write notes on layers whose state moves once per micro-batch.

    Args:
        moved: list of the variables that a forward pass gives a new value.
        count: k.

    Returns:
        List of str, empty where there is but one micro-batch.
    """
    if count == 1:
        return []
    notes = []
    if plain_batch_normalizations(model):
        notes.append(BATCH_STATISTICS.format(count=count))
    told = (keras.layers.BatchNormalization, WindowLayer)
    moving = [
        describe_layer(layer)
        for layer in owners_of(
            model, [v for v in moved if not is_random_state(v)]
        )
        if not isinstance(layer, told)
    ]
    if moving:
        more = len(moving) - MOST_LAYERS
        layers = ", ".join(moving[:MOST_LAYERS])
        layers += f" and {more} more" if more > 0 else ""
        notes.append(MOVING_STATE.format(layers=layers, count=count))
    return notes
