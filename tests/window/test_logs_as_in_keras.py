"""Claims about whose numbers logs hold, and in which order: as in Keras."""

import numpy as np
import pytest
from logged import QUICKEST, TWO, X, Y, make_model

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import keras
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
