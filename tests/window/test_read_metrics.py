"""Claims about the metrics of a model, for code that reads or resets them."""

import numpy as np
import pytest
from keras_core_gaps import keras_3_only

from accumtrainer import Accumulation, Trainer, WeightedLoss
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras, ops

pytestmark = [
    pytest.mark.usefixtures("without_xla"),
    keras_3_only("has no metrics of single losses"),
]

layers = keras.layers
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = {"a": X[:, :2], "b": X[:, 2:] ** 2}
ORDER = {"shuffle": False, "verbose": 0}


class Sharing(keras.Model):
    """Tells how much of its loss one output has."""

    def get_metrics_result(self):
        found = super().get_metrics_result()
        share = found.get("a_loss", 0.0) / found["loss"]
        return {**found, "share": share}


class Counting(keras.Model):
    """Counts samples, and goes on with that from epoch to epoch."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seen = keras.metrics.Sum(name="seen")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.seen.update_state(ops.ones_like(y_pred["a"][:, 0]))
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def reset_metrics(self):
        for metric in self.metrics:
            if metric is not self.seen:
                metric.reset_state()


class Subclassed(keras.Model):
    """Keras knows of its outputs only once it has been called."""

    def __init__(self):
        super().__init__()
        self.one, self.two = layers.Dense(2), layers.Dense(2)

    def call(self, x):
        return {"a": self.one(x), "b": self.two(x)}


def make_model(kind=keras.Model):
    keras.utils.set_random_seed(4)
    if issubclass(kind, Subclassed):
        model = kind()
    else:
        x = keras.Input([4])
        outputs = {name: layers.Dense(2, name=name)(x) for name in Y}
        model = kind(x, outputs)
    model.compile(
        keras.optimizers.SGD(0.1), {"a": "mse", "b": "mae"}, metrics=None
    )
    return model


def by_keras(model, size=12, **options):
    return model.fit(X, Y, batch_size=size, **ORDER, **options).history


def by_trainer(model, **options):
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=6))
    return trainer.fit(X, Y, batch_size=12, **ORDER, **options).history


def by_callback(model, callbacks=(), **options):
    callbacks = [GradientAccumulation(2), *callbacks]
    return by_keras(model, 6, callbacks=callbacks, **options)


both = pytest.mark.parametrize("train", [by_trainer, by_callback])


@both
def test_model_reads_the_losses_of_single_outputs(train):
    options = {
        "epochs": 2,
        "validation_data": (X[:12], {k: v[:12] for k, v in Y.items()}),
    }
    expected = by_keras(make_model(Sharing), **options)
    found = train(make_model(Sharing), **options)
    assert found.keys() >= expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


@pytest.mark.parametrize("kind", [keras.Model, Subclassed])
def test_callbacks_find_the_losses_of_single_outputs(kind):
    def read(train):
        seen = []

        def note(index, logs):
            metrics = {m.name: float(m.result()) for m in model.metrics}
            seen.append(metrics)

        model = make_model(kind)
        train(
            model,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=note)],
        )
        return seen

    (expected,), (found,) = read(by_keras), read(by_trainer)
    assert list(found) == list(expected) == ["loss", "a_loss", "b_loss"]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", [keras.Model, Subclassed])
def test_evaluation_alone_tells_them_too(kind):
    model = make_model(kind)
    trainer = Trainer(model)
    logs = trainer.evaluate(X, Y, batch_size=24, return_dict=True, verbose=0)
    names = [metric.name for metric in model.metrics]
    assert names == ["loss", "a_loss", "b_loss"]
    expected = model.evaluate(X, Y, batch_size=24, return_dict=True, verbose=0)
    assert logs == pytest.approx(expected, rel=1e-5)


@both
def test_metric_that_a_model_does_not_reset_goes_on(train):
    model = make_model(Counting)
    assert train(model, epochs=2)["seen"] == [24, 48]


def test_evaluation_leaves_such_a_metric_to_the_model_as_well():
    model = make_model(Counting)
    trainer = Trainer(model)
    seen = [
        trainer.evaluate(X, Y, return_dict=True, verbose=0)["seen"]
        for _ in range(2)
    ]
    assert seen == [24, 48]


class JudgesAlone(Subclassed):
    """Has a metric named like a loss, and tells of another one only."""

    def __init__(self):
        super().__init__()
        self.kl = keras.metrics.Mean(name="kl")
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.error.update_state(y["a"], y_pred["a"])
        return {"error": self.error.result()}


class TwoLosses(Trainer):
    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        size = ops.shape(batch.x)[0]
        error = ops.mean(ops.square(outputs["a"] - batch.y["a"]))
        spread = ops.mean(ops.abs(outputs["b"]))
        return {
            "rec": WeightedLoss(error, size, outputs=outputs),
            "kl": WeightedLoss(spread, size),
        }


def test_losses_of_a_hook_are_told_whatever_the_model_leaves_out():
    optimizer = keras.optimizers.SGD(0.01)
    trainer = TwoLosses(JudgesAlone(), optimizer, accumulation=2)
    history = trainer.fit(X, Y, 6, validation_data=(X, Y), **ORDER).history
    for name in ("loss", "rec", "kl", "error"):
        assert name in history and f"val_{name}" in history


class ListsItsOwn(Subclassed):
    """Lists a metric of its own, and none of those given to `compile`."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    @property
    def metrics(self):
        return [self.seen]


@both
def test_compiled_metrics_may_be_left_out_of_the_list_of_a_model(train):
    models = [make_model(kind) for kind in (Subclassed, ListsItsOwn)]
    for model in models:
        options = {"jit_compile": False, "metrics": {"a": ["mae"]}}
        losses = {"a": "mse", "b": "mae"}
        model.compile(keras.optimizers.SGD(0.1), losses, **options)
    histories = [train(model, epochs=2) for model in models]
    assert "a_mae" in histories[0] and "a_mae" not in histories[1]
    np.testing.assert_allclose(histories[0]["loss"], histories[1]["loss"], 1e-6)
