"""What every test starts from: a backend, fixed seeds, float32."""

import os

# Keras reads its backend once, when it is first imported.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from importlib import metadata

import hypothesis
import numpy as np
import pytest

from accumtrainer.keras_api import BACKEND, keras

# The first example of a test may compile, which no deadline foresees; and a
# run of the suite shall not depend on luck.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("suite")


def pytest_report_header():
    """Say which backend and which versions this run is about."""
    names = ("keras", BACKEND, "numpy")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return f"KERAS_BACKEND={BACKEND}: {versions}"


@pytest.fixture
def rng():
    """Give the NumPy random generator that every test starts with alike."""
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def fresh_keras():
    """Seed Keras before each test, and restore the dtype policy after it."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
