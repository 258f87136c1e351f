"""Squares of large tensors, added up without being kept."""

import os

import keras
import numpy as np
import pytest

if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("It is for PyTorch's operations.", allow_module_level=True)

import torch
from recorded import agrees, make, names_of

from accumtrainer import Trainer
from accumtrainer.steps.torch.memory import TensorPeak
from accumtrainer.steps.torch.squares import MANY, ROW, sum_in_rows


def kernel():
    """Make one that lies in memory as convolutions read it."""
    lying = make(300, 100, 3, 3).contiguous(memory_format=torch.channels_last)
    return lying.permute(2, 3, 1, 0)


LARGE = {
    "rows": lambda: make(MANY // ROW, ROW),
    "rows and a rest": lambda: make(MANY + 3),
    "a kernel": kernel,
    "every other column": lambda: make(700, 900)[:, ::2],
    "one row many times": lambda: make(ROW + 1).expand(100, -1),
}


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE.keys())
def test_sum_agrees_with_one_in_float64(large):
    tensor = large()
    expected = torch.sum(torch.square(tensor.double())).item()
    assert sum_in_rows(tensor).item() == pytest.approx(expected, rel=1e-6)
    agrees(lambda tensors: [sum_in_rows(tensors[0])], tensor)


def test_sum_of_very_many_is_as_near():
    # One row of all of them would be off by 5e-4.
    tensor = make(3 * 2**22)
    expected = torch.sum(torch.square(tensor.double())).item()
    assert sum_in_rows(tensor).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, -1])
def test_number_that_is_not_finite_is_seen(number, place):
    tensor = make(MANY + 1)
    tensor[place] = number
    assert not torch.isfinite(sum_in_rows(tensor))


@pytest.mark.parametrize("large", [kernel, LARGE["rows and a rest"]])
def test_nothing_as_large_as_the_tensor_is_made(large):
    tensor = large()
    with TensorPeak() as peak:
        sum_in_rows(tensor)
    # Of what it is given it notes the memory too, which a view has.
    assert peak.bytes < 1.1 * tensor.nbytes
    names = names_of(lambda tensors: [sum_in_rows(tensors[0])], tensor)
    assert "linalg_vector_norm" in names
    assert "clone" not in names


def test_window_adds_up_a_large_gradient_so(monkeypatch):
    rows = []
    norm = torch.linalg.vector_norm
    monkeypatch.setattr(
        torch.linalg,
        "vector_norm",
        lambda x, **options: rows.append(x.shape[0]) or norm(x, **options),
    )
    model = keras.Sequential(
        [keras.Input([512]), keras.layers.Dense(512), keras.layers.Dense(1)]
    )
    trainer = Trainer(model, optimizer="sgd", loss="mse")
    x = np.ones([4, 512], "float32")
    trainer.fit(x, x[:, :1], batch_size=4, verbose=0)
    assert MANY // ROW in rows
