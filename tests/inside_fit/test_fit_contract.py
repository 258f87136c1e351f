"""Claims about what Keras's `fit` is relied upon for."""

import numpy as np
import pytest
from accumulating import (
    ORDER,
    X,
    Y,
    assert_same_weights,
    compiled,
    executions,
    leaves_data_unended,
    make_trainer,
    mlp,
)
from copied import in_every_way
from keras_core_gaps import keras_3_only

from accumtrainer import Accumulation, LossScale, Progress
from accumtrainer.callbacks.gradient_accumulation import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras

pytestmark = keras_3_only("has a fit of its own kind, which is refused")


def test_running_eagerly_gives_the_same():
    model = mlp(run_eagerly=True, jit_compile=False)
    model.fit(X[:9], Y[:9], callbacks=[GradientAccumulation(2)], **ORDER)
    trainer = make_trainer(mlp(), 2)
    trainer.fit(X[:9], Y[:9], **ORDER)
    assert_same_weights(model, trainer.model)


def test_nothing_is_compiled_again_by_the_next_fit(monkeypatch):
    model, callback = mlp(), GradientAccumulation(3)
    model.fit(X, Y, callbacks=[callback], **ORDER)
    traced = note_traces(model, monkeypatch)
    model.fit(X, Y, callbacks=[callback], **ORDER)
    assert not traced


@in_every_way
def test_copy_counts_anew_and_the_original_goes_on(copied, monkeypatch):
    model, callback = mlp(), GradientAccumulation(3)
    model.fit(X, Y, callbacks=[callback], **ORDER)
    another, duplicate = mlp(), copied(callback)
    assert duplicate.progress == Progress()
    another.fit(X, Y, callbacks=[duplicate], **ORDER)
    assert_same_weights(another, model)
    updates = duplicate.progress.updates
    assert callback.progress.updates == updates
    traced = note_traces(model, monkeypatch)
    model.fit(X, Y, callbacks=[callback], **ORDER)
    assert not traced
    assert callback.progress.updates == 2 * updates


def note_traces(model, monkeypatch):
    """Note what is traced; a layer with another `call` would be on PyTorch."""
    if BACKEND == "torch":
        from recorded import note_graphs

        return note_graphs(monkeypatch)
    traced = []
    call = model.layers[0].call
    model.layers[0].call = lambda *args: traced.append(1) or call(*args)
    return traced


def test_windows_go_on_from_what_a_callback_makes_of_a_weight():
    def halve(model):
        weight = model.trainable_variables[0]
        if BACKEND == "torch":  # where it may get other memory
            weight.value.data = weight.value.detach() / 2
        else:
            weight.assign(weight / 2)

    def fit(model, trains, *callbacks):
        end = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: halve(model)
        )
        trains.fit(X, Y, epochs=3, callbacks=[*callbacks, end], **ORDER)
        return model

    model = mlp()
    ours = fit(model, model, GradientAccumulation(2))
    trainer = make_trainer(mlp(), 2)
    assert_same_weights(ours, fit(trainer.model, trainer))


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
    model = mlp(steps_per_execution=executions(2)[0])
    calls = []

    class Replace(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            kept = self.model.train_function

            def train(*arguments):
                calls.append(arguments)
                return kept(*arguments)

            self.model.train_function = train

    model.fit(X, Y, callbacks=[Replace()], **ORDER)
    assert len(calls) == 8 // model.steps_per_execution
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
    BACKEND != "tensorflow",
    reason="elsewhere fit cannot end an epoch before its first step",
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


@pytest.mark.skipif(
    BACKEND == "torch", reason="on PyTorch fit itself makes the data dense"
)
@pytest.mark.parametrize("steps_per_execution", executions(1, 2))
def test_sparse_data_are_refused_inside_fit_with_the_remedy(
    steps_per_execution,
):
    sparse = pytest.importorskip("scipy.sparse")
    model = mlp(steps_per_execution=steps_per_execution)
    callbacks = [GradientAccumulation(2)]
    with pytest.raises(TypeError, match="x must hold dense.*Make it dense"):
        model.fit(sparse.csr_matrix(X), Y, callbacks=callbacks, **ORDER)


@pytest.mark.parametrize("trains", ["callback", "Trainer"])
def test_what_the_last_compile_does_not_name_stays(trains):
    def make_model():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, loss_weights=2.0, metrics=["accuracy"])
        model.compile(keras.optimizers.SGD(0.1))
        return model

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=[12, 4]), rng.integers(0, 3, 12)
    how = {"shuffle": False, "verbose": 0, "epochs": 2}
    model, expected = make_model(), make_model()
    logs = expected.fit(x, y, batch_size=6, **how).history
    if trains == "Trainer":
        trainer = make_trainer(model, Accumulation(micro_batch_size=2))
        found = trainer.fit(x, y, batch_size=6, **how).history
    else:
        callbacks = [GradientAccumulation(3)]
        found = model.fit(
            x, y, batch_size=2, callbacks=callbacks, **how
        ).history
    assert_same_weights(model, expected)
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(found[name], logs[name], rtol=1e-5)
