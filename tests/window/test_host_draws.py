"""Claims about layers that draw from Python's and NumPy's own states."""

import random

import numpy as np
import pytest

from accumtrainer import Trainer
from accumtrainer.keras_api import keras

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
HOW = {"batch_size": 4, "shuffle": False, "verbose": 0}


class Shaken(keras.layers.Layer):
    """Scales by numbers that it draws as Python code does."""

    def call(self, inputs, training=None):
        if not training:
            return inputs
        return inputs * (1 + random.random()) * (1 + np.random.rand())


def train(make):
    """Train a model from fixed states; return losses, and where those are."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([keras.Input([3]), Shaken(), layers.Dense(3)])
    random.seed(1)
    np.random.seed(1)
    trains = make(model, keras.optimizers.SGD(0.1))
    losses = [trains.train_on_batch(X, X) for _ in range(3)]
    return [*map(float, losses), random.random(), np.random.rand()]


def test_nothing_is_drawn_ahead():
    def compiled(model, optimizer):
        model.compile(optimizer, "mse", run_eagerly=True)
        return model

    def trained(model, optimizer):
        # Without a seed it draws one.
        return Trainer(model, optimizer, "mse", run_eagerly=True, seed=0)

    assert train(trained) == pytest.approx(train(compiled), rel=1e-5)
