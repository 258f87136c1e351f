"""Claims about losses whose values are not one or more for each example.

They say as little about what they were averaged over as a scalar does.
"""

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import KERAS_NAME, keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")

rng = np.random.default_rng(0)
X = rng.normal(size=[24, 5]).astype("float32")
Y = X[:, :3] ** 2


def sum_of_columns(y, p):
    return ops.sum(ops.square(y - p), axis=0)


def mean_of_columns(y, p):
    return ops.mean(ops.square(y - p), axis=0)


def mean_in_axes_of_one(y, p):
    return ops.mean(ops.square(y - p), keepdims=True)


def of_pairs(y, p):
    return ops.square(ops.matmul(y - p, ops.transpose(y - p)))


def of_elements_in_a_row(y, p):
    return ops.reshape(ops.square(y - p), [-1])


class SumOfColumns(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return sum_of_columns(y_true, y_pred)


def make_model():
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(3)])
    model.set_weights([np.full(w.shape, 0.1) for w in model.weights])
    return model


def make_trainer(loss, rate=0.1, size=6, **options):
    return Trainer(
        make_model(),
        optimizer=keras.optimizers.SGD(rate),
        loss=loss,
        accumulation=Accumulation(micro_batch_size=size),
        **options,
    )


def assert_exact(loss, **options):
    trainer, expected = make_trainer(loss, **options), make_model()
    trainer.fit(X, Y, batch_size=24, verbose=0)
    expected.compile(keras.optimizers.SGD(0.1), loss)
    expected.train_on_batch(X, Y)
    pairs = zip(trainer.model.weights, expected.weights, strict=True)
    for one, other in pairs:
        one, other = map(ops.convert_to_numpy, (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


REDUCED = {
    "sum": (sum_of_columns, "adds up over samples"),
    "mean": (mean_of_columns, "is a mean over samples"),
    "kept axes": (mean_in_axes_of_one, "is a mean over samples"),
    "pairs": (of_pairs, "couples examples"),
}
if KERAS_NAME == "keras":
    REDUCED["Dice"] = keras.losses.Dice(axis=(0,)), "couples examples"


# Micro-batches of 3 have as many examples as there are columns.
@pytest.mark.parametrize("size", [6, 3])
@pytest.mark.parametrize("name", REDUCED)
def test_values_that_are_not_one_per_example_are_refused(name, size):
    loss, shown = REDUCED[name]
    with pytest.raises(ValueError, match="not one per example") as caught:
        make_trainer(loss, size=size).fit(X, Y, batch_size=24, verbose=0)
    assert f"shows that it {shown}" in str(caught.value)


def test_mean_over_samples_in_columns_is_exact_as_stated():
    assert_exact(mean_of_columns, denominator="samples")


def test_sum_of_columns_that_says_so_is_a_sum():
    assert_exact(SumOfColumns(reduction="sum"))


def test_values_of_all_elements_in_a_row_are_believed():
    assert_exact(of_elements_in_a_row, size=9)


def test_evaluation_weighs_samples_before_training_and_after():
    values = []
    for trains_first in (False, True):
        trainer = make_trainer(mean_of_columns, rate=0.0, denominator="samples")
        if trains_first:
            trainer.fit(X, Y, batch_size=24, verbose=0)
        # Batches of 8 and 3.
        values.append(trainer.evaluate(X[:11], Y[:11], batch_size=8, verbose=0))
    errors = Y[:11] - trainer.predict(X[:11], verbose=0)
    np.testing.assert_allclose(values, np.mean(errors**2), rtol=1e-5)
