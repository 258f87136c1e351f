"""What people turn on to find a fault does here what it does in Keras.

A model that runs as plain Python is called for each micro-batch, by a compiled
program once for all.
"""

import numpy as np
import pytest
from calls import Calls

from accumtrainer import Accumulation, LossScale, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras

MICRO_BATCHES = 6


class Counted(keras.layers.Dense):
    """A layer that counts how often Python calls it."""

    def __init__(self):
        super().__init__(2)
        self.calls = Calls()

    def call(self, inputs):
        self.calls.note()
        return super().call(inputs)


def make_model(**options):
    model = keras.Sequential([keras.Input([3]), Counted()])
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return model


def fit_as_keras(model, **options):
    model.fit(*data(), batch_size=4, verbose=0, **options)


def fit_by_trainer(model, loss_scale="auto", **options):
    # Of a compiled model it does not heed this.
    jit_compile = "auto" if model.jit_compile else False
    trainer = Trainer(
        model,
        accumulation=Accumulation(micro_batch_size=2),
        loss_scale=loss_scale,
        jit_compile=jit_compile,
    )
    trainer.fit(*data(), batch_size=4, verbose=0, **options)


def fit_within_keras(model, loss_scale="auto", **options):
    callbacks = [GradientAccumulation(steps=2, loss_scale=loss_scale)]
    options |= {"callbacks": callbacks, "verbose": 0}
    model.fit(*data(), batch_size=2, **options)


def data():
    rng = np.random.default_rng(0)
    size = 2 * MICRO_BATCHES
    return (
        rng.normal(size=[size, 3]).astype("float32"),
        rng.normal(size=[size, 2]).astype("float32"),
    )


def calls_of_second_fit(fit, model):
    """Count what is called when everything has been looked at and compiled."""
    fit(model)
    layer = model.layers[-1]
    before = layer.calls.count
    fit(model)
    return layer.calls.count - before


@pytest.fixture
def nothing_compiles():
    """Tell the backend itself to compile nothing."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.config.run_functions_eagerly(True)
        yield
        tf.config.run_functions_eagerly(False)
    else:
        import jax

        with jax.disable_jit():
            yield


WAYS = pytest.mark.parametrize("fit", [fit_by_trainer, fit_within_keras])


@WAYS
def test_model_that_is_compiled_so_runs_eagerly(fit):
    model = make_model(run_eagerly=True)
    assert calls_of_second_fit(fit, model) >= MICRO_BATCHES


# Keras compiles nothing on PyTorch unless it is told to, so there is nothing to
# switch off for all of it; what `torch.compiler.set_stance` has set, nobody but
# PyTorch can read.
@WAYS
@pytest.mark.skipif(BACKEND == "torch", reason="no switch that Keras heeds")
@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.filterwarnings("ignore:.*does not apply to tf.data:UserWarning")
def test_backend_that_is_told_so_runs_everything_eagerly(fit):
    assert calls_of_second_fit(fit, make_model()) >= MICRO_BATCHES


@WAYS
def test_all_else_is_compiled(fit):
    assert calls_of_second_fit(fit, make_model()) < MICRO_BATCHES


@pytest.mark.parametrize(
    ("compiled", "options"),
    [
        ({"run_eagerly": True}, {"optimizer": "adam", "loss": "mae"}),
        ({}, {"optimizer": "adam", "run_eagerly": True}),
        ({}, {"run_eagerly": True}),
    ],
)
def test_model_is_compiled_to_run_eagerly(compiled, options):
    model = make_model(**compiled)
    Trainer(model, **options)
    assert model.run_eagerly
    calls = model.layers[-1].calls
    before = calls.count
    model.evaluate(*data(), batch_size=2, verbose=0)
    assert calls.count - before >= MICRO_BATCHES


class OnlyInPython(keras.Model):
    """A model that has NumPy scale what it trains on.

    Keras itself traces a model on JAX before it runs it eagerly, as if to
    evaluate.
    """

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs, training=False):
        if training:
            numbers = keras.ops.convert_to_numpy(inputs)
            largest = np.abs(numbers).max(axis=1, keepdims=True)
            inputs = inputs / keras.ops.convert_to_tensor(largest)
        return self.dense(inputs)


@WAYS
@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"jit_compile": False}]
)
def test_what_only_python_can_compute_trains(fit, options):
    if BACKEND == "tensorflow" and "jit_compile" in options:
        pytest.skip("Keras itself cannot train it in a graph")
    models = []
    for train in (fit_as_keras, fit):
        model = OnlyInPython()
        model.compile(keras.optimizers.SGD(0.1), "mse", **options)
        model(data()[0])
        model.set_weights([np.ones([3, 2]), np.zeros([2])])
        train(model, shuffle=False)
        models.append(model.get_weights())
    for one, other in zip(*models, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.fixture
def tells_of_nan():
    """Have the backend raise where it computes NaN."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.debugging.enable_check_numerics()
        yield
        tf.debugging.disable_check_numerics()
    elif BACKEND == "jax":
        import jax

        with jax.debug_nans(True):
            yield
    else:
        import torch

        with torch.autograd.set_detect_anomaly(True):
            yield


@WAYS
@pytest.mark.usefixtures("tells_of_nan")
@pytest.mark.filterwarnings("ignore:XLA cannot compile:UserWarning")
def test_what_tells_of_nan_finds_none_in_sound_training(fit):
    model = keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(4, "tanh", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.Adam(0.1, global_clipnorm=0.1)
    model.compile(optimizer, "mse", metrics=["mae"])
    fit(model, loss_scale=LossScale(initial=8.0), validation_data=data())
    assert np.isfinite(model.history.history["val_mae"]).all()
