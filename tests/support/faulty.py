"""Small trainers whose state is looked at before and after a fault."""

import itertools

import numpy as np
from quickest import RUN_EAGERLY

from accumtrainer import (
    Trainer,
)
from accumtrainer.keras_api import keras, ops

X = np.linspace(-1, 1, 24, dtype="float32").reshape(12, 2)
Y = X.sum(axis=1, keepdims=True)


def make_trainer(loss="mse", units=1, **options):
    """Make a Trainer of a linear model, run as is quickest."""
    inputs = keras.Input([2])
    model = keras.Model(inputs, keras.layers.Dense(units)(inputs))
    options = {
        "optimizer": "adam",
        "run_eagerly": RUN_EAGERLY,
        "seed": 0,
    } | options
    return Trainer(model, loss=loss, **options)


def values_of(trainer):
    """Copy all that training changes of the model and the optimizer."""
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    return [np.array(ops.convert_to_numpy(v)) for v in variables]


def assert_same(before, after):
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def batches(count=6, size=2):
    """Cut the data into batches for a loader."""
    pairs = zip(np.split(X, 12 // size), np.split(Y, 12 // size), strict=True)
    return list(itertools.islice(pairs, count))


class KeepsWeights(keras.callbacks.Callback):
    """Remembers everything after each update."""

    def __init__(self, trainer):
        super().__init__()
        self.told_trainer = trainer
        self.seen = []

    def on_train_begin(self, logs=None):
        self.seen.append(values_of(self.told_trainer))

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(values_of(self.told_trainer))


class Fail(keras.callbacks.Callback):
    """Raises an error before an update of an epoch, both counted from 0.

    Of each epoch, if none is named.
    """

    looks_at_model = False

    def __init__(self, error, update, epoch=None):
        super().__init__()
        self.error = error
        self.update = update
        self.epoch = epoch
        self.is_epoch = epoch is None

    def on_epoch_begin(self, epoch, logs=None):
        self.is_epoch = self.epoch in (None, epoch)

    def on_train_batch_begin(self, batch, logs=None):
        if self.is_epoch and batch == self.update:
            raise self.error
