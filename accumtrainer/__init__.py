"""Exact gradient accumulation for Keras, with a Trainer that owns the loop."""

from accumtrainer.batches import Batch
from accumtrainer.callback import Callback
from accumtrainer.config import Accumulation, Every, LossScale
from accumtrainer.errors import DataError, NonFiniteError
from accumtrainer.hooks import Info
from accumtrainer.losses import WeightedLoss
from accumtrainer.progress import Progress
from accumtrainer.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Accumulation",
    "Batch",
    "Callback",
    "DataError",
    "Every",
    "Info",
    "LossScale",
    "NonFiniteError",
    "Progress",
    "Trainer",
    "WeightedLoss",
]
