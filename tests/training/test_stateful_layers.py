"""Claims about recurrent layers that keep their state from batch to batch."""

import numpy as np
import pytest
from keras_core_gaps import keras_3_only

from accumtrainer import Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, flatten_layers, keras, ops, tree

layers = keras.layers
rng = np.random.default_rng(0)
X = rng.normal(size=[32, 5, 6]).astype("float32")
Y = rng.normal(size=[32, 3]).astype("float32")

RECURRENT = {
    "lstm": lambda: layers.LSTM(4, stateful=True),
    "both ways": lambda: layers.Bidirectional(layers.GRU(4, stateful=True)),
    "several cells": lambda: layers.RNN(
        [layers.LSTMCell(4), layers.GRUCell(3)], stateful=True
    ),
}


def make_model(name):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input(batch_shape=[8, 5, 6]),
            RECURRENT[name](),
            layers.Dense(3),
        ]
    )


def states_of(model):
    return [
        np.array(ops.convert_to_numpy(state))
        for layer in flatten_layers(model)
        if getattr(layer, "states", None) is not None
        for state in tree.flatten(layer.states)
    ]


def fit(owner, x=X, **options):
    owner.fit(x, Y, batch_size=8, shuffle=False, verbose=0, **options)


def train(model, rate=0.1, accumulation=1, x=X):
    trainer = Trainer(
        model,
        optimizer=keras.optimizers.SGD(rate),
        loss="mse",
        accumulation=accumulation,
    )
    fit(trainer, x)
    return trainer


def assert_close(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_state_goes_on_from_batch_to_batch(name, accumulation):
    model, plain = make_model(name), make_model(name)
    train(model, rate=0.0, accumulation=accumulation)
    for batch in np.split(X, 4):
        plain(batch)
    assert np.abs(states_of(plain)[0]).max() > 0.1
    assert_close(states_of(model), states_of(plain))


@pytest.mark.skipif(
    BACKEND != "tensorflow",
    reason="Keras's own fit forgets states on JAX, and fails on PyTorch.",
)
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("by", ["Trainer", "GradientAccumulation"])
@keras_3_only("keeps states otherwise")
def test_stateful_layers_train_as_by_keras(name, by):
    model, plain = make_model(name), make_model(name)
    for one in (model, plain):
        one.compile(keras.optimizers.SGD(0.1), "mse")
    fit(plain)
    if by == "Trainer":
        train(model)
    else:
        fit(model, callbacks=[GradientAccumulation(1)])
    assert_close(model.get_weights(), plain.get_weights())
    assert_close(states_of(model), states_of(plain))


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_skipped_update_puts_the_state_back():
    model, plain = make_model("lstm"), make_model("lstm")
    x = X.copy()
    x[16:] = np.nan
    trainer = train(model, rate=0.0, x=x)
    assert trainer.window_logs["skipped_updates"] == 2
    for batch in np.split(X[:16], 2):
        plain(batch)
    assert_close(states_of(model), states_of(plain))


def test_state_is_saved_and_restored(tmp_path):
    trainer = train(make_model("lstm"))
    expected = states_of(trainer.model)
    trainer.save(tmp_path / "run")
    other = train(make_model("lstm"), x=X + 1)
    other.restore(tmp_path / "run")
    assert_close(states_of(other.model), expected)
