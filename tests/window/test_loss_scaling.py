"""Claims about float16: one scale per window, and how it moves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaled import (
    Applied,
    K,
    X,
    Y,
    fit,
    make_model,
    make_trainer,
    numbers,
    poisoned,
)

from accumtrainer import LossScale, Trainer
from accumtrainer.keras_api import keras, ops
from accumtrainer.window.loss_scale import next_scale


def assert_moved_alike(one, other):
    """Check that two models moved from the same start as float16 allows."""
    starts = make_model().trainable_variables
    for start, a, b in zip(
        starts, one.trainable_variables, other.trainable_variables, strict=True
    ):
        move, other_move = (
            numbers(a) - numbers(start),
            numbers(b) - numbers(start),
        )
        size = np.abs(move).max()
        assert size > 0
        np.testing.assert_allclose(move, other_move, atol=1e-2 * size)


@pytest.mark.parametrize(
    ("policy", "scale"),
    [
        ("mixed_float16", 2.0**15),
        ("float16", 2.0**15),
        ("mixed_bfloat16", 1.0),
        ("float32", 1.0),
    ],
)
def test_loss_is_scaled_only_where_a_layer_computes_in_float16(policy, scale):
    trainer, applied = make_trainer(make_model(policy))
    fit(trainer)
    assert (trainer.loss_scale is not None) == (scale != 1.0)
    assert applied.column("loss_scale")[0] == scale


def test_one_float16_layer_is_enough():
    inputs = keras.Input([3])
    inner = keras.Sequential([keras.layers.Dense(2, dtype="mixed_float16")])
    outputs = keras.layers.Dense(1, dtype="float32")(inner(inputs))
    trainer, _ = make_trainer(keras.Model(inputs, outputs))
    assert trainer.loss_scale == LossScale()


@pytest.mark.parametrize("off", [None, False])
def test_scaling_can_be_switched_off(off):
    trainer, applied = make_trainer(make_model(), loss_scale=off)
    fit(trainer)
    assert applied.column("loss_scale") == [1.0] * 4


def test_scaling_can_be_asked_for_in_float32():
    plain, _ = make_trainer(make_model("float32"))
    scaled, applied = make_trainer(
        make_model("float32"), loss_scale=LossScale(initial=256)
    )
    fit(plain)
    fit(scaled)
    assert applied.column("loss_scale") == [256.0] * 4
    for one, other in zip(
        plain.model.variables, scaled.model.variables, strict=True
    ):
        np.testing.assert_array_equal(numbers(one), numbers(other))


def test_small_gradients_survive_float16():
    """Without a scale they are below what float16 can hold."""
    moved = {}
    for scale in (None, LossScale(initial=2.0**15)):
        inputs = keras.Input([1])
        hidden = keras.layers.Dense(
            1, dtype="mixed_float16", kernel_initializer="ones", use_bias=False
        )(inputs)
        outputs = keras.layers.Dense(
            1, dtype="mixed_float16", kernel_initializer="ones", use_bias=False
        )(hidden)
        outputs = keras.layers.Activation("linear", dtype="float32")(outputs)
        model = keras.Model(inputs, outputs)
        trainer, _ = make_trainer(
            model,
            optimizer=keras.optimizers.SGD(1e4),
            loss=lambda y, p: p * 1e-8,
            loss_scale=scale,
        )
        before = numbers(model.trainable_variables[0])
        trainer.fit(np.ones([8, 1]), np.ones([8, 1]), batch_size=2, verbose=0)
        after = numbers(model.trainable_variables[0])
        moved[scale is not None] = float((before - after).item())
    assert moved[False] == 0.0
    assert moved[True] > 0.0


# What a micro-batch counts.


@pytest.mark.parametrize("k", [2, 8])
def test_float16_micro_batches_equal_one_batch_to_its_rounding(k):
    one, _ = make_trainer(make_model(), accumulation=1)
    many, _ = make_trainer(make_model(), accumulation=k)
    fit(one, batch_size=16)
    fit(many, batch_size=16 // k)
    assert one.progress.updates == many.progress.updates == 2
    assert_moved_alike(one.model, many.model)


def test_gradients_are_accumulated_in_float32():
    """In float16 the later, smaller ones would vanish in the sum."""
    seen = []

    class Look(Trainer):
        def on_accumulate(self, gradients, info):
            seen.extend(str(g.dtype) for g in gradients)
            return gradients

        def on_apply(self, gradients, info):
            seen.extend(str(g.dtype) for g in gradients)
            return gradients

    trainer, _ = make_trainer(make_model("float16"), cls=Look)
    fit(trainer)
    assert seen
    assert all("float32" in dtype for dtype in seen)


def test_scale_is_constant_inside_a_window():
    class Look(Trainer):
        def on_accumulate(self, gradients, info):
            self.log("lowest", info.loss_scale, reduce="min")
            self.log("highest", info.loss_scale, reduce="max")
            return gradients

    trainer, applied = make_trainer(
        make_model("float32"),
        cls=Look,
        loss_scale=LossScale(initial=8.0, growth_interval=1),
    )
    fit(trainer)
    assert applied.column("lowest") == applied.column("highest")
    assert applied.column("lowest") == [8.0, 16.0, 32.0, 64.0]


# Overflow.


def test_overflow_of_float16_halves_the_scale_until_windows_are_finite():
    trainer, applied = make_trainer(
        make_model(), loss_scale=LossScale(initial=2.0**24), jit_compile=True
    )
    fit(trainer, X[:8], Y[:8], epochs=16)
    flags = applied.column("applied")
    skipped = flags.index(True)
    assert skipped >= 3
    assert all(flags[skipped:])
    assert applied.column("loss_scale") == [
        2.0 ** (24 - min(window, skipped)) for window in range(16)
    ]
    assert trainer.progress.skipped_updates == skipped
    assert trainer.progress.updates == 16 - skipped
    iterations = ops.convert_to_numpy(trainer.optimizer.iterations)
    assert iterations == 16 - skipped


def test_training_that_overflows_at_first_ends_as_if_it_had_not():
    """Bad windows leave no trace: the good ones alone decide the weights."""
    calm, _ = make_trainer(make_model())
    wild, _ = make_trainer(make_model(), loss_scale=LossScale(initial=2.0**24))
    fit(wild, X[:8], Y[:8], max_updates=3, epochs=40)
    fit(calm, X[:8], Y[:8], max_updates=3, epochs=40)
    assert wild.progress.skipped_updates > 0
    assert calm.progress.skipped_updates == 0
    assert wild.progress.updates == calm.progress.updates == 3
    assert_moved_alike(calm.model, wild.model)


def test_scale_rests_at_its_floor_after_a_thousand_bad_windows():
    scale = LossScale(initial=2.0**15, minimum=4.0, growth_interval=3)
    trainer, applied = make_trainer(
        make_model(),
        loss_scale=scale,
        accumulation=2,
        max_consecutive_skips=None,
    )
    before = [numbers(v) for v in trainer.model.variables]
    bad = np.full([16, 3], np.nan, "float32")
    fit(trainer, bad, Y[:16], batch_size=1, epochs=125)
    assert trainer.progress.skipped_updates == 1000
    assert trainer.progress.updates == 0
    scales = applied.column("loss_scale")
    assert scales[-1] == min(scales) == 4.0
    for old, variable in zip(before, trainer.model.variables, strict=True):
        np.testing.assert_array_equal(old, numbers(variable))

    applied.logs.clear()
    fit(trainer, X, Y, batch_size=4, epochs=2)
    assert all(applied.column("applied"))
    assert applied.column("loss_scale") == [4.0] * 3 + [8.0] * 3 + [16.0] * 2
    assert np.all(np.isfinite(applied.column("loss")))


def test_scale_grows_after_its_interval_of_updates_up_to_its_ceiling():
    trainer, applied = make_trainer(
        make_model(),
        loss_scale=LossScale(initial=2.0, growth_interval=2, maximum=8.0),
    )
    fit(trainer, epochs=2)
    assert applied.column("loss_scale") == [2, 2, 4, 4, 8, 8, 8, 8]


def test_bad_window_starts_the_interval_anew():
    trainer, applied = make_trainer(
        make_model("float32"),
        loss_scale=LossScale(initial=4.0, growth_interval=2),
    )
    fit(trainer, poisoned([8]), Y, epochs=1)
    assert applied.column("applied") == [True, False, True, True]
    assert applied.column("loss_scale") == [4.0, 4.0, 2.0, 2.0]
    applied.logs.clear()
    fit(trainer, X[:8], Y[:8])
    assert applied.column("loss_scale") == [4.0]


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(-3, 10),
    st.integers(1, 5),
)
def test_scale_follows_the_rule_written_in_python(windows, power, interval):
    options = LossScale(
        initial=2.0**power,
        growth_interval=interval,
        minimum=2.0**-4,
        maximum=2.0**11,
    )
    scale, good = ops.convert_to_tensor(options.initial), ops.zeros((), "int32")
    expected, streak = options.initial, 0
    for is_finite in windows:
        scale, good = next_scale(
            scale, good, ops.convert_to_tensor(is_finite), options
        )
        streak = streak + 1 if is_finite else 0
        if not is_finite:
            expected = max(expected / 2, options.minimum)
        elif streak == interval:
            expected, streak = min(expected * 2, options.maximum), 0
        assert (float(scale), int(good)) == (expected, streak)


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_scale_moves_by_its_factor(factor):
    options = LossScale(initial=64.0, growth_interval=1, factor=factor)
    args = ops.convert_to_tensor(64.0), ops.zeros((), "int32")
    grown, _ = next_scale(*args, ops.convert_to_tensor(True), options)
    shrunk, _ = next_scale(*args, ops.convert_to_tensor(False), options)
    assert float(grown) == 64.0 * factor
    assert float(shrunk) == 64.0 / factor


# Models that Keras has prepared.


def test_compiled_float16_model_just_works():
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    model = make_model()
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    wrapped = model.optimizer
    assert isinstance(wrapped, keras.optimizers.LossScaleOptimizer)
    applied = Applied()
    trainer = Trainer(model, accumulation=K, callbacks=[applied])
    fit(trainer)
    assert trainer.progress.updates == 4
    assert trainer.optimizer is wrapped.inner_optimizer
    assert model.optimizer is trainer.optimizer
    assert applied.column("loss_scale") == [2.0**15] * 4
    assert all(applied.column("applied"))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_settings_of_a_loss_scale_optimizer_are_carried_over(is_compiled):
    model = make_model()
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=16.0, dynamic_growth_steps=2
    )
    how = {"optimizer": optimizer, "loss": "mse"}
    if is_compiled:
        model.compile(**how)
        how = {}
    applied = Applied()
    trainer = Trainer(model, **how, accumulation=K, callbacks=[applied])
    fit(trainer)
    assert trainer.optimizer is optimizer.inner_optimizer
    assert trainer.loss_scale.initial == 16.0
    assert trainer.loss_scale.growth_interval == 2
    assert applied.column("loss_scale") == [16.0, 16.0, 32.0, 32.0]


@pytest.mark.filterwarnings(
    # Keras's fit reads its metrics through NumPy's old protocol.
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"
)
def test_scale_that_keras_has_reached_is_carried_over():
    model = make_model()
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=16.0, dynamic_growth_steps=2
    )
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    reached = float(ops.convert_to_numpy(optimizer.dynamic_scale))
    assert reached > 16.0
    assert Trainer(model).loss_scale.initial == reached


@pytest.mark.parametrize("is_saved_by_trainer", [True, False])
def test_weights_that_are_loaded_bring_their_loss_scale(
    is_saved_by_trainer, tmp_path
):
    path = tmp_path / "some.weights.h5"
    scales = []
    for maximum in (64.0, 32.0):
        model = make_model()
        model.compile(keras.optimizers.SGD(0.01), loss="mse")
        if not is_saved_by_trainer and not scales:
            model.save_weights(path)
        scaling = LossScale(initial=16.0, growth_interval=2, maximum=maximum)
        applied = Applied()
        trainer = Trainer(
            model, loss_scale=scaling, accumulation=K, callbacks=[applied]
        )
        if scales:
            model.load_weights(path)
        fit(trainer)
        scales.append(applied.column("loss_scale"))
        if is_saved_by_trainer:
            model.save_weights(path)
    begun = [16.0, 16.0, 32.0, 32.0]
    # As far as the new limits let it.
    assert scales == [begun, [32.0] * 4 if is_saved_by_trainer else begun]


def test_given_loss_scale_goes_before_that_of_a_compiled_model():
    model = make_model()
    model.compile(optimizer="sgd", loss="mse")
    chosen = LossScale(initial=4.0)
    assert Trainer(model, loss_scale=chosen).loss_scale is chosen


def test_optimizer_given_for_a_float16_model_is_not_wrapped():
    model = make_model()
    optimizer = keras.optimizers.SGD(0.01)
    trainer = Trainer(model, optimizer=optimizer, loss="mse")
    assert trainer.optimizer is model.optimizer is optimizer
