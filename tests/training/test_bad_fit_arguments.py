"""Claims about bad arguments of `fit`, `evaluate` and `predict`."""

import numpy as np
import pytest
from refusals import (
    X,
    Y,
    assert_refused,
    assert_same_state,
    make_model,
    row,
    state_of,
)

from accumtrainer import (
    CheckpointError,
    Every,
    Trainer,
)
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]


FIT = [
    row(
        "steps-of-an-epoch-of-the-first-batches",
        lambda: {"overfit_batches": 2, "steps_per_epoch": 1},
        ValueError,
        "steps_per_epoch must be left out with overfit_batches",
        "steps_per_epoch=1, overfit_batches=2",
    ),
    row(
        "lengths-that-differ",
        lambda: {"y": Y[:5]},
        ValueError,
        "x, y and sample_weight must hold the same number of samples",
        "x: 12, y: 5",
    ),
    row(
        "length-of-sample-weight",
        lambda: {"sample_weight": np.ones(3)},
        ValueError,
        "sample_weight: 3",
    ),
    row(
        "empty-data",
        lambda: {"x": X[:0], "y": Y[:0]},
        ValueError,
        "at least 1",
        "x: 0, y: 0",
    ),
    row("no-data", lambda: {"x": None, "y": None}, TypeError, "x must hold"),
    row(
        "empty-list",
        lambda: {"x": [], "y": None},
        ValueError,
        "x must hold at least one batch",
    ),
    row(
        "function-instead-of-generator",
        lambda: {"x": len, "y": None},
        TypeError,
        "x must be data",
        "Call it first",
    ),
    row(
        "y-beside-a-loader",
        lambda: {"x": iter([(X, Y)])},
        ValueError,
        "y must be left out",
    ),
    *(
        row(
            f"{name}={value!r}",
            lambda name=name, value=value: {name: value},
            (TypeError, ValueError),
            f"{name} must be",
            f"{name}={value!r}",
        )
        for name, values in {
            "batch_size": (0, -4, 2.5, True, "4"),
            "epochs": (-1, 1.5, True),
            "initial_epoch": (-1, 0.5, True),
            "steps_per_epoch": (0, 1.5, True),
            "max_updates": (0, -1, 1.5, True),
            "max_seconds": (0, -1.0, True, "10", float("nan")),
            "validation_every": (10, "updates", (100, "updates")),
            "validation_freq": (0, 1.5, "daily"),
            "fast_dev_run": (-1, 1.5, "yes"),
            "overfit_batches": (0, 0.5, True),
            "shuffle": ("rows", 1, None),
            "verbose": (3, -1, "loud", None),
            "resume_from": (5, True, ["runs/a"]),
            "fast_forward": (1, "yes", None),
            "check_inputs": (1, "labels", None),
            "validation_split": (1.0, -0.1, 1.5, True, "0.2"),
        }.items()
        for value in values
    ),
    row(
        "resume-from-auto-without-a-checkpoint-callback",
        lambda: {"resume_from": "auto"},
        ValueError,
        "resume_from='auto' must come with a Checkpoint",
    ),
    row(
        "resume-from-nowhere",
        lambda: {"resume_from": "/nowhere/at/all"},
        CheckpointError,
        "There must be a checkpoint to go on from",
        "/nowhere/at/all",
    ),
    row(
        "data-without-an-end",
        lambda: {"x": Endless(), "y": None},
        ValueError,
        "steps_per_epoch must be given with data that never end",
        "steps_per_epoch=None",
    ),
    row(
        "validation-data-without-an-end",
        lambda: {"validation_data": Endless()},
        ValueError,
        "validation_steps must be given with data that never end",
        "validation_steps=None",
    ),
    row(
        "validation-steps",
        lambda: {"validation_data": (X, Y), "validation_steps": 0},
        ValueError,
        "validation_steps must be",
        "validation_steps=0",
    ),
    row(
        "validation-batch-size",
        lambda: {"validation_data": (X, Y), "validation_batch_size": 0},
        ValueError,
        "validation_batch_size must be",
        "validation_batch_size=0",
    ),
    row(
        "validation-lengths-that-differ",
        lambda: {"validation_data": (X, Y[:4])},
        ValueError,
        "x: 12, y: 4",
    ),
    row(
        "validation-data-of-four-parts",
        lambda: {"validation_data": (X, Y, Y, Y)},
        ValueError,
        "validation_data must be",
    ),
    row(
        "validation-split-of-a-loader",
        lambda: {"x": [(X, Y)], "y": None, "validation_split": 0.5},
        TypeError,
        "validation_split must come with arrays",
    ),
    row(
        "unknown-clock",
        lambda: {"validation_every": Every(3, "batches")},
        ValueError,
        "unit must be one of",
        "unit='batches'",
    ),
    row(
        "class-weight-that-is-no-dict",
        lambda: {"class_weight": [1.0, 2.0]},
        TypeError,
        "class_weight must be a dict",
    ),
    row(
        "class-weight-beside-sample-weight",
        lambda: {"class_weight": {0: 1.0}, "sample_weight": np.ones(12)},
        ValueError,
        "class_weight must not be combined with sample_weight",
    ),
    row(
        "callback-that-is-none",
        lambda: {"callbacks": ["csv"]},
        TypeError,
        "callbacks must hold",
        "'csv'",
    ),
]


class Endless(keras.utils.PyDataset):
    """Yields the same batch for ever."""

    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        return X, Y


@pytest.mark.parametrize(("make", "error", "words"), FIT)
def test_fit_refuses_a_bad_argument(make, error, words):
    model = make_model()
    trainer = Trainer(model)
    before = state_of(model)

    def call():
        trainer.fit(**({"x": X, "y": Y, "verbose": 0} | make()))

    assert_refused(call, error, *words)
    assert_same_state(before, state_of(model))
    assert trainer.progress.samples == 0


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        row(
            "batch-size",
            lambda: {"batch_size": 0},
            ValueError,
            "batch_size must be",
            "batch_size=0",
        ),
        row("steps", lambda: {"steps": 0}, ValueError, "steps", "=0"),
        row("no-data", lambda: {"x": None}, TypeError, "x must hold"),
        row("empty-data", lambda: {"x": X[:0]}, ValueError, "x: 0"),
        row(
            "verbose",
            lambda: {"verbose": 5},
            ValueError,
            "verbose must be",
            "verbose=5",
        ),
        row(
            "callbacks",
            lambda: {"callbacks": [print]},
            TypeError,
            "callbacks must hold",
        ),
    ],
)
def test_evaluate_and_predict_refuse_a_bad_argument(method, make, error, words):
    model = make_model()
    trainer = Trainer(model)
    before = state_of(model)

    def call():
        arguments = {"x": X, "verbose": 0} | make()
        getattr(trainer, method)(**arguments)

    assert_refused(call, error, *words)
    assert_same_state(before, state_of(model))


def test_evaluate_refuses_lengths_that_differ():
    trainer = Trainer(make_model())
    assert_refused(
        lambda: trainer.evaluate(X, Y[:4], verbose=0), ValueError, "y: 4"
    )


def test_train_on_batch_refuses_lengths_that_differ():
    model = make_model()
    trainer = Trainer(model)
    before = state_of(model)
    assert_refused(lambda: trainer.train_on_batch(X, Y[:4]), ValueError, "y: 4")
    assert_same_state(before, state_of(model))
