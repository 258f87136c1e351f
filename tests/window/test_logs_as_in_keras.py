"""Claims about whose numbers logs hold, and in which order: as in Keras."""

import numpy as np
import pytest
from keras_core_gaps import keras_3_only
from logged import QUICKEST, TWO, X, Y, make_model
from quickest import RUN_EAGERLY

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import keras, ops
from accumtrainer.observers.logs import OF_WINDOWS


class Unknown(keras.metrics.MeanAbsoluteError):
    """Has no number to tell."""

    def result(self):
        return super().result() * np.nan


class BatchLogs(keras.callbacks.Callback):
    """Keeps the logs of batches."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


@pytest.mark.parametrize(
    "accumulation",
    [1, TWO, Accumulation(micro_batch_size=3)],
    ids=["one", "fused", "streamed"],
)
def test_metric_named_like_a_number_of_the_window_is_logged(accumulation):
    named_ours = [*OF_WINDOWS, "learning_rate"]
    metrics = dict.fromkeys(named_ours, keras.metrics.MeanAbsoluteError)
    metrics["gradient_norm"] = Unknown
    trainer = Trainer(
        make_model(),
        optimizer=keras.optimizers.SGD(0.0),
        loss="mse",
        metrics=[metric(name=name) for name, metric in metrics.items()],
        accumulation=accumulation,
        **QUICKEST,
    )
    error = float(np.abs(X.sum(axis=1, keepdims=True) - Y).mean())
    expected = dict.fromkeys(metrics, error) | {"gradient_norm": np.nan}
    batches = BatchLogs()
    history = trainer.fit(X, Y, 8, callbacks=[batches], verbose=0).history
    returned = trainer.train_on_batch(X, Y, return_dict=True)
    epoch = {name: value for name, (value,) in history.items()}
    for logs in (epoch, batches.logs[0], returned):
        told = {name: logs[name] for name in expected}
        assert told == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert trainer.window_logs["updates"] == 2
    assert trainer.window_logs["learning_rate"] == 0


class Extremes(keras.metrics.Metric):
    """Has two results."""

    def __init__(self):
        super().__init__(name="extremes")
        self.high = self.add_weight(name="high", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.high.assign_add(ops.sum(ops.abs(y_true - y_pred)))

    def result(self):
        high = self.high + 0.0  # not the variable, which moves on
        # Names of which some come before those of validation, and some after.
        return {"zenith": -high, "high": high}


@keras_3_only("logs metrics with several results in another way")
def test_an_epoch_has_its_numbers_in_the_order_of_keras():
    def history_of(make_fit):
        x = keras.Input([3])
        heads = {name: keras.layers.Dense(1, name=name)(x) for name in "az"}
        model = keras.Model(x, heads)
        metrics = {"a": [Extremes(), "mae"], "z": ["mae"]}
        model.compile("sgd", "mse", metrics=metrics, run_eagerly=RUN_EAGERLY)
        data = X, {"a": Y, "z": Y}
        fit = make_fit(model)
        return fit(*data, 8, validation_data=data, verbose=0).history

    expected = history_of(lambda model: model.fit)
    found = history_of(lambda model: Trainer(model, accumulation=TWO).fit)
    assert [name for name in found if name in expected] == list(expected)
    assert list(expected).index("val_loss") < list(expected).index("z_loss")


@pytest.mark.parametrize("last", ["zz", "mae"])
def test_metrics_named_like_numbers_of_ours_keep_the_order_of_keras(last):
    def history_of(make_fit):
        model = make_model()
        named = [
            keras.metrics.MeanAbsoluteError(name=name)
            for name in ("learning_rate", "updates", last)
        ]
        model.compile("sgd", "mse", metrics=named, run_eagerly=RUN_EAGERLY)
        fit = make_fit(model)
        return fit(X, Y, 8, validation_data=(X, Y), verbose=0).history

    expected = history_of(lambda model: model.fit)
    found = history_of(lambda model: Trainer(model, accumulation=TWO).fit)
    assert [name for name in found if name in expected] == list(expected)
