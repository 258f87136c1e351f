"""Loggers that keep their points, and the windows to compare with."""

import numpy as np

from accumtrainer import Logger, Trainer
from accumtrainer.keras_api import keras

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")


class Points(Logger):
    """Keeps every point, and how often it was opened and closed."""

    def __init__(self, every=None):
        super().__init__(every)
        self.points = []
        self.told = []

    def open(self):
        self.told.append("open")

    def write(self, updates, numbers):
        self.points.append((updates, numbers))

    def close(self):
        self.told.append("close")

    @property
    def training(self):
        """The points of training."""
        return [p for p in self.points if "loss" in p[1]]

    @property
    def validation(self):
        """The points of validation."""
        return [p for p in self.points if "val_loss" in p[1]]


def make_trainer(model=None, **options):
    keras.utils.set_random_seed(0)
    if model is None:
        layers = [keras.Input([3]), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
    options = {"optimizer": "sgd", "accumulation": 2, "seed": 0} | options
    return Trainer(model, loss="mse", **options)


def fit(*callbacks, trainer=None, x=X, y=Y, **options):
    """Train, six updates an epoch of two micro-batches of 2."""
    trainer = make_trainer() if trainer is None else trainer
    options = {"batch_size": 2, "verbose": 0, "epochs": 1} | options
    trainer.fit(x, y, callbacks=list(callbacks), **options)
    return trainer


def positions(points):
    return [updates for updates, _ in points]
