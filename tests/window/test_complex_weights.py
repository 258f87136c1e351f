"""Weights that are complex numbers are trained as Keras does."""

import numpy as np
import pytest
from complex_layer import START, Turn
from keras_core_gaps import keras_3_only

from accumtrainer import Accumulation, LossScale, Trainer
from accumtrainer.callbacks import Checkpoint, GradientAccumulation
from accumtrainer.keras_api import keras, ops

pytestmark = [
    keras_3_only("has no complex variables"),
    pytest.mark.usefixtures("without_xla"),
]

X = np.random.default_rng(0).normal(size=[12, 3]).astype("float32")
Y = X.sum(axis=1, keepdims=True)
SGD = keras.optimizers.SGD
"""The lists that Keras makes for Adam on PyTorch must be of one kind."""


def make_model(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), Turn(), keras.layers.Dense(1)])
    model.compile(loss="mse", **{"optimizer": SGD(0.02)} | options)
    return model


def train_plainly(model, x=X, y=Y):
    model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return weights_of(model)


def train(model, x=X, y=Y, trainer=Trainer, **options):
    trainer = trainer(model, **options)
    batch_size = trainer.accumulation.micro_batch_size and 6 or 2
    trainer.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return weights_of(model)


def weights_of(model):
    return [ops.convert_to_numpy(weight) for weight in model.weights]


def assert_same(actual, expected):
    assert np.abs(expected[0].imag - START.imag).max() > 1e-4
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulation": Accumulation(steps=3)},
        {"accumulation": Accumulation(micro_batch_size=2)},
        {"accumulation": Accumulation(micro_batch_size=6)},
        {"accumulation": Accumulation(micro_batch_size=2, per_example=True)},
        {
            "accumulation": Accumulation(micro_batch_size=4),
            "loss_scale": LossScale(initial=1024.0),
        },
    ],
)
def test_both_parts_are_trained(options):
    assert_same(train(make_model(), **options), train_plainly(make_model()))


def test_both_parts_are_trained_inside_fit():
    model = make_model()
    callbacks = [GradientAccumulation(3)]
    order = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(X, Y, callbacks=callbacks, **order)
    assert_same(weights_of(model), train_plainly(make_model()))


class Doubled(Trainer):
    """Changes gradients by hooks, which see complex ones."""

    def on_accumulate(self, gradients, info):
        return [gradient * 4.0 for gradient in gradients]

    def on_apply(self, gradients, info):
        self.log("imaginary", ops.norm(ops.imag(gradients[0])))
        return [gradient / 2.0 for gradient in gradients]


def test_hooks_are_given_complex_gradients():
    accumulation = Accumulation(micro_batch_size=2)
    model = make_model(optimizer=SGD(0.01))
    actual = train(model, trainer=Doubled, accumulation=accumulation)
    twice = SGD(0.02)
    assert_same(actual, train_plainly(make_model(optimizer=twice)))


def test_norm_is_of_both_parts():
    model = make_model(optimizer=SGD(1.0))
    before = weights_of(model)
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=4))
    history = trainer.fit(X, Y, batch_size=12, verbose=0).history
    moved = [b - a for b, a in zip(before, weights_of(model), strict=True)]
    norm = np.sqrt(sum(np.sum(np.abs(part) ** 2) for part in moved))
    np.testing.assert_allclose(history["gradient_norm"], norm, rtol=1e-5)


def test_update_that_is_not_finite_is_skipped():
    x = X.copy()
    x[2] = np.nan
    model = make_model()
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=2))
    trainer.fit(x[:6], Y[:6], batch_size=6, verbose=0)
    assert trainer.progress.skipped_updates == 1
    np.testing.assert_array_equal(weights_of(model)[0], START)


def test_checkpoint_holds_both_parts(tmp_path):
    def fit(epochs, folder="cut", **options):
        model = make_model()
        trainer = Trainer(model, accumulation=Accumulation(steps=3), seed=0)
        trainer.fit(
            X,
            Y,
            batch_size=2,
            epochs=epochs,
            verbose=0,
            callbacks=[Checkpoint(tmp_path / folder)],
            **options,
        )
        return weights_of(model)

    expected = fit(2, "whole")
    fit(1)
    again = fit(2, resume_from="auto")
    for one, other in zip(again, expected, strict=True):
        np.testing.assert_array_equal(one, other)
