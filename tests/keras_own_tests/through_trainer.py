"""Run the tests that come with Keras through a `Trainer`.

A plugin of pytest. The tests call `fit`, `evaluate`, `predict` and
`train_on_batch` of a model; in this process a Trainer does these, one that is
made for the model as it was compiled. What may fail then stands in
`may_fail.py`, and nothing else may:

    make test-keras_own-jax

does that, with batches of one micro-batch each and with batches that are cut
(`--micro-batch-size`).
"""

import functools
import importlib.util
import os
import re
import sys
import types
from pathlib import Path

from xla_flags import quick_flags

# Keras reads its backend once, when it is first imported.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# Compiling takes longer than what it is for; JAX keeps it for the next run.
os.environ |= {
    "JAX_COMPILATION_CACHE_DIR": str(Path(".pytest_cache/jax").absolute()),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
os.environ.setdefault("XLA_FLAGS", quick_flags())

import keras
import pytest
from divided import is_due, keep, leave_to_others, one_in
from may_fail import MAY_FAIL, WRITTEN_FOR

from accumtrainer import Accumulation, Trainer

BACKEND = keras.backend.backend()
PLACE = Path(keras.__file__).parent / "src"

MARKERS = ("requires_trainable_backend", "multi_device")
"""What Keras's own configuration of pytest, not installed, would know."""

THROUGH_TRAINER = ("fit", "evaluate", "predict", "train_on_batch")

trainers = {}


def pytest_addoption(parser):
    """Let the command line say into what batches are cut."""
    parser.addoption("--micro-batch-size", type=int, default=None)


def pytest_configure(config):
    """Put Trainers into the place of Keras's own loops."""
    for name in MARKERS:
        config.addinivalue_line("markers", name)
    # The tests were not written for warnings that are errors.
    config.addinivalue_line("filterwarnings", "default")
    sys.modules["conftest"] = make_conftest()
    size = config.getoption("micro_batch_size")
    accumulation = Accumulation(micro_batch_size=size) if size else 1
    for name in THROUGH_TRAINER:
        setattr(keras.Model, name, through_trainer(name, accumulation))
    # Where it is defined, since Keras asks whether a class overrides it.
    owner = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    owner.compile = forgetting_trainer(owner.compile)
    make_models_of_trainable_layers()


def make_conftest():
    """Make what tests import from Keras's `conftest.py`, not installed."""
    conftest = types.ModuleType("conftest")
    conftest.skip_if_backend = lambda name, reason: pytest.mark.skipif(
        name == BACKEND, reason=reason
    )
    return conftest


def pytest_report_header(config):
    """Say what this run is about."""
    size = config.getoption("micro_batch_size")
    return (
        f"Tests of Keras {keras.__version__} on {BACKEND}, through a Trainer; "
        f"micro-batches of {size or 'a whole batch'}"
    )


def through_trainer(name, accumulation):
    """Make a method of `keras.Model` that has a Trainer do its work."""

    @functools.wraps(getattr(keras.Model, name))
    def method(model, *args, **kwargs):
        if model not in trainers:
            trainers[model] = make_trainer(model, accumulation)
        return getattr(trainers[model], name)(*args, **kwargs)

    return method


def make_trainer(model, accumulation):
    """Make a Trainer for a model as it is."""
    options = {"accumulation": accumulation}
    if BACKEND == "tensorflow":
        # XLA takes longer to compile than these models to train.
        options["jit_compile"] = False
    if not model.compiled:
        # To predict, which Keras's models do without.
        options |= {"optimizer": "sgd", "loss": "mse"}
    return Trainer(model, **options)


def forgetting_trainer(compile_model):
    """Have a model that is compiled anew get a new Trainer."""

    @functools.wraps(compile_model)
    def method(model, *args, **kwargs):
        trainers.pop(model, None)
        return compile_model(model, *args, **kwargs)

    return method


def make_models_of_trainable_layers():
    """Make models of the layers into which tests mix a private class.

    Some tests build their models of a layer and the private base of
    `keras.Model` that trains. A Trainer takes models, so they get a model in
    its place, of which the layer decides as much as before.
    """
    base = keras.Model.__bases__[0]

    class TrainableLayer(keras.Model):
        layers = ()  # which a model reserves, and a layer does not

        def __init__(self):
            base.__init__(self)

        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            mro = cls.__mro__
            layers = mro[mro.index(keras.Model) : mro.index(keras.Layer)]
            for layer in reversed(layers):
                if issubclass(layer, keras.Layer) and layer is not keras.Model:
                    inherit(cls, layer)

    def inherit(cls, layer):
        """Prefer what a layer defines to what `keras.Model` does."""
        for name, value in vars(layer).items():
            if not name.startswith("__") and name not in vars(cls):
                setattr(cls, name, value)

    TrainableLayer.__name__ = base.__name__
    setattr(sys.modules[base.__module__], base.__name__, TrainableLayer)


def pytest_collection_modifyitems(config, items):
    """Expect the tests of the list to fail, and no others.

    Raises:
        pytest.UsageError: the list names a test that there is not.
    """
    is_cut = config.getoption("micro_batch_size") is not None
    concerned = [
        entry
        for entry in MAY_FAIL
        if entry.concerns(backend=BACKEND, is_cut=is_cut)
    ]
    found = set()
    for item in items:
        file = item.path.relative_to(PLACE).as_posix()
        for entry in concerned:
            pattern = entry.find(item.name) if entry.file == file else None
            if pattern is not None:
                found.add((file, pattern))
                mark = pytest.mark.xfail(reason=entry.reason, strict=True)
                item.add_marker(mark)
    if not config.getoption("keyword"):
        check_all_found(concerned, found, items)
    keep(config, items, {i.nodeid for i in items if runs_so(i, is_cut)})
    # The tests of a file are divided among the backends.
    leave_to_others(config, items, lambda item: item.path.name, BACKEND)


def runs_so(item, is_cut):
    """Say whether a test runs at this commit with batches cut, or whole."""
    way = "cut" if is_cut else "whole"
    return is_due(f"{item.nodeid} {way}", one_in())


def check_all_found(entries, found, items):
    """Refuse patterns of a file that name none of its tests."""
    files = {item.path.relative_to(PLACE).as_posix() for item in items}
    unknown = [
        (entry.file, pattern)
        for entry in entries
        for pattern in entry.tests
        if entry.file in files and (entry.file, pattern) not in found
    ]
    # Another version of Keras has other tests.
    if unknown and keras.__version__ == WRITTEN_FOR:
        raise pytest.UsageError(
            f"may_fail.py must name tests of Keras {WRITTEN_FOR}. Received: "
            f"{unknown}. Take out what is not there."
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Skip a test that needs a package which is not installed."""
    report = yield
    if report.failed and call.excinfo is not None:
        skip_if_absent(report, str(call.excinfo.value), item.location)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skip a file of tests that needs such a package."""
    report = yield
    if report.failed:
        skip_if_absent(
            report, str(report.longrepr), (str(collector.path), 1, "")
        )
    return report


def skip_if_absent(report, message, location):
    """Make a failure a skip where nothing but a package was missing."""
    found = re.search(r"No module named '(\w+)", message)
    if found and importlib.util.find_spec(found[1]) is None:
        report.outcome = "skipped"
        file, line, _ = location
        report.longrepr = (file, line, f"{found[1]} is not installed")


def pytest_runtest_teardown():
    """Forget the Trainers of a test, which hold their models."""
    trainers.clear()
