"""Claims about what XLA cannot compile, and Keras trains without it."""

import warnings

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import BACKEND, keras

pytestmark = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="on JAX all is compiled by XLA, as in Keras"
)

if BACKEND == "tensorflow":
    import tensorflow as tf

X = np.random.default_rng(0).normal(size=[16, 6]).astype("float32")
Y = X[:, :1] - X[:, 1:2]


class Calls(keras.layers.Layer):
    """Calls a function that XLA cannot compile."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def in_python(inputs):
    doubled = tf.py_function(lambda x: 2 * x, [inputs], "float32")
    return tf.ensure_shape(doubled, inputs.shape)


def by_table(inputs):
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([0, 1], [0.5, 2.0]), 1.0
    )
    return inputs * table.lookup(tf.cast(inputs[:, :1] > 0, "int32"))


def in_loop(inputs):
    def step(index, x):
        return index + 1, tf.tanh(x)

    return tf.while_loop(lambda index, x: index < 3, step, [0, inputs])[1]


def printed(inputs):
    tf.print("seen", output_stream="file:///dev/null")
    return inputs


def make_model(function):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Dense(6),
            Calls(function),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("size", [2, 3, 8], ids=["fused", "streamed", "whole"])
@pytest.mark.parametrize("function", [in_python, by_table, in_loop, printed])
def test_what_xla_cannot_compile_trains_as_in_keras(function, size):
    model, expected = make_model(function), make_model(function)
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=size))
    with pytest.warns(UserWarning, match="XLA cannot compile") as told:
        trainer.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert len(told) == 1
    expected.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(
        model.get_weights(), expected.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_xla_that_was_asked_for_refuses_it():
    trainer = Trainer(make_model(in_python), jit_compile=True)
    with pytest.raises(tf.errors.OpError, match="EagerPyFunc"):
        trainer.fit(X, Y, verbose=0)


def test_an_error_that_comes_without_xla_too_is_raised_as_it_is():
    def fails(inputs):
        def fail(x):
            raise ValueError("my own")

        failed = tf.py_function(fail, [inputs], "float32")
        return tf.ensure_shape(failed, inputs.shape)

    trainer = Trainer(make_model(fails), accumulation=2)
    with (
        warnings.catch_warnings(),
        pytest.raises(tf.errors.OpError, match="my own"),
    ):
        warnings.simplefilter("error")
        trainer.fit(X, Y, batch_size=4, verbose=0)
    assert trainer.progress.updates == 0
