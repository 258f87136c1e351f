"""Claims about `Trainer.save` where a callback calls it, in any hook."""

import numpy as np
import pytest
from resumable import X, Y, assert_same, fit_arrays, fit_list, make_trainer

from accumtrainer import Accumulation, Callback
from accumtrainer.keras_api import keras

HOOKS = {
    "on_train_begin": [0],
    "on_epoch_begin": [0, 1],
    "on_train_batch_begin": [0, 2, 4],
    "on_micro_batch": [0, 5],
    "on_apply": [0, 3],
    "on_train_batch_end": [0, 2, 3],
    "on_validation_end": [1],
    "on_epoch_end": [0, 1, 2],
    "on_train_end": [0],
}
"""At which of their calls the tests save."""


class Ended(Callback):
    """Keeps which epochs have ended."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


def saving(name, nth, path):
    """Make a callback that saves at some call of one of its hooks."""

    def save(self, *args, logs=None):
        self.calls += 1
        if self.calls == nth + 1:
            self.trainer.save(path)

    cls = type("Saving", (Callback,), {name: save, "needs_trainer": True})
    callback = cls()
    callback.calls = 0
    return callback


def fit(fit_data, *callbacks, accumulation=None, **options):
    """Train 3 epochs of 3 updates, and return the Trainer."""
    accumulation = accumulation or Accumulation(steps=2)
    trainer = make_trainer(accumulation=accumulation)
    callbacks, validation_data = list(callbacks), (X, Y)
    history = fit_data(
        trainer, callbacks=callbacks, validation_data=validation_data, **options
    )
    return trainer, history


@pytest.mark.parametrize("fit_data", [fit_arrays, fit_list])
@pytest.mark.parametrize(
    ("name", "nth"), [(name, nth) for name in HOOKS for nth in HOOKS[name]]
)
def test_run_goes_on_from_where_a_hook_saved(name, nth, fit_data, tmp_path):
    path, before, after = tmp_path / "saved", Ended(), Ended()
    whole, history = fit(fit_data, before, saving(name, nth, path), after)
    assert before.epochs == after.epochs == [0, 1, 2]
    before, after = Ended(), Ended()
    never = saving(name, 10**6, path)
    resumed, resumed_history = fit(
        fit_data, before, never, after, resume_from=path
    )
    assert_same(whole, resumed)
    assert before.epochs == after.epochs == [0, 1, 2]
    assert resumed_history.history == history.history


class Writer(Callback):
    """Writes into the logs of every epoch."""

    def on_epoch_end(self, epoch, logs=None):
        logs["written"] = float(epoch)


def test_logs_that_were_written_before_the_save_are_kept(tmp_path):
    path = tmp_path / "saved"
    _, history = fit(fit_arrays, Writer(), saving("on_epoch_end", 1, path))
    never = saving("on_epoch_end", 10**6, path)
    _, resumed = fit(fit_arrays, Writer(), never, resume_from=path)
    assert resumed.history["written"] == history.history["written"]


def test_callback_that_is_listed_twice_is_told_twice():
    ended = Ended()
    fit(fit_arrays, ended, ended)
    assert ended.epochs == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", ["on_train_begin", "on_epoch_begin"])
def test_run_that_goes_on_may_save_before_its_first_update(name, tmp_path):
    path = tmp_path / "saved"
    whole, _ = fit(fit_arrays, saving("on_train_batch_end", 3, path))
    fit(fit_arrays, saving(name, 0, path), resume_from=path)
    resumed, _ = fit(fit_arrays, resume_from=path)
    assert_same(whole, resumed)


def test_epoch_that_goes_on_ends_anew(tmp_path):
    path, ended = tmp_path / "saved", Ended()
    save = saving("on_epoch_end", 0, path)
    fit(fit_arrays, save, max_updates=2)
    whole, history = fit(fit_arrays)
    resumed, resumed_history = fit(fit_arrays, ended, resume_from=path)
    for one, other in zip(
        whole.model.get_weights(), resumed.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert ended.epochs == [0, 1, 2]
    values = resumed_history.history["val_loss"][-3:]
    np.testing.assert_array_equal(values, history.history["val_loss"])


def test_rest_that_an_epoch_carries_on_is_trained_on_after_a_stop(tmp_path):
    path, carry = tmp_path / "saved", Accumulation(steps=5, tail="carry")

    def stop(epoch, logs):
        whole.model.stop_training = True

    whole = make_trainer(accumulation=carry)
    stopping = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    callbacks = [stopping, saving("on_epoch_end", 0, path)]
    fit_arrays(whole, callbacks=callbacks)
    assert whole.progress.samples == len(X)  # with those of no full window
    idle = [keras.callbacks.LambdaCallback(), saving("on_epoch_end", 9, path)]
    resumed, _ = fit(fit_arrays, *idle, accumulation=carry, resume_from=path)
    assert_same(whole, resumed)
