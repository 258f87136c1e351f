"""The names of what Keras and its backends give no types to.

A checker takes them for anything; a reader does not.
"""

from typing import Any, NamedTuple

Tensor = Any
"""What the backend computes with, traced or not."""

Nest = Any
"""Tuples, lists and dicts of something, with `None` where a part is missing."""

Variable = Any
"""`keras.Variable`."""

Layer = Any
"""`keras.Layer`."""

Model = Any
"""`keras.Model`."""

Optimizer = Any
"""`keras.optimizers.Optimizer`."""

Metric = Any
"""`keras.metrics.Metric`."""


class PairedLoss(NamedTuple):
    """How a compiled model uses one of its losses.

    Attributes:
        name: under which it is logged where there are several.
        weight: its entry of `loss_weights`, `None` where there is none.
        counts: whether it is a part of the sum.
    """

    name: str
    weight: Any
    counts: bool
