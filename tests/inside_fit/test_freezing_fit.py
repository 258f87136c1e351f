"""Layers that are frozen amid one `Model.fit`, accumulated inside it."""

import numpy as np
import pytest
from keras_core_gaps import keras_3_only

from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

pytestmark = [
    keras_3_only("has a fit of its own kind, which is refused"),
    pytest.mark.skipif(
        BACKEND == "jax", reason="Keras fails itself: its state has changed"
    ),
]

X = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Set(keras.callbacks.Callback):
    """Makes a layer trainable or not, after some batch of every epoch."""

    def __init__(self, batch, trainable):
        super().__init__()
        self.batch, self.trainable = batch, trainable

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.model.get_layer("base").trainable = self.trainable


def train(*callbacks, run_eagerly=False, batch_size=4):
    """Train, and return the model and what was logged of the loss."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(4, "tanh", name="base"),
        keras.layers.Dense(1, name="head"),
    ]
    model = keras.Sequential([keras.Input([3]), *layers], name="model")
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "mse", run_eagerly=run_eagerly)
    history = model.fit(
        *(X, Y),
        batch_size=batch_size,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks],
    )
    return model, history.history["loss"]


def fit(*callbacks, **options):
    model, _ = train(*callbacks, **options)
    return [ops.convert_to_numpy(v) for v in model.weights]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_is_frozen_is_what_keras_would_freeze(run_eagerly):
    expected = fit(Set(1, False), run_eagerly=run_eagerly, batch_size=12)
    found = fit(
        *(GradientAccumulation(3), Set(5, False)), run_eagerly=run_eagerly
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_epoch_in_which_a_layer_was_frozen_logs_all_its_windows():
    options = {"run_eagerly": BACKEND == "tensorflow"}
    _, expected = train(Set(1, False), **options, batch_size=12)
    _, found = train(GradientAccumulation(3), Set(5, False), **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_layers_frozen_amid_a_window_are_refused():
    with pytest.raises(ValueError, match="Received: .* after 2 batches of a"):
        fit(GradientAccumulation(3), Set(4, False), run_eagerly=True)
