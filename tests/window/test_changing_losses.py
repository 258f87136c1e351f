"""Claims about losses that depend on what the data are made of."""

import numpy as np
import pytest
from logged import QUICKEST, TWO, X, Y, make_model
from oracle import cuts_in_many_ways
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, Trainer, WeightedLoss
from accumtrainer.keras_api import keras, ops
from accumtrainer.steps import CLOCKS

layers = keras.layers
OURS = (*CLOCKS, "learning_rate")


def errors_of(trainer, batch):
    """Return squared errors, predictions, and the number of samples."""
    outputs = trainer.model(batch.x)
    errors = ops.mean(ops.square(outputs - batch.y), axis=-1)
    return errors, outputs, ops.cast(ops.shape(outputs)[0], "float32")


class MeanOrSum(Trainer):
    """Its loss is a mean, and with sample weights a sum."""

    def compute_loss(self, batch, info):
        errors, outputs, samples = errors_of(self, batch)
        if batch.sample_weight is None:
            return WeightedLoss(ops.mean(errors), samples, outputs)
        weighted = ops.sum(errors * batch.sample_weight)
        return WeightedLoss(weighted, None, outputs)


class OneOrTwo(Trainer):
    """It has a second loss, and logs its value, with sample weights."""

    def compute_loss(self, batch, info):
        errors, outputs, samples = errors_of(self, batch)
        parts = {"plain": WeightedLoss(ops.mean(errors), samples, outputs)}
        if batch.sample_weight is not None:
            weighted = ops.mean(errors * batch.sample_weight)
            parts["weighted"] = WeightedLoss(weighted, samples)
            self.log("second", weighted, weight=samples)
        return parts


WEIGHTS = np.linspace(0, 2, 8, dtype="float32")


@cuts_in_many_ways
@pytest.mark.parametrize("cls", [MeanOrSum, OneOrTwo])
@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0, 1)])
@pytest.mark.parametrize("micro_batch_size", [4, 3])
def test_losses_may_change_with_the_parts_of_the_data(
    cls, order, micro_batch_size
):
    model = make_model()
    trainer = cls(
        model,
        optimizer=keras.optimizers.SGD(0.01),
        accumulation=Accumulation(micro_batch_size=micro_batch_size),
        jit_compile=JIT_COMPILE,
    )
    for weights in (WEIGHTS if weighs else None for weighs in order):
        kernel, bias = model.get_weights()
        difference = X @ kernel + bias - Y
        errors = np.square(difference)[:, 0]
        factors = np.full([8], 1 / 8)
        logged = {"loss": None}
        if weights is not None:
            factors = weights if cls is MeanOrSum else (1 + weights) / 8
            if cls is OneOrTwo:
                second = (errors * weights).mean()
                logged |= {"plain": errors.mean(), "weighted": second}
                logged["second"] = second
        logged["loss"] = (errors * factors).sum()

        before = trainer.evaluate(
            X, Y, sample_weight=weights, verbose=0, return_dict=True
        )
        history = trainer.fit(
            X, Y, sample_weight=weights, batch_size=8, verbose=0, shuffle=False
        ).history
        assert before == pytest.approx(logged, rel=1e-4)
        assert {k: v[0] for k, v in history.items() if k not in OURS} == (
            pytest.approx(logged, rel=1e-4)
        )
        step = 0.01 * X.T @ (2 * factors[:, None] * difference)
        np.testing.assert_allclose(
            model.get_weights()[0], kernel - step, rtol=1e-4, atol=1e-5
        )


class AddsWithWeights(layers.Layer):
    """Adds a loss only where its input has a second part."""

    def call(self, inputs):
        if isinstance(inputs, dict) and "extra" in inputs:
            self.add_loss(ops.sum(ops.square(inputs["extra"]), axis=-1))
        return inputs["x"] if isinstance(inputs, dict) else inputs


class Extra(keras.Model):
    def __init__(self):
        super().__init__()
        self.adds = AddsWithWeights()
        self.dense = layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        hidden = self.dense(inputs["x"])
        parts = {"x": hidden}
        if "extra" in inputs:
            parts["extra"] = self.dense(inputs["extra"])
        return self.adds(parts)


def test_layers_may_add_losses_with_later_data_only():
    def train(make):
        model = Extra()
        model({"x": X})
        trainer = make(model)
        history = [
            trainer.fit(
                data, Y, batch_size=8, shuffle=False, verbose=0
            ).history["loss"][0]
            for data in ({"x": X}, {"x": X, "extra": X}, {"x": X})
        ]
        return [*history, *model.get_weights()]

    def compiled(model):
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    def accumulating(model):
        return Trainer(
            model,
            optimizer=keras.optimizers.SGD(0.01),
            loss="mse",
            accumulation=TWO,
            jit_compile=JIT_COMPILE,
        )

    pairs = zip(train(accumulating), train(compiled), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


class LossesBySize(Trainer):
    """Has other losses for micro-batches of four than for smaller ones."""

    def __init__(self, *arguments, of_four, **options):
        super().__init__(*arguments, **options)
        self._of_four = of_four

    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        error = ops.mean(ops.square(outputs - batch.y))
        loss = WeightedLoss(error, 4)
        if len(outputs) != 4:
            return {"error": loss, "second": loss}
        return {
            "more": {"error": loss, "second": loss, "third": loss},
            "name": {"error": loss, "other": loss},
            "kind": {"error": loss, "second": WeightedLoss(error, None)},
        }[self._of_four]


@pytest.mark.parametrize("of_four", ["more", "name", "kind"])
@pytest.mark.parametrize("batch_size", [4, 6])
@pytest.mark.parametrize("run", ["fit", "evaluate"])
def test_losses_that_depend_on_the_size_of_micro_batches_are_refused(
    run, batch_size, of_four
):
    trainer = LossesBySize(
        make_model(),
        optimizer="sgd",
        of_four=of_four,
        accumulation=Accumulation(micro_batch_size=4),
        **QUICKEST,
    )
    with pytest.raises(ValueError, match="Losses must be alike"):
        getattr(trainer, run)(X[:6], Y[:6], batch_size=batch_size, verbose=0)


class AddsLossInTraining(layers.Layer):
    def call(self, x, training=False):
        if training:
            self.add_loss(ops.mean(ops.square(x)))
        return x


def test_layer_may_add_a_loss_in_training_only_beside_several_outputs():
    def make():
        x = keras.Input([3])
        hidden = layers.Dense(4, kernel_initializer="ones")(x)
        hidden = AddsLossInTraining()(hidden)
        heads = [layers.Dense(1, kernel_initializer="ones") for _ in range(2)]
        return keras.Model(x, [head(hidden) for head in heads])

    reference, model = make(), make()
    samples, targets = X[:7], [Y[:7], -Y[:7]]
    weights = [np.arange(1.0, 8.0), np.arange(8.0, 1.0, -1.0)]
    losses = [
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        for _ in range(2)
    ]
    reference.compile(keras.optimizers.SGD(0.01), losses)
    reference.train_on_batch(samples, targets, sample_weight=weights)
    trainer = Trainer(
        model,
        optimizer=keras.optimizers.SGD(0.01),
        loss=losses,
        denominator="samples",
        accumulation=TWO,
        **QUICKEST,
    )
    trainer.train_on_batch(samples, targets, sample_weight=weights)
    for ours, theirs in zip(
        model.get_weights(), reference.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_hook_may_log_beside_a_layer_that_adds_a_loss_in_training_only():
    class LoggingTrainer(Trainer):
        def compute_loss(self, batch, info):
            self.log("largest", ops.max(batch.x), reduce="max")
            return super().compute_loss(batch, info)

    x = keras.Input([3])
    hidden = AddsLossInTraining()(x)
    model = keras.Model(x, [layers.Dense(1)(hidden) for _ in range(2)])
    losses = [
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        for _ in range(2)
    ]
    trainer = LoggingTrainer(
        model,
        optimizer="sgd",
        loss=losses,
        denominator="samples",
        accumulation=TWO,
        **QUICKEST,
    )
    logs = trainer.train_on_batch(
        X[:7],
        [Y[:7], -Y[:7]],
        sample_weight=[np.arange(1.0, 8.0), np.arange(8.0, 1.0, -1.0)],
        return_dict=True,
    )
    assert logs["largest"] == X[:7].max()
