"""Claims about `self.log`: what hooks tell reaches logs and history."""

import numpy as np
import pytest
from hooked import (
    K,
    M,
    X,
    Y,
    fit,
    make_trainer,
    numbers,
)

from accumtrainer import Trainer
from accumtrainer.keras_api import ops

pytestmark = pytest.mark.usefixtures("without_xla")


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
        self.log("place", ops.cast(info.index, "float32"))
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
        "place": [1.5, 1.5],
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
