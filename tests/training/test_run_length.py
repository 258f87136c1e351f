"""Claims about how long `fit` trains: limits, clocks, trials."""

import math
import types

import numpy as np
import pytest
from linear import (
    Batches,
    X,
    Y,
    assert_same_weights,
    fit,
    make_model,
    make_trainer,
    weights_of,
)

from accumtrainer import Callback, Every
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras
from accumtrainer.training import clock as clock_module

pytestmark = pytest.mark.usefixtures("without_xla")


# What comes back.


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
def test_max_updates_stops_after_so_many(limit):
    trainer, applied = make_trainer()
    history = fit(trainer, max_updates=limit)
    assert trainer.progress.updates == limit
    assert len(history.epoch) == -(-limit // 3)


def test_max_updates_ends_within_the_epochs_given():
    trainer, _ = make_trainer()
    fit(trainer, max_updates=100, epochs=2)
    assert trainer.progress.updates == 6


def test_max_updates_counts_updates_not_windows():
    x = X.copy()
    x[0] = np.nan
    trainer, _ = make_trainer()
    fit(trainer, x, max_updates=4, shuffle=False)
    assert trainer.progress.updates == 4
    assert trainer.progress.skipped_updates == 2


def test_max_updates_counts_from_this_call():
    trainer, _ = make_trainer()
    fit(trainer, max_updates=2)
    fit(trainer, max_updates=2)
    assert trainer.progress.updates == 4


@pytest.fixture
def clock(monkeypatch):
    """Give a clock that stands still until a test moves it."""
    stopped = types.SimpleNamespace(now=100.0)
    stopped.monotonic = lambda: stopped.now
    monkeypatch.setattr(clock_module, "time", stopped)
    return stopped


class Tick(Callback):
    """Lets a second go by with every update."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def on_train_batch_begin(self, batch, logs=None):
        self._clock.now += 1.0


def test_max_seconds_stops_when_they_have_passed(clock):
    trainer, _ = make_trainer()
    history = fit(trainer, max_seconds=5, callbacks=[Tick(clock)])
    assert trainer.progress.updates == 5
    assert history.epoch == [0, 1]


def test_progress_counts_the_seconds_of_training(clock):
    trainer, _ = make_trainer()
    fit(trainer, callbacks=[Tick(clock)])
    clock.now += 1000.0
    fit(trainer, callbacks=[Tick(clock)])
    assert trainer.progress.seconds == 6.0


def test_validation_every_so_many_seconds(clock):
    trainer, applied = make_trainer()
    fit(
        trainer,
        epochs=3,
        validation_data=(X, Y),
        validation_every=Every(2.5, "seconds"),
        callbacks=[Tick(clock)],
    )
    assert [update for update, _ in applied.validations] == [3, 5, 8]


def test_seconds_go_on_from_a_run_saved_by_hand(clock, tmp_path):
    first, _ = make_trainer()
    fit(first, callbacks=[Tick(clock)])
    first.save(tmp_path / "a")
    trainer, _ = make_trainer()
    fit(
        trainer,
        max_seconds=5,
        callbacks=[Tick(clock)],
        resume_from=tmp_path / "a",
    )
    assert trainer.progress.updates == 5
    assert trainer.progress.seconds == 5.0


def test_validations_go_on_from_a_run_saved_by_hand(tmp_path):
    first, _ = make_trainer()
    fit(first)
    first.save(tmp_path / "a")
    trainer, applied = make_trainer()
    fit(
        trainer,
        epochs=3,
        validation_data=(X, Y),
        validation_every=Every(3, "updates"),
        resume_from=tmp_path / "a",
    )
    assert [update for update, _ in applied.validations] == [6, 9]


def test_initial_epoch_counts_epochs_from_there():
    trainer, applied = make_trainer()
    history = fit(trainer, epochs=4, initial_epoch=2)
    assert applied.epochs == history.epoch == [2, 3]
    assert trainer.progress.updates == 6


@pytest.mark.parametrize(
    "options", [{"epochs": 2, "initial_epoch": 2}, {"epochs": 0}]
)
def test_no_epochs_to_train_train_nothing_as_in_keras(options):
    trainer, applied = make_trainer()
    before = weights_of(trainer.model)
    history = fit(trainer, **options)
    of_keras = make_model()
    of_keras.compile("sgd", "mse")
    of_keras = of_keras.fit(X, Y, verbose=0, **options)
    assert history.history == of_keras.history == {}
    assert applied.logs == []
    for old, new in zip(before, weights_of(trainer.model), strict=True):
        np.testing.assert_array_equal(old, new)


def test_run_goes_on_from_no_epochs_with_the_first_window(tmp_path):
    order = {"callbacks": [Checkpoint(tmp_path)], "shuffle": False}
    begun, _ = make_trainer()
    fit(begun, epochs=0, **order)
    resumed, _ = make_trainer()
    fit(resumed, epochs=1, resume_from=tmp_path, **order)
    expected, _ = make_trainer()
    fit(expected, epochs=1, shuffle=False)
    assert resumed.progress.updates == expected.progress.updates
    for one, other in zip(
        weights_of(resumed.model), weights_of(expected.model), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_run_that_ended_ends_again_though_a_callback_would_go_on(tmp_path):
    class Stops(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.stop_training = False

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    stopped, _ = make_trainer()
    fit(stopped, epochs=3, callbacks=[Checkpoint(tmp_path), Stops()])
    resumed, _ = make_trainer()
    with pytest.warns(UserWarning, match="ran out of data|no batch"):
        fit(resumed, epochs=3, callbacks=[Stops()], resume_from=tmp_path)
    assert resumed.progress.updates == stopped.progress.updates


def test_initial_epoch_takes_up_the_order_of_its_epoch():
    straight, _ = make_trainer()
    fit(straight, epochs=3)
    broken, _ = make_trainer()
    fit(broken, epochs=2)
    fit(broken, epochs=3, initial_epoch=2)
    for one, other in zip(
        weights_of(straight.model), weights_of(broken.model), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_dataset", [False, True])
def test_initial_epoch_begins_with_the_first_batch_as_in_keras(is_dataset):
    def train(model):
        data = {"x": Batches()} if is_dataset else {"x": X, "y": Y}
        sizes = {} if is_dataset else {"batch_size": 2}
        epochs = {"steps_per_epoch": 5, "initial_epoch": 1, "epochs": 3}
        model.fit(**data, **sizes, **epochs, shuffle=False, verbose=0)

    trainer, _ = make_trainer(accumulation=1)
    model = make_model()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    train(trainer)
    train(model)
    assert_same_weights(trainer.model, model, rtol=1e-6)


@pytest.mark.parametrize("is_dataset", [False, True])
def test_several_fits_have_the_orders_of_a_single_one(is_dataset):
    def train(trainer, **options):
        if is_dataset:
            trainer.fit(Batches(), verbose=0, **options)
        else:
            fit(trainer, **options)

    single, _ = make_trainer()
    train(single, epochs=4)
    several, _ = make_trainer()
    train(several)
    train(several, epochs=2)
    train(several, epochs=4, initial_epoch=3)
    assert_same_weights(single.model, several.model, rtol=0, atol=0)


def test_steps_per_epoch_counts_loader_batches():
    trainer, applied = make_trainer()
    fit(trainer, steps_per_epoch=6, epochs=3)
    assert len(applied.logs) == 6
    assert trainer.progress.samples == 36


def test_second_fit_goes_on_counting():
    trainer, applied = make_trainer()
    fit(trainer, epochs=2)
    first = trainer.progress
    fit(trainer)
    assert first.as_dict() == {
        "updates": 6,
        "micro_batches": 24,
        "samples": 48,
        "skipped_updates": 0,
        "epochs": 2,
        "seconds": first.seconds,
    }
    assert trainer.progress.updates == 9
    assert trainer.progress.epochs == 3
    assert applied.epochs == [0, 1, 0]


def test_second_fit_goes_on_with_weights_and_optimizer():
    data = {"shuffle": False}
    adam = [keras.optimizers.Adam(0.01) for _ in range(2)]
    once, _ = make_trainer(optimizer=adam[0])
    fit(once, epochs=2, **data)
    twice, _ = make_trainer(optimizer=adam[1])
    fit(twice, **data)
    fit(twice, **data)
    for one, other in zip(
        weights_of(once.model), weights_of(twice.model), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_fast_dev_run_tries_everything_once():
    trainer, applied = make_trainer()
    history = fit(trainer, epochs=50, validation_data=(X, Y), fast_dev_run=True)
    assert trainer.progress.updates == 1
    assert len(applied.validations) == 1
    assert "val_loss" in history.history
    assert len(history.epoch) == 1


def test_fast_dev_run_can_be_a_number_of_updates():
    trainer, applied = make_trainer()
    seen = []

    class Count(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            seen.append(batch)

    fit(
        trainer,
        validation_data=(X, Y),
        fast_dev_run=2,
        callbacks=[Count()],
    )
    assert trainer.progress.updates == 2
    assert seen == [0, 1]


def test_overfit_batches_shows_the_same_few_batches_again():
    trainer, applied = make_trainer(optimizer=keras.optimizers.SGD(0.0))
    kernel, bias = weights_of(trainer.model)
    fit(trainer, overfit_batches=4, epochs=3)
    expected = np.mean((X[:8] @ kernel + bias - Y[:8]) ** 2)
    losses = [logs["loss"] for logs in applied.logs]
    np.testing.assert_allclose(losses, [expected] * 3, rtol=1e-5)


def test_overfit_batches_have_the_usual_size():
    x, y = np.tile(X, [6, 1]), np.tile(Y, [6, 1])
    trainer, _ = make_trainer(accumulation=1)
    fit(trainer, x, y, batch_size=None, overfit_batches=2)
    assert trainer.progress.samples == 64


def test_overfit_batches_are_not_more_than_there_are():
    trainer, _ = make_trainer()
    fit(trainer, overfit_batches=99)
    assert trainer.progress.samples == 24


@pytest.mark.parametrize(
    ("batch_size", "updates", "samples"), [(None, 2, 64), (48, 4, 144)]
)
def test_fast_dev_run_validates_on_the_first_few_batches(
    batch_size, updates, samples
):
    x, y = np.tile(X, [6, 1]), np.tile(Y, [6, 1])
    trainer, _ = make_trainer(
        optimizer=keras.optimizers.SGD(0.0), accumulation=1
    )
    history = fit(
        trainer,
        x,
        y,
        batch_size=batch_size,
        validation_data=(x, y),
        fast_dev_run=updates,
    ).history
    x, y = x[:samples], y[:samples]
    loss = trainer.evaluate(x, y, batch_size=batch_size, verbose=0)
    assert history["val_loss"] == pytest.approx([loss], rel=1e-5)


def test_fast_dev_run_validates_on_data_that_never_end():
    class Endless(Batches):
        num_batches = None

        def __len__(self):
            raise TypeError

        def __getitem__(self, index):
            return super().__getitem__(index % 12)

    trainer, applied = make_trainer()
    fit(trainer, validation_data=Endless(), fast_dev_run=True)
    assert len(applied.validations) == 1


# What an update is made of.


class NotesEpochs(keras.callbacks.Callback):
    """Keeps how many epochs it is told of."""

    def on_train_begin(self, logs=None):
        self.epochs = self.params["epochs"]


@pytest.mark.parametrize(
    "options, epochs",
    [
        ({"epochs": 2}, 2),
        ({}, 1),
        ({"initial_epoch": 3}, 4),
        ({"max_updates": 2}, math.inf),
    ],
)
def test_callbacks_are_told_of_the_epochs(options, epochs):
    trainer, _ = make_trainer()
    notes = NotesEpochs()
    fit(trainer, callbacks=[notes], **options)
    assert notes.epochs == epochs


def test_callback_of_keras_reckons_with_epochs_that_have_no_end():
    optimizer = keras.optimizers.SGD(0.01, use_ema=True)
    trainer, _ = make_trainer(optimizer=optimizer)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    fit(trainer, max_updates=3, callbacks=[swap])
    assert trainer.progress.updates == 3
