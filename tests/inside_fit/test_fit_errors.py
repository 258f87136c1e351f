"""Claims about what goes wrong inside `Model.fit`, and what is left then."""

import numpy as np
import pytest
from accumulating import (
    ORDER,
    WEIGHTS,
    X,
    Y,
    assert_same_weights,
    attributes,
    executions,
    leaves_data_unended,
    make_trainer,
    mlp,
    read,
)
from keras_core_gaps import keras_3_only

from accumtrainer import NonFiniteError
from accumtrainer.callbacks.gradient_accumulation import GradientAccumulation
from accumtrainer.keras_api import keras

pytestmark = keras_3_only("has a fit of its own kind, which is refused")


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
    model = mlp(loss=mean, steps_per_execution=executions(3)[0])
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
@pytest.mark.parametrize(
    "goes_on", ["fit", "train_on_batch", "callback", "Trainer"]
)
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
    elif goes_on == "Trainer":
        make_trainer(model, 3).fit(X, Y, **ORDER)
        make_trainer(twin, 3).fit(X, Y, **ORDER)
        before["own"] |= set(vars(twin))  # with what a Trainer adds
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
