"""Which checkpoint `Checkpoint(keep_best=...)` takes for the best."""

import os

import numpy as np
import pytest
from quickest import RUN_EAGERLY

from accumtrainer import Callback, Trainer
from accumtrainer.callbacks import Checkpoint
from accumtrainer.callbacks.best_values import direction_by_name
from accumtrainer.keras_api import keras

RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 3]).astype("float32")
Y = (X[:, :1] * 2 + 1).astype("float32")


def fit(checkpoint, metrics=(), callbacks=(), **options):
    keras.utils.set_random_seed(1)
    trainer = Trainer(
        keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(0.05),
        loss="mse",
        metrics=list(metrics),
        seed=0,
        run_eagerly=RUN_EAGERLY,
        callbacks=[*callbacks, checkpoint],
    )
    options = {"epochs": 3, "validation_data": (X, Y)} | options
    return trainer.fit(X, Y, batch_size=4, verbose=0, **options)


def best_epoch(directory):
    trainer = Trainer(
        keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(0.05),
        loss="mse",
    )
    trainer.restore(directory, which="best")
    return trainer.progress.epochs - 1


class Writes(Callback):
    """Writes a number of its own into the logs of epochs."""

    def __init__(self, name, values):
        super().__init__()
        self.name = name
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs[self.name] = self.values[epoch]


@pytest.mark.parametrize(
    "name, direction",
    [
        ("val_loss", "min"),
        ("mae", "min"),
        ("val_accuracy", "max"),
        ("val_mean_io_u", "max"),
        ("val_cosine_similarity", "max"),
        ("specificity_at_sensitivity", "max"),
        ("val_R2", "max"),
        ("recall_2", "max"),
        ("val_precision_loss", "min"),
        ("val_acceleration_mae", "min"),
        ("val_decoder2_mae", "min"),
        ("val_previous_mae", "min"),
        ("accuracy_mean_squared_error", "min"),
        ("val_brier_score", None),
        ("val_acceleration", None),
    ],
)
def test_a_direction_goes_by_the_whole_words_of_a_name(name, direction):
    assert direction_by_name(name) == direction


@pytest.mark.parametrize("name", ["distance", "acc_of_fit"])
def test_a_metric_says_itself_what_is_best(name, tmp_path):
    checkpoint = Checkpoint(tmp_path, keep=1, keep_best=f"val_{name}")
    metric = keras.metrics.MeanAbsoluteError(name=name)
    history = fit(checkpoint, [metric]).history[f"val_{name}"]
    assert history[-1] < history[0]
    assert best_epoch(tmp_path) == np.argmin(history)
    # Where nothing is left to be trained, no metric has been built.
    again = Checkpoint(tmp_path, keep=1, keep_best=f"val_{name}")
    assert fit(again, [metric], resume_from="auto").epoch == [0, 1, 2]


def test_what_is_best_is_asked_after_the_first_update(tmp_path):
    checkpoint = Checkpoint(tmp_path, keep_best="val_distance")
    with pytest.raises(ValueError, match="Give mode='max' or mode='min'"):
        fit(checkpoint, callbacks=[Writes("val_distance", [1, 2, 3])])
    assert checkpoint.trainer.progress.updates == 1


def test_a_number_that_a_callback_writes_can_be_the_best(tmp_path):
    writes = Writes("val_f1", [0.1, 0.9, 0.5])
    fit(Checkpoint(tmp_path, keep=1, keep_best="val_f1"), callbacks=[writes])
    assert best_epoch(tmp_path) == 1


def test_a_validation_is_judged_when_it_is_made_alone(tmp_path):
    checkpoint = Checkpoint(tmp_path, keep=9, keep_best="val_loss", mode="max")
    fit(checkpoint, epochs=4, validation_freq=2)
    resumed = Checkpoint(tmp_path, keep=9, keep_best="val_loss", mode="max")
    fit(resumed, epochs=5, validation_freq=2, resume_from="auto")
    assert best_epoch(tmp_path) == 1


def test_a_number_that_never_came_is_warned_of(tmp_path):
    checkpoint = Checkpoint(tmp_path, keep_best="val_f1")
    with pytest.warns(UserWarning, match="val_f1.*available are.*val_loss"):
        fit(checkpoint)
    assert len(os.listdir(tmp_path)) == 3


def test_several_numbers_are_no_best_one(tmp_path):
    writes = Writes("val_f1", [np.array([0.1, 0.2])] * 3)
    checkpoint = Checkpoint(tmp_path, keep_best="val_f1")
    with pytest.raises(ValueError, match=r"single number.*\(2,\)"):
        fit(checkpoint, callbacks=[writes])
    writes = Writes("val_f1", [np.array([0.1]), None, np.array([0.5])])
    fit(Checkpoint(tmp_path, keep_best="val_f1"), callbacks=[writes])
    assert best_epoch(tmp_path) == 2
