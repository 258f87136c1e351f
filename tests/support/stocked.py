"""A small model with its data, for tests of Keras's own callbacks."""

import numpy as np

from accumtrainer import Trainer
from accumtrainer.keras_api import keras, ops

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")


def numbers(variable):
    """Copy a variable's values to the host."""
    return np.array(ops.convert_to_numpy(variable))


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])


def fit(*callbacks, optimizer=None, trainer=None, **options):
    """Train, three updates an epoch of 4 micro-batches of 2."""
    if trainer is None:
        trainer = Trainer(
            make_model(),
            optimizer=optimizer or keras.optimizers.SGD(0.05),
            loss="mse",
            accumulation=4,
            seed=0,
        )
    options = {"batch_size": 2, "verbose": 0, "epochs": 4} | options
    history = trainer.fit(X, Y, callbacks=list(callbacks), **options)
    return trainer, history


class Watch(keras.callbacks.Callback):
    """Keeps the weights and the arguments of every hook of training."""

    def __init__(self):
        super().__init__()
        self.batches = []
        self.weights = []
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        self.logs.append(dict(logs))
        self.weights.append([numbers(v) for v in self.model.variables])
