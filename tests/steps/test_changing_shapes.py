"""Claims about micro-batches whose shapes change, and what XLA makes of them.

Training that XLA does not survive would end the tests: it runs in a process of
its own.
"""

import os

import forked
import numpy as np
import pytest

from accumtrainer import Every, Trainer
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import BACKEND, keras

tensorflow_only = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="JAX compiles for every shape by XLA"
)

RECURRENT = """
import numpy as np

from accumtrainer import Trainer
from accumtrainer.keras_api import keras

layers = keras.layers
rng = np.random.default_rng(0)
LAYERS = {
    "LSTM": lambda: layers.LSTM(2),
    "GRU": lambda: layers.Bidirectional(layers.GRU(2)),
    "cells": lambda: layers.RNN([layers.SimpleRNNCell(2), layers.LSTMCell(2)]),
}


def weights_after(name, jit_compile):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([None], dtype="int32"),
            layers.Embedding(9, 3, mask_zero=True),
            LAYERS[name](),
            layers.Dense(1),
        ]
    )
    trainer = Trainer(
        model,
        optimizer="sgd",
        loss="mse",
        accumulation=2,
        jit_compile=jit_compile,
    )
    for x, y in data:
        trainer.fit(x, y, batch_size=2, verbose=0)
        trainer.evaluate(x, y, verbose=0)
        trainer.predict(x, verbose=0)
    return model.get_weights()


data = [
    (rng.integers(1, 9, [4, length]), rng.normal(size=[4, 1]))
    for length in (5, 7, 6)
]
for name in LAYERS:
    for one, other in zip(
        weights_after(name, "auto"), weights_after(name, False), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    print(name)
"""


@tensorflow_only
def test_recurrent_layers_behind_embeddings_take_changing_lengths():
    finished = forked.run(["-c", RECURRENT], os.environ)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["LSTM", "GRU", "cells"]


def lengths_trainer(**options):
    """Make a Trainer of a model that takes sequences of any length."""
    layers = keras.layers
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([None], dtype="int32"),
            layers.Embedding(9, 3),
            layers.Dense(3, activation="tanh"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    return Trainer(model, optimizer="adam", loss="mse", **options)


def windows_of(lengths):
    """List loader batches, two of each length."""
    rng = np.random.default_rng(0)
    return [
        (rng.integers(0, 9, [2, length]), rng.normal(size=[2, 1]))
        for length in lengths
        for _ in range(2)
    ]


@pytest.fixture
def traced_for(monkeypatch):
    """Give a list of the lengths that windows were traced for, or recorded."""
    traced = []
    if BACKEND == "torch":
        from accumtrainer.steps.torch import programs

        monkeypatch.setattr(programs, "MOST_SHAPES", 2)
        record = programs.Program._record

        def recorded(self, leaves, treedef):
            if len(leaves[0].shape) > 0:  # of windows and micro-batches
                traced.append((leaves[0].shape[-1], True))
            return record(self, leaves, treedef)

        monkeypatch.setattr(programs.Program, "_record", recorded)
        return traced
    from accumtrainer.steps.tensorflow import backend, programs

    monkeypatch.setattr(backend, "XLA_SHAPES", 2)
    trace = programs.Compiled._trace

    def noted(self, leaves, treedef, uses_xla):
        if len(leaves[0].shape) == 3:
            traced.append((leaves[0].shape[-1], uses_xla))
        return trace(self, leaves, treedef, uses_xla)

    monkeypatch.setattr(programs.Compiled, "_trace", noted)
    return traced


@tensorflow_only
def test_xla_compiles_for_the_first_lengths_alone(traced_for):
    trainer = lengths_trainer(accumulation=2)
    trainer.fit(windows_of([4, 5, 6, 5, 7, 8, 6, 4]), verbose=0)
    assert traced_for == [
        (4, True),
        (5, True),
        (6, False),
        (7, False),
        (8, False),
    ]


@tensorflow_only
def test_xla_that_is_asked_for_compiles_for_all_lengths(traced_for):
    trainer = lengths_trainer(accumulation=2, jit_compile=True)
    trainer.fit(windows_of([4, 5, 6]), verbose=0)
    with pytest.warns(
        UserWarning, match="fourth .* 7.*buckets.*'auto'"
    ) as told:
        trainer.fit(windows_of([7, 8, 9]), verbose=0)
    assert len(told) == 1
    assert traced_for == [(length, True) for length in range(4, 10)]


@tensorflow_only
@pytest.mark.parametrize(
    "lengths", [[4, 5, 6, 7], [4, 6, 5, 7]], ids=["forward", "mixed"]
)
def test_windows_of_unequal_lengths_are_summed_exactly(lengths):
    """Some by XLA, those that come after the first ones without it."""
    batches = windows_of(lengths)
    trainer = lengths_trainer(accumulation=8)
    plain = lengths_trainer(accumulation=8, jit_compile=False)
    for one in (trainer, plain):
        one.fit(batches, verbose=0)
    for a, b in zip(
        trainer.model.get_weights(), plain.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# JAX compiles for every shape, so that there is no choice of some to be saved.
@pytest.mark.skipif(
    BACKEND == "jax", reason="JAX compiles for every shape by XLA"
)
@pytest.mark.parametrize("jit_compile", ["auto", False])
def test_a_resumed_run_compiles_for_the_lengths_of_the_first(
    jit_compile, traced_for, tmp_path
):
    batches = windows_of([4, 5, 6, 7, 5, 6, 8])
    whole = lengths_trainer(accumulation=2, jit_compile=jit_compile)
    whole.fit(batches, shuffle=False, verbose=0)

    def resumed(updates):
        trainer = lengths_trainer(
            accumulation=2,
            jit_compile=jit_compile,
            callbacks=[Checkpoint(tmp_path, Every(1, "updates"))],
        )
        trainer.fit(
            batches,
            max_updates=updates,
            resume_from="auto",
            shuffle=False,
            verbose=0,
        )
        return trainer

    resumed(3)
    traced_for.clear()
    trainer = resumed(7)
    compiled = [
        length for length, is_among_first in traced_for if is_among_first
    ]
    if BACKEND == "torch":
        # Micro-batches alone: there was a third length of windows already.
        assert compiled == [7, 6]
    else:
        assert compiled == ([5] if jit_compile == "auto" else [])
    for a, b in zip(
        trainer.model.get_weights(), whole.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(a, b)
