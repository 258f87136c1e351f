"""Claims about `fit` and `train_on_batch`: when they end, what they leave."""

import json
import types

import numpy as np
import pytest
from linear import (
    Batches,
    X,
    Y,
    assert_same_weights,
    fit,
    generate,
    make_model,
    make_trainer,
    many_shapes,
    numbers,
    weights_of,
)

from accumtrainer import Accumulation, Callback, Every, Trainer
from accumtrainer.keras_api import keras
from accumtrainer.training import clock as clock_module

pytestmark = pytest.mark.usefixtures("without_xla")


# What comes back.


def test_history_has_the_names_of_keras_and_the_clocks():
    trainer, _ = make_trainer(metrics=["mae"], weighted_metrics=["mape"])
    history = fit(trainer, epochs=2, validation_data=(X, Y))
    assert history.epoch == [0, 1]
    assert set(history.history) == {
        "loss",
        "mae",
        "mape",
        "val_loss",
        "val_mae",
        "val_mape",
        "learning_rate",
        "loss_scale",
        "gradient_norm",
        "updates",
        "skipped_updates",
    }
    assert all(len(column) == 2 for column in history.history.values())
    assert history.history["updates"] == [3, 6]


def test_history_holds_plain_numbers():
    trainer, _ = make_trainer(metrics=["mae"])
    history = fit(trainer, validation_data=(X, Y))
    json.dumps(history.history)


def test_several_outputs_log_their_losses_as_keras_does():
    inputs = keras.Input([3])
    model = keras.Model(
        inputs,
        {
            "a": keras.layers.Dense(1, name="a")(inputs),
            "b": keras.layers.Dense(1, name="b")(inputs),
        },
    )
    trainer, _ = make_trainer(
        model,
        loss={"a": "mse", "b": "mae"},
        loss_weights={"a": 1.0, "b": 0.5},
        metrics={"a": "mae"},
    )
    history = fit(
        trainer, y={"a": Y, "b": Y}, validation_data=(X, {"a": Y, "b": Y})
    ).history
    for prefix in ("", "val_"):
        total = (
            history[f"{prefix}a_loss"][0] + 0.5 * history[f"{prefix}b_loss"][0]
        )
        assert history[f"{prefix}loss"][0] == pytest.approx(total, rel=1e-5)
        assert f"{prefix}a_mae" in history


def test_first_epoch_is_plain_training_on_bigger_batches():
    """The weights after three updates, computed in NumPy."""
    trainer, _ = make_trainer()
    kernel, bias = weights_of(trainer.model)
    fit(trainer, shuffle=False)
    for start in range(0, 24, 8):
        x, y = X[start : start + 8], Y[start : start + 8]
        error = x @ kernel + bias - y
        kernel = kernel - 0.05 * 2 * x.T @ error / 8
        bias = bias - 0.05 * 2 * error.mean(axis=0)
    for expected, received in zip(
        (kernel, bias), weights_of(trainer.model), strict=True
    ):
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


# How long.


def test_one_epoch_is_the_default():
    trainer, applied = make_trainer()
    fit(trainer)
    assert applied.epochs == [0]
    assert trainer.progress.epochs == 1


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


def test_initial_epoch_at_the_end_trains_nothing_as_in_keras():
    trainer, applied = make_trainer()
    before = weights_of(trainer.model)
    history = fit(trainer, epochs=2, initial_epoch=2)
    assert history.history == {}
    assert applied.logs == []
    for old, new in zip(before, weights_of(trainer.model), strict=True):
        np.testing.assert_array_equal(old, new)


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


def test_number_of_micro_batches_may_change_with_the_epoch():
    trainer, applied = make_trainer(
        accumulation=Accumulation(steps={0: 2, 1: 4, 3: 12})
    )
    fit(trainer, epochs=4)
    assert applied.logs[-1]["updates"] == 6 + 3 + 3 + 1
    assert trainer.progress.micro_batches == 48


@many_shapes
def test_number_of_micro_batches_may_follow_the_updates_made():
    asked = []

    def steps(updates):
        asked.append(updates)
        return updates + 1

    trainer, _ = make_trainer(accumulation=Accumulation(steps=steps))
    seen = []

    class Sizes(Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(self.trainer.progress.micro_batches)

    fit(trainer, callbacks=[Sizes()])
    assert seen == [1, 3, 6, 10, 12]
    assert asked == [0, 1, 2, 3, 4]


@many_shapes
def test_skipped_updates_do_not_move_a_function_of_the_updates():
    x = X.copy()
    x[0] = np.nan
    trainer, applied = make_trainer(
        accumulation=Accumulation(steps=lambda updates: updates + 1)
    )
    fit(trainer, x, shuffle=False)
    assert [logs["applied"] for logs in applied.logs][:2] == [False, True]
    assert trainer.progress.updates == 5
    assert trainer.progress.skipped_updates == 1


@pytest.fixture(
    scope="module",
    params=[
        Accumulation(steps=4, tail="flush"),
        Accumulation(steps=4, tail="carry"),
        Accumulation(steps=2, tail="drop"),
        Accumulation(micro_batch_size=3),
        Accumulation(steps={0: 1, 2: 3}),
    ],
    ids=["flush", "carry", "drop", "slices", "by-epoch"],
)
def trained_often(request):
    """Make a Trainer that several tests train, one after the other."""
    return make_trainer(accumulation=request.param)[0]


@many_shapes
@pytest.mark.parametrize("samples", [24, 22, 17, 5])
@pytest.mark.parametrize("epochs", [1, 3])
def test_updates_made_are_those_foretold(trained_often, samples, epochs):
    before = trained_often.progress.updates
    fit(trained_often, X[:samples], Y[:samples], epochs=epochs)
    made = trained_often.progress.updates - before
    assert made == trained_often.accumulation.updates(
        samples=samples, batch_size=2, epochs=epochs
    )


def test_flushed_tail_is_divided_by_what_it_holds():
    trainer, _ = make_trainer()
    kernel, bias = weights_of(trainer.model)
    fit(trainer, X[:3], Y[:3], shuffle=False)
    error = X[:3] @ kernel + bias - Y[:3]
    np.testing.assert_allclose(
        weights_of(trainer.model)[0],
        kernel - 0.05 * 2 * X[:3].T @ error / 3,
        rtol=1e-5,
    )


def test_carried_tail_is_applied_in_the_next_epoch():
    """Two epochs of 3 batches are one window of 4 and one of 2."""
    carried, _ = make_trainer(accumulation=Accumulation(steps=4, tail="carry"))
    fit(carried, X[:6], Y[:6], epochs=2, shuffle=False)
    twice = np.r_[0:6, 0:6]
    flat, _ = make_trainer()
    fit(flat, X[twice], Y[twice], shuffle=False)
    assert_same_weights(carried.model, flat.model)


class StopAfter(keras.callbacks.Callback):
    """Stops training at the end of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == self.epoch


@pytest.mark.parametrize("last_epoch", [0, 1])
def test_carried_tail_is_applied_where_training_stops_early(last_epoch):
    """Epochs of 5 batches are windows of 4 and, where it stops, the rest."""
    carried, applied = make_trainer(
        accumulation=Accumulation(steps=4, tail="carry")
    )
    history = fit(
        carried,
        X[:10],
        Y[:10],
        epochs=9,
        shuffle=False,
        callbacks=[StopAfter(last_epoch)],
    )
    epochs = last_epoch + 1
    assert carried.progress.samples == 10 * epochs
    assert carried.progress.epochs == len(history.history["loss"]) == epochs
    assert len(applied.logs) == carried.progress.updates == epochs + 1
    often = np.tile(np.arange(10), epochs)
    flat, _ = make_trainer()
    fit(flat, X[often], Y[often], shuffle=False)
    assert_same_weights(carried.model, flat.model)


def test_carried_tail_is_applied_where_the_data_run_out():
    carried, _ = make_trainer(accumulation=Accumulation(steps=4, tail="carry"))
    batches = ((X[i : i + 2], Y[i : i + 2]) for i in range(0, 24, 2))
    with pytest.warns(UserWarning, match="nothing for epoch 2"):
        carried.fit(batches, steps_per_epoch=6, epochs=9, verbose=0)
    assert (carried.progress.samples, carried.progress.updates) == (24, 3)
    carried, _ = make_trainer(accumulation=Accumulation(steps=5, tail="carry"))
    batches = ((X[i : i + 2], Y[i : i + 2]) for i in range(0, 24, 2))
    with pytest.warns(UserWarning, match="nothing for epoch 2"):
        carried.fit(batches, steps_per_epoch=6, epochs=9, verbose=0)
    assert (carried.progress.samples, carried.progress.updates) == (24, 3)


def test_best_weights_are_restored_after_a_carried_tail():
    best = []

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                best.extend(weights_of(self.model))

    stopping = keras.callbacks.EarlyStopping(
        "loss", patience=1, min_delta=1e9, restore_best_weights=True
    )
    carried, _ = make_trainer(accumulation=Accumulation(steps=4, tail="carry"))
    fit(carried, X[:10], Y[:10], epochs=9, callbacks=[Keep(), stopping])
    assert carried.progress.samples == 20
    for one, other in zip(best, weights_of(carried.model), strict=True):
        np.testing.assert_array_equal(one, other)


def test_last_allowed_update_leaves_a_tail_alone():
    carried, _ = make_trainer(accumulation=Accumulation(steps=4, tail="carry"))
    fit(carried, X[:10], Y[:10], max_updates=2)
    assert carried.progress.updates == 2


def test_epoch_too_short_for_an_update_carries_everything(capsys):
    """Four epochs of 3 batches are one window of 8 and one of 4."""
    carried, applied = make_trainer(
        accumulation=Accumulation(steps=8, tail="carry")
    )
    history = fit(carried, X[:6], Y[:6], epochs=4, shuffle=False, verbose=2)
    line = capsys.readouterr().out.splitlines()[0]
    assert line == (
        f"16 samples per update = 8 micro-batches x 2; {carried.plan}"
    )
    assert carried.progress.updates == 2
    assert carried.progress.epochs == 4
    assert history.history["updates"] == [1, 2]
    flat, _ = make_trainer(accumulation=8)
    often = np.tile(np.arange(6), 4)
    fit(flat, X[often], Y[often], shuffle=False)
    assert_same_weights(carried.model, flat.model)


def test_dropped_tail_changes_nothing():
    dropped, _ = make_trainer(accumulation=Accumulation(steps=4, tail="drop"))
    fit(dropped, X[:14], Y[:14], shuffle=False)
    shorter, _ = make_trainer()
    fit(shorter, X[:8], Y[:8], shuffle=False)
    assert dropped.progress.updates == 1
    assert_same_weights(dropped.model, shorter.model)


def test_loader_batch_is_one_update_when_it_is_sliced():
    sliced, _ = make_trainer(accumulation=Accumulation(micro_batch_size=3))
    fit(sliced, batch_size=8, shuffle=False)
    whole, _ = make_trainer(accumulation=1)
    fit(whole, batch_size=8, shuffle=False)
    assert sliced.progress.updates == 3
    assert sliced.progress.micro_batches == 9
    assert_same_weights(sliced.model, whole.model)


# What is printed.


@pytest.mark.parametrize(
    ("accumulation", "options", "line"),
    [
        (
            4,
            {},
            "8 samples per update = 4 micro-batches x 2; 3 updates per epoch; ",
        ),
        (
            Accumulation(micro_batch_size=4),
            {"batch_size": 12},
            "12 samples per update = 3 micro-batches x 4; "
            "2 updates per epoch; ",
        ),
        (
            Accumulation(micro_batch_size=5),
            {"batch_size": 12},
            "12 samples per update = 3 micro-batches of 2 to 5; "
            "2 updates per epoch; ",
        ),
        (
            1,
            {},
            "2 samples per update = 1 micro-batch; 12 updates per epoch; ",
        ),
    ],
    ids=["steps", "slices", "uneven", "plain"],
)
def test_first_line_says_what_will_happen(capsys, accumulation, options, line):
    trainer, _ = make_trainer(accumulation=accumulation)
    fit(trainer, verbose=2, **options)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == line + str(trainer.plan)


def test_first_line_leaves_out_what_nobody_knows(capsys):
    trainer, _ = make_trainer()
    trainer.fit(generate(), verbose=2)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        f"8 samples per update = 4 micro-batches x 2; {trainer.plan}"
    )


def test_verbose_0_prints_nothing(capfd):
    trainer, _ = make_trainer()
    fit(trainer, epochs=2, validation_data=(X, Y))
    trainer.evaluate(X, Y, verbose=0)
    trainer.predict(X, verbose=0)
    trainer.train_on_batch(X, Y)
    captured = capfd.readouterr()
    assert captured.out == ""


def test_verbose_2_prints_a_line_per_epoch(capsys):
    trainer, _ = make_trainer()
    fit(trainer, epochs=2, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert any("Epoch 1/2" in line for line in lines)
    assert any("Epoch 2/2" in line and "loss" in line for line in lines)


# What the model is left like.


def test_model_is_left_compiled_with_the_live_optimizer():
    optimizer = keras.optimizers.Adam()
    trainer, _ = make_trainer(optimizer=optimizer, metrics=["mae"])
    fit(trainer)
    assert trainer.model.compiled
    assert trainer.model.optimizer is trainer.optimizer is optimizer
    assert int(trainer.model.optimizer.iterations) == 3


def test_saved_model_brings_its_optimizer(tmp_path):
    trainer, _ = make_trainer(optimizer=keras.optimizers.Adam(0.01))
    fit(trainer)
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_same_weights(trainer.model, loaded, rtol=0, atol=0)
    for one, other in zip(
        trainer.optimizer.variables, loaded.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(numbers(one), numbers(other))
    again, _ = make_trainer(loaded, optimizer=None, loss=None)
    fit(again, shuffle=False)
    fit(trainer, shuffle=False)
    assert_same_weights(trainer.model, again.model)


def test_compiled_model_needs_nothing_but_the_trainer():
    model = make_model()
    optimizer = keras.optimizers.SGD(0.05)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    compiled = Trainer(model, accumulation=4, seed=0)
    history = fit(compiled).history
    given, _ = make_trainer(metrics=["mae"])
    fit(given)
    assert "mae" in history
    assert compiled.optimizer is optimizer
    assert_same_weights(compiled.model, given.model)


def test_trainer_arguments_go_before_those_compiled():
    model = make_model()
    model.compile(optimizer="adam", loss="mae", metrics=["mae"])
    optimizer = keras.optimizers.SGD(0.05)
    trainer = Trainer(
        model, optimizer=optimizer, loss="mse", accumulation=4, seed=0
    )
    fit(trainer)
    given, _ = make_trainer()
    fit(given)
    assert trainer.optimizer is model.optimizer is optimizer
    assert_same_weights(model, given.model)


def test_changed_trainable_flags_are_refused():
    model = keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(2), keras.layers.Dense(1)]
    )
    trainer, _ = make_trainer(model)
    fit(trainer)
    before = weights_of(model)
    model.layers[0].trainable = False
    for train in (
        lambda: fit(trainer),
        lambda: trainer.train_on_batch(X, Y),
    ):
        with pytest.raises(ValueError, match="Make a new Trainer"):
            train()
    model.layers[0].trainable = True
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_model_compiled_anew_is_refused():
    trainer, _ = make_trainer(metrics=["mae"])
    model = trainer.model
    fit(trainer)
    before = weights_of(model)
    model.compile("adam", "mse", metrics=["mse"])
    for use in (
        lambda: fit(trainer),
        lambda: trainer.train_on_batch(X, Y),
        lambda: trainer.evaluate(X, Y, verbose=0),
        lambda: trainer.check_equivalence((X, Y)),
    ):
        with pytest.raises(ValueError, match="compiled anew"):
            use()
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
    again = Trainer(model, accumulation=2)
    got = again.evaluate(X, Y, verbose=0, return_dict=True)
    want = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert got == pytest.approx(want, rel=1e-5)


def test_frozen_layers_stay_as_they_were():
    model = keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(2), keras.layers.Dense(1)]
    )
    model.layers[0].trainable = False
    frozen = numbers(model.layers[0].kernel)
    moved = numbers(model.layers[1].kernel)
    trainer, _ = make_trainer(model)
    fit(trainer)
    np.testing.assert_array_equal(numbers(model.layers[0].kernel), frozen)
    assert np.any(numbers(model.layers[1].kernel) != moved)


# Single batches.


@pytest.mark.parametrize(
    "accumulation",
    [4, Accumulation(micro_batch_size=2)],
    ids=["steps", "slices"],
)
def test_train_on_batch_makes_one_update_of_the_batch(accumulation):
    single, applied = make_trainer(accumulation=accumulation)
    loss = single.train_on_batch(X[:8], Y[:8])
    reference, _ = make_trainer()
    history = fit(reference, X[:8], Y[:8], shuffle=False)
    assert single.progress.updates == 1
    assert single.progress.micro_batches == 4
    assert loss == pytest.approx(history.history["loss"][0], rel=1e-5)
    assert_same_weights(single.model, reference.model)


def test_train_on_batch_returns_what_keras_returns():
    trainer, _ = make_trainer(metrics=["mae"])
    results = trainer.train_on_batch(X, Y)
    assert len(results) == 2
    named = trainer.train_on_batch(X, Y, return_dict=True)
    assert list(named) == ["loss", "mae"]


def test_train_on_batch_takes_weights():
    weighted, _ = make_trainer()
    weight = np.r_[np.ones(12), np.zeros(12)]
    weighted.train_on_batch(X, Y, sample_weight=weight)
    kernel, bias = weights_of(make_model())
    error = (X @ kernel + bias - Y)[:12]
    np.testing.assert_allclose(
        weights_of(weighted.model)[0],
        kernel - 0.05 * 2 * X[:12].T @ error / 24,
        rtol=1e-5,
        atol=1e-6,
    )
