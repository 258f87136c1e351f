"""A small float16 model in a Trainer, and inputs that overflow."""

import numpy as np
from quickest import JIT_COMPILE

from accumtrainer import Callback, Trainer
from accumtrainer.keras_api import keras, ops

K = 4

# TensorFlow starts sooner without XLA, which has tests of its own below.
X = 0.1 * np.random.default_rng(1).normal(size=(32, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Applied(Callback):
    """Keeps the logs of every window."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_apply(self, update, logs=None):
        self.logs.append(dict(logs) | {"update": update})

    def column(self, name):
        return [logs[name] for logs in self.logs]


def numbers(variable):
    """Copy a variable's values to the host."""
    return np.array(ops.convert_to_numpy(variable))


def make_model(policy="mixed_float16", *, normalize=False):
    keras.utils.set_random_seed(0)
    layers = [keras.Input([3]), keras.layers.Dense(4, dtype=policy)]
    if normalize:
        layers.append(keras.layers.BatchNormalization(dtype=policy))
    layers.append(keras.layers.Dense(1, dtype=policy))
    return keras.Sequential(layers)


def make_trainer(model, **options):
    """Make a Trainer of k micro-batches that keeps its logs."""
    applied = Applied()
    callbacks = [applied, *options.pop("callbacks", [])]
    options = {
        "optimizer": keras.optimizers.SGD(0.01, momentum=0.9),
        "loss": "mse",
        "accumulation": K,
        "seed": 0,
        "jit_compile": JIT_COMPILE,
    } | options
    cls = options.pop("cls", Trainer)
    return cls(model, callbacks=callbacks, **options), applied


def fit(trainer, x=X, y=Y, **options):
    options = {"batch_size": 2, "shuffle": False, "verbose": 0} | options
    return trainer.fit(x, y, **options)


def poisoned(rows, value=np.nan):
    """Copy the inputs with some rows made bad."""
    x = X.copy()
    x[rows] = value
    return x


# Where it is on.
