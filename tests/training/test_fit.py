"""Claims about `fit` and `train_on_batch`: what they tell and leave."""

import json
import sys

import numpy as np
import pytest
from linear import (
    X,
    Y,
    assert_same_weights,
    fit,
    generate,
    make_model,
    make_trainer,
    numbers,
    weights_of,
)

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import keras

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


def test_first_line_is_in_a_file_as_training_begins(tmp_path, monkeypatch):
    path, seen = tmp_path / "log", []

    def look(batch, logs):
        seen.append(path.read_text())

    looking = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    trainer, _ = make_trainer(callbacks=[looking])
    with open(path, "w") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        fit(trainer, verbose=2)
    assert "per update" in seen[0]


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


def assign_between_fits(trainer):
    fit(trainer)
    trainer.model.optimizer = keras.optimizers.SGD(0.3)
    fit(trainer)


def assign_amid_a_fit(trainer):
    def assign(epoch, logs=None):
        if epoch == 1:
            trainer.model.optimizer = keras.optimizers.SGD(0.3)

    assigns = keras.callbacks.LambdaCallback(on_epoch_begin=assign)
    fit(trainer, epochs=2, callbacks=[assigns])


def assign_to_the_trainer(trainer):
    fit(trainer)
    trainer.optimizer = keras.optimizers.SGD(0.3)
    trainer.train_on_batch(X, Y)


@pytest.mark.parametrize(
    "train", [assign_between_fits, assign_amid_a_fit, assign_to_the_trainer]
)
def test_another_optimizer_is_refused(train):
    trainer, _ = make_trainer()
    with pytest.raises(ValueError, match="a SGD as model.optimizer beside"):
        train(trainer)
    once, _ = make_trainer()
    fit(once)
    assert_same_weights(trainer.model, once.model, rtol=0, atol=0)


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
