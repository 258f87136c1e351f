"""Claims about what moves once per update: rates, averages, counters."""

import math

import numpy as np
import pytest
from keras_core_gaps import keras_3_only

from accumtrainer import Accumulation, Callback, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

X = np.linspace(-1, 1, 48, dtype="float32").reshape(24, 2)
Y = X.sum(axis=1, keepdims=True)

pytestmark = pytest.mark.usefixtures("without_xla")

# Keras reads variables through NumPy's old protocol in some callbacks.
ignore_old_protocol = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept:DeprecationWarning"
)


@keras.saving.register_keras_serializable("test_schedules")
class StepPlusOne(keras.optimizers.schedules.LearningRateSchedule):
    """The rates 1, 2, 3, ... times a factor."""

    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, step):
        return self.factor * (ops.cast(step, "float32") + 1.0)

    def get_config(self):
        return {"factor": self.factor}


class Applied(Callback):
    """Keeps the logs of every window."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_apply(self, update, logs=None):
        self.logs.append(dict(logs) | {"update": update})

    def column(self, name):
        return [logs[name] for logs in self.logs]


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])


def fit(optimizer, *, accumulation=4, callbacks=(), trainer=Trainer, **options):
    """Train a small model with k=4 and return everything there is to see."""
    applied = Applied()
    model = make_model()
    made = trainer(
        model,
        optimizer=optimizer,
        loss="mse",
        accumulation=accumulation,
        callbacks=[applied, *callbacks],
        seed=0,
    )
    options = {"batch_size": 2, "verbose": 0, "shuffle": False} | options
    history = made.fit(X, Y, **options)
    return made, applied, history


@pytest.mark.parametrize(
    "options",
    [{"jit_compile": False}, {"jit_compile": True}, {"run_eagerly": True}],
    ids=str,
)
def test_schedule_is_asked_once_per_update(options):
    applied = Applied()
    trainer = Trainer(
        make_model(),
        optimizer=keras.optimizers.SGD(StepPlusOne(1e-3)),
        loss="mse",
        accumulation=4,
        callbacks=[applied],
        **options,
    )
    trainer.fit(X, Y, batch_size=2, epochs=2, verbose=0)
    np.testing.assert_allclose(
        applied.column("learning_rate"),
        [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3],
        rtol=1e-6,
    )


def test_rates_in_the_logs_are_those_that_moved_the_weights():
    kernels = []

    class Moves(Callback):
        def on_apply(self, update, logs=None):
            kernels.append(weights_of(self.model))

    class OnesForGradients(Trainer):
        def on_apply(self, gradients, info):
            return [ops.ones_like(g) for g in gradients]

    trainer, applied, _ = fit(
        keras.optimizers.SGD(StepPlusOne()),
        callbacks=[Moves()],
        trainer=OnesForGradients,
    )
    moved = -np.diff([k[0][0, 0] for k in kernels])
    np.testing.assert_allclose(moved, [2.0, 3.0], rtol=1e-5)
    assert applied.column("learning_rate") == [1.0, 2.0, 3.0]
    assert trainer.progress.updates == 3


def weights_of(model):
    return [
        np.array(ops.convert_to_numpy(v)) for v in model.trainable_variables
    ]


def test_slices_of_a_loader_batch_do_not_move_the_schedule():
    _, applied, _ = fit(
        keras.optimizers.SGD(StepPlusOne(1e-3)),
        accumulation=Accumulation(micro_batch_size=2),
        batch_size=8,
    )
    np.testing.assert_allclose(
        applied.column("learning_rate"), [1e-3, 2e-3, 3e-3], rtol=1e-6
    )


@pytest.mark.parametrize(
    "schedule",
    [
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5),
        keras.optimizers.schedules.CosineDecay(
            0.0, 4, warmup_target=0.2, warmup_steps=2
        ),
        keras.optimizers.schedules.PiecewiseConstantDecay(
            [1, 3], [0.3, 0.2, 0.1]
        ),
        keras.optimizers.schedules.PolynomialDecay(0.1, 5),
        keras.optimizers.schedules.InverseTimeDecay(0.1, 2, 0.5),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_schedules_of_keras_are_given_the_updates_made(schedule):
    _, applied, _ = fit(keras.optimizers.SGD(schedule), epochs=2)
    expected = [float(schedule(update)) for update in range(6)]
    np.testing.assert_allclose(
        applied.column("learning_rate"), expected, rtol=1e-5, atol=1e-7
    )


def test_rate_that_is_a_number_stays():
    _, applied, _ = fit(keras.optimizers.SGD(0.25))
    assert applied.column("learning_rate") == [0.25, 0.25, 0.25]


@keras_3_only("gives such a function the number of updates")
def test_rate_that_is_a_function_is_asked():
    _, applied, _ = fit(keras.optimizers.SGD(lambda: 0.125))
    assert applied.column("learning_rate") == [0.125, 0.125, 0.125]


@keras_3_only("gives such a function the number of updates")
@pytest.mark.parametrize("run_eagerly", [True, False])
@pytest.mark.parametrize("weight_decay", [None, 0.1])
@pytest.mark.parametrize("is_within_fit", [False, True])
def test_function_that_counts_rates_is_asked_once_per_update(
    is_within_fit, weight_decay, run_eagerly
):
    if not run_eagerly and BACKEND != "torch":
        pytest.skip("compiled, the function is asked while it is traced")
    asked = []

    def next_rate():
        asked.append(1e-3 * (len(asked) + 1))
        return asked[-1]

    def compiled(rate):
        model = make_model()
        optimizer = keras.optimizers.SGD(rate, weight_decay=weight_decay)
        model.compile(optimizer, loss="mse", run_eagerly=run_eagerly)
        return model

    options = {"batch_size": 8, "verbose": 0, "shuffle": False}
    model = compiled(next_rate)
    if is_within_fit:
        model.fit(X, Y, callbacks=[GradientAccumulation(steps=1)], **options)
    else:
        applied = Applied()
        Trainer(model).fit(X, Y, callbacks=[applied], **options)
        np.testing.assert_allclose(applied.column("learning_rate"), asked)
    assert len(asked) == 3
    # Keras may ask a schedule as often as it likes, and is told the same.
    plain = compiled(StepPlusOne(1e-3))
    plain.fit(X, Y, **options)
    for one, other in zip(
        model.get_weights(), plain.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@keras_3_only("gives such a function the number of updates")
@pytest.mark.parametrize("run_eagerly", [True, False])
@pytest.mark.parametrize("is_within_fit", [False, True])
def test_function_is_asked_at_the_moment_of_each_update(
    is_within_fit, run_eagerly
):
    if not run_eagerly and BACKEND != "torch":
        pytest.skip("compiled, the function is asked while it is traced")
    rate = {}

    class Lowering(Callback):
        looks_at_model = False

        def on_train_batch_end(self, batch, logs=None):
            rate["now"] *= rate["factor"]

    def weights(batch_size, *callbacks, first, factor, by=lambda model: model):
        rate.update(now=first, factor=factor)
        model = make_model()
        optimizer = keras.optimizers.SGD(lambda: rate["now"])
        model.compile(optimizer, loss="mse", run_eagerly=run_eagerly)
        options = {"epochs": 2, "shuffle": False, "verbose": 0}
        callbacks = [*callbacks, Lowering()]
        by(model).fit(X, Y, batch_size, callbacks=callbacks, **options)
        return model.get_weights()

    if is_within_fit:
        # Lowered once before the first update, and twice before the next.
        found = weights(4, GradientAccumulation(2), first=0.5, factor=0.8)
        expected = weights(8, first=0.4, factor=0.64)
    else:
        found = weights(8, first=0.5, factor=0.8, by=Trainer)
        expected = weights(8, first=0.5, factor=0.8)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_rate_assigned_between_updates_is_used_at_once():
    class Halve(Callback):
        def on_train_batch_end(self, batch, logs=None):
            optimizer = self.model.optimizer
            rate = optimizer.learning_rate
            optimizer.learning_rate = ops.convert_to_numpy(rate) / 2

    _, applied, _ = fit(keras.optimizers.SGD(0.5), callbacks=[Halve()])
    assert applied.column("learning_rate") == [0.5, 0.25, 0.125]


@ignore_old_protocol
def test_learning_rate_scheduler_sets_the_rate_of_an_epoch():
    scheduler = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: 0.5 / (epoch + 1)
    )
    _, applied, history = fit(
        keras.optimizers.SGD(0.1), callbacks=[scheduler], epochs=2
    )
    assert applied.column("learning_rate") == [0.5] * 3 + [0.25] * 3
    assert history.history["learning_rate"] == [0.5, 0.25]


def test_iterations_count_updates():
    trainer, applied, _ = fit(keras.optimizers.Adam(), epochs=2)
    assert ops.convert_to_numpy(trainer.optimizer.iterations) == 6
    assert applied.column("updates") == [1, 2, 3, 4, 5, 6]
    assert applied.column("update") == [1, 2, 3, 4, 5, 6]


def test_moving_average_of_weights_moves_per_update():
    trainer, _, _ = fit(
        keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    )
    reference = plain_average(0.1, momentum=0.5)
    averages = [
        np.array(ops.convert_to_numpy(v))
        for v in trainer.optimizer._model_variables_moving_average
    ]
    for average, expected in zip(averages, reference, strict=True):
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7)


def plain_average(rate, *, momentum):
    """Average the weights after each of the three updates, in NumPy."""
    kernel, bias = weights_of(make_model())
    average = None
    for start in range(0, 24, 8):
        x, y = X[start : start + 8], Y[start : start + 8]
        error = x @ kernel + bias - y
        kernel = kernel - rate * 2 * x.T @ error / 8
        bias = bias - rate * 2 * error.mean(axis=0)
        average = [
            momentum * old + (1 - momentum) * new
            for old, new in zip(
                average or (kernel, bias), (kernel, bias), strict=True
            )
        ]
    return average


@pytest.mark.usefixtures("keras_may_promote")
def test_weights_are_overwritten_by_their_average_every_few_updates():
    overwriting = keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    )
    trainer, _, _ = fit(overwriting)
    for weights, expected in zip(
        weights_of(trainer.model),
        plain_average(0.1, momentum=0.5),
        strict=True,
    ):
        np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-7)


def test_weight_decay_acts_once_per_update():
    class NoGradients(Trainer):
        def on_apply(self, gradients, info):
            return [ops.zeros_like(g) for g in gradients]

    before = weights_of(make_model())
    trainer, _, _ = fit(
        keras.optimizers.SGD(0.5, weight_decay=0.2), trainer=NoGradients
    )
    for old, new in zip(before, weights_of(trainer.model), strict=True):
        np.testing.assert_allclose(new, old * 0.9**3, rtol=1e-5)


def test_logs_carry_the_numbers_of_the_update():
    seen = []

    class Seen(Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(dict(logs))

    _, applied, history = fit(keras.optimizers.SGD(0.1), callbacks=[Seen()])
    clocks = {
        "learning_rate",
        "loss_scale",
        "gradient_norm",
        "updates",
        "skipped_updates",
    }
    for logs in [*seen, *applied.logs]:
        assert clocks <= set(logs)
        assert logs["loss_scale"] == 1.0
        assert logs["skipped_updates"] == 0
        assert math.isfinite(logs["gradient_norm"])
    assert clocks <= set(history.history)
    assert history.history["updates"] == [3]


def test_gradient_norm_in_the_logs_is_taken_before_clipping():
    _, applied, _ = fit(keras.optimizers.SGD(0.0, global_clipnorm=1e-3))
    kernel, bias = weights_of(make_model())
    error = X[:8] @ kernel + bias - Y[:8]
    gradient = [2 * X[:8].T @ error / 8, 2 * error.mean(axis=0)]
    norm = math.sqrt(sum(float(np.sum(g**2)) for g in gradient))
    assert applied.column("gradient_norm")[0] == pytest.approx(norm, rel=1e-5)


def test_logs_of_an_update_are_of_its_window_alone():
    seen = []

    class Seen(Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["loss"])

    _, applied, history = fit(keras.optimizers.SGD(0.0), callbacks=[Seen()])
    losses = applied.column("loss")
    kernel, bias = weights_of(make_model())
    errors = (X @ kernel + bias - Y) ** 2
    np.testing.assert_allclose(
        losses, errors.reshape(3, 8).mean(axis=1), rtol=1e-5
    )
    running = np.cumsum(losses) / [1, 2, 3]
    np.testing.assert_allclose(seen, running, rtol=1e-5)
    np.testing.assert_allclose(history.history["loss"], running[-1], rtol=1e-5)


def test_second_fit_goes_on_with_the_schedule():
    applied = Applied()
    trainer = Trainer(
        make_model(),
        optimizer=keras.optimizers.SGD(StepPlusOne(1e-3)),
        loss="mse",
        accumulation=4,
        callbacks=[applied],
    )
    for _ in range(2):
        trainer.fit(X, Y, batch_size=2, verbose=0)
    np.testing.assert_allclose(
        applied.column("learning_rate"), np.arange(1, 7) * 1e-3, rtol=1e-6
    )
