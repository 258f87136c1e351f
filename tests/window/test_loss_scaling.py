"""Claims about float16: one scale per window, and bad windows forgotten."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quickest import JIT_COMPILE

from accumtrainer import Callback, LossScale, NonFiniteError, Trainer
from accumtrainer.keras_api import keras, ops
from accumtrainer.window.loss_scale import next_scale

K = 4

# TensorFlow starts sooner without XLA, which has tests of its own below.
X = 0.1 * np.random.default_rng(1).normal(size=(32, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Applied(Callback):
    """Keeps the logs of every window."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_apply(self, update, logs=None):
        self.logs.append(dict(logs) | {"update": update})

    def column(self, name):
        return [logs[name] for logs in self.logs]


def numbers(variable):
    """Copy a variable's values to the host."""
    return np.asarray(ops.convert_to_tensor(variable)).copy()


def make_model(policy="mixed_float16", *, normalize=False):
    keras.utils.set_random_seed(0)
    layers = [keras.Input([3]), keras.layers.Dense(4, dtype=policy)]
    if normalize:
        layers.append(keras.layers.BatchNormalization(dtype=policy))
    layers.append(keras.layers.Dense(1, dtype=policy))
    return keras.Sequential(layers)


def make_trainer(model, **options):
    """Make a Trainer of k micro-batches that keeps its logs."""
    applied = Applied()
    callbacks = [applied, *options.pop("callbacks", [])]
    options = {
        "optimizer": keras.optimizers.SGD(0.01, momentum=0.9),
        "loss": "mse",
        "accumulation": K,
        "seed": 0,
        "jit_compile": JIT_COMPILE,
    } | options
    cls = options.pop("cls", Trainer)
    return cls(model, callbacks=callbacks, **options), applied


def fit(trainer, x=X, y=Y, **options):
    options = {"batch_size": 2, "shuffle": False, "verbose": 0} | options
    return trainer.fit(x, y, **options)


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


def poisoned(rows, value=np.nan):
    """Copy the inputs with some rows made bad."""
    x = X.copy()
    x[rows] = value
    return x


# Where it is on.


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


class Everything(Trainer):
    """Tracks, draws, logs and measures in every hook there is."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = self.track(keras.Variable(0.0, name="seen"))
        self.applied = self.track(keras.Variable(0.0, name="applied"))

    def on_micro_batch(self, batch, info):
        noise = keras.random.uniform(ops.shape(batch.x), seed=self.rng)
        self.seen.assign(self.seen + ops.sum(batch.x))
        return batch._replace(x=batch.x + 0.01 * noise)

    def after_apply(self, info):
        self.applied.assign(self.applied + 1.0)


@pytest.mark.parametrize("plan", ["fused", "streamed"])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize(("value", "position"), [(np.nan, 0), (np.inf, 5)])
def test_window_with_a_bad_micro_batch_leaves_everything_unchanged(
    use_plan, plan, jit_compile, value, position
):
    use_plan(plan, jit_compile=jit_compile)
    model = make_model("float32", normalize=True)
    trainer, applied = make_trainer(
        model,
        cls=Everything,
        metrics=["mae"],
        optimizer=keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5),
            use_ema=True,
        ),
    )
    fit(trainer, X[:8], Y[:8])
    state = [
        *model.variables,
        *trainer.optimizer.variables,
        trainer.seen,
        trainer.applied,
    ]
    before = [numbers(v) for v in state]
    assert before[-1] == 1.0
    fit(trainer, poisoned([position], value)[:8], Y[:8])
    assert trainer.plan.name == plan
    assert applied.column("applied") == [True, False]
    assert applied.column("updates") == [1, 1]
    assert applied.column("skipped_updates") == [0, 1]
    for old, variable in zip(before, state, strict=True):
        np.testing.assert_array_equal(old, numbers(variable), variable.path)
    fit(trainer, X[:8], Y[:8])
    np.testing.assert_allclose(
        applied.column("learning_rate"), [0.1, 0.05, 0.05], rtol=1e-6
    )


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_metrics_forget_a_bad_window(use_plan, plan):
    use_plan(plan)
    good, _ = make_trainer(make_model("float32"), metrics=["mae"])
    bad, _ = make_trainer(make_model("float32"), metrics=["mae"])
    expected = fit(good, X[:16], Y[:16]).history
    order = np.r_[0:8, 16:24, 8:16]
    received = fit(bad, poisoned([20])[order], Y[order]).history
    assert bad.progress.skipped_updates == 1
    for name in ("loss", "mae"):
        np.testing.assert_allclose(
            received[name], expected[name], rtol=1e-6, err_msg=name
        )


def test_epoch_forgets_a_bad_window_that_ends_it():
    good, _ = make_trainer(make_model("float32"))
    bad, _ = make_trainer(make_model("float32"))
    expected = fit(good, X[:16], Y[:16]).history["loss"]
    received = fit(bad, poisoned([20])[:24], Y[:24]).history["loss"]
    assert bad.progress.skipped_updates == 1
    np.testing.assert_allclose(received, expected, rtol=1e-6)


def test_epoch_of_bad_windows_alone_has_no_loss():
    trainer, _ = make_trainer(make_model("float32"))
    history = fit(trainer, np.full_like(X, np.nan), Y).history
    assert trainer.progress.skipped_updates == 4
    assert np.isnan(history["loss"]).all()


def test_overflow_before_any_update_shows_the_loss_of_its_window():
    """TerminateOnNaN would take it for the end of training otherwise."""
    shown = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: shown.append(logs["loss"])
    )
    scale = LossScale(initial=2.0**127, maximum=2.0**127)
    trainer, applied = make_trainer(make_model("float32"), loss_scale=scale)
    history = fit(trainer, 100 * X, Y, callbacks=[watch]).history
    assert not any(applied.column("applied"))
    assert np.all(np.isfinite(shown))
    assert shown == applied.column("loss")
    assert np.isnan(history["loss"]).all()


def test_losses_of_outputs_are_shown_as_the_loss_is():
    inputs = keras.Input([3])
    heads = {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"}
    shown = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: shown.append(dict(logs))
    )
    scale = LossScale(initial=2.0**127, maximum=2.0**127)
    trainer, applied = make_trainer(
        keras.Model(inputs, heads),
        loss=dict.fromkeys(heads, "mse"),
        loss_scale=scale,
    )
    y = {"a": Y, "b": -Y}
    history = fit(trainer, 100 * X, y, callbacks=[watch]).history
    assert not any(applied.column("applied"))
    for name in ("loss", "a_loss", "b_loss"):
        column = [logs[name] for logs in shown]
        assert np.all(np.isfinite(column))
        assert column == applied.column(name)
        assert np.isnan(history[name]).all()


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_training_goes_on_as_if_a_bad_window_had_not_been(use_plan, plan):
    use_plan(plan)
    good, _ = make_trainer(make_model("float32", normalize=True))
    bad, _ = make_trainer(make_model("float32", normalize=True))
    fit(good, X[:16], Y[:16])
    order = np.r_[0:8, 16:24, 8:16]
    fit(bad, poisoned([20])[order], Y[order])
    for a, b in zip(good.model.variables, bad.model.variables, strict=True):
        np.testing.assert_array_equal(numbers(a), numbers(b), a.path)


def test_bad_label_is_forgotten_like_a_bad_input():
    trainer, applied = make_trainer(make_model("float32"))
    before = [numbers(v) for v in trainer.model.variables]
    y = Y.copy()
    y[5] = np.nan
    fit(trainer, X[:8], y[:8])
    assert applied.column("applied") == [False]
    for old, variable in zip(before, trainer.model.variables, strict=True):
        np.testing.assert_array_equal(old, numbers(variable))


def test_window_that_a_hook_makes_bad_is_forgotten():
    class Spoil(Trainer):
        def on_apply(self, gradients, info):
            return [g / 0.0 for g in gradients]

    trainer, applied = make_trainer(make_model("float32"), cls=Spoil)
    before = [numbers(v) for v in trainer.model.variables]
    fit(trainer, X[:8], Y[:8])
    assert applied.column("applied") == [False]
    for old, variable in zip(before, trainer.model.variables, strict=True):
        np.testing.assert_array_equal(old, numbers(variable))


def test_random_streams_alone_go_on_in_a_bad_window():
    trainer, _ = make_trainer(make_model("float32"), cls=Everything)
    fit(trainer, X[:8], Y[:8])
    before = numbers(trainer.rng.state)
    fit(trainer, poisoned([0])[:8], Y[:8])
    assert np.any(before != numbers(trainer.rng.state))


def test_random_stream_of_a_layer_goes_on_in_a_bad_window():
    dropout = keras.layers.Dropout(0.5, seed=1)
    model = keras.Sequential([keras.Input([3]), dropout, keras.layers.Dense(2)])
    trainer, applied = make_trainer(model)
    before = numbers(dropout.seed_generator.state)
    fit(trainer, poisoned([0])[:8], Y[:8])
    assert applied.column("applied") == [False]
    assert np.any(before != numbers(dropout.seed_generator.state))


def test_logs_of_a_bad_window_are_its_own():
    trainer, applied = make_trainer(make_model("float32"))
    fit(trainer, poisoned([0]), Y)
    assert applied.column("applied") == [False, True, True, True]
    assert np.isnan(applied.column("loss")[0])
    assert np.all(np.isfinite(applied.column("loss")[1:]))
    assert not np.isfinite(applied.column("gradient_norm")[0])


# How long it may last.


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


def test_too_many_bad_windows_in_a_row_stop_training():
    trainer, applied = make_trainer(make_model("float32"))
    fit(trainer)
    weights = [numbers(v) for v in trainer.model.variables]
    bad = np.full_like(X, np.nan)
    with pytest.raises(NonFiniteError) as caught:
        fit(trainer, bad, Y, epochs=1000)
    message = str(caught.value)
    assert "in 101 windows in a row after update 4" in message
    assert "max_consecutive_skips=100" in message
    for old, variable in zip(weights, trainer.model.variables, strict=True):
        np.testing.assert_array_equal(old, numbers(variable))


@pytest.mark.parametrize("limit", [1, 3])
def test_limit_of_bad_windows_can_be_chosen(limit):
    trainer, applied = make_trainer(
        make_model("float32"), max_consecutive_skips=limit
    )
    bad = np.full_like(X, np.nan)
    with pytest.raises(NonFiniteError, match=f"in {limit + 1} windows"):
        fit(trainer, bad, Y, epochs=3)
    assert applied.column("applied") == [False] * limit


def test_bad_windows_with_good_ones_between_do_not_stop_training():
    trainer, applied = make_trainer(
        make_model("float32"), max_consecutive_skips=1
    )
    fit(trainer, poisoned([0, 16]), Y, epochs=3)
    assert applied.column("applied") == [False, True, False, True] * 3


def test_bad_windows_are_noticed_by_train_on_batch():
    trainer, _ = make_trainer(make_model("float32"), max_consecutive_skips=1)
    bad = np.full_like(X[:8], np.nan)
    trainer.train_on_batch(bad, Y[:8])
    with pytest.raises(NonFiniteError, match="in 2 windows"):
        trainer.train_on_batch(bad, Y[:8])


# Growth.


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


def test_settings_of_a_compiled_loss_scale_optimizer_are_carried_over():
    model = make_model()
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=16.0, dynamic_growth_steps=2
    )
    model.compile(optimizer=optimizer, loss="mse")
    applied = Applied()
    trainer = Trainer(model, accumulation=K, callbacks=[applied])
    fit(trainer)
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
