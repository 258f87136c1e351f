"""Claims about plans: the same numbers, and nothing compiled twice."""

import itertools
import json
import os

import forked
import numpy as np
import pytest

from accumtrainer import Accumulation, Callback, Trainer
from accumtrainer.keras_api import BACKEND, keras, ops
from accumtrainer.steps import choose_plan, make_backend
from accumtrainer.steps.plan import COMPILER

X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, size=22)


class Applied(Callback):
    """Keeps the logs of every window."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_apply(self, update, logs=None):
        self.logs.append(dict(logs))


def numbers(variable):
    """Copy a variable's values to the host."""
    return np.array(ops.convert_to_numpy(variable))


def dense():
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def normalized():
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Dense(5, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def dropped():
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Dense(8),
            keras.layers.Dropout(0.5, seed=3),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def regularized():
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Dense(
                5, kernel_regularizer="l2", activity_regularizer="l2"
            ),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


def convolutional():
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Reshape([6, 1]),
            keras.layers.Conv1D(4, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )


class AllHooks(Trainer):
    """Draws, tracks, logs and changes something in every hook."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.count = self.track(keras.Variable(0.0, name="count"))

    def on_micro_batch(self, batch, info):
        noise = keras.random.uniform(ops.shape(batch.x), seed=self.rng)
        return batch._replace(x=batch.x + 0.1 * noise)

    def on_accumulate(self, gradients, info):
        self.log("index", info.index, reduce="sum")
        self.count.assign(self.count + 1.0)
        return [
            g * (1.0 + 0.1 * ops.cast(info.is_last, g.dtype)) for g in gradients
        ]

    def on_apply(self, gradients, info):
        keep = keras.random.uniform((), seed=self.rng)
        return [g * keep for g in gradients]

    def after_apply(self, info):
        self.count.assign(self.count + 100.0)


def train(make_model, cls=Trainer, **options):
    """Train by the plan in use, and return everything that changed."""
    keras.utils.set_random_seed(0)
    applied = Applied()
    fitting = {
        name: options.pop(name)
        for name in ("sample_weight", "batch_size", "epochs")
        if name in options
    }
    options = {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        "accumulation": 4,
        "seed": 5,
    } | options
    trainer = cls(make_model(), callbacks=[applied], **options)
    history = trainer.fit(
        X, Y, **({"batch_size": 3, "epochs": 2, "verbose": 0} | fitting)
    )
    state = [numbers(v) for v in [*trainer.model.variables, *trainer._tracked]]
    return state, applied.logs, history.history


@pytest.mark.parametrize(
    ("make_model", "options"),
    [
        pytest.param(dense, {}, id="dense"),
        pytest.param(normalized, {}, id="batch-normalization"),
        pytest.param(dropped, {}, id="dropout"),
        pytest.param(regularized, {}, id="regularizers"),
        pytest.param(convolutional, {}, id="convolution"),
        pytest.param(
            dense, {"sample_weight": np.linspace(0, 2, 22)}, id="weights"
        ),
        pytest.param(dense, {"cls": AllHooks}, id="hooks"),
        pytest.param(
            dense,
            {"accumulation": Accumulation(steps=4, combine="mean")},
            id="mean",
        ),
        pytest.param(
            dense,
            {"accumulation": Accumulation(steps=4, combine="sum")},
            id="sum",
        ),
        pytest.param(
            dense,
            {"accumulation": Accumulation(micro_batch_size=2), "batch_size": 8},
            id="slices",
        ),
    ],
)
def test_fused_and_streamed_give_the_same_numbers(
    use_plan, make_model, options
):
    made = {}
    for name in ("fused", "streamed"):
        use_plan(name)
        made[name] = train(make_model, **options)
    (state, logs, history), (other_state, other_logs, other_history) = (
        made.values()
    )
    for one, other in zip(state, other_state, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert len(logs) == len(other_logs) > 2
    for one, other in zip(
        [*logs, history], [*other_logs, other_history], strict=True
    ):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(
                one[name], other[name], rtol=1e-4, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_xla_changes_nothing_but_rounding(use_plan, plan):
    made = {}
    for jit_compile in (False, True):
        use_plan(plan, jit_compile=jit_compile)
        made[jit_compile], _, _ = train(normalized)
    for one, other in zip(*made.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_finite", [True, False])
def test_xla_applies_a_large_gradient_or_puts_all_back(is_finite):
    # Where XLA adds up the squares of a gradient row by row, and some remain.
    model = keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(311),
            keras.layers.Dense(997, use_bias=False),
        ]
    )
    trainer = Trainer(
        model,
        optimizer=keras.optimizers.SGD(1.0),
        loss="mse",
        metrics=["mae"],
        accumulation=2,
        jit_compile=True,
    )
    y = np.zeros([6, 997], "float32")
    y[4] = 1.0 if is_finite else np.inf
    before = [numbers(v) for v in model.variables]
    logs = Applied()
    trainer.fit(X[:6], y, batch_size=3, verbose=0, callbacks=[logs])
    changes = {
        v.path: numbers(v) - old
        for v, old in zip(model.variables, before, strict=True)
    }
    assert trainer.progress.updates == is_finite
    if not is_finite:
        assert not any(np.any(change) for change in changes.values())
        return
    assert all(np.any(change) for change in changes.values())
    squares = [
        np.sum(np.square(changes[v.path], dtype="float64"))
        for v in model.trainable_variables
    ]
    norm = np.sqrt(sum(squares))
    (window,) = logs.logs
    assert window["gradient_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_equal_windows_are_traced_once(use_plan, plan):
    use_plan(plan)
    # On PyTorch what fills a list in every call is never recorded.
    accumulated, applied = itertools.count(), itertools.count()

    class Traced(Trainer):
        def on_accumulate(self, gradients, info):
            next(accumulated)
            return gradients

        def on_apply(self, gradients, info):
            next(applied)
            return gradients

    trainer = Traced(dense(), optimizer="sgd", loss=LOSS, accumulation=2)
    # Who may look at weights and change them, and does not, changes nothing.
    look = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: None)
    trainer.fit(X[:6], Y[:6], batch_size=3, verbose=0, callbacks=[look])
    assert next(applied) == 2  # the survey, and the step
    made = next(accumulated)
    trainer.fit(X[:18], Y[:18], batch_size=3, epochs=2, verbose=0)
    trainer.train_on_batch(X[:6], Y[:6])
    assert next(applied) == 2 + 1
    assert next(accumulated) == made + 1


def test_windows_of_many_sizes_are_traced_no_more_than_needed(use_plan):
    use_plan("streamed")
    traced = itertools.count()

    class Traced(Trainer):
        def on_accumulate(self, gradients, info):
            next(traced)
            return gradients

    def batches(*sizes):
        return [(X[:size], Y[:size]) for size in sizes]

    trainer = Traced(dense(), optimizer="sgd", loss=LOSS, accumulation=3)
    trainer.fit(batches(3, 1, 2, 2, 1, 3), verbose=0)
    survey = 1
    # TensorFlow has one program for all sizes, others one for each.
    expected = 1 if BACKEND == "tensorflow" else 3
    assert next(traced) - survey == expected


LOSS = "sparse_categorical_crossentropy"


# Compilations, counted by what XLA writes down of each.

STORY = """
import json
import os
import sys

import numpy as np

from accumtrainer import Trainer
from accumtrainer.training import engine as engine_module
from accumtrainer.keras_api import keras
from accumtrainer.steps import Plan

directory, plan = sys.argv[1:]
chosen = Plan(name=plan, jit_compile=True)
engine_module.choose_plan = lambda *args, **options: chosen


def data(samples):
    x = np.random.default_rng(0).normal(size=(samples, 6)).astype("float32")
    return x, x[:, :1]


def batches(sizes):
    for size in sizes:
        yield data(size)


def count(run, *args, **options):
    before = len(written())
    run(*args, **options)
    return len(written()) - before


def written():
    names = os.listdir(directory)
    return [name for name in names if name.endswith("before_optimizations.txt")]


model = keras.Sequential([keras.Input([6]), keras.layers.Dense(1)])
trainer = Trainer(
    model, optimizer="adam", loss="mse", accumulation=4, jit_compile=True
)
shown = {"batch_size": 2, "verbose": 0}
sizes = [3, 5, 2, 4]
counts = {
    "first window": count(trainer.fit, *data(8), **shown),
    "second window": count(trainer.fit, *data(8), **shown),
    "many windows": count(trainer.fit, *data(80), epochs=2, **shown),
    "train_on_batch": count(trainer.train_on_batch, *data(8)),
    "first tail": count(trainer.fit, *data(11), **shown),
    "second tail": count(trainer.fit, *data(11), epochs=2, **shown),
    "uneven": count(trainer.fit, batches(sizes * 2), verbose=0),
    "other order": count(trainer.fit, batches(sizes[::-1] * 2), verbose=0),
    "other mixture": count(trainer.fit, batches([2, 2, 5, 4]), verbose=0),
    "first evaluation": count(trainer.evaluate, *data(8), verbose=0),
    "second evaluation": count(trainer.evaluate, *data(8), verbose=0),
    "first prediction": count(trainer.predict, data(8)[0], verbose=0),
    "second prediction": count(trainer.predict, data(8)[0], verbose=0),
}
print(json.dumps(counts))
"""


@pytest.fixture(scope="module", params=["fused", "streamed"])
def compilations(request, tmp_path_factory):
    """Give the number of programs that XLA compiled in each part of a run."""
    if BACKEND == "torch":
        pytest.skip("PyTorch has no XLA; tests/steps/test_torch.py counts")
    directory = tmp_path_factory.mktemp("xla")
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_dump_to={directory}",
        "KERAS_BACKEND": BACKEND,
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = forked.run(["-c", STORY, directory, request.param], environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_second_window_of_a_shape_compiles_nothing(compilations):
    assert compilations["first window"] > 0
    assert compilations["second window"] == 0
    assert compilations["many windows"] == 0
    assert compilations["train_on_batch"] == 0


def test_tail_compiles_one_program_per_batch_shape_and_one_apply(compilations):
    """The tail has micro-batches of 2 and of 1."""
    assert 0 < compilations["first tail"] <= 2 + 1
    assert compilations["second tail"] == 0


def test_uneven_windows_compile_one_program_per_batch_shape(compilations):
    """The sizes are 2, 3, 4 and 5; what applies them is there already."""
    assert 0 < compilations["uneven"] <= 4
    assert compilations["other order"] == 0
    assert compilations["other mixture"] == 0


def test_evaluation_compiles_nothing_the_second_time(compilations):
    assert compilations["first evaluation"] > 0
    assert compilations["second evaluation"] == 0


def test_prediction_compiles_nothing_the_second_time(compilations):
    assert compilations["first prediction"] > 0
    assert compilations["second prediction"] == 0


# The choice.


@pytest.fixture
def choose(monkeypatch):
    """Give a function that chooses a plan, with an accelerator or without."""

    def choose(operations, model=None, *, has_accelerator=False, **options):
        backend = make_backend()
        monkeypatch.setattr(backend, "has_accelerator", lambda: has_accelerator)
        options = {"jit_compile": "auto", "run_eagerly": False} | options
        plan = choose_plan(model or dense(), operations, backend, **options)
        return str(plan)

    return choose


PLANS = {
    "tensorflow": [
        ({"MatMul"}, False, "fused, XLA"),
        ({"MatMul", "Conv2D"}, False, "fused"),
        ({"MatMul", "Conv2D"}, True, "fused, XLA"),
    ],
    "jax": [
        ({"dot_general"}, False, "fused, XLA"),
        ({"conv_general_dilated"}, False, "streamed, XLA"),
        ({"conv_general_dilated"}, True, "fused, XLA"),
    ],
    "torch": [
        ({"mm"}, False, "fused"),
        ({"convolution"}, False, "fused"),
        ({"convolution"}, True, "fused"),
    ],
}


@pytest.mark.parametrize(
    ("operations", "has_accelerator", "plan"), PLANS[BACKEND]
)
def test_plan_is_chosen_by_device_and_model(
    choose, operations, has_accelerator, plan
):
    assert choose(operations, has_accelerator=has_accelerator) == plan


@pytest.mark.parametrize("jit_compile", [True, False])
def test_wish_for_xla_is_granted(choose, jit_compile):
    plan = choose({"Conv2D"}, jit_compile=jit_compile)
    assert (COMPILER in plan) == jit_compile


def test_layer_that_xla_cannot_compile_switches_it_off(choose):
    model = dense()
    model.layers[0].supports_jit = False
    # On JAX XLA is what compiles at all.
    plan = "fused, XLA" if BACKEND == "jax" else "fused"
    assert choose({"MatMul"}, model) == plan


def test_eager_run_is_said_to_be_one(choose):
    assert choose({"MatMul"}, run_eagerly=True).endswith("eager")


class Projection(keras.layers.Layer):
    """Projects by numbers that a constant draws anew each time."""

    def call(self, x):
        return x @ keras.random.normal((5, 5), seed=4)


def test_constant_seed_draws_the_same_in_training_and_evaluation():
    model = keras.Sequential(
        [keras.Input([5]), Projection(), keras.layers.Dense(1)]
    )
    trainer = Trainer(model, keras.optimizers.SGD(0.0), "mse", seed=0)
    x = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
    y = x[:, :1]
    logs = trainer.fit(x, y, batch_size=8, verbose=0).history
    expected = np.mean((keras.ops.convert_to_numpy(model(x)) - y) ** 2)
    np.testing.assert_allclose(logs["loss"], [expected], rtol=1e-5)
    evaluated = trainer.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(evaluated, expected, rtol=1e-5)
