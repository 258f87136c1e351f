"""A small linear model in a Trainer, for tests of hooks."""

import numpy as np

from accumtrainer import Callback, Trainer
from accumtrainer.keras_api import keras, ops

K, M, RATE = 4, 2, 0.1
X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.3).astype("float32")


class Applied(Callback):
    """Keeps the logs of every window."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_apply(self, update, logs=None):
        self.logs.append(dict(logs))

    def column(self, name):
        return [logs[name] for logs in self.logs]


def numbers(variable):
    """Copy a variable's values to the host."""
    return np.array(ops.convert_to_numpy(variable))


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])


def make_trainer(cls=Trainer, model=None, **options):
    """Make a Trainer of k micro-batches, with a list of its windows' logs."""
    applied = Applied()
    options = {
        "optimizer": keras.optimizers.SGD(RATE),
        "loss": "mse",
        "accumulation": K,
        "seed": 0,
    } | options
    callbacks = [applied, *options.pop("callbacks", [])]
    trainer = cls(model or make_model(), callbacks=callbacks, **options)
    return trainer, applied


def fit(trainer, x=X, y=Y, **options):
    """Train in given order, two updates of 4 micro-batches of 2."""
    options = {"batch_size": M, "shuffle": False, "verbose": 0} | options
    return trainer.fit(x, y, **options)
