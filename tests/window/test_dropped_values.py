"""Losses and hooks that leave out values by the numbers in them are exact."""

import numpy as np
import pytest

from accumtrainer import Accumulation, Batch, Trainer
from accumtrainer.keras_api import BACKEND, keras, ops

if BACKEND == "jax":
    # On JAX all sizes follow from shapes, or nothing can be compiled.
    pytest.skip("JAX has no such sizes.", allow_module_level=True)

rng = np.random.default_rng(0)
X = rng.normal(size=[16, 3]).astype("float32")
Y = rng.normal(size=[16, 1]).astype("float32")
Y[[0, 1, 2, 5, 9]] = -9.0  # of micro-batches of four 1, 3, 3 and 4 are left


def pick(values, mask):
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.boolean_mask(values, mask)
    return values[mask]


def loss_of_the_known(y_true, y_pred):
    return pick(ops.square(y_true - y_pred), y_true > -5)


class KnownTrainer(Trainer):
    """Leave samples without a target out."""

    def on_micro_batch(self, batch, info):
        known = batch.y[:, 0] > -5
        return Batch(pick(batch.x, known), pick(batch.y, known))


def make_model(outputs=1):
    keras.utils.set_random_seed(0)
    inputs = keras.Input([3])
    return keras.Model(
        inputs, [keras.layers.Dense(1)(inputs) for _ in range(outputs)]
    )


def weights_by_keras(model, loss, x=X, y=Y):
    model.compile(keras.optimizers.SGD(1.0), loss, jit_compile=False)
    model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
    return model.get_weights()


def weights_by_trainer(model, loss, y=Y, trainer_class=Trainer, **options):
    trainer = trainer_class(
        model,
        optimizer=keras.optimizers.SGD(1.0),
        loss=loss,
        accumulation=Accumulation(micro_batch_size=4),
        **options,
    )
    trainer.fit(X, y, batch_size=16, shuffle=False, verbose=0)
    return model.get_weights()


def check(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_values_left_out_by_a_loss_do_not_count(run_eagerly):
    expected = weights_by_keras(make_model(), loss_of_the_known)
    ours = weights_by_trainer(
        make_model(), loss_of_the_known, run_eagerly=run_eagerly
    )
    check(ours, expected)


def known_by_the_host(y_true, y_pred):
    places = np.flatnonzero(y_true.numpy() > -5)
    return ops.square(y_true - y_pred)[places]


def known_by_a_list(y_true, y_pred):
    places = [i for i, (y,) in enumerate(y_true.tolist()) if y > -5]
    return ops.square(y_true - y_pred)[places]


def known_by_what_is_not_zero(y_true, y_pred):
    places = ops.cast(y_true[:, 0] > -5, "int32").to_sparse().indices()[0]
    return ops.square(y_true - y_pred)[places]


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch tells the host alone.")
@pytest.mark.parametrize(
    "loss", [known_by_the_host, known_by_a_list, known_by_what_is_not_zero]
)
def test_values_left_out_by_what_the_host_has_read_do_not_count(loss):
    expected = weights_by_keras(make_model(), loss)
    check(weights_by_trainer(make_model(), loss), expected)


def test_values_left_out_of_one_output_do_not_count():
    loss, y = [loss_of_the_known, "mse"], [Y, X[:, :1]]
    expected = weights_by_keras(make_model(2), loss, y=y)
    check(weights_by_trainer(make_model(2), loss, y=y), expected)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_samples_left_out_by_a_hook_do_not_count(run_eagerly):
    known = Y[:, 0] > -5
    expected = weights_by_keras(make_model(), "mse", X[known], Y[known])
    ours = weights_by_trainer(
        make_model(),
        "mse",
        trainer_class=KnownTrainer,
        run_eagerly=run_eagerly,
    )
    check(ours, expected)
