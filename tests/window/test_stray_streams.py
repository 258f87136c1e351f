"""Claims about random layers that stand outside of the model."""

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras, ops
from accumtrainer.window.objective import is_random_state

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make_model(augment):
    keras.utils.set_random_seed(0)

    class Augmented(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x, training=False):
            return self.dense(stray[0](x, training=training))

    stray = (augment,)
    return Augmented()


def make_augment():
    return keras.layers.GaussianNoise(0.5, seed=3)


def make_trainer(model, cls=Trainer, **options):
    return cls(
        model,
        optimizer=keras.optimizers.SGD(0.05),
        loss="mse",
        accumulation=4,
        seed=0,
        jit_compile=JIT_COMPILE,
        **options,
    )


def fit(trainer, x=X, **options):
    return trainer.fit(x, Y, batch_size=4, shuffle=False, verbose=0, **options)


def seed_of(layer):
    return np.array(ops.convert_to_numpy(layer.seed_generator.state))


def numbers(model):
    return [np.array(ops.convert_to_numpy(v)) for v in model.variables]


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_layer_outside_the_model_draws_as_one_inside(use_plan, plan):
    use_plan(plan)
    augment = make_augment()
    model = make_model(augment)
    fit(make_trainer(model), epochs=2)
    keras.utils.set_random_seed(0)
    inside = keras.Sequential([make_augment(), keras.layers.Dense(1)])
    fit(make_trainer(inside), epochs=2)
    assert seed_of(augment)[1] == 8  # one draw for each micro-batch
    for one, other in zip(
        model.trainable_variables, inside.trainable_variables, strict=True
    ):
        np.testing.assert_allclose(
            ops.convert_to_numpy(one), ops.convert_to_numpy(other), rtol=1e-5
        )


def test_generator_outside_the_model_goes_on_in_a_bad_window():
    augment = make_augment()
    trainer = make_trainer(make_model(augment))
    fit(trainer, np.full_like(X, np.nan))
    assert trainer.progress.skipped_updates == 1
    assert seed_of(augment)[1] == 4


def test_hook_may_draw_from_a_generator_of_its_own():
    class Noisy(Trainer):
        def on_micro_batch(self, batch, info):
            noise = keras.random.normal(ops.shape(batch.x), seed=generator)
            return batch._replace(x=batch.x + noise)

    generator = keras.random.SeedGenerator(5)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    fit(make_trainer(model, Noisy))
    assert ops.convert_to_numpy(generator.state)[1] == 4


def test_layer_outside_the_model_draws_inside_fit():
    augment = make_augment()
    model = make_model(augment)
    model.compile("sgd", "mse", jit_compile=JIT_COMPILE)
    model.fit(
        X, Y, batch_size=4, verbose=0, callbacks=[GradientAccumulation(4)]
    )
    assert seed_of(augment)[1] == 4


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
@pytest.mark.parametrize("method", ["predict", "evaluate"])
def test_generator_outside_the_model_goes_on_without_training(method, options):
    class Noisy(keras.Model):
        def call(self, x):
            return x + keras.random.normal(ops.shape(x), seed=generator)

    generator = keras.random.SeedGenerator(5)
    trainer = make_trainer(Noisy(), **options)
    data = (X,) if method == "predict" else (X, X)
    answers = [
        np.array(getattr(trainer, method)(*data, batch_size=4, verbose=0))
        for _ in range(2)
    ]
    assert ops.convert_to_numpy(generator.state)[1] == 8
    assert np.all(answers[0] != answers[1])
    if method == "predict":  # every batch has noise of its own
        noise = (answers[0] - X).reshape(4, -1)
        assert np.all(noise[0] != noise[1])


@pytest.mark.parametrize("has_begun", [False, True])
def test_run_with_a_layer_outside_the_model_goes_on_bit_for_bit(
    tmp_path, has_begun
):
    augment = make_augment()
    model = make_model(augment)
    trainer = make_trainer(model)
    fit(trainer)
    trainer.save(tmp_path / "saved")
    fit(trainer)
    augment = make_augment()
    again = make_model(augment)
    other = make_trainer(again)
    if has_begun:
        fit(other)
        fit(other)
    else:
        other.predict(X, verbose=0)  # creates the weights
    other.restore(tmp_path / "saved")
    fit(other)
    assert seed_of(augment)[1] == 8
    for one, two in zip(numbers(model), numbers(again), strict=True):
        np.testing.assert_array_equal(one, two)


def test_other_variable_outside_the_model_must_be_tracked():
    count = keras.Variable(0.0, trainable=False, name="count")

    class Counting(Trainer):
        def on_micro_batch(self, batch, info):
            count.assign(count + 1.0)
            return batch

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"self\.track"):
        fit(make_trainer(model, Counting))


def test_states_of_generators_are_known_without_making_one(monkeypatch):
    # A first one, made amid the trace of a replica, would be made by it.
    states = [keras.random.SeedGenerator(0).state]
    states += [v for v in make_augment().variables]
    weights = make_model(None).dense
    weights.build([None, 3])
    monkeypatch.setattr(keras.random, "SeedGenerator", None)
    assert all(map(is_random_state, states)) and len(states) == 2
    assert not any(map(is_random_state, weights.variables))
