"""What is logged and returned where names meet, and where results are many."""

import warnings

import numpy as np
import pytest
from keras_core_gaps import keras_3_only
from logged import QUICKEST, TWO, X, Y, make_model
from quickest import RUN_EAGERLY

from accumtrainer import Trainer, WeightedLoss
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras, ops
from accumtrainer.observers.logs import is_of_windows

layers = keras.layers


class TwoLosses(Trainer):
    """Has a loss that is named like a metric."""

    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        samples = ops.cast(ops.shape(outputs)[0], "float32")
        error = ops.mean(ops.square(outputs - batch.y))
        return {
            "mae": WeightedLoss(error, samples, outputs),
            "loss": WeightedLoss(ops.mean(ops.abs(outputs)), samples),
        }


class Tracking(keras.Model):
    """Has a metric of its own, which only it updates."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.tracker = keras.metrics.MeanAbsoluteError(name="mae")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.tracker.update_state(y, y_pred)
        return self.get_metrics_result()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_metric_and_loss_of_one_name_are_both_logged(is_compiled):
    model = make_model()
    if not is_compiled:
        model = Tracking(model.inputs, model.outputs)
    trainer = TwoLosses(
        model,
        optimizer=keras.optimizers.SGD(0.0),
        metrics=["mae"] if is_compiled else None,
        accumulation=TWO,
        **QUICKEST,
    )
    outputs = X.sum(axis=1, keepdims=True)
    expected = {
        "mae": np.abs(outputs - Y).mean(),
        "mae_loss": np.square(outputs - Y).mean(),
        "loss_loss": np.abs(outputs).mean(),
    }
    expected["loss"] = expected["mae_loss"] + expected["loss_loss"]
    history = trainer.fit(X, Y, batch_size=8, verbose=0).history
    for name, value in expected.items():
        np.testing.assert_allclose(history[name], [value], rtol=1e-5)
    results = trainer.evaluate(X, Y, verbose=0, return_dict=True)
    assert results == pytest.approx(expected, rel=1e-5)
    values = trainer.evaluate(X, Y, verbose=0)
    assert sorted(values) == pytest.approx(sorted(expected.values()))


class DerivingInComputeMetrics(Tracking):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return results | {"twice": 2.0 * results["mae"]}


class DerivingInResults(Tracking):
    def get_metrics_result(self):
        results = super().get_metrics_result()
        return results | {"twice": 2.0 * results["mae"]}


def train_own(model_class, is_inside, metrics=None):
    """Train a model that judges its outputs itself; returns the history."""
    model = make_model()
    model = model_class(model.inputs[0], model.outputs[0])
    options = {"validation_data": (X, Y), "verbose": 0, "shuffle": False}
    if is_inside:
        model.compile(
            keras.optimizers.SGD(0.01),
            "mse",
            metrics=metrics,
            jit_compile=False,
        )
        callbacks = [GradientAccumulation(steps=2)]
        history = model.fit(X, Y, 4, callbacks=callbacks, **options)
    else:
        trainer = Trainer(
            model,
            keras.optimizers.SGD(0.01),
            "mse",
            metrics=metrics,
            accumulation=TWO,
            **QUICKEST,
        )
        history = trainer.fit(X, Y, batch_size=4, **options)
    return history.history


@keras_3_only("asks no get_metrics_result of a model")
@pytest.mark.parametrize("is_inside", [False, True], ids=["trainer", "fit"])
def test_values_that_compute_metrics_alone_returns_are_told(is_inside):
    told = "'twice' of DerivingInComputeMetrics, from compute_metrics alone"
    with pytest.warns(UserWarning, match=told):
        history = train_own(DerivingInComputeMetrics, is_inside)
    assert "twice" not in history and "mae" in history


@keras_3_only("asks no get_metrics_result of a model")
@pytest.mark.parametrize("is_inside", [False, True], ids=["trainer", "fit"])
def test_values_that_get_metrics_result_returns_are_logged(is_inside):
    history = train_own(DerivingInResults, is_inside)
    for name in ("", "val_"):
        expected = 2.0 * np.array(history[f"{name}mae"])
        np.testing.assert_allclose(history[f"{name}twice"], expected, rtol=1e-6)


class Popping(keras.Model):
    """Judges what it predicts in evaluation alone, and then tells no `mae`."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.error = keras.metrics.MeanAbsoluteError(name="mae")
        self.top = keras.metrics.Mean(name="top")

    def call(self, x, training=False):
        outputs = super().call(x)
        return (outputs, None if training else 2.0 * outputs)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(ops.subtract(y_pred[0], y)))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        outputs, judged = y_pred
        self.error.update_state(y, outputs)
        if judged is not None:
            self.top.update_state(judged)
        results = super().compute_metrics(x, y, outputs, sample_weight)
        results.pop("top" if judged is None else "mae")
        return results


def compiled_popping():
    model = make_model()
    model = Popping(model.inputs[0], model.outputs[0])
    model.compile(keras.optimizers.SGD(0.01), jit_compile=False)
    return model


@keras_3_only("logs in the end all metrics that a model has")
@pytest.mark.parametrize("is_inside", [False, True], ids=["trainer", "fit"])
def test_result_that_compute_metrics_leaves_out_is_in_no_logs(is_inside):
    options = {"validation_data": (X, Y), "verbose": 0, "shuffle": False}
    theirs = compiled_popping()
    expected = theirs.fit(X, Y, batch_size=4, **options).history
    assert "top" not in expected and "val_mae" not in expected
    model = compiled_popping()
    if is_inside:
        callbacks = [GradientAccumulation(2, denominator="samples")]
        history = model.fit(X, Y, 2, callbacks=callbacks, **options).history
        assert list(history) == list(expected)
    else:
        trainer = Trainer(
            model, denominator="samples", accumulation=TWO, **QUICKEST
        )
        history = trainer.fit(X, Y, batch_size=4, **options).history
        for run in ("evaluate", "train_on_batch"):
            one, other = (
                getattr(m, run)(X, Y, return_dict=True)
                for m in (trainer, theirs)
            )
            assert one.keys() == other.keys()
        assert len(trainer.evaluate(X, Y, verbose=0)) == 2
    named = {k: v for k, v in history.items() if not is_of_windows(k)}
    assert named.keys() - {"updates", "skipped_updates"} == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4)


class ListingMetrics(keras.Model):
    """As in Keras's guides: compiled metrics are a dict within the dict."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        super().compute_metrics(x, y, y_pred, sample_weight)
        return {m.name: m.result() for m in self.metrics}


class Renaming(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {f"my_{name}": value for name, value in results.items()}


@keras_3_only("logs all metrics that there are")
@pytest.mark.parametrize("is_inside", [False, True], ids=["trainer", "fit"])
@pytest.mark.parametrize("cls", [ListingMetrics, Renaming])
def test_results_that_compute_metrics_tells_otherwise_stay(cls, is_inside):
    expected = train_own(keras.Model, is_inside, ["mae"])
    assert "mae" in expected and "val_mae" in expected
    with warnings.catch_warnings():
        action = "ignore" if cls is Renaming else "error"
        warnings.simplefilter(action, UserWarning)
        history = train_own(cls, is_inside, ["mae"])
    # Inside fit Keras validates by itself.
    trained = {name for name in expected if not name.startswith("val_")}
    assert trained <= history.keys()
    assert cls is Renaming or history.keys() == expected.keys()


class DerivingFromLoss(keras.Model):
    def get_metrics_result(self):
        loss = super().get_metrics_result()["loss"]
        return {"loss": 2.0 * loss, "perplexity": ops.exp(loss)}


@keras_3_only("asks no get_metrics_result of a model")
@pytest.mark.parametrize("is_inside", [False, True], ids=["trainer", "fit"])
def test_what_a_model_makes_of_its_loss_is_logged(is_inside):
    expected = train_own(keras.Model, is_inside)
    history = train_own(DerivingFromLoss, is_inside)
    for name in ("", "val_"):
        loss = np.array(expected[f"{name}loss"])
        assert (loss > 0).all()
        for told, value in (("loss", 2.0 * loss), ("perplexity", np.exp(loss))):
            np.testing.assert_allclose(
                history[f"{name}{told}"], value, rtol=1e-5
            )


@keras_3_only("asks no get_metrics_result of a model")
def test_a_loss_that_a_model_does_not_tell_is_not_logged():
    class Silent(keras.Model):
        def get_metrics_result(self):
            return {"twice": 2.0 * self.metrics[0].result()}

    model = make_model()
    model = Silent(model.inputs[0], model.outputs[0])
    trainer = Trainer(model, "sgd", "mse", accumulation=TWO, **QUICKEST)
    assert "loss" not in trainer.fit(X, Y, verbose=0).history
    expected = np.square(model.predict(X, verbose=0) - Y).mean()
    found = trainer.evaluate(X, Y, verbose=0)
    assert found == pytest.approx(2.0 * expected, rel=1e-5)


class ReadsMetrics(keras.callbacks.Callback):
    """Keeps what the model's first metric tells beside what is logged."""

    def __init__(self):
        super().__init__()
        self.pairs = []

    def on_train_batch_end(self, batch, logs):
        self.pairs.append((self.model.metrics[0].result(), logs["loss"]))


@pytest.mark.parametrize("is_inside", [False, True], ids=["trainer", "fit"])
def test_metric_of_the_loss_tells_it(is_inside):
    model, callback = make_model(), ReadsMetrics()
    if is_inside:
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
        callbacks = [GradientAccumulation(steps=2)]
        model.fit(X, Y, 2, callbacks=[*callbacks, callback], verbose=0)
        callback.pairs = callback.pairs[1::2]  # amid an update it lags
    else:
        optimizer = keras.optimizers.SGD(0.01)
        trainer = Trainer(model, optimizer, "mse", accumulation=TWO, **QUICKEST)
        trainer.fit(X, Y, batch_size=4, callbacks=[callback], verbose=0)
    told, logged = np.array([list(map(float, p)) for p in callback.pairs]).T
    np.testing.assert_allclose(told, logged, rtol=1e-6)
    assert len(set(logged)) > 1


class Errors(keras.metrics.Metric):
    """Its result is a dict, and not of scalars alone."""

    def __init__(self):
        super().__init__(name="errors")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y_true - y_pred)))

    def result(self):
        total = self.total + 0.0  # not the variable, which moves on
        return {"z": total, "a": 2.0 * total, "both": total * ops.ones([2])}


class Logs(Trainer):
    """Logs a value under a name."""

    def __init__(self, *arguments, name, **options):
        super().__init__(*arguments, **options)
        self._name = name

    def compute_loss(self, batch, info):
        self.log(self._name, ops.mean(batch.x))
        return super().compute_loss(batch, info)


def run_with_log(name, run):
    """Train or evaluate with metrics `"a_mae"`, and `"z"` and others of b."""
    x = keras.Input([3])
    heads = {key: layers.Dense(1, name=key)(x) for key in ("a", "b")}
    trainer = Logs(
        keras.Model(x, heads),
        optimizer="sgd",
        loss={"a": "mse", "b": "mse"},
        metrics={"a": ["mae"], "b": [Errors()]},
        accumulation=TWO,
        name=name,
        **QUICKEST,
    )
    y = {"a": Y, "b": Y}
    getattr(trainer, run)(X, y, batch_size=8, verbose=0)


@keras_3_only("logs such metrics in another way")
@pytest.mark.parametrize("name", ["loss", "a_loss", "a_mae", "z"])
@pytest.mark.parametrize("run", ["fit", "evaluate"])
def test_hook_that_logs_under_the_name_of_a_loss_or_metric_is_refused(
    run, name
):
    with pytest.raises(ValueError, match=f"of its own.*Received: {name!r}"):
        run_with_log(name, run)


@pytest.mark.parametrize(
    "name", ["gradient_norm", "weight", "applied", "learning_rate"]
)
def test_hook_that_logs_under_the_name_of_a_window_number_is_refused(name):
    with pytest.raises(ValueError, match=f"of its own.*Received: {name!r}"):
        run_with_log(name, "fit")


def test_every_number_of_a_window_is_among_the_names_that_are_taken():
    trainer = Trainer(
        keras.Sequential([keras.Input([3]), layers.Dense(1)]),
        optimizer=keras.optimizers.SGD(0.1, global_clipnorm=1.0),
        loss="mse",
        accumulation=TWO,
        **QUICKEST,
    )
    trainer.fit(X, Y, batch_size=8, verbose=0)
    names = set(trainer.window_logs) - {"loss"}
    assert len(names) > 6 and all(map(is_of_windows, names))


def test_hook_may_log_under_a_name_that_is_only_like_that_of_a_metric():
    for run in ("fit", "evaluate"):
        run_with_log("mae", run)


def run_keras(model, **options):
    model.compile("sgd", "mse", metrics=[Errors()], run_eagerly=RUN_EAGERLY)
    return model, model.fit(X, Y, batch_size=8, **options)


def run_callback(model, **options):
    model.compile("sgd", "mse", metrics=[Errors()], run_eagerly=RUN_EAGERLY)
    callbacks = [GradientAccumulation(4)]
    return model, model.fit(X, Y, batch_size=2, callbacks=callbacks, **options)


def run_trainer(model, **options):
    trainer = Trainer(
        model,
        optimizer="sgd",
        loss="mse",
        metrics=[Errors()],
        accumulation=TWO,
        **QUICKEST,
    )
    return trainer, trainer.fit(X, Y, batch_size=8, **options)


@keras_3_only("logs such metrics in another way")
@pytest.mark.parametrize("run", [run_trainer, run_callback])
def test_metric_with_a_dict_of_results_is_logged_as_in_keras(run):
    options = {"shuffle": False, "verbose": 0, "validation_data": (X, Y)}
    reference, expected = run_keras(make_model(), **options)
    trainer, history = run(make_model(), **options)
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-4)
    ours = trainer.evaluate(X, Y, verbose=0)
    theirs = reference.evaluate(X, Y, verbose=0)
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4)


class AddsLoss(layers.Layer):
    def call(self, x):
        self.add_loss(ops.sum(ops.square(x), axis=-1))
        return x


def make_model_with_loss():
    x = keras.Input([3])
    y = AddsLoss()(layers.Dense(2, kernel_initializer="ones")(x))
    return keras.Model(x, y)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_functional_model_may_have_no_loss_but_what_its_layers_add(is_compiled):
    model, optimizer = make_model_with_loss(), keras.optimizers.SGD(0.01)
    kernel = model.get_weights()[0]
    if is_compiled:
        model.compile(optimizer)
        optimizer = None
    trainer = Trainer(model, optimizer=optimizer, accumulation=TWO, **QUICKEST)
    (loss,) = trainer.fit(X, batch_size=8, verbose=0).history["loss"]
    outputs = X @ kernel
    np.testing.assert_allclose(loss, np.square(outputs).sum(), rtol=1e-5)
    np.testing.assert_allclose(
        model.get_weights()[0],
        kernel - 0.01 * 2 * X.T @ outputs,
        rtol=1e-4,
        atol=1e-5,
    )
