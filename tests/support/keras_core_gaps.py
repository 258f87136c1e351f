"""What Keras Core lacks, so that a test about it is skipped with the reason.

A test whose claim is not true of Keras Core is marked with `keras_3_only`.
Where another one asks Keras Core for something it does not have, the error
says so in one of the ways below, and the test is skipped, printing it. Every
other failure stays a failure. `test_keras_core.py` tests the refusals.
"""

import re
import traceback
from pathlib import Path

import pytest

from accumtrainer import errors
from accumtrainer.keras_api import KERAS_NAME

TESTS = Path(__file__).parents[1]

# Errors of Keras Core itself, about what Keras 3 can do.
LACKING = (
    "Invalid value for argument `reduction`",
    "Expected `loss_weights` argument to be a list, tuple, or dict",
    # Adafactor cannot be built, for one reason or another.
    "BaseOptimizer.add_variable() missing",
    'can only concatenate tuple (not "int") to tuple',
    "`np.Inf` was removed in the NumPy 2.0 release",  # some callbacks use it
)

# A name that is missing, as Python says it.
MISSING = r"module 'keras_core[\w.]*' has no attribute '\w+'"

REFUSALS = (
    errors.KERAS_CORE_CONSTRAINT,
    errors.KERAS_CORE_EMA,
    errors.KERAS_CORE_MASK,
    errors.KERAS_CORE_PAIRING,
    errors.KERAS_CORE_PENALTY,
)


def keras_3_only(reason):
    """Mark a test that does not hold with Keras Core, saying why not."""
    return pytest.mark.skipif(
        KERAS_NAME != "keras", reason=f"Keras Core: it {reason}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test that asks for what Keras Core lacks."""
    try:
        return (yield)
    except Exception as error:
        reason = lacking(error)
        if reason is None:
            raise
        pytest.skip(f"Keras Core: {reason}")


def lacking(error):
    """Return what an error says Keras Core lacks, or `None` for any other."""
    message = str(error)
    if isinstance(error, AttributeError) and is_raised_by_a_test(error):
        found = re.search(MISSING, message)
        return found and found[0]
    if isinstance(error, ValueError | TypeError | AttributeError):
        beginnings = (*LACKING, *(r.partition("{")[0] for r in REFUSALS))
        if message.startswith(beginnings):
            return message.partition(". ")[0]
    return None


def is_raised_by_a_test(error):
    """Return whether a name was missing in a test, and not in the package."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return TESTS in Path(last.filename).parents
