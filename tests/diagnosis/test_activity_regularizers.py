"""Claims about activity regularizers, which Keras divides by the batch size.

What adds up over samples is exact then. Of other ones a trial tells.
"""

import numpy as np
import pytest
from keras_core_gaps import keras_3_only

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.diagnosis.trials import Trials
from accumtrainer.keras_api import keras, ops

pytestmark = [
    pytest.mark.usefixtures("without_xla"),
    keras_3_only("does not divide activity regularizers by the batch size"),
]

layers = keras.layers
X = np.random.default_rng(0).normal(size=[16, 5]).astype("float32")
Y = X[:, :3] ** 2


def sparsity(a):
    return ops.sum(ops.square(ops.mean(a, axis=0) - 0.05))


def mean_square(a):
    return ops.mean(ops.square(a))


class Gram(keras.regularizers.Regularizer):
    """Wants samples to differ from each other."""

    def __call__(self, a):
        return 0.01 * ops.sum(ops.square(ops.matmul(a, ops.transpose(a))))


def above(a):
    return ops.sum(ops.relu(a - 0.3))


class Squares(keras.regularizers.Regularizer):
    def __call__(self, a):
        return 0.1 * ops.sum(ops.square(a))


NO_SUMS = {
    sparsity: "couples examples",
    mean_square: "is no sum over samples",
    Gram(): "couples examples",
}


def make_model(regularizer, **options):
    keras.utils.set_random_seed(2)
    options = {"activation": "tanh", "name": "code", **options}
    model = keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(8, activity_regularizer=regularizer, **options),
            layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def by_trainer(regularizer, size=4, **options):
    model = make_model(regularizer)
    accumulation = Accumulation(micro_batch_size=size, **options)
    trainer = Trainer(model, accumulation=accumulation)
    trainer.fit(X, Y, batch_size=16, epochs=2, verbose=0)
    return model.get_weights()


def by_fit(regularizer):
    model = make_model(regularizer)
    model.fit(
        *(X, Y, 4),
        **{"epochs": 2, "verbose": 0, "shuffle": False},
        callbacks=[GradientAccumulation(4)],
    )
    return model.get_weights()


def by_keras(regularizer):
    model = make_model(regularizer)
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    return model.get_weights()


@pytest.mark.parametrize("train", [by_trainer, by_fit])
@pytest.mark.parametrize("regularizer", NO_SUMS)
def test_what_is_no_sum_over_samples_is_refused(regularizer, train):
    shown = NO_SUMS[regularizer]
    with pytest.raises(
        ValueError, match=rf"activity regularizer of code.* {shown}\. Have it"
    ):
        train(regularizer)


@pytest.mark.parametrize("train", [by_trainer, by_fit])
@pytest.mark.parametrize("regularizer", [above, Squares()])
def test_sums_of_users_are_exact(regularizer, train):
    for one, other in zip(
        train(regularizer), by_keras(regularizer), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def scaled_mean(weight):
    return lambda a: weight * ops.mean(ops.square(a))


def scaled_sum(weight):
    return lambda a: weight * ops.sum(ops.square(a))


class WarmUp(keras.callbacks.Callback):
    """Raises the weight of a penalty, which begins at zero."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def on_epoch_begin(self, epoch, logs=None):
        self.weight.assign(0.3 * epoch)


@pytest.mark.parametrize("is_tracked", [True, False])
@pytest.mark.parametrize("make", [scaled_mean, scaled_sum])
def test_a_penalty_that_is_zero_at_first_is_tried_with_another_weight(
    make, is_tracked
):
    def train(fit, model, weight, is_tracked=True):
        weight.assign(0.0)
        model.penalty = weight if is_tracked else None
        how = {"batch_size": 16, "epochs": 3, "verbose": 0, "shuffle": False}
        fit(X, Y, callbacks=[WarmUp(weight)], **how)
        return list(map(ops.convert_to_numpy, model.trainable_variables))

    weight = keras.Variable(0.0, trainable=False, name="penalty")
    model = make_model(make(weight))
    accumulation = Accumulation(micro_batch_size=4)
    trainer = Trainer(model, accumulation=accumulation)
    if make is scaled_mean:
        with pytest.raises(ValueError, match="is no sum over samples"):
            train(trainer.fit, model, weight, is_tracked)
        return
    found = train(trainer.fit, model, weight, is_tracked)
    model = make_model(make(weight))
    expected = train(model.fit, model, weight)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("regularizer", [mean_square, Squares()])
def test_a_penalty_on_what_is_zero_at_first_is_tried_with_other_weights(
    regularizer,
):
    def train(accumulation):
        model = make_model(
            regularizer, activation=None, kernel_initializer="zeros"
        )
        trainer = Trainer(model, accumulation=accumulation)
        trainer.fit(X, Y, batch_size=16, epochs=3, verbose=0)
        return model.get_weights()

    if regularizer is mean_square:
        with pytest.raises(ValueError, match="is no sum over samples"):
            train(Accumulation(micro_batch_size=4))
        return
    found, expected = train(Accumulation(micro_batch_size=4)), train(1)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow",
    reason="TensorFlow multiplies no penalty of bfloat16 by Keras's float32",
)
def test_a_penalty_in_half_precision_is_tried_too():
    def train(regularizer):
        model = make_model(regularizer, dtype="mixed_bfloat16")
        trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=4))
        trainer.fit(X, Y, batch_size=16, verbose=0)

    train(Squares())
    with pytest.raises(ValueError, match="activity regularizer of code"):
        train(mean_square)


@pytest.mark.parametrize("regularizer", NO_SUMS)
def test_any_is_right_where_an_update_has_one_micro_batch(regularizer):
    for one, other in zip(
        by_trainer(regularizer, 16), by_keras(regularizer), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_any_is_taken_where_micro_batches_count_alike():
    for one, other in zip(
        by_trainer(sparsity, combine="mean"),
        by_keras(sparsity),
        strict=True,
    ):
        assert np.isfinite(one).all()
        assert one.shape == other.shape


def test_those_of_keras_need_no_trial(monkeypatch):
    def refuse(trials, window):
        raise AssertionError

    monkeypatch.setattr(Trials, "judge_losses", refuse)
    by_trainer("l2")
    by_trainer(keras.regularizers.L1L2(0.1, 0.1))
    with pytest.raises(AssertionError):
        by_trainer(above)
