"""Claims about what a range test suggests, prints and draws."""

import sys

import numpy as np
import pytest

from accumtrainer import RangeTest

RATES = np.geomspace(1e-6, 1.0, 61)


def make_test(losses, *, smoothing=0.5, **options):
    return RangeTest(
        learning_rates=tuple(RATES[: len(losses)].tolist()),
        losses=tuple(map(float, losses)),
        smoothing=smoothing,
        ended_by="updates",
        **options,
    )


def falling_at(rate, noise=0.0):
    """Make losses that fall at one rate, and rise at a hundred times that."""
    steps = np.log10(RATES / rate)
    losses = 2 - np.tanh(2 * steps) + 10.0 ** (4 * (steps - 2))
    return losses + np.random.default_rng(0).normal(scale=noise, size=61)


@pytest.mark.parametrize("smoothing", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("rate", [1e-4, 1e-3])
def test_the_rate_of_the_steepest_fall_is_suggested(rate, smoothing):
    found = make_test(falling_at(rate), smoothing=smoothing)
    assert rate / 2 < found.suggestion < 2 * rate


def test_noise_does_not_move_the_suggestion_far():
    found = make_test(falling_at(1e-3, noise=0.1), smoothing=0.8)
    assert 3e-4 < found.suggestion < 3e-3


def test_a_fall_after_the_lowest_loss_suggests_nothing():
    losses = falling_at(1e-4)
    losses[-5:] = [50.0, 100.0, 40.0, 20.0, 10.0]
    assert make_test(losses).suggestion < 1e-3


@pytest.mark.parametrize("losses", [[], [1.0], [1.0, 0.5], range(20)])
def test_too_few_losses_or_rising_ones_suggest_nothing(losses):
    found = make_test(losses)
    assert found.suggestion is None
    assert "suggest" not in str(found).replace("No suggestion", "")


def test_what_is_printed_names_each_of_several_optimizers():
    found = make_test(falling_at(1e-3), shares={"head": 1.0, "base": 0.1})
    printed = str(found)
    assert f"of head, {found.suggestion:.1e}" in printed
    assert f"of base, {found.suggestion / 10:.1e}" in printed


@pytest.mark.parametrize("losses", [falling_at(1e-3), [1.0, 1.0, 1.0], []])
def test_a_picture_is_drawn_without_pyplot(losses, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    path = tmp_path / "pictures" / "range.png"
    make_test(losses).plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"accumtrainer\[plot\]"):
        make_test(falling_at(1e-3)).plot(tmp_path / "range.png")
