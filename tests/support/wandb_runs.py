"""Trainings that W&B follows, offline, and how a test begins them."""

from types import SimpleNamespace

import numpy as np

from accumtrainer import Trainer
from accumtrainer.callbacks import WandbLogger
from accumtrainer.keras_api import keras

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")

QUIET = {"silent": True, "console": "off"}


def make_trainer(cls=Trainer, **options):
    keras.utils.set_random_seed(0)
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    options = {"accumulation": 2} | options
    return cls(
        keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(schedule, clipnorm=0.5),
        loss="mse",
        metrics=["mae"],
        seed=0,
        **options,
    )


def make_logger(folder, **options):
    # Nothing here depends on how fast this machine is.
    options = {
        "mode": "offline",
        "settings": QUIET,
        "close_secs": 600,
    } | options
    return WandbLogger("claims", dir=folder, **options)


def fit(trainer, *callbacks, **options):
    """Train, six updates an epoch."""
    options = {"batch_size": 2, "verbose": 0} | options
    return trainer.fit(X, Y, callbacks=list(callbacks), **options)


def positions(history, name):
    return [row["updates"] for row in history if name in row]


class Run:
    """Stands for a run whose `log` does what a test wants."""

    def __init__(self, id="fake", log=lambda row: None):
        self.id = id
        self.log = lambda row, **_: log(row)
        self.config = type("Config", (dict,), {"update": lambda *_, **__: 0})()
        self.summary = {}
        self.offline = self.disabled = False
        self.settings = SimpleNamespace(mode="shared")  # without steps

    def define_metric(self, *names, **options):
        pass
