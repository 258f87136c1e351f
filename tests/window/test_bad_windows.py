"""Claims about windows that are not finite: forgotten as a whole."""

import numpy as np
import pytest
from scaled import (
    X,
    Y,
    fit,
    make_model,
    make_trainer,
    numbers,
    poisoned,
)

from accumtrainer import LossScale, NonFiniteError, Trainer
from accumtrainer.keras_api import keras, ops


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
