"""Claims about Profile: which updates are in the trace, and when it ends."""

import contextlib
import re

import numpy as np
import pytest

from accumtrainer import Trainer, record_trace
from accumtrainer.callbacks import Profile
from accumtrainer.keras_api import BACKEND, keras

pytestmark = pytest.mark.usefixtures("without_xla")

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")


def fit(*callbacks, **options):
    """Train, three updates an epoch."""
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = Trainer(model, optimizer="sgd", loss="mse", accumulation=4)
    options = {"epochs": 2, "verbose": 0, "batch_size": 2} | options
    trainer.fit(X, Y, callbacks=list(callbacks), **options)
    return trainer


def traces(folder):
    """List the files that TensorBoard's profiler reads."""
    if BACKEND == "torch":
        return sorted(folder.glob("*.pt.trace.json"))
    return sorted(folder.glob("plugins/profile/*/*.xplane.pb"))


def test_trace_is_written_and_names_its_updates(tmp_path):
    fit(Profile(tmp_path, first_update=2, updates=2))
    (trace,) = traces(tmp_path)
    content = trace.read_bytes()
    assert re.search(rb"\bupdate\b", content)
    named = b'"update 2"' if BACKEND == "torch" else b"step_num"
    assert named in content


def test_only_the_updates_asked_for_are_recorded(tmp_path, monkeypatch):
    marked = []

    def note(number):
        marked.append(number)
        return contextlib.nullcontext()

    monkeypatch.setattr("accumtrainer.callbacks.profile.mark_update", note)
    fit(Profile(tmp_path, first_update=2, updates=3))
    assert marked == [2, 3, 4]
    assert len(traces(tmp_path)) == 1


def test_trace_is_there_before_the_next_update(tmp_path):
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(len(traces(tmp_path)))

    fit(Profile(tmp_path, first_update=1, updates=2), Look())
    assert seen == [0, 0, 0, 1, 1, 1]


def test_training_that_ends_early_leaves_a_trace(tmp_path):
    fit(Profile(tmp_path, first_update=4, updates=100))
    assert len(traces(tmp_path)) == 1


def test_trace_is_closed_on_errors_and_another_can_begin(tmp_path):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(Profile(tmp_path / "first", first_update=1), Fail())
    assert len(traces(tmp_path / "first")) == 1
    fit(Profile(tmp_path / "second", first_update=1))
    assert len(traces(tmp_path / "second")) == 1


def test_profiler_that_runs_already_is_a_warning(tmp_path):
    with record_trace(tmp_path / "own"):
        with pytest.warns(RuntimeWarning, match="Training goes on"):
            trainer = fit(Profile(tmp_path / "other", first_update=1))
    assert trainer.progress.updates == 6
    assert len(traces(tmp_path / "own")) == 1
    assert not traces(tmp_path / "other")


def test_trial_writes_nothing(tmp_path):
    fit(Profile(tmp_path, first_update=0), fast_dev_run=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [{"first_update": -1}, {"updates": 0}])
def test_wrong_arguments_are_refused(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be"):
        Profile("traces", **option)
