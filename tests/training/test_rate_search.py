"""Claims about `find_learning_rate`: what it sees, and leaves no trace of."""

import signal

import numpy as np
import pytest
import replicated
from keras_core_gaps import keras_3_only
from quickest import JIT_COMPILE
from resumable import (
    NoisyTrainer,
    X,
    Y,
    assert_same,
    fit_arrays,
    list_batches,
    make_trainer,
)

from accumtrainer import Accumulation, Callback, LossScale, Trainer
from accumtrainer.keras_api import keras, ops

pytestmark = pytest.mark.any_backend

SCHEDULES = keras.optimizers.schedules

RATES = {
    "number": lambda: 0.01,
    "schedule": lambda: SCHEDULES.ExponentialDecay(0.01, 3, 0.5),
    "function": lambda: lambda *step: 0.01,
}

OPTIONS = {"run_eagerly": False, "jit_compile": JIT_COMPILE}


def find(trainer, x=X, y=Y, **options):
    options = {"lowest": 1e-4, "updates": 12, "divergence": 1e6} | options
    return trainer.find_learning_rate(x, y, 4, **options)


def noisy(rate="number", **options):
    optimizer = keras.optimizers.Adam(RATES[rate](), use_ema=True)
    return make_trainer(NoisyTrainer, optimizer=optimizer, **OPTIONS | options)


@pytest.mark.parametrize("begun", ["before any fit", "after one"])
@pytest.mark.parametrize("plan", ["fused", "streamed"])
@pytest.mark.parametrize("rate", RATES)
def test_a_fit_afterwards_is_as_if_there_had_been_no_search(
    rate, plan, begun, use_plan
):
    use_plan(plan)
    searched, plain = noisy(rate), noisy(rate)
    for trainer in (searched, plain) if begun == "after one" else ():
        fit_arrays(trainer, epochs=1)
    before = searched.progress
    assert find(searched).ended_by == "updates"
    assert searched.progress == before
    ours, theirs = (fit_arrays(t, epochs=2) for t in (searched, plain))
    assert ours.history == theirs.history
    assert_same(searched, plain)


def test_random_numbers_that_belong_to_nobody_are_drawn_as_if_unsearched():
    histories = []
    for is_searched in (True, False):
        stray = keras.random.SeedGenerator(7)

        class Stray(Trainer):
            def on_micro_batch(self, batch, info, stray=stray):
                noise = keras.random.normal(ops.shape(batch.x), seed=stray)
                return batch._replace(x=batch.x + noise)

        trainer = make_trainer(Stray, **OPTIONS)
        if is_searched:
            find(trainer)
        histories.append(fit_arrays(trainer).history)
    assert histories[0] == histories[1]


def test_numbers_schedules_and_functions_are_searched_alike():
    found = [find(noisy(rate)) for rate in RATES]
    assert found[0] == found[1] == found[2]
    np.testing.assert_allclose(
        found[0].learning_rates, np.geomspace(1e-4, 10.0, 12)
    )


@pytest.mark.parametrize("rate", RATES)
def test_each_update_is_made_at_its_rate(rate):
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    trainer = Trainer(
        keras.Sequential([keras.Input([1]), layer]),
        optimizer=keras.optimizers.SGD(RATES[rate]()),
        loss=lambda y, outputs: ops.mean(outputs, axis=-1),
        accumulation=2,
        denominator="samples",
        jit_compile=JIT_COMPILE,
    )
    found = find(trainer, np.ones([24, 1]), np.ones([24, 1]))
    # Every update takes its rate off the only weight, which is the loss.
    made = np.cumsum((0.0, *found.learning_rates[:-1]))
    np.testing.assert_allclose(found.losses, -made, rtol=1e-5)


def several(*rates):
    kinds = (keras.optimizers.SGD, keras.optimizers.Adam)
    head, base = (
        kind(rate, name=name)
        for kind, rate, name in zip(kinds, rates, ("head", "base"), strict=True)
    )
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(head, {"dense/.*": base})
    )


def test_several_optimizers_keep_the_ratio_of_their_rates():
    schedule = SCHEDULES.ExponentialDecay(0.01, 3, 0.5)
    searched, plain = (
        make_trainer(optimizer=several(0.1, schedule), **OPTIONS)
        for _ in range(2)
    )
    found = find(searched)
    assert found.shares == pytest.approx({"head": 1.0, "base": 0.1})
    fit_arrays(searched)
    fit_arrays(plain)
    assert_same(searched, plain)


def test_several_optimizers_of_which_one_begins_at_zero_are_refused():
    warming_up = SCHEDULES.PolynomialDecay(0.0, 5, 0.1)
    trainer = make_trainer(optimizer=several(0.1, warming_up), **OPTIONS)
    with pytest.raises(ValueError, match="above 0.*begin above 0"):
        find(trainer)


@keras_3_only("has no replicas")
@pytest.mark.parametrize("rate", ["number", "schedule"])
def test_replicas_search_as_one_device_does(rate):
    x = np.random.default_rng(0).normal(size=[24, 6]).astype("float32")
    searched, plain, one = (
        replicated.make_trainer(
            replicas,
            replicated.make_mlp,
            optimizer=lambda: keras.optimizers.Adam(RATES[rate]()),
            accumulation=Accumulation(micro_batch_size=2),
        )
        for replicas in (2, 2, 1)
    )
    found, expected = (find(t, x, x[:, :2]) for t in (searched, one))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)
    for trainer in (searched, plain):
        trainer.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0)
    assert_same(searched, plain)


class Failing:
    """Batches of which one does what it must not."""

    def __init__(self, fail):
        self.fail = fail

    def __iter__(self):
        for index, batch in enumerate(list_batches() * 2):
            if index == 7:
                self.fail()
            yield batch


def raise_error():
    raise OSError("no disk")


@pytest.mark.parametrize(
    "fail, error",
    [
        (raise_error, OSError),
        (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
    ],
    ids=["error", "Ctrl-C"],
)
@pytest.mark.parametrize("rate", ["number", "schedule"])
def test_everything_is_put_back_after_an_error(rate, fail, error):
    searched, plain = noisy(rate), noisy(rate)
    with pytest.raises(error):
        searched.find_learning_rate(Failing(fail))
    fit_arrays(searched)
    fit_arrays(plain)
    assert_same(searched, plain)


def test_callbacks_are_not_told():
    class Refusing(Callback):
        def set_model(self, model):
            raise AssertionError

        on_train_begin = set_model

    trainer = make_trainer(callbacks=[Refusing()], **OPTIONS)
    trainer.model.stop_training = True
    find(trainer)
    assert trainer.model.stop_training
    assert trainer.last_window is trainer.plan is None


def test_data_that_begin_anew_go_round():
    trainer = make_trainer(**OPTIONS)
    found = trainer.find_learning_rate(list_batches(), updates=8)
    assert (len(found.losses), found.ended_by) == (8, "updates")


def test_data_that_end_end_the_search():
    trainer = make_trainer(**OPTIONS)
    found = trainer.find_learning_rate(iter(list_batches()), updates=8)
    assert (len(found.losses), found.ended_by) == (3, "data")
    assert "3 updates" in str(found)


def test_a_loss_that_rises_far_ends_the_search():
    trainer = make_trainer(optimizer=keras.optimizers.SGD(0.1), **OPTIONS)
    found = find(trainer, updates=40, lowest=0.01, highest=1e4, divergence=4.0)
    assert found.ended_by == "divergence"
    assert found.suggestion is None or found.suggestion < 10
    assert len(found.losses) < 40


def test_an_update_that_is_not_finite_ends_the_search():
    trainer = make_trainer(optimizer=keras.optimizers.SGD(0.1), **OPTIONS)
    y = Y.copy()
    y[:] = np.nan
    found = find(trainer, y=y)
    assert (found.losses, found.ended_by) == ((), "not finite")
    assert found.suggestion is None
    assert "0 updates" in str(found)


def test_a_rate_is_tried_again_where_the_loss_scale_was_too_high():
    scale = LossScale(initial=2.0**127, growth_interval=100, maximum=2.0**127)
    trainer = make_trainer(loss_scale=scale, **OPTIONS)
    found = find(trainer)
    assert (len(found.losses), found.ended_by) == (12, "updates")
    values = trainer.snapshot().variables["state"].values()
    assert any(value == 2.0**127 for value in values if value.shape == ())
    assert trainer.progress.skipped_updates == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"updates": 1}, "updates must be .* at least 2"),
        ({"lowest": 0.0}, "lowest must be a number above 0"),
        ({"lowest": 2.0, "highest": 1.0}, "highest must be .* above lowest"),
        ({"smoothing": 1.0}, "smoothing must be"),
        ({"divergence": 1.0}, "divergence must be"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        find(make_trainer(), **options)


def test_optimizers_that_a_function_makes_are_searched():
    x, y = np.ones([24, 1]), np.ones([24, 1])
    rates = []
    for is_several in (False, True):
        optimizer = sgd = keras.optimizers.SGD(1e-6, name="sgd")
        if is_several:
            optimizer = keras.optimizers.MultiOptimizer(lambda v, sgd=sgd: sgd)
        model = keras.Sequential(
            [keras.Input([1]), keras.layers.Dense(1, "linear", False, "ones")]
        )
        trainer = Trainer(model, optimizer=optimizer, loss="mae", **OPTIONS)
        rates.append(find(trainer, x, y).losses)
    np.testing.assert_allclose(*rates, rtol=1e-5)
    assert trainer.find_learning_rate(x, y, updates=2).shares == {"sgd": 1.0}


def test_optimizers_that_nobody_has_chosen_yet_are_refused():
    chosen = keras.optimizers.MultiOptimizer(
        lambda variable: keras.optimizers.SGD(0.1)
    )
    model = keras.Sequential([keras.layers.Dense(1)])
    trainer = Trainer(model, optimizer=chosen, loss="mse", **OPTIONS)
    with pytest.raises(ValueError, match="built model.*Call the model"):
        find(trainer)
