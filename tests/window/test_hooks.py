"""Claims about the hooks of a Trainer: what they may do to an update."""

import numpy as np
import pytest
from hooked import (
    RATE,
    K,
    M,
    X,
    Y,
    fit,
    make_model,
    make_trainer,
    numbers,
)

from accumtrainer import Accumulation, Batch, Trainer, WeightedLoss
from accumtrainer.keras_api import keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")


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


def test_predict_step_of_an_eager_trainer_may_leave_the_backend():
    class Tripled(Trainer):
        def predict_step(self, batch):
            return 3 * numbers(self.model(batch.x))

    trainer, _ = make_trainer(Tripled, run_eagerly=True)
    expected = 3 * numbers(trainer.model(X))
    np.testing.assert_allclose(
        trainer.predict(X, verbose=0), expected, rtol=1e-5
    )


def test_predict_step_decides_what_predict_returns():
    class Probabilities(Trainer):
        def predict_step(self, batch):
            logits = self.model(batch.x, training=False)
            return {"logits": logits, "positive": logits > 0}

    trainer, _ = make_trainer(Probabilities)
    outputs = trainer.predict(X, batch_size=5, verbose=0)
    kernel, bias = [numbers(v) for v in trainer.model.variables]
    np.testing.assert_allclose(
        outputs["logits"], X @ kernel + bias, rtol=1e-5, atol=1e-6
    )
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
