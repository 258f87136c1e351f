"""Exact gradient accumulation for Keras, with a Trainer that owns the loop."""

from accumtrainer.config import Accumulation, Every, LossScale, beta_for_batch
from accumtrainer.data.batches import Batch
from accumtrainer.diagnosis.device import (
    mark_update,
    peak_memory_bytes,
    record_trace,
)
from accumtrainer.diagnosis.equivalence import Equivalence
from accumtrainer.diagnosis.range_test import RangeTest
from accumtrainer.errors import (
    CheckpointError,
    DataError,
    NonFiniteError,
    Preempted,
)
from accumtrainer.inside_fit.accumulator import FitAccumulator
from accumtrainer.observers.callback import Callback
from accumtrainer.observers.logger import Logger
from accumtrainer.observers.media import Histogram, Image, Table, Text
from accumtrainer.progress import Progress
from accumtrainer.saving.checkpoint import CheckpointDirectory, Score
from accumtrainer.saving.snapshot import Snapshot
from accumtrainer.trainer import Trainer
from accumtrainer.window.clipping import adaptive_clip
from accumtrainer.window.hooks import Info
from accumtrainer.window.losses import WeightedLoss
from accumtrainer.window_loss_trainer import WindowLossTrainer

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
    "Histogram",
    "Image",
    "Info",
    "Logger",
    "LossScale",
    "NonFiniteError",
    "Preempted",
    "Progress",
    "RangeTest",
    "Score",
    "Snapshot",
    "Table",
    "Text",
    "Trainer",
    "WeightedLoss",
    "WindowLossTrainer",
    "adaptive_clip",
    "beta_for_batch",
    "mark_update",
    "peak_memory_bytes",
    "record_trace",
]
