"""Ready-made callbacks, installed as `accumtrainer.callbacks`."""

from accumtrainer.callbacks.checkpoint import Checkpoint
from accumtrainer.callbacks.gradient_accumulation import GradientAccumulation
from accumtrainer.callbacks.gradient_noise_scale import GradientNoiseScale
from accumtrainer.callbacks.keep_gradients import (
    KeepGradientNorms,
    KeepGradients,
)
from accumtrainer.callbacks.mlflow_logger import MLflowLogger
from accumtrainer.callbacks.nan_locator import NaNLocator
from accumtrainer.callbacks.predictions import Predictions
from accumtrainer.callbacks.profile import Profile
from accumtrainer.callbacks.run_log import RunLog
from accumtrainer.callbacks.tensorboard_logger import TensorBoardLogger
from accumtrainer.callbacks.throughput import Throughput
from accumtrainer.callbacks.trackio_logger import TrackioLogger
from accumtrainer.callbacks.training_plot import TrainingPlot
from accumtrainer.callbacks.unfreeze import Unfreeze
from accumtrainer.callbacks.wandb_logger import WandbLogger

__all__ = [
    "KeepGradientNorms",
    "KeepGradients",
    "WandbLogger",
    "Checkpoint",
    "GradientAccumulation",
    "GradientNoiseScale",
    "MLflowLogger",
    "NaNLocator",
    "Predictions",
    "Profile",
    "RunLog",
    "TensorBoardLogger",
    "Throughput",
    "TrackioLogger",
    "TrainingPlot",
    "Unfreeze",
]
