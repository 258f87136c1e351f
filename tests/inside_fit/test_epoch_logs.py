"""Claims about the logs of epochs that end amid a window."""

import numpy as np
import pytest
from accumulating import (
    ORDER,
    X,
    Y,
    leaves_data_unended,
    make_trainer,
    mlp,
    sequences,
    two_outputs,
)
from keras_core_gaps import keras_3_only

from accumtrainer.callbacks.gradient_accumulation import GradientAccumulation
from accumtrainer.keras_api import keras

pytestmark = [
    keras_3_only("has a fit of its own kind, which is refused"),
    pytest.mark.filterwarnings("ignore:.*ran out of data"),
]


class Told(keras.callbacks.Callback):
    """Notes the logs of epochs; stops after a number of batches."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.stop_after = stop_after
        self.history = {}

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch + 1 == self.stop_after

    def on_epoch_end(self, epoch, logs=None):
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)


def tagging():
    """Make the data of `two_outputs`."""
    tokens, tags = sequences()
    means = tokens.mean(axis=1, keepdims=True).astype("float32")
    return tokens, {"tags": tags, "mean": means}


def rows_of(data, rows):
    return keras.tree.map_structure(lambda array: array[rows], data)


def unended(data):
    """Yield the batches of `ORDER`, and do not say how many there are."""
    for start in range(0, 22, 3):
        yield rows_of(data, slice(start, start + 3))


def assert_same_logs(actual, expected):
    """Compare logs of `fit` with those of a Trainer, which tells more."""
    names = {name for name in actual if not name.startswith("val_")}
    assert names and names <= set(expected)
    assert {name for name in expected if name.endswith("loss")} <= names
    for name in names:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5)


@leaves_data_unended
@pytest.mark.parametrize("steps", [3, 9])
def test_logs_have_a_window_of_data_whose_length_is_unknown(steps):
    # Several losses wait for the window: only the whole weighs them.
    model, data, told = two_outputs(), tagging(), Told()
    history = model.fit(
        unended(data),
        shuffle=False,
        verbose=0,
        callbacks=[GradientAccumulation(steps), told],
    )
    expected = make_trainer(two_outputs(), steps).fit(*data, **ORDER)
    assert_same_logs(history.history, expected.history)
    assert_same_logs(told.history, expected.history)


@leaves_data_unended
@pytest.mark.parametrize("stop_after", [1, 5])
def test_logs_have_a_window_in_which_training_was_stopped(stop_after):
    model, data = two_outputs(weighted_metrics={"mean": ["mae"]}), tagging()
    told = Told(stop_after)
    history = model.fit(
        *data,
        epochs=2,
        validation_data=data,
        callbacks=[GradientAccumulation(3), told],
        **ORDER,
    )
    twin = two_outputs(weighted_metrics={"mean": ["mae"]})
    first = rows_of(data, slice(stop_after * 3))
    expected = make_trainer(twin, 3).fit(*first, **ORDER)
    assert_same_logs(history.history, expected.history)
    assert_same_logs(told.history, expected.history)
    assert "val_loss" in history.history


@leaves_data_unended
def test_logs_forget_the_last_window_where_it_is_not_finite():
    x, told = np.where(np.arange(22)[:, None] < 12, X, np.nan), Told(5)
    model = mlp(weighted_metrics=["accuracy"])
    history = model.fit(
        x, Y, callbacks=[GradientAccumulation(2), told], **ORDER
    )
    trainer = make_trainer(mlp(weighted_metrics=["accuracy"]), 2)
    expected = trainer.fit(x[:12], Y[:12], **ORDER)
    assert_same_logs(history.history, expected.history)
