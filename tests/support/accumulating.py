"""Models and data for accumulation inside plain `Model.fit`."""

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Trainer
from accumtrainer.keras_api import BACKEND, keras, ops

# What XLA takes to compile on TensorFlow is not what these tests are about.
X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 22)
WEIGHTS = np.random.default_rng(2).uniform(0.2, 2, 22).astype("float32")
# 8 batches of 3 samples, the last of one: windows of 3, 3 and 2 batches.
ORDER = {"batch_size": 3, "shuffle": False, "verbose": 0}


leaves_data_unended = pytest.mark.usefixtures("unended_data_are_let_go_of")


def compiled(model, optimizer=None, **options):
    """Compile a classifier."""
    arguments = {
        "optimizer": optimizer or keras.optimizers.Adam(0.05),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "jit_compile": JIT_COMPILE,
    }
    model.compile(**arguments | options)
    return model


def mlp(**options):
    """Make a compiled classifier of `X`, always with the same weights."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input([6]), *layers]), **options)


def two_outputs(**options):
    """Make a compiled model whose outputs count differently."""
    keras.utils.set_random_seed(0)
    x = keras.Input([5])
    hidden = keras.layers.Embedding(9, 4, mask_zero=True)(x)
    tags = keras.layers.Dense(3, name="tags")(hidden)
    mean = keras.layers.GlobalAveragePooling1D()(hidden)
    mean = keras.layers.Dense(1, name="mean")(mean)
    cross = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {
        "loss": {"tags": cross, "mean": "mse"},
        "loss_weights": {"tags": 0.7, "mean": 2.0},
    } | options
    return compiled(keras.Model(x, {"tags": tags, "mean": mean}), **options)


def sequences():
    """Rows of tokens, padded to very different lengths, and their tags."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 9, [22, 5])
    tokens[np.arange(5) >= rng.integers(1, 6, [22, 1])] = 0
    return tokens, rng.integers(0, 3, [22, 5])


def make_trainer(model, steps, **options):
    """Make the Trainer whose training it is."""
    options = {"jit_compile": JIT_COMPILE} | options
    return Trainer(model, accumulation=steps, **options)


def assert_same_weights(model, other, tolerance=1e-6):
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def read(variable):
    return ops.convert_to_numpy(variable)


# It is the Trainer's training.


def batches():
    for start in range(0, 22, 3):
        yield X[start : start + 3], Y[start : start + 3]


class Watch(keras.callbacks.Callback):
    """Notes what callbacks see after every batch."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.stop_after = stop_after
        self.weights, self.losses = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights()[0])
        self.losses.append(logs["loss"])
        if len(self.losses) == self.stop_after:
            self.model.stop_training = True


def attributes(model):
    return {
        "own": set(vars(model)),
        "train_function": model.train_function,
        "optimizer": model.optimizer,
        "steps_per_execution": model.steps_per_execution,
    }


def executions(*counts):
    """List `steps_per_execution`s to test, of which PyTorch knows but 1."""
    return [1] if BACKEND == "torch" else list(counts)
