"""A linear model on few samples, for tests of what `fit` does with it."""

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Callback, Trainer
from accumtrainer.keras_api import keras, ops

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.1).astype("float32")
LABELS = (X[:, 0] > 0).astype("int32")

many_shapes = pytest.mark.filterwarnings("ignore:Micro-batches should have few")


class Applied(Callback):
    """Keeps the logs of every window, and when validations ended."""

    def __init__(self):
        super().__init__()
        self.logs = []
        self.validations = []
        self.epochs = []

    def on_apply(self, update, logs=None):
        self.logs.append(dict(logs))

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_validation_end(self, update, logs=None):
        self.validations.append((update, dict(logs)))


def numbers(variable):
    """Copy a variable's values to the host."""
    return np.array(ops.convert_to_numpy(variable))


def weights_of(model):
    return [numbers(v) for v in model.trainable_variables]


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])


def make_trainer(model=None, **options):
    """Make a Trainer of 4 micro-batches, with the list of what it did."""
    applied = Applied()
    options = {
        "optimizer": keras.optimizers.SGD(0.05),
        "loss": "mse",
        "accumulation": 4,
        "seed": 0,
        "callbacks": [applied],
        "jit_compile": JIT_COMPILE,
    } | options
    return Trainer(model or make_model(), **options), applied


def fit(trainer, x=X, y=Y, **options):
    """Train on three updates an epoch of 4 micro-batches of 2."""
    return trainer.fit(x, y, **({"batch_size": 2, "verbose": 0} | options))


def assert_same_weights(one, other, **tolerance):
    tolerance = {"rtol": 1e-5, "atol": 1e-6} | tolerance
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


class Subclassed(keras.Model):
    """A model whose variables are made by its first call."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.dense(x)


# The training data, in other forms.


class Batches(keras.utils.PyDataset):
    """The training data in batches of 2."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        rows = slice(2 * index, 2 * index + 2)
        return X[rows], Y[rows]


def generate(epochs=1):
    for _ in range(epochs):
        for start in range(0, 24, 2):
            yield X[start : start + 2], Y[start : start + 2]


def as_tf_data():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
