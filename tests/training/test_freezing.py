"""Claims about what an optimizer keeps of layers that are frozen meanwhile."""

import numpy as np
import pytest
from quickest import JIT_COMPILE
from slotted import OPTIMIZERS, make_optimizer

from accumtrainer import Every, Trainer
from accumtrainer.callbacks import Checkpoint, GradientAccumulation, Unfreeze
from accumtrainer.keras_api import keras, ops

X = np.random.default_rng(0).normal(1.0, size=(8, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make_trainer(optimizer="Adam"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(4, "tanh", name="base"),
            keras.layers.Dense(1, name="head"),
        ],
        name="model",
    )
    if isinstance(optimizer, str):
        optimizer = make_optimizer(optimizer)
    return Trainer(
        model,
        optimizer=optimizer,
        loss="mse",
        accumulation=2,
        seed=0,
        jit_compile=JIT_COMPILE,
    )


def fit(trainer, *, trainable=True, **options):
    trainer.model.get_layer("base").trainable = trainable
    options = {"batch_size": 2, "verbose": 0, "shuffle": False} | options
    trainer.fit(X, Y, **options)


def values(variables):
    return [np.array(ops.convert_to_numpy(v)) for v in variables]


def assert_same(variables, others):
    for one, other in zip(variables, others, strict=True):
        np.testing.assert_array_equal(one, other)


LOOKS = {
    "evaluate": lambda trainer: trainer.evaluate(X, Y, verbose=0),
    "predict": lambda trainer: trainer.predict(X, verbose=0),
    "snapshot": lambda trainer: trainer.snapshot(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_a_frozen_model_leaves_no_trace(look):
    looked, alone = make_trainer(), make_trainer()
    for trainer in (looked, alone):
        fit(trainer)
    looked.model.trainable = False
    LOOKS[look](looked)
    looked.model.trainable = True
    for trainer in (looked, alone):
        fit(trainer)
    assert_same(values(looked.model.weights), values(alone.model.weights))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_has_again_what_it_had_of_a_frozen_layer(name):
    trainer = make_trainer(name)
    fit(trainer)
    before = values(trainer.optimizer.variables)
    for trainable in (False, True):
        trainer.model.get_layer("base").trainable = trainable
        trainer.snapshot()
    assert_same(values(trainer.optimizer.variables), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_layer_that_was_frozen_goes_on_as_in_keras(name):
    inputs = keras.Input([3])
    layers = [keras.layers.Dense(1, use_bias=False) for _ in range(2)]
    outputs = keras.layers.add([layer(inputs) for layer in layers])
    trainer = Trainer(
        keras.Model(inputs, outputs),
        optimizer=make_optimizer(name),
        loss=lambda y, p: p[:, 0],
        jit_compile=JIT_COMPILE,
    )
    weights = [keras.Variable(v) for v in trainer.model.get_weights()]
    expected = make_optimizer(name)
    expected.build(weights)
    gradient = ops.convert_to_tensor(X.mean(axis=0)[:, None])
    for trainable in (True, False, True):
        layers[0].trainable = trainable
        trained = weights if trainable else weights[1:]
        for _ in range(2):
            trainer.train_on_batch(X, Y)
            expected.apply([gradient for _ in trained], trained)
    # Averages, where there are any, become the weights.
    variables = trainer.model.trainable_variables
    trainer.optimizer.finalize_variable_values(variables)
    expected.finalize_variable_values(weights)
    found = trainer.model.get_weights()
    for value, weight in zip(found, values(weights), strict=True):
        np.testing.assert_allclose(value, weight, rtol=1e-5, atol=1e-6)


def by_paths():
    # Nadam keeps a number of its own, beside what it keeps of variables.
    first, second = make_optimizer("Nadam"), make_optimizer("Nadam")
    return keras.optimizers.OptimizerMap(first, {".*base/.*": second})


def by_function():
    return lambda variable: make_optimizer("Nadam")


def several():
    return keras.optimizers.MultiOptimizer(by_paths())


def one():
    return make_optimizer("Adam")


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("make", [one, several])
def test_runs_that_freeze_a_layer_meanwhile_go_on_bit_for_bit(
    make, epochs, tmp_path
):
    def callbacks():
        freeze = Unfreeze(Every(1, "epochs"), ["base"], trainable=False)
        return [freeze, Unfreeze(Every(3, "epochs"), ["base"])]

    whole, part, rest = (make_trainer(make()) for _ in range(3))
    fit(whole, epochs=4, callbacks=callbacks())
    saving = Checkpoint(tmp_path, every=Every(1, "epochs"))
    fit(part, epochs=epochs, callbacks=[*callbacks(), saving])
    fit(rest, epochs=4, callbacks=callbacks(), resume_from=tmp_path)
    assert_same(values(rest.model.weights), values(whole.model.weights))


def test_restoring_brings_back_what_was_kept_of_a_frozen_layer(tmp_path):
    saved, restored = make_trainer(), make_trainer()
    fit(saved)
    fit(saved, trainable=False)
    saved.save(tmp_path / "saved")
    restored.model.get_layer("base").trainable = False
    restored.restore(tmp_path / "saved")
    for trainer in (saved, restored):
        fit(trainer)
    assert_same(values(restored.model.weights), values(saved.model.weights))


@pytest.mark.parametrize("chosen", [by_paths, by_function])
def test_a_member_whose_layers_are_all_frozen_keeps_what_is_its(chosen):
    optimizer = keras.optimizers.MultiOptimizer(chosen())
    trainer = make_trainer(optimizer)
    fit(trainer)
    members = list(optimizer.optimizers)
    kernel = trainer.model.get_layer("base").kernel
    (member,) = (
        one
        for one in members
        if any(known is kernel for known in one._trainable_variables)
    )
    before = values(member.variables)
    fit(trainer, trainable=False)
    trainer.model.get_layer("base").trainable = True
    trainer.snapshot()
    assert optimizer.optimizers == members
    assert_same(values(member.variables), before)
    fit(trainer)


@pytest.mark.parametrize("is_in_fit", [False, True])
def test_another_trainer_takes_an_optimizer_that_keeps_what_was_frozen(
    is_in_fit,
):
    first, alone = make_trainer(), make_trainer()
    for trainer in (first, alone):
        fit(trainer)
        fit(trainer, trainable=False)
    model, optimizer = first.model, first.optimizer
    model.get_layer("base").trainable = True
    model.compile(optimizer, "mse")
    options = {"verbose": 0, "shuffle": False}
    if is_in_fit:
        callbacks = [GradientAccumulation(steps=2)]
        model.fit(X, Y, batch_size=2, callbacks=callbacks, **options)
    else:
        Trainer(model, accumulation=2).fit(X, Y, batch_size=2, **options)
    fit(alone)
    for one, other in zip(
        values(model.weights), values(alone.model.weights), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_optimizer_of_a_larger_model_is_refused_where_that_would_lose_it():
    trainer = make_trainer()
    fit(trainer)
    fit(trainer, trainable=False)
    base = trainer.model.get_layer("base")
    base.trainable = True
    part = keras.Model(trainer.model.inputs, base.output)
    with pytest.raises(ValueError, match="built for other variables"):
        Trainer(part, optimizer=trainer.optimizer, loss="mse")
