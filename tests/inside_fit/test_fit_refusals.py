"""Claims about models and arguments that `GradientAccumulation` refuses."""

import numpy as np
import pytest
from accumulating import (
    ORDER,
    X,
    Y,
    assert_same_weights,
    attributes,
    compiled,
    leaves_data_unended,
    make_trainer,
    mlp,
)
from keras_core_gaps import keras_3_only

from accumtrainer.callbacks.gradient_accumulation import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

pytestmark = keras_3_only("has a fit of its own kind, which is refused")


class OwnLoss(keras.Model):
    """Averages over the samples by itself."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        losses = keras.losses.sparse_categorical_crossentropy(
            y, y_pred, from_logits=True
        )
        return 3.0 * ops.mean(losses)


def own_loss(**options):
    keras.utils.set_random_seed(0)
    return compiled(OwnLoss(), **options)


def test_overridden_compute_loss_is_honoured_with_its_denominator():
    model = own_loss()
    callback = GradientAccumulation(3, denominator="samples")
    history = model.fit(X, Y, callbacks=[callback], epochs=2, **ORDER)
    trainer = make_trainer(own_loss(), 3, denominator="samples")
    expected = trainer.fit(X, Y, epochs=2, **ORDER)
    assert_same_weights(model, trainer.model)
    np.testing.assert_allclose(
        history.history["loss"], expected.history["loss"], rtol=1e-5
    )


@leaves_data_unended
def test_bare_loss_without_denominator_is_refused():
    model = own_loss()
    with pytest.raises(
        ValueError, match=r"GradientAccumulation\(denominator='samples'\)"
    ):
        model.fit(X, Y, callbacks=[GradientAccumulation(3)], **ORDER)
    model.fit(X, Y, callbacks=[GradientAccumulation(1)], **ORDER)


class OwnStep(keras.Model):
    def train_step(self, *arguments):
        return super().train_step(*arguments)


class OwnTrainFunction(keras.Model):
    def make_train_function(self, force=False):
        return super().make_train_function(force)


class OwnOtherSteps(keras.Model):
    def test_step(self, *arguments):
        return super().test_step(*arguments)

    def predict_step(self, *arguments):
        return super().predict_step(*arguments)


def subclassed(cls):
    keras.utils.set_random_seed(0)
    x = keras.Input([6])
    return compiled(cls(x, keras.layers.Dense(3)(x)))


class Distills(keras.Model):
    def train_step(self, *arguments):
        self.teach(*arguments)
        return super().train_step(*arguments)


@pytest.mark.parametrize(
    ("cls", "name", "remedy"),
    [
        (OwnStep, "train_step", "Leave it out"),
        (Distills, "train_step", "Move the loss into"),
        (OwnTrainFunction, "make_train_function", "Move the loss into"),
    ],
)
def test_models_that_train_themselves_are_refused(cls, name, remedy):
    message = rf"must not override {name}.*Received: .*{name}\. {remedy}"
    with pytest.raises(ValueError, match=message):
        subclassed(cls).fit(X, Y, callbacks=[GradientAccumulation(2)], **ORDER)


def test_model_that_was_given_a_train_step_is_refused():
    model = subclassed(keras.Model)
    model.train_step = lambda *arguments: {}
    with pytest.raises(ValueError, match="must not override train_step"):
        model.fit(X, Y, callbacks=[GradientAccumulation(2)], **ORDER)


def test_model_may_evaluate_and_predict_by_itself():
    model = subclassed(OwnOtherSteps)
    options = {"validation_data": (X, Y)}
    callbacks = [GradientAccumulation(2)]
    history = model.fit(X, Y, callbacks=callbacks, **ORDER | options)
    assert "val_loss" in history.history


def test_accumulating_optimizer_is_refused():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"GradientAccumulation\(steps=2\)"):
        mlp(optimizer=optimizer).fit(
            X, Y, callbacks=[GradientAccumulation(2)], **ORDER
        )


def test_two_of_them_are_refused_and_leave_nothing_behind():
    model = mlp()
    model.fit(X, Y, **ORDER)
    before = attributes(model)
    both = [GradientAccumulation(2), GradientAccumulation(3)]
    with pytest.raises(ValueError, match="one GradientAccumulation"):
        model.fit(X, Y, callbacks=both, **ORDER)
    model.fit(X, Y, **ORDER)
    assert attributes(model) == before


def test_trainer_refuses_it():
    trainer = make_trainer(mlp(), 2)
    with pytest.raises(ValueError, match=r"Use Trainer\(accumulation"):
        trainer.fit(X, Y, callbacks=[GradientAccumulation(2)], **ORDER)


def test_strategy_is_refused():
    if BACKEND != "tensorflow":
        pytest.skip("tf.distribute belongs to TensorFlow")
    import tensorflow as tf

    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = mlp()
    with pytest.raises(ValueError, match="trains on one device"):
        model.fit(X, Y, callbacks=[GradientAccumulation(2)], **ORDER)


def test_distribution_is_refused():
    if BACKEND != "jax":
        pytest.skip("keras.distribution needs JAX")
    distribution = keras.distribution.DataParallel(devices=["cpu:0"])
    keras.distribution.set_distribution(distribution)
    try:
        with pytest.raises(ValueError, match="trains on one device"):
            mlp().fit(X, Y, callbacks=[GradientAccumulation(2)], **ORDER)
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": 2, "combine": "median"},
        {"steps": 2, "max_consecutive_skips": 0},
        {"steps": 2, "denominator": "tokens"},
    ],
)
def test_bad_arguments_are_refused(options):
    with pytest.raises((TypeError, ValueError), match="Received"):
        mlp().fit(X, Y, callbacks=[GradientAccumulation(**options)], **ORDER)
