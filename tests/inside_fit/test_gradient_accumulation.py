"""Accumulation inside plain `Model.fit`, held to the Trainer and to Keras."""

import itertools
import threading

import numpy as np
import pytest
from accumulating import (
    ORDER,
    WEIGHTS,
    Watch,
    X,
    Y,
    assert_same_weights,
    batches,
    compiled,
    executions,
    leaves_data_unended,
    make_trainer,
    mlp,
    read,
    sequences,
    two_outputs,
)
from keras_core_gaps import keras_3_only

from accumtrainer.callbacks.gradient_accumulation import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras
from accumtrainer.steps import make_backend

pytestmark = keras_3_only("has a fit of its own kind, which is refused")


def conv_net(**options):
    """Make a compiled classifier with convolution and regularizers."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Reshape([6, 1]),
        keras.layers.Conv1D(4, 3, kernel_regularizer="l2"),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(3, bias_regularizer="l2"),
    ]
    return compiled(keras.Sequential([keras.Input([6]), *layers]), **options)


def masked_lstm(**options):
    """Make a compiled tagger of padded sequences."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Embedding(9, 4, mask_zero=True),
        keras.layers.LSTM(3, return_sequences=True),
        keras.layers.Dense(3),
    ]
    return compiled(keras.Sequential([keras.Input([5]), *layers]), **options)


def fit_and_train(make, data, steps, *, options=None, per_execution=(1,)):
    """Train models by `fit`, and a twin of theirs by a Trainer.

    Args:
        make: function that makes a compiled model.
        data: tuple of arrays.
        steps: int, micro-batches of an update.
        options: dict of what else `fit` gets.
        per_execution: for each of these `steps_per_execution`, one model is
            trained by `fit`.

    Returns:
        List of pairs, those models with their histories; and such a pair of
        the twin.
    """
    options = ORDER | {"epochs": 2} | (options or {})
    trainer = make_trainer(make(), steps)
    expected = trainer.fit(*data, **options)
    fitted = []
    for count in per_execution:
        model = make(steps_per_execution=count)
        callback = GradientAccumulation(steps)
        history = model.fit(*data, callbacks=[callback], **options)
        assert callback.progress.updates == trainer.progress.updates
        assert callback.progress.samples == trainer.progress.samples
        fitted.append((model, history.history))
    return fitted, (trainer.model, expected.history)


def test_weights_are_those_of_a_trainer():
    # Compiled as Keras chooses, which on TensorFlow is by XLA too.
    metrics = {"weighted_metrics": ["accuracy"], "jit_compile": "auto"}
    fitted, (twin, expected) = fit_and_train(
        lambda **more: mlp(**metrics, **more),
        (X, Y),
        3,
        options={"sample_weight": WEIGHTS, "validation_data": (X, Y)},
        per_execution=executions(1, 2, 3),
    )
    for model, history in fitted:
        assert_same_weights(model, twin)
        for name in ("loss", "accuracy", "val_loss"):
            np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)
        assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}


@pytest.mark.parametrize("make", [conv_net, masked_lstm])
def test_weights_are_those_of_a_trainer_for(make):
    data = (X, Y) if make is conv_net else sequences()
    fitted, (twin, expected) = fit_and_train(
        make, data, 4, per_execution=executions(1, 4)
    )
    for model, history in fitted:
        assert_same_weights(model, twin, tolerance=1e-5)
        np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


def test_outputs_that_count_differently_are_exact():
    tokens, tags = sequences()
    means = tokens.mean(axis=1, keepdims=True).astype("float32")
    data = (tokens, {"tags": tags, "mean": means})
    fitted, (twin, expected) = fit_and_train(
        two_outputs,
        data,
        3,
        options={"validation_data": data},
        per_execution=executions(1, 3),
    )
    for model, history in fitted:
        assert_same_weights(model, twin)
        # Validation is that of Keras, which averages the means of batches.
        for name in ("loss", "tags_loss", "mean_loss"):
            np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)


def test_steps_can_be_more_than_an_epoch_has():
    ((model, _),), (twin, _) = fit_and_train(mlp, (X, Y), 50)
    assert_same_weights(model, twin)


def test_one_step_is_plain_fit():
    model = mlp(metrics=["accuracy"])
    history = model.fit(X, Y, callbacks=[GradientAccumulation(1)], **ORDER)
    plain = mlp(metrics=["accuracy"])
    expected = plain.fit(X, Y, **ORDER)
    assert_same_weights(model, plain)
    for name, value in expected.history.items():
        np.testing.assert_allclose(history.history[name], value, rtol=1e-5)


def test_steps_can_change_by_epoch():
    model = mlp()
    callback = GradientAccumulation({0: 8, 2: 4})
    model.fit(X, Y, epochs=3, initial_epoch=1, callbacks=[callback], **ORDER)
    assert callback.progress.updates == 1 + 2
    assert callback.progress.epochs == 2


def test_function_of_the_updates_goes_on_with_a_restored_model(tmp_path):
    class Broken(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("torn")

    def fit(*callbacks):
        model = mlp()
        accumulation = GradientAccumulation(lambda updates: 1 + updates // 3)
        callbacks = [accumulation, *callbacks]
        return model, model.fit(X, Y, epochs=2, callbacks=callbacks, **ORDER)

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path)

    expected, _ = fit()
    with pytest.raises(RuntimeError, match="torn"):
        fit(backup(), Broken())
    model, history = fit(backup())
    assert history.epoch == [1]
    assert_same_weights(model, expected)


def test_clocks_move_once_per_update():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [1], [0.1, 0.0]
    )
    optimizer = keras.optimizers.SGD(schedule, use_ema=True, ema_momentum=0.5)
    model = mlp(optimizer=optimizer)
    start = model.get_weights()[0]
    model.fit(X, Y, callbacks=[GradientAccumulation(4)], **ORDER)
    assert int(read(optimizer.iterations)) == 2
    # Both of two updates at rate 0.1, half of the way each, and then: `fit`
    # puts the average into the weights.
    assert np.abs(model.get_weights()[0] - start).max() > 0


@leaves_data_unended
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("steps_per_execution", executions(1, 3))
def test_data_of_unknown_length_loses_nothing(steps_per_execution):
    model = mlp(steps_per_execution=steps_per_execution)
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()[0])
    )
    callback = GradientAccumulation(3)
    model.fit(batches(), verbose=0, shuffle=False, callbacks=[watch, callback])
    trainer = make_trainer(mlp(), 3)
    trainer.fit(X, Y, **ORDER)
    assert_same_weights(model, trainer.model)
    if BACKEND == "torch":
        return  # there nobody can know which batch is the last
    # Also for callbacks that come first: the tail had been applied by then.
    np.testing.assert_array_equal(seen[0], model.get_weights()[0])


@leaves_data_unended
@pytest.mark.parametrize("steps", [None, 8])
@pytest.mark.parametrize("steps_per_execution", executions(1, 2))
def test_data_that_fail_end_training_after_what_came_before(
    steps_per_execution, steps
):
    def failing():
        yield from itertools.islice(batches(), 4)
        raise RuntimeError("torn")

    model = mlp(steps_per_execution=steps_per_execution)
    callback, watch = GradientAccumulation(2), Watch()
    with pytest.raises(Exception, match="torn"):
        model.fit(
            failing(),
            steps_per_epoch=steps,
            shuffle=False,
            verbose=0,
            callbacks=[callback, watch],
        )
    assert callback.progress.updates == 2
    trainer = make_trainer(mlp(), 2)
    trainer.fit(X[:12], Y[:12], **ORDER)
    last = trainer.model.get_weights()[0]
    np.testing.assert_allclose(watch.weights[-1], last, rtol=0, atol=1e-6)


@pytest.mark.skipif(
    BACKEND == "torch", reason="on PyTorch fit hands over one batch at a time"
)
def test_next_group_is_asked_for_while_one_is_trained_on(monkeypatch):
    askers = []
    backend = type(make_backend(run_eagerly=False))
    next_batches = backend.next_batches

    def ask(self, iterator, count):
        askers.append(threading.current_thread() is threading.main_thread())
        return next_batches(self, iterator, count)

    monkeypatch.setattr(backend, "next_batches", ask)
    model = mlp(steps_per_execution=2)
    model.fit(X, Y, callbacks=[GradientAccumulation(2)], **ORDER)
    # 8 batches. An iterator of Python belongs to the thread of `fit`.
    is_main = BACKEND == "jax"
    assert askers == [True, is_main, is_main, is_main]


def test_steps_per_epoch_end_a_window():
    callback = GradientAccumulation(3)
    mlp().fit(X, Y, steps_per_epoch=4, epochs=2, callbacks=[callback], **ORDER)
    assert callback.progress.updates == 4
    assert callback.progress.micro_batches == 8


# Callbacks beside it.


def test_callbacks_see_every_batch_and_the_weights_of_every_update():
    watch = Watch()
    model = mlp()
    callbacks = [watch, GradientAccumulation(3)]
    history = model.fit(X, Y, callbacks=callbacks, **ORDER)
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(watch.weights[:-1], watch.weights[1:], strict=True)
    ]
    assert changed == [False, True, False, False, True, False, True]
    # The first batch's loss is that of the first three samples alone.
    expected = mlp().evaluate(X[:3], Y[:3], verbose=0)
    np.testing.assert_allclose(watch.losses[0], expected, rtol=1e-5)
    np.testing.assert_allclose(watch.losses[-1], history.history["loss"][0])


@leaves_data_unended
def test_stopping_amid_a_window_still_makes_its_update():
    watch = Watch(stop_after=5)
    model = mlp()
    callback = GradientAccumulation(3)
    options = {"validation_data": (X, Y), "epochs": 3}
    model.fit(X, Y, callbacks=[callback, watch], **ORDER | options)
    assert callback.progress.updates == 2
    trainer = make_trainer(mlp(), 3)
    trainer.fit(X[:15], Y[:15], **ORDER)
    assert_same_weights(model, trainer.model)


@leaves_data_unended
@pytest.mark.parametrize("is_validated", [True, False])
def test_weights_are_swapped_after_the_update_of_a_stopped_window(
    is_validated,
):
    def fit(*callbacks, **options):
        model = mlp(optimizer=keras.optimizers.Adam(0.05, use_ema=True))
        if is_validated:
            options["validation_data"] = (X, Y)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        history = model.fit(
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks[:1], swap, *callbacks[1:]],
            **options,
        )
        return model, history.history["loss"]

    windows = (part for part in [(X[:9], Y[:9]), (X[9:15], Y[9:15])])
    expected, losses = fit(x=windows, steps_per_epoch=2)
    callbacks = Watch(stop_after=5), GradientAccumulation(3)
    model, found = fit(*callbacks, x=X, y=Y, batch_size=3)
    assert_same_weights(model, expected, tolerance=1e-5)
    np.testing.assert_allclose(found, losses, rtol=1e-5)


def test_stock_callbacks_work_beside_it(tmp_path):
    path = tmp_path / "model.keras"
    optimizer = keras.optimizers.Adam(0.05, use_ema=True)
    model = mlp(optimizer=optimizer)
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / 2**epoch)
    callback = GradientAccumulation(3)
    history = model.fit(
        X,
        Y,
        epochs=3,
        validation_data=(X, Y),
        callbacks=[
            callback,
            keras.callbacks.EarlyStopping("val_loss", patience=5),
            keras.callbacks.ModelCheckpoint(path, save_freq=4),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            rates,
            keras.callbacks.TerminateOnNaN(),
        ],
        **ORDER,
    )
    np.testing.assert_allclose(
        history.history["learning_rate"], [0.05, 0.025, 0.0125], rtol=1e-6
    )
    assert callback.progress.updates == 9
    assert keras.models.load_model(path).built
