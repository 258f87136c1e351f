"""Random programs end as with plain Keras.

`make fuzz` runs many more of them; see `tests/support/fuzz`.
"""

import pytest
from fuzz.programs import case_of
from fuzz.run import run

CASES = 360


@pytest.mark.parametrize("seed", range(CASES))
def test_random_program_trains_as_in_keras(seed):
    result = run(seed)
    if result.verdict == "untold":
        pytest.skip(f"Keras cannot train it: {result.text[-200:]}")
    if result.verdict != "same":
        print(result.case.program)
    assert result.verdict == "same", result.text


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_seed_always_draws_the_same_program(backend):
    assert case_of(3, backend) == case_of(3, backend)
    assert case_of(3, backend) != case_of(4, backend)
