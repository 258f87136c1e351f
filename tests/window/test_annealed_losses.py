"""Loss weights that are variables, and change while training goes on."""

import numpy as np
import pytest
from keras_core_gaps import keras_3_only
from logged import QUICKEST, X, Y, make_model
from quickest import JIT_COMPILE, RUN_EAGERLY

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras

layers = keras.layers


class Halve(keras.callbacks.Callback):
    """Halves a loss weight after every update."""

    def __init__(self, weight, every=1):
        super().__init__()
        self.weight = weight
        self.every = every

    def on_train_batch_end(self, batch, logs=None):
        if (batch + 1) % self.every == 0:
            self.weight.assign(self.weight.value * 0.5)


def annealed_kernel():
    """Make the two updates by hand."""
    kernel = np.ones([3, 1], "float32")
    bias = np.zeros([1], "float32")
    for weight, rows in [(1.0, slice(0, 4)), (0.5, slice(4, 8))]:
        error = 2 * (X[rows] @ kernel + bias - Y[rows]) / 4
        kernel = kernel - 0.1 * weight * X[rows].T @ error
        bias = bias - 0.1 * weight * error.sum(axis=0)
    return kernel


@keras_3_only("takes no variables in loss_weights")
@pytest.mark.parametrize("micro_batch_size", [4, 2])
@pytest.mark.parametrize("run_eagerly", {False, RUN_EAGERLY})
def test_loss_weight_that_is_a_variable_is_read_at_every_update(
    micro_batch_size, run_eagerly
):
    weight = keras.Variable(1.0, trainable=False)
    model = make_model()
    trainer = Trainer(
        model,
        optimizer=keras.optimizers.SGD(0.1),
        loss=["mse"],
        loss_weights=[weight],
        accumulation=Accumulation(micro_batch_size=micro_batch_size),
        jit_compile=JIT_COMPILE,
        run_eagerly=run_eagerly,
    )
    trainer.fit(
        X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[Halve(weight)]
    )
    np.testing.assert_allclose(
        model.get_weights()[0], annealed_kernel(), rtol=1e-5
    )
    loss = trainer.evaluate(X, Y, verbose=0)
    weight.assign(1.0)
    assert trainer.evaluate(X, Y, verbose=0) == pytest.approx(4 * loss)


@keras_3_only("takes no variables in loss_weights")
def test_loss_weight_that_is_a_variable_is_read_inside_fit():
    weight = keras.Variable(1.0, trainable=False)
    model = make_model()
    model.compile(
        keras.optimizers.SGD(0.1), loss=["mse"], loss_weights=[weight]
    )
    callbacks = [GradientAccumulation(2), Halve(weight, every=2)]
    model.fit(X, Y, batch_size=2, shuffle=False, verbose=0, callbacks=callbacks)
    np.testing.assert_allclose(
        model.get_weights()[0], annealed_kernel(), rtol=1e-5
    )


class TenFold(keras.callbacks.Callback):
    """Has a loss weight of 1, 10, 100 and so on in a round."""

    def __init__(self, weight, every=1):
        super().__init__()
        self.weight = weight
        self.every = every

    def on_train_batch_begin(self, batch, logs=None):
        self.weight.assign(10.0 ** (batch // self.every))

    on_test_batch_begin = on_train_batch_begin


def make_outputs(count):
    x = keras.Input([3])
    return keras.Model(x, [layers.Dense(1, name=n)(x) for n in "ab"[:count]])


@keras_3_only("takes no variables in loss_weights")
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("way", ["fit", "halves", "evaluate", "inside fit"])
def test_loss_logged_counts_each_batch_by_its_loss_weight(way, outputs):
    weight = keras.Variable(1.0, trainable=False)
    model = make_outputs(outputs)
    model.compile(
        keras.optimizers.SGD(0.0),
        loss=["mse"] * outputs,
        loss_weights=[1.0, weight][-outputs:],
        run_eagerly=RUN_EAGERLY,
    )
    y = [Y, -Y][:outputs]
    every = 2 if way == "inside fit" else 1
    anneal = TenFold(weight, every)
    how = {"batch_size": 2, "verbose": 0, "callbacks": [anneal]}
    if way == "inside fit":
        how["callbacks"].append(GradientAccumulation(2))
        logs = model.fit(X, y, shuffle=False, **how).history
    else:
        size = 1 if way == "halves" else 2
        accumulation = Accumulation(micro_batch_size=size)
        trainer = Trainer(model, accumulation=accumulation, **QUICKEST)
        if way == "evaluate":
            logs = trainer.evaluate(X, y, return_dict=True, **how)
        else:
            logs = trainer.fit(X, y, shuffle=False, **how).history
    losses = np.array(
        [
            np.square(X @ layer.get_weights()[0] - true).reshape(4, 2).mean(1)
            for layer, true in zip(model.layers[1:], y, strict=True)
        ]
    )
    weights = 10.0 ** (np.arange(4) // every)
    expected = (losses[:-1].sum(axis=0) + weights * losses[-1]).mean()
    np.testing.assert_allclose(np.squeeze(logs["loss"]), expected, rtol=1e-5)
    if outputs == 2:
        np.testing.assert_allclose(
            np.squeeze([logs["a_loss"], logs["b_loss"]]),
            losses.mean(axis=1),
            rtol=1e-5,
        )
