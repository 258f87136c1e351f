"""Claims about models of which Keras is told to make its functions anew."""

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import keras

X = np.random.default_rng(0).normal(1.0, size=(24, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
HOW = {"batch_size": 8, "shuffle": False, "verbose": 0}


def make_model():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inner = layers.Dense(4, "tanh", name="inner")
    return keras.Sequential([keras.Input([3]), inner, layers.Dense(1)])


def change(model):
    """Do as Keras asks whoever changes what its functions have traced."""
    model.get_layer("inner").activation = keras.activations.relu
    model.make_train_function(force=True)
    model.make_test_function(force=True)


MOMENTS = {
    "amid an epoch": ("on_train_batch_end", (1,)),
    "after the last window": ("on_train_batch_end", (2,)),
    "after an epoch": ("on_epoch_end", (0,)),
}


class Changing(keras.callbacks.Callback):
    """Changes the model once, in the first epoch."""

    def __init__(self, hook, positions):
        super().__init__()
        self.left = list(positions)
        setattr(self, hook, self.act)

    def act(self, position, logs=None):
        if position in self.left:
            self.left.remove(position)
            change(self.model)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("k", [1, 2])
def test_what_a_callback_has_made_anew_is_that_of_keras(moment, k):
    def fit(trains):
        callback = Changing(*MOMENTS[moment])
        how = {**HOW, "epochs": 3, "validation_data": (X[:8], Y[:8])}
        history = trains.fit(X, Y, **how, callbacks=[callback]).history
        return [*history["loss"], *history["val_loss"]]

    plain = make_model()
    plain.compile(keras.optimizers.SGD(0.01), "mse")
    expected = fit(plain)
    expected.append(plain.evaluate(X, Y, verbose=0))
    trainer = Trainer(
        make_model(),
        keras.optimizers.SGD(0.01),
        "mse",
        accumulation=Accumulation(micro_batch_size=8 // k),
    )
    found = [*fit(trainer), trainer.evaluate(X, Y, verbose=0)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("hook", ["on_train_begin", *dict(MOMENTS.values())])
def test_a_callback_that_evaluates_sees_what_it_has_had_made_anew(hook):
    trainer = Trainer(make_model(), keras.optimizers.SGD(0.01), "mse")
    trainer.evaluate(X, Y, verbose=0)
    trainer.predict(X, verbose=0)
    found = []

    def ask(*args, **kwargs):
        change(trainer.model)
        model = trainer.model
        for evaluated in (trainer, model):
            predicted = evaluated.predict(X[:1], verbose=0).item()
            found.append([evaluated.evaluate(X, Y, verbose=0), predicted])

    callback = keras.callbacks.Callback()
    setattr(callback, hook, ask)
    history = trainer.fit(X, Y, **HOW, callbacks=[callback]).history
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    assert np.isfinite(history["loss"]).all()


def test_what_is_made_anew_between_calls_is_that_of_the_next_one():
    trainer = Trainer(make_model(), keras.optimizers.SGD(0.0), "mse")

    def losses():
        found = trainer.fit(X, Y, **HOW).history["loss"]
        return [*found, trainer.evaluate(X, Y, verbose=0)]

    before = losses()
    change(trainer.model)
    expected = trainer.model.evaluate(X, Y, verbose=0)
    assert before[0] != pytest.approx(expected, rel=1e-3)
    assert losses() == pytest.approx([expected] * 2, rel=1e-5)
