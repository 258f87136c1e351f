"""Where no compiler foresees memory: gradients of a few samples are tried."""

import numpy as np
import pytest
from shortages import out_of_memory
from test_memory import UNLIMITED, auto, make_trainer

from accumtrainer.keras_api import BACKEND
from accumtrainer.steps.step import Step

DATA = np.ones([48, 32, 32], "float32"), np.ones([48, 1], "float32")


def test_window_is_tried_with_two_of_its_micro_batches(monkeypatch):
    tried, gradients = [], Step.gradients

    def watch(self, window):
        tried.append(window.micro_batches)
        return gradients(self, window)

    monkeypatch.setattr(Step, "gradients", watch)
    make_trainer(1).memory_plan(DATA, [1, 8])
    # JAX asks its compiler and runs none.
    assert set(tried) == (set() if BACKEND == "jax" else {2})


def run_out_beyond(most, monkeypatch):
    """Have memory run out as soon as more samples are tried at a time."""

    def peak_bytes(_, window):
        if max(window.sizes) > most:
            raise out_of_memory()
        return 1

    monkeypatch.setattr(Step, "peak_bytes", peak_bytes)


def test_size_whose_trial_runs_out_of_memory_does_not_fit(monkeypatch):
    run_out_beyond(6, monkeypatch)
    trainer = make_trainer(auto(UNLIMITED))
    trainer.fit(*DATA, batch_size=24, verbose=0)
    assert trainer.plan.micro_batch_size == 6
    assert trainer.progress.updates == 2


def test_trial_of_one_sample_that_runs_out_of_memory_is_told(monkeypatch):
    run_out_beyond(0, monkeypatch)
    trainer = make_trainer(auto(UNLIMITED))
    with pytest.raises(type(out_of_memory()), match="injected"):
        trainer.fit(*DATA, batch_size=24, verbose=0)
