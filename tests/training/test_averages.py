"""Averages of weights (`use_ema`), which begin as zeros in Keras, and copies.

An optimizer may copy the weights when it is built.
"""

import numpy as np
import pytest

from accumtrainer import Every, Trainer
from accumtrainer.callbacks import GradientAccumulation, Unfreeze
from accumtrainer.keras_api import keras

pytestmark = pytest.mark.usefixtures("without_xla")

X = np.ones([8, 2], "float32")
Y = np.full([8, 1], 5.0, "float32")
BAD = np.full([8, 1], np.nan, "float32")


def make_model(*, frozen=False):
    model = keras.Sequential(
        [
            keras.Input([2]),
            keras.layers.Dense(2, kernel_initializer="ones", name="base"),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )
    model.get_layer("base").trainable = not frozen
    return model


def weights_of(model):
    return [np.asarray(value) for value in model.get_weights()]


def fit_by_trainer(model, y):
    trainer = Trainer(model, loss="mse", accumulation=2)
    trainer.fit(X, y, batch_size=2, verbose=0)


def fit_by_keras(model, y):
    accumulation = GradientAccumulation(steps=2)
    model.fit(X, y, batch_size=2, verbose=0, callbacks=[accumulation])


def one():
    return keras.optimizers.SGD(1e-3, use_ema=True)


def two():
    by_layer = keras.optimizers.OptimizerMap(one(), {"base/.*": one()})
    return keras.optimizers.MultiOptimizer(by_layer)


@pytest.mark.parametrize("fit", [fit_by_trainer, fit_by_keras])
@pytest.mark.parametrize("optimizer", [one, two])
def test_weights_stay_where_every_update_is_skipped(fit, optimizer):
    model = make_model()
    model.compile(optimizer(), "mse")
    before = weights_of(model)
    fit(model, BAD)
    for now, old in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(now, old)


def test_weights_that_were_loaded_since_stay_too():
    model = make_model()
    model.compile(one(), "mse")
    model.optimizer.build(model.trainable_variables)
    loaded = [weight + 1 for weight in weights_of(model)]
    model.set_weights(loaded)
    fit_by_trainer(model, BAD)
    for now, old in zip(weights_of(model), loaded, strict=True):
        np.testing.assert_array_equal(now, old)


LOOKS = {
    "check": lambda trainer: trainer.check_equivalence((X, Y)),
    "plan": lambda trainer: trainer.memory_plan((X, Y), [2]),
    "snapshot": lambda trainer: trainer.snapshot(),
    "find": lambda trainer: trainer.find_learning_rate(X, Y, 4, updates=2),
}

UPDATES = {
    "fit": lambda trainer: trainer.fit(X, Y, batch_size=4, verbose=0),
    "train_on_batch": lambda trainer: trainer.train_on_batch(X, Y),
}


# Keras 3.12, the oldest that is supported, has no such optimizer.
@pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"),
    reason="this version of Keras has no ScheduleFreeAdamW",
)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("update", UPDATES)
def test_optimizer_goes_from_weights_that_were_loaded_since_it_was_built(
    look, update
):
    model = make_model()
    start = [
        np.random.default_rng(0).normal(size=w.shape) for w in weights_of(model)
    ]
    model.set_weights(start)
    optimizer = keras.optimizers.ScheduleFreeAdamW(1e-3)
    trainer = Trainer(model, optimizer=optimizer, loss="mse", accumulation=2)
    LOOKS[look](trainer)
    loaded = [weight + 1 for weight in start]
    model.set_weights(loaded)
    UPDATES[update](trainer)
    for now, old in zip(weights_of(model), loaded, strict=True):
        np.testing.assert_allclose(now, old, atol=0.01)
        assert np.all(now != old)


@pytest.mark.parametrize("fit", [fit_by_trainer, fit_by_keras])
def test_average_of_good_updates_is_that_of_keras(fit):
    models = [make_model(), make_model()]
    for model in models:
        model.compile(one(), "mse")
    fit(models[0], Y)
    models[1].fit(X, Y, batch_size=4, verbose=0)
    for ours, keras_own in zip(*map(weights_of, models), strict=True):
        np.testing.assert_allclose(ours, keras_own, rtol=1e-5)


def test_average_of_a_layer_begins_with_its_weights_as_it_is_unfrozen():
    model = make_model(frozen=True)
    trainer = Trainer(model, optimizer=one(), loss="mse", accumulation=2)
    unfreeze = Unfreeze(at=Every(1, "epochs"), layers=["base"])
    trainer.fit(X, Y, batch_size=2, epochs=2, verbose=0, callbacks=[unfreeze])
    kernel = np.asarray(model.get_layer("base").get_weights()[0])
    assert np.all(kernel != 1)
    np.testing.assert_allclose(kernel, np.ones([2, 2]), atol=0.02)


def test_average_of_a_layer_that_no_update_has_met_begins_with_its_weights():
    model = make_model()
    optimizer = one()
    optimizer.build(model.trainable_variables)
    trainer = Trainer(model, optimizer=optimizer, loss="mse")
    base = model.get_layer("base")
    base.trainable = False
    trainer.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    base.trainable = True
    trainer.evaluate(X, Y, verbose=0)  # has the optimizer made anew
    trainer.snapshot()
    averages = optimizer._model_variables_moving_average
    average = averages[optimizer._get_variable_index(base.kernel)]
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(average), np.ones([2, 2])
    )


def test_optimizers_that_a_function_makes_keep_what_they_have():
    model = make_model(frozen=True)
    made = keras.optimizers.MultiOptimizer(
        lambda variable: keras.optimizers.SGD(1e-3, momentum=0.9)
    )
    trainer = Trainer(model, optimizer=made, loss="mse")
    trainer.fit(X, Y, batch_size=2, verbose=0)
    head = made.optimizers[0]
    momentum = np.asarray(keras.ops.convert_to_numpy(head.momentums[0]))
    model.get_layer("base").trainable = True
    trainer.fit(X, BAD, batch_size=2, verbose=0)  # is skipped
    assert head.built and len(made.optimizers) == 4
    assert int(head.iterations) == 4
    assert len([one for one in made.optimizers if one.built]) == 4
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(head.momentums[0]), momentum
    )
