"""Claims about the hooks of a Trainer, and the callbacks beside them."""

import numpy as np
import pytest

from accumtrainer import Accumulation, Batch, Callback, Trainer, WeightedLoss
from accumtrainer.keras_api import keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")

K, M, RATE = 4, 2, 0.1
X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.3).astype("float32")


class Applied(Callback):
    """Keeps the logs of every window."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_apply(self, update, logs=None):
        self.logs.append(dict(logs))

    def column(self, name):
        return [logs[name] for logs in self.logs]


def numbers(variable):
    """Copy a variable's values to the host."""
    return np.asarray(ops.convert_to_tensor(variable)).copy()


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])


def make_trainer(cls=Trainer, model=None, **options):
    """Make a Trainer of k micro-batches, with a list of its windows' logs."""
    applied = Applied()
    options = {
        "optimizer": keras.optimizers.SGD(RATE),
        "loss": "mse",
        "accumulation": K,
        "seed": 0,
    } | options
    callbacks = [applied, *options.pop("callbacks", [])]
    trainer = cls(model or make_model(), callbacks=callbacks, **options)
    return trainer, applied


def fit(trainer, x=X, y=Y, **options):
    """Train in given order, two updates of 4 micro-batches of 2."""
    options = {"batch_size": M, "shuffle": False, "verbose": 0} | options
    return trainer.fit(x, y, **options)


class PlainLoop:
    """The loop a window stands for, on a linear model, in NumPy.

    Args:
        on_micro_batch: function `(x, y) -> (x, y)`.
        on_accumulate: function of one micro-batch's gradients.
        on_apply: function of a window's gradients.
        after_apply: function of the weights.
    """

    def __init__(
        self,
        *,
        on_micro_batch=lambda x, y: (x, y),
        on_accumulate=lambda gradients: gradients,
        on_apply=lambda gradients: gradients,
        after_apply=lambda weights: None,
    ):
        self.weights = [numbers(v) for v in make_model().trainable_variables]
        self._on_micro_batch = on_micro_batch
        self._on_accumulate = on_accumulate
        self._on_apply = on_apply
        self._after_apply = after_apply

    def gradients(self, x, y):
        kernel, bias = self.weights
        error = x @ kernel + bias - y
        return [2 * x.T @ error / len(x), 2 * error.mean(axis=0)]

    def run(self, x=X, y=Y):
        for start in range(0, len(x), K * M):
            sums, total = [0.0, 0.0], 0.0
            for first in range(start, start + K * M, M):
                rows = slice(first, first + M)
                batch = self._on_micro_batch(x[rows], y[rows])
                gradients = self._on_accumulate(self.gradients(*batch))
                sums = [s + M * g for s, g in zip(sums, gradients, strict=True)]
                total += M
            gradients = self._on_apply([s / total for s in sums])
            self.weights = [
                w - RATE * g
                for w, g in zip(self.weights, gradients, strict=True)
            ]
            self._after_apply(self.weights)
        return self.weights


def assert_weights(model, expected):
    for variable, weight in zip(
        model.trainable_variables, expected, strict=True
    ):
        np.testing.assert_allclose(
            numbers(variable), weight, rtol=1e-5, atol=1e-6
        )


def clip(gradients, norm=0.5):
    """Clip gradients by their global norm, in NumPy."""
    size = np.sqrt(sum(np.sum(g**2) for g in gradients))
    return [g * min(1.0, norm / size) for g in gradients]


# What hooks may change.


class DoubleInputs(Trainer):
    def on_micro_batch(self, batch, info):
        return batch._replace(x=2.0 * batch.x)


class ClipEachMicroBatch(Trainer):
    def on_accumulate(self, gradients, info):
        size = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        return [g * ops.minimum(1.0, 0.5 / size) for g in gradients]


class FollowTheSign(Trainer):
    def on_apply(self, gradients, info):
        return [ops.sign(g) for g in gradients]


class OwnLoss(Trainer):
    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        errors = ops.mean(ops.square(batch.y - outputs), axis=-1)
        return WeightedLoss(
            ops.mean(errors), denominator=ops.shape(errors)[0], outputs=outputs
        )


class AllAtOnce(Trainer):
    """Changes something in every hook."""

    def on_micro_batch(self, batch, info):
        return batch._replace(x=2.0 * batch.x)

    def on_accumulate(self, gradients, info):
        size = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        return [g * ops.minimum(1.0, 0.5 / size) for g in gradients]

    def on_apply(self, gradients, info):
        return [3.0 * g for g in gradients]


CHANGES = [
    pytest.param(Trainer, {}, id="nothing"),
    pytest.param(
        DoubleInputs, {"on_micro_batch": lambda x, y: (2 * x, y)}, id="batch"
    ),
    pytest.param(
        ClipEachMicroBatch, {"on_accumulate": clip}, id="each-micro-batch"
    ),
    pytest.param(
        FollowTheSign,
        {"on_apply": lambda gradients: [np.sign(g) for g in gradients]},
        id="window",
    ),
    pytest.param(OwnLoss, {}, id="loss"),
    pytest.param(
        AllAtOnce,
        {
            "on_micro_batch": lambda x, y: (2 * x, y),
            "on_accumulate": clip,
            "on_apply": lambda gradients: [3 * g for g in gradients],
        },
        id="all",
    ),
]


@pytest.mark.parametrize(
    "options",
    [{"jit_compile": True}, {"run_eagerly": True}],
    ids=["xla", "eager"],
)
@pytest.mark.parametrize(("cls", "changes"), CHANGES)
def test_step_equals_the_plain_loop_it_stands_for(cls, changes, options):
    trainer, _ = make_trainer(cls, **options)
    fit(trainer)
    assert_weights(trainer.model, PlainLoop(**changes).run())


@pytest.mark.parametrize(("cls", "changes"), CHANGES)
def test_train_on_batch_equals_the_plain_loop(cls, changes):
    trainer, _ = make_trainer(cls)
    for start in (0, 8):
        trainer.train_on_batch(X[start : start + 8], Y[start : start + 8])
    assert_weights(trainer.model, PlainLoop(**changes).run())


def test_after_apply_keeps_a_moving_average_of_the_weights():
    class Teacher(Trainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            teacher = keras.models.clone_model(self.model)
            teacher.set_weights([numbers(v) for v in self.model.variables])
            self.teacher = self.track(teacher)

        def after_apply(self, info):
            for old, new in zip(
                self.teacher.variables, self.model.variables, strict=True
            ):
                old.assign(0.75 * old + 0.25 * new)

    trainer, _ = make_trainer(Teacher)
    fit(trainer)

    averages = [numbers(v) for v in make_model().trainable_variables]

    def average(weights):
        for position, new in enumerate(weights):
            averages[position] = 0.75 * averages[position] + 0.25 * new

    PlainLoop(after_apply=average).run()
    for variable, expected in zip(
        trainer.teacher.variables, averages, strict=True
    ):
        np.testing.assert_allclose(numbers(variable), expected, rtol=1e-5)


def test_predict_step_decides_what_predict_returns():
    class Probabilities(Trainer):
        def predict_step(self, batch):
            logits = self.model(batch.x, training=False)
            return {"logits": logits, "positive": logits > 0}

    trainer, _ = make_trainer(Probabilities)
    outputs = trainer.predict(X, batch_size=5, verbose=0)
    kernel, bias = [numbers(v) for v in trainer.model.variables]
    np.testing.assert_allclose(outputs["logits"], X @ kernel + bias, rtol=1e-5)
    np.testing.assert_array_equal(outputs["positive"], outputs["logits"] > 0)


def test_own_loss_is_the_loss_of_validation_too():
    class Trick(Trainer):
        def compute_loss(self, batch, info):
            outputs = self.model(batch.x, training=info.training)
            value = 1.0 if info.training else 2.0
            loss = ops.mean(0.0 * outputs) + value
            return WeightedLoss(loss, denominator=ops.shape(batch.x)[0])

    trainer, _ = make_trainer(Trick)
    history = fit(trainer, validation_data=(X, Y)).history
    assert history["loss"] == [1.0]
    assert history["val_loss"] == [2.0]
    assert trainer.evaluate(X, Y, verbose=0) == 2.0


def test_several_own_losses_are_added_up_each_by_its_denominator():
    class Two(Trainer):
        def compute_loss(self, batch, info):
            outputs = self.model(batch.x, training=info.training)
            errors = ops.square(batch.y - outputs)[:, 0]
            large = ops.cast(errors > 1.0, "float32")
            count = ops.sum(large)
            return {
                "all": WeightedLoss(ops.mean(errors), ops.shape(errors)[0]),
                "large": WeightedLoss(
                    ops.divide_no_nan(ops.sum(errors * large), count), count
                ),
            }

    trainer, applied = make_trainer(Two, optimizer=keras.optimizers.SGD(0.0))
    history = fit(trainer).history
    kernel, bias = [numbers(v) for v in trainer.model.variables]
    errors = ((X @ kernel + bias - Y) ** 2)[:, 0]
    large = errors[errors > 1.0].mean()
    assert history["all"][0] == pytest.approx(errors.mean(), rel=1e-5)
    assert history["large"][0] == pytest.approx(large, rel=1e-5)
    assert history["loss"][0] == pytest.approx(errors.mean() + large, rel=1e-5)


def test_on_micro_batch_is_for_training_only():
    trainer, _ = make_trainer(DoubleInputs)
    kernel, bias = [numbers(v) for v in trainer.model.variables]
    loss = trainer.evaluate(X, Y, verbose=0)
    assert loss == pytest.approx(
        np.mean((X @ kernel + bias - Y) ** 2), rel=1e-5
    )
    outputs = trainer.predict(X, verbose=0)
    np.testing.assert_allclose(outputs, X @ kernel + bias, rtol=1e-5)


def test_denominators_are_measured_after_on_micro_batch():
    class DropHalf(Trainer):
        def on_micro_batch(self, batch, info):
            weight = ops.cast(batch.x[:, 0] > 0, "float32")
            return Batch(batch.x, batch.y, weight)

    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    trainer, _ = make_trainer(
        DropHalf, loss=loss, accumulation=Accumulation(micro_batch_size=M)
    )
    weight = np.ones([16], "float32")
    before = [numbers(v) for v in trainer.model.variables]
    fit(trainer, sample_weight=weight, batch_size=16)
    kernel, bias = before
    kept = X[:, 0] > 0
    error = (X @ kernel + bias - Y)[kept]
    expected = [
        kernel - RATE * 2 * X[kept].T @ error / kept.sum(),
        bias - RATE * 2 * error.mean(axis=0),
    ]
    assert_weights(trainer.model, expected)


# What hooks are told.


class Tell(Trainer):
    """Logs every field of `info` that a hook is given."""

    def on_micro_batch(self, batch, info):
        assert info.training is True
        self.log("batch_index", info.index, reduce="sum")
        self.log("batch_is_last", info.is_last, reduce="sum")
        self.log("batch_micro_batches", info.micro_batches)
        self.log("batch_update", info.update)
        self.log("batch_epoch", info.epoch)
        return batch

    def on_accumulate(self, gradients, info):
        assert info.training is True
        self.log("last_index", info.index, reduce="max")
        self.log("first_index", info.index, reduce="min")
        self.log("accumulate_is_last", info.is_last, reduce="sum")
        self.log("micro_loss", info.loss, reduce="mean")
        self.log("largest_loss", info.loss, reduce="max")
        self.log("weights", info.weight, reduce="sum")
        self.log("scale", info.loss_scale)
        return gradients

    def on_apply(self, gradients, info):
        assert info.index is None
        assert info.is_last is None
        self.log("window_loss", info.loss)
        self.log("total_weight", info.total_weight)
        self.log("window_micro_batches", info.micro_batches)
        self.log("apply_update", info.update)
        self.log("apply_epoch", info.epoch)
        return gradients

    def after_apply(self, info):
        self.log("after_loss", info.loss)
        self.log("after_total_weight", info.total_weight)
        self.log("after_update", info.update)


@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": True}], ids=["compiled", "eager"]
)
def test_info_says_where_in_training_a_hook_is(options):
    trainer, applied = make_trainer(
        Tell, optimizer=keras.optimizers.SGD(0.0), **options
    )
    fit(trainer, epochs=2)
    kernel, bias = [numbers(v) for v in trainer.model.variables]
    errors = ((X @ kernel + bias - Y) ** 2)[:, 0]
    micro_losses = errors.reshape(2, K, M).mean(axis=2)
    for name, expected in {
        "batch_index": [0 + 1 + 2 + 3] * 4,
        "batch_is_last": [1] * 4,
        "accumulate_is_last": [1] * 4,
        "batch_micro_batches": [K] * 4,
        "window_micro_batches": [K] * 4,
        "batch_update": [0, 1, 2, 3],
        "apply_update": [0, 1, 2, 3],
        "after_update": [1, 2, 3, 4],
        "batch_epoch": [0, 0, 1, 1],
        "apply_epoch": [0, 0, 1, 1],
        "first_index": [0] * 4,
        "last_index": [K - 1] * 4,
        "weights": [K * M] * 4,
        "total_weight": [K * M] * 4,
        "after_total_weight": [K * M] * 4,
        "scale": [1.0] * 4,
        "micro_loss": np.tile(micro_losses.mean(axis=1), 2),
        "largest_loss": np.tile(micro_losses.max(axis=1), 2),
        "window_loss": np.tile(micro_losses.mean(axis=1), 2),
        "after_loss": np.tile(micro_losses.mean(axis=1), 2),
        "loss": np.tile(micro_losses.mean(axis=1), 2),
    }.items():
        np.testing.assert_allclose(
            applied.column(name), expected, rtol=1e-5, err_msg=name
        )


def test_info_of_a_tail_counts_its_own_micro_batches():
    trainer, applied = make_trainer(Tell)
    fit(trainer, X[:11], Y[:11])
    assert applied.column("batch_micro_batches") == [4, 2]
    assert applied.column("last_index") == [3, 1]
    assert applied.column("batch_is_last") == [1, 1]
    assert applied.column("weights") == [8, 3]


def test_hooks_get_zeros_for_variables_that_are_not_used():
    class Look(Trainer):
        def on_accumulate(self, gradients, info):
            for position, gradient in enumerate(gradients):
                size = ops.sum(ops.abs(gradient))
                self.log(f"size_{position}", size)
            return gradients

    class Half(keras.Model):
        def __init__(self):
            super().__init__()
            self.used = keras.layers.Dense(1, use_bias=False)
            self.unused = keras.layers.Dense(1, use_bias=False)
            self.unused.build([None, 3])

        def call(self, x):
            return self.used(x)

    trainer, applied = make_trainer(Look, Half())
    fit(trainer)
    names = [v.path for v in trainer.model.trainable_variables]
    assert len(names) == 2
    sizes = {
        name: applied.column(f"size_{position}")
        for position, name in enumerate(names)
    }
    for name, size in sizes.items():
        is_unused = name == trainer.model.unused.kernel.path
        assert (size == [0.0, 0.0]) == is_unused


# Random numbers.


class Noise(Trainer):
    """Logs what it drew, and adds it to the inputs."""

    def on_micro_batch(self, batch, info):
        noise = keras.random.uniform(ops.shape(batch.x), seed=self.rng)
        self.log("lowest", ops.mean(noise), reduce="min")
        self.log("highest", ops.mean(noise), reduce="max")
        self.log("noise", ops.mean(noise))
        return batch._replace(x=batch.x + noise)


def test_random_numbers_are_the_same_for_the_same_seed():
    drawn = []
    for _ in range(2):
        trainer, applied = make_trainer(Noise, seed=7)
        fit(trainer)
        drawn.append(applied.column("noise"))
    assert drawn[0] == drawn[1]


def test_random_numbers_differ_between_seeds():
    drawn = []
    for seed in (7, 8):
        trainer, applied = make_trainer(Noise, seed=seed)
        fit(trainer)
        drawn.append(applied.column("noise"))
    assert not set(drawn[0]) & set(drawn[1])


def test_random_numbers_differ_between_micro_batches_and_windows():
    trainer, applied = make_trainer(Noise)
    fit(trainer, epochs=2)
    assert np.all(
        np.array(applied.column("lowest")) < np.array(applied.column("highest"))
    )
    assert len(set(applied.column("noise"))) == 4


def test_random_numbers_are_those_of_an_eager_run():
    drawn = []
    # XLA draws other numbers than TensorFlow does by itself.
    for options in ({"jit_compile": False}, {"run_eagerly": True}):
        trainer, applied = make_trainer(Noise, **options)
        fit(trainer)
        drawn.append(applied.column("noise"))
    np.testing.assert_allclose(drawn[0], drawn[1], rtol=1e-6)


# Tracked state.


class Tracks(Trainer):
    """Keeps a variable, a layer and a metric of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = self.track(keras.Variable(0.0, name="calls"))
        self.layer = keras.layers.Dense(1, kernel_initializer="ones")
        self.layer.build([None, 3])
        self.track(self.layer)
        self.mean = self.track(keras.metrics.Mean(name="mean"))

    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        errors = ops.square(batch.y - outputs)
        target = self.layer(batch.x)
        pull = ops.mean(ops.square(outputs - target))
        if info.training:
            self.calls.assign(self.calls + 1.0)
            self.mean.update_state(batch.x)
        return WeightedLoss(
            ops.mean(errors) + pull, denominator=ops.shape(batch.x)[0]
        )


@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": True}], ids=["compiled", "eager"]
)
def test_tracked_state_changes_with_every_micro_batch(options):
    trainer, _ = make_trainer(Tracks, **options)
    fit(trainer)
    assert float(numbers(trainer.calls)) == 2 * K
    result = float(np.asarray(trainer.mean.result()))
    assert result == pytest.approx(X.mean(), rel=1e-5)


def test_tracked_layers_are_not_trained():
    trainer, _ = make_trainer(Tracks)
    fit(trainer)
    np.testing.assert_array_equal(numbers(trainer.layer.kernel), 1.0)
    np.testing.assert_array_equal(numbers(trainer.layer.bias), 0.0)


def test_skipped_window_undoes_what_hooks_did_to_tracked_state():
    trainer, applied = make_trainer(Tracks)
    x = X.copy()
    x[9] = np.nan
    fit(trainer, x)
    assert applied.column("applied") == [True, False]
    assert float(numbers(trainer.calls)) == K
    result = float(np.asarray(trainer.mean.result()))
    assert result == pytest.approx(X[:8].mean(), rel=1e-5)


def test_validation_leaves_tracked_state_alone():
    trainer, _ = make_trainer(Tracks)
    fit(trainer, validation_data=(X, Y))
    assert float(numbers(trainer.calls)) == 2 * K


def test_after_apply_does_not_run_for_a_skipped_window():
    class Count(Trainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.count = self.track(keras.Variable(0.0, name="count"))

        def after_apply(self, info):
            self.count.assign(self.count + 1.0)
            self.log("counted", self.count, reduce="max")

    trainer, applied = make_trainer(Count)
    x = X.copy()
    x[1] = np.nan
    fit(trainer, x)
    assert applied.column("applied") == [False, True]
    assert float(numbers(trainer.count)) == 1.0


def test_tracking_after_training_has_begun_is_refused():
    trainer, _ = make_trainer()
    fit(trainer)
    with pytest.raises(RuntimeError, match="track must be called before"):
        trainer.track(keras.Variable(0.0))


# Logged values.


class LogsEverywhere(Trainer):
    """Logs from every hook, in every way."""

    def on_micro_batch(self, batch, info):
        self.log("batch_mean", ops.mean(batch.x))
        self.log("batch_max", ops.max(batch.x), reduce="max")
        return batch

    def compute_loss(self, batch, info):
        self.log("rows", ops.shape(batch.x)[0], reduce="sum")
        self.log("smallest", ops.min(batch.x), reduce="min")
        self.log(
            "weighted", ops.mean(batch.x), weight=ops.max(ops.abs(batch.x))
        )
        return super().compute_loss(batch, info)

    def on_accumulate(self, gradients, info):
        self.log("accumulated", info.index, reduce="sum")
        return gradients

    def on_apply(self, gradients, info):
        self.log("applied_at", info.update, reduce="max")
        return gradients

    def after_apply(self, info):
        self.log("made", 1.0, reduce="sum")


def windows_of(array):
    """Cut an array as training does: windows, micro-batches, rows."""
    return array.reshape(2, K, M, -1)


@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": True}], ids=["compiled", "eager"]
)
def test_logged_values_are_reduced_over_the_window(options):
    trainer, applied = make_trainer(LogsEverywhere, **options)
    fit(trainer)
    x = windows_of(X)
    means = x.mean(axis=(2, 3))
    weights = np.abs(x).max(axis=(2, 3))
    for name, expected in {
        "batch_mean": means.mean(axis=1),
        "batch_max": x.max(axis=(1, 2, 3)),
        "rows": [8, 8],
        "smallest": x.min(axis=(1, 2, 3)),
        "weighted": (means * weights).sum(axis=1) / weights.sum(axis=1),
        "accumulated": [6, 6],
        "applied_at": [0, 1],
        "made": [1, 1],
    }.items():
        np.testing.assert_allclose(
            applied.column(name), expected, rtol=1e-5, err_msg=name
        )


def test_logged_values_are_reduced_over_the_epoch_in_the_history():
    trainer, _ = make_trainer(LogsEverywhere)
    history = fit(trainer).history
    x = windows_of(X)
    means = x.mean(axis=(2, 3))
    weights = np.abs(x).max(axis=(2, 3))
    for name, expected in {
        "batch_mean": X.mean(),
        "batch_max": X.max(),
        "rows": 16,
        "smallest": X.min(),
        "accumulated": 12,
        "applied_at": 1,
        "made": 2,
    }.items():
        assert history[name] == pytest.approx([expected], rel=1e-5), name
    # The mean of the windows' means, each as heavy as its weights together.
    expected = (means * weights).sum() / weights.sum()
    assert history["weighted"] == pytest.approx([expected], rel=1e-5)


def test_values_logged_in_validation_are_prefixed():
    trainer, _ = make_trainer(LogsEverywhere)
    history = fit(trainer, validation_data=(X[:5], Y[:5])).history
    assert history["val_rows"] == [5]
    assert history["val_smallest"] == pytest.approx([X[:5].min()])
    assert "val_batch_mean" not in history
    assert "val_made" not in history


def test_values_logged_in_an_evaluation_are_returned():
    trainer, _ = make_trainer(LogsEverywhere)
    results = trainer.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True)
    assert results["rows"] == 16
    assert results["smallest"] == pytest.approx(X.min())


def test_values_logged_in_a_skipped_window_do_not_reach_the_epoch():
    trainer, applied = make_trainer(LogsEverywhere)
    y = Y.copy()
    y[0] = np.nan
    history = fit(trainer, X, y).history
    assert applied.column("applied") == [False, True]
    assert applied.column("rows") == [8, 8]
    assert history["rows"] == [8]
    assert history["batch_max"] == pytest.approx([X[8:].max()])


def test_logging_outside_a_hook_is_refused():
    trainer, _ = make_trainer()
    with pytest.raises(RuntimeError, match="must be called from a hook"):
        trainer.log("early", 1.0)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            lambda self, batch: self.log("name", ops.mean(batch.x, axis=0)),
            "must be a scalar",
        ),
        (
            lambda self, batch: self.log("name", 1.0, reduce="median"),
            "reduce must be one of",
        ),
        (
            lambda self, batch: [self.log("name", 1.0) for _ in range(2)],
            "once per hook",
        ),
    ],
    ids=["not-a-scalar", "unknown-reduce", "twice"],
)
def test_wrong_use_of_log_is_refused_before_training(log, message):
    class Wrong(Trainer):
        def on_micro_batch(self, batch, info):
            log(self, batch)
            return batch

    trainer, _ = make_trainer(Wrong)
    before = [numbers(v) for v in trainer.model.variables]
    with pytest.raises(ValueError, match=message):
        fit(trainer)
    for old, variable in zip(before, trainer.model.variables, strict=True):
        np.testing.assert_array_equal(old, numbers(variable))


# Hooks and callbacks together.


def test_hooks_are_traced_and_callbacks_called_in_the_order_written():
    told = []

    class Traced(Trainer):
        def on_micro_batch(self, batch, info):
            told.append("Trainer.on_micro_batch")
            return batch

        def compute_loss(self, batch, info):
            told.append(f"Trainer.compute_loss training={info.training}")
            return super().compute_loss(batch, info)

        def on_accumulate(self, gradients, info):
            told.append("Trainer.on_accumulate")
            return gradients

        def on_apply(self, gradients, info):
            told.append("Trainer.on_apply")
            return gradients

        def after_apply(self, info):
            told.append("Trainer.after_apply")

    trainer, _ = make_trainer(Traced, run_eagerly=True, callbacks=[Told(told)])
    fit(trainer, X[:10], Y[:10], validation_data=(X[:2], Y[:2]))
    survey = [
        "Trainer.on_micro_batch",
        "Trainer.compute_loss training=True",
        "Trainer.on_accumulate",
        "Trainer.on_apply",
        "Trainer.after_apply",
    ]
    micro_batch = [
        "Trainer.on_micro_batch",
        "Trainer.compute_loss training=True",
        "Trainer.on_accumulate",
    ]
    assert told == [
        *survey,  # once, without effect, before anything is trained
        "on_train_begin",
        "on_epoch_begin 0",
        "on_train_batch_begin 0",
        *micro_batch * 4,
        "Trainer.on_apply",
        "Trainer.after_apply",
        "on_micro_batch 0",
        "on_accumulate 0",
        "on_micro_batch 1",
        "on_accumulate 1",
        "on_micro_batch 2",
        "on_accumulate 2",
        "on_micro_batch 3",
        "on_accumulate 3",
        "on_apply 1",
        "on_train_batch_end 0",
        "on_train_batch_begin 1",
        *micro_batch,
        "Trainer.on_apply",
        "Trainer.after_apply",
        "on_micro_batch 0",
        "on_accumulate 0",
        "on_apply 2",
        "on_train_batch_end 1",
        "on_test_begin",
        "on_test_batch_begin 0",
        "Trainer.compute_loss training=False",  # the survey of evaluation
        "Trainer.compute_loss training=False",
        "on_test_batch_end 0",
        "on_test_end",
        "on_validation_end 2",
        "on_epoch_end 0",
        "on_train_end",
    ]


class Told(Callback):
    """Notes every hook of training that is called on the host."""

    def __init__(self, told):
        super().__init__()
        self._told = told


def _note(name):
    def hook(self, *args, logs=None):
        position = [arg for arg in args if isinstance(arg, int)]
        self._told.append(" ".join([name, *map(str, position)]))

    return hook


for _name in (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_micro_batch",
    "on_accumulate",
    "on_apply",
    "on_test_begin",
    "on_test_end",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_validation_end",
):
    setattr(Told, _name, _note(_name))


def test_compiled_hooks_are_traced_once_for_equal_windows():
    traced = []

    class Traced(Trainer):
        def on_micro_batch(self, batch, info):
            traced.append(batch)
            return batch

    trainer, _ = make_trainer(Traced)
    fit(trainer)
    made = len(traced)
    assert made
    fit(trainer, epochs=3)
    assert len(traced) == made


def test_progress_in_callbacks_is_what_streaming_would_show():
    seen = []

    class Look(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self._note("begin")

        def on_micro_batch(self, index, logs=None):
            self._note(f"micro_batch {index}")

        def on_accumulate(self, index, logs=None):
            self._note(f"accumulate {index}")

        def on_apply(self, update, logs=None):
            assert update == self.trainer.progress.updates
            self._note("apply")

        def on_train_batch_end(self, batch, logs=None):
            self._note("end")

        def _note(self, place):
            progress = self.trainer.progress
            seen.append(
                (
                    place,
                    progress.updates,
                    progress.micro_batches,
                    progress.samples,
                )
            )

    trainer, _ = make_trainer(callbacks=[Look()], accumulation=2)
    fit(trainer, X[:8], Y[:8])
    assert seen == [
        ("begin", 0, 0, 0),
        ("micro_batch 0", 0, 1, 2),
        ("accumulate 0", 0, 1, 2),
        ("micro_batch 1", 0, 2, 4),
        ("accumulate 1", 0, 2, 4),
        ("apply", 1, 2, 4),
        ("end", 1, 2, 4),
        ("begin", 1, 2, 4),
        ("micro_batch 0", 1, 3, 6),
        ("accumulate 0", 1, 3, 6),
        ("micro_batch 1", 1, 4, 8),
        ("accumulate 1", 1, 4, 8),
        ("apply", 2, 4, 8),
        ("end", 2, 4, 8),
    ]


def test_callbacks_see_loss_and_weight_of_each_micro_batch():
    seen = []

    class Look(Callback):
        def on_micro_batch(self, index, logs=None):
            seen.append((index, logs["loss"], logs["weight"]))

    trainer, _ = make_trainer(
        callbacks=[Look()], optimizer=keras.optimizers.SGD(0.0)
    )
    fit(trainer, X[:11], Y[:11])
    kernel, bias = [numbers(v) for v in trainer.model.variables]
    errors = ((X @ kernel + bias - Y) ** 2)[:11, 0]
    parts = [errors[first : first + M] for first in range(0, 11, M)]
    assert [index for index, _, _ in seen] == [0, 1, 2, 3, 0, 1]
    assert [weight for _, _, weight in seen] == [len(part) for part in parts]
    np.testing.assert_allclose(
        [loss for _, loss, _ in seen],
        [part.mean() for part in parts],
        rtol=1e-5,
    )


def test_variable_that_a_hook_only_reads_is_current():
    factor = keras.Variable(1.0, trainable=False)

    class Reading(Trainer):
        def compute_loss(self, batch, info):
            outputs = self.model(batch.x, training=info.training)
            self.log("factor", factor.value)
            return WeightedLoss(ops.mean(outputs**2), ops.shape(batch.x)[0])

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    trainer = Reading(model, optimizer="sgd")
    x = np.ones([4, 2], "float32")
    seen = []
    for value in (1.0, 2.0, 3.0):
        factor.assign(value)
        trainer.train_on_batch(x, x[:, :1])
        seen.append(trainer.window_logs["factor"])
        seen.append(
            trainer.evaluate(x, x, verbose=0, return_dict=True)["factor"]
        )
    assert seen == [1, 1, 2, 2, 3, 3]


def test_variable_that_a_hook_writes_must_be_tracked():
    count = keras.Variable(0.0, trainable=False, name="count")

    class Writing(Trainer):
        def after_apply(self, info):
            count.assign(count.value + 1)

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    trainer = Writing(model, optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match=r"write to 'count'.*self.track"):
        trainer.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
    trainer = Writing(model, optimizer="sgd", loss="mse")
    trainer.track(count)
    trainer.fit(np.ones([4, 2]), np.ones([4, 1]), batch_size=2, verbose=0)
    assert float(count.value) == 2
