"""Gradients of the user's own that are no multiple of what comes back.

Where micro-batches are alike, all that is differentiated is as large as in the
big batch, however the window runs.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops
from replicated import distributed

from accumtrainer import Accumulation, Trainer

LIMIT = 0.02


@ops.custom_gradient
def clipped(x):
    def grad(*args, upstream=None):
        (upstream,) = args if upstream is None else (upstream,)
        return ops.clip(upstream, -LIMIT, LIMIT)

    return x, grad


class Clipped(layers.Layer):
    def call(self, x):
        return clipped(x)


def make_model(is_convolved):
    keras.utils.set_random_seed(0)
    first = layers.Conv2D(3, 2) if is_convolved else layers.Dense(3)
    return keras.Sequential(
        [
            keras.Input([3, 3, 2]),
            first,
            layers.Flatten(),
            Clipped(),
            layers.Dense(2),
        ]
    )


def make_data(samples):
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal([samples, 3, 3, 2], dtype="float32"),
        rng.standard_normal([samples, 2], dtype="float32"),
    )


def make_trainer(is_convolved, **accumulation):
    return Trainer(
        make_model(is_convolved),
        optimizer=keras.optimizers.SGD(0.3),
        loss="mse",
        accumulation=Accumulation(**accumulation),
    )


def assert_same_as_keras(trainer, is_convolved, *batches):
    """Compare with two epochs of big batches `(x, y)`."""
    model = make_model(is_convolved)
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(0.3), "mse")
    for _ in range(2):
        for batch in batches:
            model.train_on_batch(*batch)
    assert np.abs(before[0] - model.get_weights()[0]).max() > 1e-3
    for ours, theirs in zip(
        trainer.model.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def halves(x, y):
    return (x[:8], y[:8]), (x[8:], y[8:])


@pytest.mark.parametrize("is_convolved", [False, True], ids=["dense", "conv"])
@pytest.mark.parametrize("micro_batch_size", [2, 4, 8])
def test_clipping_gradient_sees_those_of_the_big_batch(
    is_convolved, micro_batch_size
):
    x, y = make_data(16)
    trainer = make_trainer(is_convolved, micro_batch_size=micro_batch_size)
    trainer.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    if is_convolved and keras.backend.backend() == "jax":
        assert trainer.plan.name == "streamed"
    assert_same_as_keras(trainer, is_convolved, *halves(x, y))


def test_tail_of_fewer_micro_batches_too():
    x, y = make_data(12)
    trainer = make_trainer(True, steps=4)
    trainer.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    assert_same_as_keras(trainer, True, *halves(x, y))


def test_replicas_too():
    x, y = make_data(16)
    with distributed(2):
        trainer = make_trainer(False, micro_batch_size=2)
        trainer.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert trainer.replicas == 2
    assert_same_as_keras(trainer, False, *halves(x, y))
