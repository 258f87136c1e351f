"""Claims about backends: each works alone, and both do the same."""

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import environments
import forked
import numpy as np
import pytest
from sequenced import small_trainer

from accumtrainer import Accumulation, Callback, Trainer
from accumtrainer.data.batches import ALIGNMENT, empty_for_device
from accumtrainer.keras_api import BACKEND, keras
from accumtrainer.steps import make_backend

RUN = Path(__file__).parent / "backend_run.py"

# Stands in front of a script that must get along without a package.
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
"""

FIT = """
import numpy as np
from accumtrainer import Callback, NonFiniteError, Trainer
from accumtrainer.observers.callback import HOOKS
from accumtrainer.keras_api import keras

model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
trainer = Trainer(model, optimizer="adam", loss="mse", accumulation=2)
x, y = np.ones([16, 3]), np.ones([16, 1])
trainer.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0)
trainer.predict(x, verbose=0)
print("updates", trainer.progress.updates)
"""


def run_fresh(arguments, env):
    """Run Python from its very beginning."""
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True
    )


def train(path, *options, backend=BACKEND):
    """Train the models of `RUN` on a backend, and return their weights."""
    run = forked.run if backend == BACKEND else run_fresh
    done = run(
        [str(argument) for argument in (RUN, path, *options)],
        environments.of_one_backend(backend=backend),
    )
    assert done.returncode == 0, done.stderr
    return np.load(path)


# An environment may have one backend only, and the suite runs in any.
INSTALLED = [n for n in ("tensorflow", "jax", "torch") if util.find_spec(n)]
needs_several_backends = pytest.mark.skipif(
    len(INSTALLED) < 2, reason="compares backends, of which one is installed"
)
# Such a test starts a process per backend, whichever is in use here.
once_is_enough = pytest.mark.skipif(
    BACKEND != INSTALLED[0],
    reason="runs all backends itself, so once is enough",
)


def assert_close(weights, others, model):
    """Compare the weights of a model that two runs have saved."""
    names = [name for name in weights if name.startswith(model)]
    largest = max(abs(weights[name]).max() for name in names)
    for name in names:
        difference = weights[name] - others[name]
        assert abs(difference).max() <= 1e-5 * largest, name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Give the weights of undisturbed runs, dict by backend."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        backend: train(folder / f"{backend}.npz", backend=backend)
        for backend in INSTALLED
    }


@needs_several_backends
@once_is_enough
def test_backends_agree_after_twenty_updates(whole):
    first, *others = whole.values()
    for other in others:
        assert set(other) == set(first)
        for model in ("make_mlp", "make_conv", "make_transformer"):
            assert_close(other, first, model)


@needs_several_backends
@once_is_enough
@pytest.mark.parametrize(
    ("first", "second"),
    [*zip(INSTALLED, INSTALLED[1:] + INSTALLED[:1], strict=True)],
)
def test_run_of_one_backend_goes_on_with_the_other(
    tmp_path, whole, first, second
):
    saving = ("--checkpoints", tmp_path / "checkpoints")
    begun = train(
        tmp_path / "begun.npz", "--updates", 7, *saving, backend=first
    )
    with pytest.raises(AssertionError):
        assert_close(begun, whole[second], "make_mlp")
    gone_on = train(tmp_path / "gone_on.npz", *saving, backend=second)
    assert_close(gone_on, whole[second], "make_mlp")


@pytest.mark.parametrize("other", ["tensorflow", "jax", "torch"])
def test_backend_trains_without_the_other_one(other):
    if other == BACKEND:
        pytest.skip("is about the backend that is not in use")
    if BACKEND == "torch" and other == "tensorflow":
        pytest.skip("PyTorch looks for TensorFlow itself")
    code = BLOCK.format(package=other) + FIT
    done = run_fresh(["-c", code], os.environ)
    assert "updates 2" in done.stdout, done.stderr


def test_unsupported_backend_is_refused_with_the_supported_ones(monkeypatch):
    monkeypatch.setattr("accumtrainer.steps.BACKEND", "openvino")
    names = r"jax or tensorflow or torch.*'openvino'"
    with pytest.raises(ImportError, match=names):
        make_backend()


jax_only = pytest.mark.skipif(
    BACKEND != "jax",
    reason="is about arrays that JAX is given for good, or its tracers",
)


@jax_only
@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_training_keeps_no_tracers(plan, use_plan):
    import jax

    use_plan(plan)
    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    trainer = small_trainer()
    with jax.check_tracer_leaks(True):
        trainer.fit(x, y, batch_size=4, verbose=0, validation_data=(x, y))
        trainer.predict(x, verbose=0)
    assert trainer.progress.updates == 2


@jax_only
def test_window_moves_nothing_implicitly_between_host_and_device():
    import jax

    guarded = []

    class Guard(Callback):
        looks_at_model = False

        def on_train_batch_begin(self, batch, logs=None):
            jax.config.update("jax_transfer_guard", "disallow")

        def on_train_batch_end(self, batch, logs=None):
            jax.config.update("jax_transfer_guard", "allow")
            guarded.append(batch)

    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    trainer = small_trainer()
    try:
        trainer.fit(x, y, batch_size=4, callbacks=[Guard()], verbose=0)
    finally:
        jax.config.update("jax_transfer_guard", "allow")
    assert guarded == [0, 1]


@jax_only
def test_array_kept_by_a_callback_outlives_the_next_update():
    kept = []
    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    trainer = small_trainer()
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: kept.append(
            trainer.model.trainable_variables[0].value
        )
    )
    trainer.fit(x, y, batch_size=4, callbacks=[keep], verbose=0)
    first, second = map(np.asarray, kept)
    assert not np.array_equal(first, second)


@jax_only
def test_variables_may_share_an_array_when_training_begins():
    trainer = small_trainer()
    teacher = trainer.track(keras.Variable(np.zeros([3, 4], "float32")))
    teacher.assign(trainer.model.trainable_variables[0])
    before = np.asarray(teacher.value)
    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    trainer.fit(x, y, batch_size=4, verbose=0)
    np.testing.assert_array_equal(np.asarray(teacher.value), before)


@jax_only
def test_evaluation_returns_no_weights_it_has_only_read():
    trainer = small_trainer()
    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    trainer.fit(x, y, batch_size=4, verbose=0)
    before = [variable.value for variable in trainer.model.weights]
    trainer.evaluate(x, y, batch_size=4, verbose=0)
    trainer.predict(x, verbose=0)
    after = [variable.value for variable in trainer.model.weights]
    assert all(a is b for a, b in zip(before, after, strict=True))


@jax_only
def test_program_is_given_what_it_reads_and_nothing_else():
    import jax

    from accumtrainer.steps.jax.programs import (
        changed_positions,
        read_positions,
    )

    def program(variables, x):
        read, unused, added, copied_to, copied = variables
        return read * x, [read, unused, added + x, copied, copied]

    closed = jax.make_jaxpr(program)([1.0, 2.0, 3.0, 4.0, 5.0], 6.0)
    assert read_positions(closed, 5) == {0, 2, 4}
    assert changed_positions(closed, 5) == [2, 3]


def fit_lengths(trainer, lengths):
    """Train on micro-batches of sequences, two of each length."""
    trainer.fit(
        [
            (np.ones([2, length, 3], "float32"), np.ones([2, 1], "float32"))
            for length in lengths
            for _ in range(2)
        ],
        verbose=0,
    )


def sequence_trainer(accumulation):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input([None, 3]),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    return Trainer(
        model, optimizer="sgd", loss="mse", accumulation=accumulation
    )


@jax_only
@pytest.mark.parametrize(
    "accumulation",
    [pytest.param(2, id="fused"), pytest.param(4, id="streamed")],
)
def test_fourth_shape_is_warned_of_once_with_the_remedy(accumulation):
    trainer = sequence_trainer(accumulation)
    fit_lengths(trainer, [4, 5, 6, 4])
    with pytest.warns(UserWarning, match="fourth .* 7, 3.*buckets.*pad") as all:
        fit_lengths(trainer, [7, 4])
        fit_lengths(trainer, [8, 9, 10, 11])
    assert len(all) == 1


class OneVariable:
    """Stands for a program."""

    def __init__(self):
        self.variable = keras.Variable(np.ones([3], "float32"))
        self.all_variables = [self.variable]


def give_away(program):
    """Take what a program has, and give it to whoever destroys it."""
    from accumtrainer.steps.jax.programs import Holder

    holder = Holder(program, make_backend().replicas)
    holder.take()
    (given,) = holder.donate([0])
    return given.unsafe_buffer_pointer()


@jax_only
def test_array_that_nobody_keeps_is_given_away_as_it_is():
    program = OneVariable()
    before = program.variable.value.unsafe_buffer_pointer()
    assert give_away(program) == before


@jax_only
def test_array_that_host_code_keeps_is_not_given_away():
    program = OneVariable()
    kept = program.variable.value
    assert give_away(program) != kept.unsafe_buffer_pointer()


tensorflow_only = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="is about what TensorFlow does of its own"
)

MEMORY = empty_for_device((48,), np.dtype("float32"))
MEMORY[:] = np.arange(48)


@tensorflow_only
@pytest.mark.parametrize(
    "array",
    [
        MEMORY[:20].reshape(4, 5),
        MEMORY[1:21].reshape(4, 5),
        MEMORY[:40].reshape(4, 10)[:, ::2],
        np.broadcast_to(MEMORY[:5], [4, 5]),
        MEMORY[:20].astype(">i4").reshape(4, 5),
        MEMORY[:20].astype("int64").reshape(4, 5),
        MEMORY[:20].astype("float16").reshape(4, 5),
        MEMORY[:20].reshape(4, 5) > 3,
        MEMORY[:20].astype("S2").reshape(4, 5),
        np.float32(3),
    ],
    ids=lambda array: f"{array.dtype}{array.strides}",
)
def test_arrays_become_tensors_wherever_they_begin(array):
    from accumtrainer.steps.tensorflow.programs import to_tensor

    tensor = to_tensor(array)
    assert tensor.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(tensor.numpy(), array)
    if array.dtype.kind in "iuf":
        # Arithmetic insists on memory that begins well, or ends the process.
        np.testing.assert_array_equal((tensor + tensor).numpy(), array + array)


@pytest.mark.parametrize("jit_compile", [True, False])
@pytest.mark.parametrize("size", [32, 128])
def test_window_whose_memory_a_device_shares_is_left_as_it_is(
    rng, size, jit_compile
):
    x = rng.normal(size=[256, 512]).astype("float32")
    layers = [keras.layers.Rescaling(2.0), keras.layers.Dense(1)]
    trainer = Trainer(
        keras.Sequential([keras.Input([512]), *layers]),
        optimizer="sgd",
        loss="mse",
        accumulation=Accumulation(micro_batch_size=size),
        jit_compile=jit_compile,
    )
    trainer.fit(x, x[:, :1], batch_size=128, shuffle=False, verbose=0)
    received = trainer.last_window.stacked.x
    assert received.ctypes.data % ALIGNMENT == 0
    np.testing.assert_array_equal(received.reshape(x[128:].shape), x[128:])


@tensorflow_only
def test_many_shapes_are_no_matter_on_tensorflow():
    fit_lengths(sequence_trainer(4), [4, 5, 6, 7, 8, 9])
