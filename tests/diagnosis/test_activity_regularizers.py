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


def make_model(regularizer):
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(
                8, "tanh", activity_regularizer=regularizer, name="code"
            ),
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
