"""Claims about settings that follow the size of an update."""

import numpy as np
import pytest

from accumtrainer import beta_for_batch


def half_life(beta, batch_size):
    """Count the samples after which half is forgotten."""
    return batch_size * np.log(0.5) / np.log(beta)


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.999])
@pytest.mark.parametrize("batch_size", [1, 32, 100, 4096])
def test_half_life_in_samples_stays(beta, batch_size):
    scaled = beta_for_batch(beta, batch_size=batch_size, reference=32)
    assert half_life(scaled, batch_size) == pytest.approx(half_life(beta, 32))


def test_same_size_keeps_beta():
    assert beta_for_batch(0.999, batch_size=64, reference=64) == 0.999


def test_average_of_one_update_stays_one():
    assert beta_for_batch(0.0, batch_size=8, reference=64) == 0.0


@pytest.mark.parametrize("beta", [1.0, -0.1, float("nan")])
def test_beta_out_of_range_is_refused(beta):
    with pytest.raises(ValueError, match="beta must be at least 0"):
        beta_for_batch(beta, batch_size=8, reference=8)


@pytest.mark.parametrize("name", ["batch_size", "reference"])
@pytest.mark.parametrize("size", [0, -4])
def test_sizes_that_are_not_above_zero_are_refused(name, size):
    sizes = {"batch_size": 8, "reference": 8} | {name: size}
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        beta_for_batch(0.9, **sizes)
