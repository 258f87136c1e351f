"""Accumulation inside plain `Model.fit`, held to the Trainer and to Keras."""

import gc
import itertools
import threading

import numpy as np
import pytest
from keras_core_gaps import keras_3_only
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, LossScale, NonFiniteError, Trainer
from accumtrainer.callbacks.gradient_accumulation import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops
from accumtrainer.steps import make_backend

pytestmark = keras_3_only("has a fit of its own kind, which is refused")

# What XLA takes to compile on TensorFlow is not what these tests are about.
X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 22)
WEIGHTS = np.random.default_rng(2).uniform(0.2, 2, 22).astype("float32")
# 8 batches of 3 samples, the last of one: windows of 3, 3 and 2 batches.
ORDER = {"batch_size": 3, "shuffle": False, "verbose": 0}


@pytest.fixture
def unended_data_are_let_go_of():
    """Delete the iterator that `fit` leaves amid its data, at once.

    A thread of TensorFlow looks after each, ever more rarely, and who deletes
    one waits for the thread: up to a minute, in whichever test that falls.
    """
    yield
    gc.collect()


leaves_data_unended = pytest.mark.usefixtures("unended_data_are_let_go_of")


def compiled(model, optimizer=None, **options):
    """Compile a classifier."""
    arguments = {
        "optimizer": optimizer or keras.optimizers.Adam(0.05),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "jit_compile": JIT_COMPILE,
    }
    model.compile(**arguments | options)
    return model


def mlp(**options):
    """Make a compiled classifier of `X`, always with the same weights."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input([6]), *layers]), **options)


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


def two_outputs(**options):
    """Make a compiled model whose outputs count differently."""
    keras.utils.set_random_seed(0)
    x = keras.Input([5])
    hidden = keras.layers.Embedding(9, 4, mask_zero=True)(x)
    tags = keras.layers.Dense(3, name="tags")(hidden)
    mean = keras.layers.GlobalAveragePooling1D()(hidden)
    mean = keras.layers.Dense(1, name="mean")(mean)
    cross = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {
        "loss": {"tags": cross, "mean": "mse"},
        "loss_weights": {"tags": 0.7, "mean": 2.0},
    } | options
    return compiled(keras.Model(x, {"tags": tags, "mean": mean}), **options)


def sequences():
    """Rows of tokens, padded to very different lengths, and their tags."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, 9, [22, 5])
    tokens[np.arange(5) >= rng.integers(1, 6, [22, 1])] = 0
    return tokens, rng.integers(0, 3, [22, 5])


def make_trainer(model, steps, **options):
    """Make the Trainer whose training it is."""
    options = {"jit_compile": JIT_COMPILE} | options
    return Trainer(model, accumulation=steps, **options)


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


def assert_same_weights(model, other, tolerance=1e-6):
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def read(variable):
    return ops.convert_to_numpy(variable)


# It is the Trainer's training.


def test_weights_are_those_of_a_trainer():
    # Compiled as Keras chooses, which on TensorFlow is by XLA too.
    metrics = {"weighted_metrics": ["accuracy"], "jit_compile": "auto"}
    fitted, (twin, expected) = fit_and_train(
        lambda **more: mlp(**metrics, **more),
        (X, Y),
        3,
        options={"sample_weight": WEIGHTS, "validation_data": (X, Y)},
        per_execution=(1, 2, 3),
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
        make, data, 4, per_execution=(1, 4)
    )
    for model, history in fitted:
        assert_same_weights(model, twin)
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
        per_execution=(1, 3),
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


def batches():
    for start in range(0, 22, 3):
        yield X[start : start + 3], Y[start : start + 3]


@leaves_data_unended
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("steps_per_execution", [1, 3])
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
    # Also for callbacks that come first: the tail had been applied by then.
    np.testing.assert_array_equal(seen[0], model.get_weights()[0])


@leaves_data_unended
@pytest.mark.parametrize("steps", [None, 8])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
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


class Watch(keras.callbacks.Callback):
    """Notes what callbacks see after every batch."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.stop_after = stop_after
        self.weights, self.losses = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights()[0])
        self.losses.append(logs["loss"])
        if len(self.losses) == self.stop_after:
            self.model.stop_training = True


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


@leaves_data_unended
def test_nan_terminates_and_leaves_the_weights():
    bad = X.copy()
    bad[4] = np.nan
    model = mlp()
    start = model.get_weights()
    callbacks = [GradientAccumulation(4), keras.callbacks.TerminateOnNaN()]
    model.fit(bad, Y, callbacks=callbacks, **ORDER)
    assert all(map(np.array_equal, start, model.get_weights()))
    assert callbacks[0].progress.skipped_updates == 1
    assert callbacks[0].progress.updates == 0


@leaves_data_unended
def test_too_many_bad_windows_stop_training_with_the_weights_kept():
    model = mlp()
    start = model.get_weights()
    callback = GradientAccumulation(2, max_consecutive_skips=2)
    with pytest.raises(NonFiniteError, match="3 windows in a row"):
        model.fit(np.full_like(X, np.nan), Y, callbacks=[callback], **ORDER)
    assert all(map(np.array_equal, start, model.get_weights()))


# Afterwards the model is as it was.


def attributes(model):
    return {
        "own": set(vars(model)),
        "train_function": model.train_function,
        "optimizer": model.optimizer,
        "steps_per_execution": model.steps_per_execution,
    }


def test_model_is_as_it_was_and_a_second_fit_goes_on():
    model, callback = mlp(), GradientAccumulation(3)
    model.fit(X, Y, **ORDER)
    before = attributes(model)
    model.fit(X, Y, callbacks=[callback], **ORDER)
    assert attributes(model) == before
    model.fit(X, Y, callbacks=[callback], **ORDER)
    assert attributes(model) == before
    assert callback.progress.updates == 6
    trainer = make_trainer(mlp(), 1)
    trainer.fit(X, Y, **ORDER)
    trainer = make_trainer(trainer.model, 3)
    trainer.fit(X, Y, epochs=2, **ORDER)
    assert_same_weights(model, trainer.model, 1e-5)


def test_weights_that_only_a_later_fit_has_count():
    mean = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    model = mlp(loss=mean, steps_per_execution=3)
    twin = mlp(loss=mean)
    callback, trainer = GradientAccumulation(3), make_trainer(twin, 3)
    data = X[:18], Y[:18]
    for options in ({}, {"sample_weight": WEIGHTS[:18]}, {}):
        model.fit(*data, callbacks=[callback], **ORDER, **options)
        trainer.fit(*data, **ORDER, **options)
    assert_same_weights(model, twin, 1e-5)


class Fail(keras.callbacks.Callback):
    """Raises an error after some batches."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batches - 1:
            raise RuntimeError("on purpose")


@leaves_data_unended
@pytest.mark.parametrize("goes_on", ["fit", "train_on_batch", "callback"])
def test_error_leaves_nothing_behind_in_the_next(goes_on):
    model, callback = mlp(), GradientAccumulation(3)
    model.fit(X[:3], Y[:3], **ORDER)
    before = attributes(model)
    with pytest.raises(RuntimeError, match="on purpose"):
        model.fit(X, Y, callbacks=[callback, Fail(5)], **ORDER)
    assert callback.progress.updates == 1
    twin = mlp()
    twin.fit(X[:3], Y[:3], **ORDER)
    make_trainer(twin, 3).fit(X[:9], Y[:9], **ORDER)
    assert_same_weights(model, twin)
    if goes_on == "fit":
        model.fit(X, Y, **ORDER)
        twin.fit(X, Y, **ORDER)
    elif goes_on == "train_on_batch":
        model.train_on_batch(X, Y)
        twin.train_on_batch(X, Y)
    else:
        model.fit(X, Y, callbacks=[callback], **ORDER)
        make_trainer(twin, 3).fit(X, Y, **ORDER)
    assert attributes(model) == before
    assert_same_weights(model, twin, 1e-5)


def test_loss_scale_optimizer_stays_and_learns_the_scale():
    keras.config.set_dtype_policy("mixed_float16")
    model = mlp()
    optimizer = model.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    bad = X.copy()
    bad[0] = np.nan
    callback = GradientAccumulation(4)
    model.fit(bad, Y, callbacks=[callback], **ORDER)
    assert model.optimizer is optimizer
    assert float(read(optimizer.dynamic_scale)) == 2.0**14
    assert int(read(optimizer.inner_optimizer.iterations)) == 1
    assert callback.progress.skipped_updates == 1
    model.fit(X, Y, callbacks=[callback], **ORDER)
    assert float(read(optimizer.dynamic_scale)) == 2.0**14
    # XLA keeps more digits of a float16 than one operation after another.
    trainer = make_trainer(mlp(), 4)
    trainer.fit(bad, Y, **ORDER)
    trainer.fit(X, Y, **ORDER)
    assert_same_weights(model, trainer.model, 1e-5)


def test_loss_scale_that_a_later_callback_restores_is_gone_on_with():
    keras.config.set_dtype_policy("mixed_float16")
    model = mlp()
    model.optimizer.build(model.trainable_variables)

    class Restores(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.optimizer.dynamic_scale.assign(64.0)

    callbacks = [GradientAccumulation(4), Restores()]
    model.fit(X, Y, callbacks=callbacks, **ORDER)
    assert float(read(model.optimizer.dynamic_scale)) == 64.0


def test_loss_scale_learned_before_an_error_is_gone_on_with():
    keras.config.set_dtype_policy("mixed_float16")
    model, callback = mlp(), GradientAccumulation(3)
    bad = X.copy()
    bad[0] = np.nan
    with pytest.raises(RuntimeError, match="on purpose"):
        model.fit(bad, Y, callbacks=[callback, Fail(5)], **ORDER)
    model.fit(X, Y, callbacks=[callback], **ORDER)
    assert float(read(model.optimizer.dynamic_scale)) == 2.0**14


# What is refused, and what is honoured.


class OwnLoss(keras.Model):
    """Averages over the samples by itself."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        losses = keras.losses.sparse_categorical_crossentropy(
            y, y_pred, from_logits=True
        )
        return 3.0 * ops.mean(losses)


def own_loss(**options):
    keras.utils.set_random_seed(0)
    return compiled(OwnLoss(), **options)


def test_overridden_compute_loss_is_honoured_with_its_denominator():
    model = own_loss()
    callback = GradientAccumulation(3, denominator="samples")
    history = model.fit(X, Y, callbacks=[callback], epochs=2, **ORDER)
    trainer = make_trainer(own_loss(), 3, denominator="samples")
    expected = trainer.fit(X, Y, epochs=2, **ORDER)
    assert_same_weights(model, trainer.model)
    np.testing.assert_allclose(
        history.history["loss"], expected.history["loss"], rtol=1e-5
    )


@leaves_data_unended
def test_bare_loss_without_denominator_is_refused():
    model = own_loss()
    with pytest.raises(
        ValueError, match=r"GradientAccumulation\(denominator='samples'\)"
    ):
        model.fit(X, Y, callbacks=[GradientAccumulation(3)], **ORDER)
    model.fit(X, Y, callbacks=[GradientAccumulation(1)], **ORDER)


class OwnStep(keras.Model):
    def train_step(self, *arguments):
        return super().train_step(*arguments)


class OwnTrainFunction(keras.Model):
    def make_train_function(self, force=False):
        return super().make_train_function(force)


class OwnTestStep(keras.Model):
    def test_step(self, *arguments):
        return super().test_step(*arguments)


def subclassed(cls):
    keras.utils.set_random_seed(0)
    x = keras.Input([6])
    return compiled(cls(x, keras.layers.Dense(3)(x)))


@pytest.mark.parametrize(
    ("cls", "name"),
    [(OwnStep, "train_step"), (OwnTrainFunction, "make_train_function")],
)
def test_models_that_train_themselves_are_refused(cls, name):
    with pytest.raises(ValueError, match=f"must not override {name}"):
        subclassed(cls).fit(X, Y, callbacks=[GradientAccumulation(2)], **ORDER)


def test_model_may_evaluate_by_itself():
    model = subclassed(OwnTestStep)
    options = {"validation_data": (X, Y)}
    callbacks = [GradientAccumulation(2)]
    history = model.fit(X, Y, callbacks=callbacks, **ORDER | options)
    assert "val_loss" in history.history


def test_accumulating_optimizer_is_refused():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"GradientAccumulation\(steps=2\)"):
        mlp(optimizer=optimizer).fit(
            X, Y, callbacks=[GradientAccumulation(2)], **ORDER
        )


def test_two_of_them_are_refused_and_leave_nothing_behind():
    model = mlp()
    model.fit(X, Y, **ORDER)
    before = attributes(model)
    both = [GradientAccumulation(2), GradientAccumulation(3)]
    with pytest.raises(ValueError, match="one GradientAccumulation"):
        model.fit(X, Y, callbacks=both, **ORDER)
    model.fit(X, Y, **ORDER)
    assert attributes(model) == before


def test_trainer_refuses_it():
    trainer = make_trainer(mlp(), 2)
    with pytest.raises(ValueError, match=r"Use Trainer\(accumulation"):
        trainer.fit(X, Y, callbacks=[GradientAccumulation(2)], **ORDER)


def test_strategy_is_refused():
    if BACKEND != "tensorflow":
        pytest.skip("tf.distribute belongs to TensorFlow")
    import tensorflow as tf

    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = mlp()
    with pytest.raises(ValueError, match="trains on one device"):
        model.fit(X, Y, callbacks=[GradientAccumulation(2)], **ORDER)


def test_distribution_is_refused():
    if BACKEND != "jax":
        pytest.skip("keras.distribution needs JAX")
    distribution = keras.distribution.DataParallel(devices=["cpu:0"])
    keras.distribution.set_distribution(distribution)
    try:
        with pytest.raises(ValueError, match="trains on one device"):
            mlp().fit(X, Y, callbacks=[GradientAccumulation(2)], **ORDER)
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": 2, "combine": "median"},
        {"steps": 2, "max_consecutive_skips": 0},
        {"steps": 2, "denominator": "tokens"},
    ],
)
def test_bad_arguments_are_refused(options):
    with pytest.raises((TypeError, ValueError), match="Received"):
        mlp().fit(X, Y, callbacks=[GradientAccumulation(**options)], **ORDER)


def test_running_eagerly_gives_the_same():
    model = mlp(run_eagerly=True, jit_compile=False)
    model.fit(X[:9], Y[:9], callbacks=[GradientAccumulation(2)], **ORDER)
    trainer = make_trainer(mlp(), 2)
    trainer.fit(X[:9], Y[:9], **ORDER)
    assert_same_weights(model, trainer.model)


def test_nothing_is_compiled_again_by_the_next_fit():
    model, callback = mlp(), GradientAccumulation(3)
    model.fit(X, Y, callbacks=[callback], **ORDER)
    traced = []
    call = model.layers[0].call
    model.layers[0].call = lambda *args: traced.append(1) or call(*args)
    model.fit(X, Y, callbacks=[callback], **ORDER)
    assert not traced


# What is relied on of Keras.


def test_fit_makes_the_train_function_before_training_begins():
    calls = []

    class Listening(keras.Model):
        def make_train_function(self, force=False):
            calls.append("make_train_function")
            return super().make_train_function(force)

    x = keras.Input([6])
    model = compiled(Listening(x, keras.layers.Dense(3)(x)))
    begin = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: calls.append("on_train_begin")
    )
    model.fit(X, Y, epochs=2, callbacks=[begin], **ORDER)
    assert calls == ["make_train_function", "on_train_begin"]
    model.train_on_batch(X, Y)
    assert calls[2:] == ["make_train_function"]


@leaves_data_unended
def test_fit_calls_the_train_function_that_it_finds():
    model = mlp(steps_per_execution=2)
    calls = []

    class Replace(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            kept = self.model.train_function

            def train(*arguments):
                calls.append(arguments)
                return kept(*arguments)

            self.model.train_function = train

    model.fit(X, Y, callbacks=[Replace()], **ORDER)
    assert len(calls) == 4
    if BACKEND == "jax":
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        state, _ = calls[0]
        assert list(map(len, state)) == list(map(len, groups))


# On TensorFlow the state stays in the variables, and there is nothing to hand.
@pytest.mark.skipif(
    BACKEND != "jax", reason="only on JAX is fit handed the state"
)
def test_fit_is_handed_no_lists_whose_items_it_would_look_at():
    model = mlp()
    states = []

    class Watch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            kept = self.model.train_function

            def train(state, iterator):
                logs, state = kept(state, iterator)
                states.append(state)
                return logs, state

            self.model.train_function = train

    model.fit(X, Y, callbacks=[GradientAccumulation(2), Watch()], **ORDER)
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    for state in states:
        assert not any(isinstance(group, list) for group in state)
        assert list(map(len, state)) == list(map(len, groups))
    for kept, variable in zip(states[-1][0], groups[0], strict=True):
        np.testing.assert_array_equal(kept, variable)


@pytest.mark.skipif(
    BACKEND == "jax",
    reason="on JAX, fit cannot end an epoch before its first step",
)
def test_fit_ends_an_epoch_by_stop_iteration_and_reads_the_metrics():
    model = mlp()

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            def train(*arguments):
                raise StopIteration

            self.model.train_function = train
            self.model.metrics[0].update_state(7.0)

    with pytest.warns(UserWarning, match="ran out of data"):
        history = model.fit(X, Y, callbacks=[Stop()], **ORDER)
    assert history.epoch == [0]


def test_accumulation_takes_the_words_of_the_trainer():
    model = mlp()
    callback = GradientAccumulation(2, combine="sum", loss_scale=LossScale())
    model.fit(X, Y, callbacks=[callback], **ORDER)
    accumulation = Accumulation(steps=2, combine="sum")
    trainer = make_trainer(mlp(), accumulation, loss_scale=LossScale())
    trainer.fit(X, Y, **ORDER)
    assert_same_weights(model, trainer.model)


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_sparse_data_are_refused_inside_fit_with_the_remedy(
    steps_per_execution,
):
    sparse = pytest.importorskip("scipy.sparse")
    model = mlp(steps_per_execution=steps_per_execution)
    callbacks = [GradientAccumulation(2)]
    with pytest.raises(TypeError, match="x must hold dense.*Make it dense"):
        model.fit(sparse.csr_matrix(X), Y, callbacks=callbacks, **ORDER)
