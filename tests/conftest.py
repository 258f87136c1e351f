"""What every test starts from: a backend, fixed seeds, float32."""

import gc
import itertools
import logging
import os
import pathlib
import signal

from xla_flags import quick_flags

# Keras reads its backend once, when it is first imported.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# JAX then refuses to mix dtypes where the code does not say how, here and in
# every process that a test starts.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# Most models of the tests take longer to compile than to train. What JAX has
# compiled it keeps, for the tests after that and for the next run.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "jax"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("XLA_FLAGS", quick_flags())

from importlib import metadata

import hypothesis
import numpy as np
import pytest
import tracing
from divided import (
    leave_to_later,
    leave_to_others,
    one_in,
    test_of,
    tested_backends,
)

# What is started in the background is started deaf to Ctrl-C, of which some
# tests make use.
signal.signal(signal.SIGINT, signal.default_int_handler)

BACKEND = os.environ["KERAS_BACKEND"]
KERAS_NAME = os.environ.get("ACCUMTRAINER_KERAS", "keras")

if KERAS_NAME == "keras_core":
    from keras_core_contract import (
        pytest_collection_modifyitems,
    )
    from keras_core_gaps import pytest_runtest_call  # noqa: F401, a hook
else:

    def pytest_collection_modifyitems(config, items):
        """Order the tests, and choose those of this commit and backend.

        What takes long and would come last runs first: otherwise one of two
        workers waits for the other in the end.
        """
        late = ("test_window.py", "test_window_loss.py")
        items.sort(key=lambda item: item.path.name not in late)
        leave_to_later(config, items, sampled_test_of)
        leave_to_others(config, items, divided_test_of, BACKEND)


def sampled_test_of(item):
    """Give an item's test where a few of its cases are enough at a commit.

    What is marked `any_backend` asks little time, or each case is a claim.
    """
    is_any = item.get_closest_marker("any_backend")
    return None if is_any else test_of(item.nodeid)


def divided_test_of(item):
    """Give an item's test where one backend is enough for each of its cases.

    What some backends skip runs on all others, and what is about backends on
    each.
    """
    is_any = item.get_closest_marker("any_backend")
    is_own = item.path.parent.name == "steps" and not is_any
    if item.get_closest_marker("skipif") or is_own:
        return None
    return test_of(item.nodeid)


# The first example of a test may compile, which no deadline foresees; and a
# run of the suite shall not depend on luck.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("suite")


DEVICES = 4
"""Into how many devices the tests divide the processor."""


def pytest_sessionstart(session):
    """Set the backend up, but not where others run the tests.

    What leads them need not spend seconds on importing it.
    """
    runs_tests = not session.config.getoption("numprocesses", 0)
    if runs_tests or hasattr(session.config, "workerinput"):
        {
            "jax": set_up_jax,
            "tensorflow": set_up_tensorflow,
            "torch": set_up_torch,
        }[BACKEND]()


def set_up_jax():
    """Divide the processor."""
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)


def set_up_tensorflow():
    """Divide the processor, and leave programs as they are."""
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * DEVICES,
    )
    # Rewriting a program takes longer than a test then runs it.
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )
    tracing.leave_out_stacks()


def set_up_torch():
    """Leave the other cores to the tests beside these."""
    import torch

    from accumtrainer.steps.torch import source

    torch.set_num_threads(1)
    # The code that is compiled elsewhere takes seconds for every program.
    source.COMPILER = "aot_eager"
    # It tells of every tensor that is recorded, which pytest would keep.
    logging.getLogger("torch.__trace").disabled = True


TESTS_PER_LOOK = 20

# JAX keeps every program it has compiled for single operations, each in pieces
# of memory of its own. Linux gives a process 65,530 of them, and ends it when
# they are used up; a whole suite on one worker comes close.
MOST_PIECES = 20_000


def pytest_collection_finish():
    """Have garbage looked for only in what tests make, and more rarely.

    Otherwise a twentieth of the time goes into looking through the modules.
    """
    forget_what_lasts()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True, scope="session")
def tests_run():
    """Count the tests of this process."""
    return itertools.count(1)


@pytest.fixture(autouse=True)
def little_is_looked_through(tests_run):
    """Have garbage looked for in what few tests have made.

    Backends keep what they have traced. To look through that again and again
    takes a third of a suite's time.
    """
    yield
    if next(tests_run) % TESTS_PER_LOOK == 0:
        if BACKEND == "jax" and pieces() > MOST_PIECES:
            import jax

            gc.unfreeze()
            jax.clear_caches()
        forget_what_lasts()


def forget_what_lasts():
    """Look for garbage once, and then no more in what is left."""
    gc.collect()
    gc.freeze()


def pieces():
    """Count the pieces of this process's memory, 0 if nobody tells."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def pytest_report_header():
    """Say which backend and which versions this run is about."""
    names = (KERAS_NAME.replace("_", "-"), BACKEND, "numpy")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    lines = [f"KERAS_BACKEND={BACKEND}: {versions}"]
    others = [name for name in tested_backends(BACKEND) if name != BACKEND]
    if others:
        lines.append(f"What {', '.join(others)} run is left to them.")
    if one_in() > 1:
        lines.append(
            f"Of a test's cases one in {one_in()} runs at a commit, of those "
            "that take long fewer."
        )
    return lines


@pytest.fixture
def rng():
    """Give the NumPy random generator that every test starts with alike."""
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def fresh_keras():
    """Seed Keras before each test, and restore the dtype policy after it."""
    from accumtrainer.keras_api import keras

    keras.utils.set_random_seed(0)
    yield
    keras.mixed_precision.set_dtype_policy("float32")


@pytest.fixture
def keras_may_promote():
    """Let JAX mix dtypes where Keras 3.15 itself relies on it.

    `ema_overwrite_frequency` multiplies float32 weights by int32, int4 layers
    float32 by int8, and KerasHub mixes more.
    """
    if BACKEND != "jax":
        yield
        return
    import jax

    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def without_xla(monkeypatch):
    """Have XLA compile nothing on TensorFlow but where a test asks for it.

    For tests whose subject is the same either way: windows compile in half of
    the time so, and TensorFlow keeps what XLA has compiled for good, some 10
    MiB for each Trainer.
    """
    if BACKEND == "tensorflow":
        from accumtrainer.steps import choose_plan
        from accumtrainer.training import engine

        def choose(*arguments, jit_compile, **options):
            jit_compile = False if jit_compile == "auto" else jit_compile
            return choose_plan(*arguments, jit_compile=jit_compile, **options)

        monkeypatch.setattr(engine, "choose_plan", choose)


@pytest.fixture
def use_plan(monkeypatch):
    """Give a function that has every Trainer run its windows by one plan."""
    from quickest import JIT_COMPILE

    from accumtrainer.steps import Plan
    from accumtrainer.training import engine

    def use(name, *, jit_compile=JIT_COMPILE):
        plan = Plan(name=name, jit_compile=jit_compile)
        monkeypatch.setattr(engine, "choose_plan", lambda *_, **__: plan)

    return use


@pytest.fixture
def away_from_wandb(monkeypatch, tmp_path):
    """Keep W&B from what is configured on this machine, and from its files."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
