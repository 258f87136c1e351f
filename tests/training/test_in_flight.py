"""Claims about how far the host runs ahead of a device."""

import numpy as np
import pytest

from accumtrainer import Trainer
from accumtrainer.keras_api import BACKEND, keras
from accumtrainer.training.in_flight import (
    LEAST,
    LIMIT_BYTES,
    SMALL_BYTES,
    InFlight,
)


class Report:
    """Notes that it was waited for."""

    def __init__(self, name, waited):
        self._name, self._waited = name, waited

    def wait(self):
        self._waited.append(self._name)


@pytest.mark.parametrize(
    ("sizes", "waited"),
    [
        ([LIMIT_BYTES * 2] * 5, [0, 1, 2]),
        ([LIMIT_BYTES // 4] * 6, [0, 1]),
        ([SMALL_BYTES] * 1000, []),
        ([SMALL_BYTES + 1] * 33, [0, 1]),
        ([0, 0, LIMIT_BYTES * 2] * 3, [2]),
    ],
)
def test_host_waits_for_the_oldest_of_too_many_windows(sizes, waited):
    in_flight, seen = InFlight(), []
    for name, size in enumerate(sizes):
        in_flight.add(Report(name, seen), size)
    assert seen == waited


def test_windows_that_may_never_run_are_not_waited_for():
    in_flight, seen = InFlight(), []
    for name in range(LEAST):
        in_flight.add(Report(name, seen), LIMIT_BYTES)
    in_flight.clear()
    in_flight.add(Report("new", seen), LIMIT_BYTES)
    assert seen == []


@pytest.mark.skipif(
    BACKEND != "jax", reason="TensorFlow returns when a window has run"
)
def test_few_large_windows_are_in_flight(monkeypatch):
    seen = []
    monkeypatch.setattr("accumtrainer.training.in_flight.LIMIT_BYTES", 100)
    monkeypatch.setattr("accumtrainer.training.in_flight.SMALL_BYTES", 100)
    monkeypatch.setattr(
        "accumtrainer.steps.step.Report.wait", lambda self: seen.append(self)
    )
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = Trainer(model, optimizer="sgd", loss="mse", accumulation=2)
    x = np.ones([80, 3], "float32")
    trainer.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    # Of 10 windows in each epoch, the last two are still in flight.
    assert len(seen) == 2 * (10 - LEAST)
