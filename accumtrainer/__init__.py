"""Exact gradient accumulation for Keras, with a Trainer that owns the loop."""

from accumtrainer.batch_scaling import beta_for_batch
from accumtrainer.batches import Batch
from accumtrainer.callback import Callback
from accumtrainer.checkpoint import CheckpointDirectory, Score
from accumtrainer.clipping import adaptive_clip
from accumtrainer.config import Accumulation, Every, LossScale
from accumtrainer.device import (
    mark_update,
    peak_memory_bytes,
    record_trace,
)
from accumtrainer.equivalence import Equivalence
from accumtrainer.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    Preempted,
)
from accumtrainer.hooks import Info
from accumtrainer.inside_fit import FitAccumulator
from accumtrainer.logger import Logger
from accumtrainer.losses import WeightedLoss
from accumtrainer.progress import Progress
from accumtrainer.snapshot import Snapshot
from accumtrainer.trainer import Trainer
from accumtrainer.window_loss import WindowLossTrainer

__version__ = "0.1.0"

__all__ = [
    "Accumulation",
    "Batch",
    "Callback",
    "CheckpointDirectory",
    "CheckpointError",
    "DataError",
    "Equivalence",
    "Every",
    "FitAccumulator",
    "Info",
    "Logger",
    "LossScale",
    "NonFiniteError",
    "Preempted",
    "Progress",
    "Score",
    "Snapshot",
    "Trainer",
    "WeightedLoss",
    "WindowLossTrainer",
    "adaptive_clip",
    "beta_for_batch",
    "mark_update",
    "peak_memory_bytes",
    "record_trace",
]
