"""Tests for Keras's Adam, in whose place PyTorch's own operation is put."""

import os

import numpy as np
import pytest

if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("It records with PyTorch.", allow_module_level=True)

import keras
import torch
from recorded import agrees, make

from accumtrainer import Trainer
from accumtrainer.steps.torch import adam as module
from accumtrainer.steps.torch.adam import adam


@pytest.fixture
def updated(monkeypatch):
    """Return a list of how many variables PyTorch's operation updated."""
    counts = []
    own = module.OWN

    def count(variables, *arguments, **options):
        counts.append(len(variables))
        own(variables, *arguments, **options)

    monkeypatch.setattr(module, "OWN", count)
    return counts


def make_update(beta_1=0.9, kept=0.1, subtracted=-1):
    """Make a function that updates two variables, as Keras writes it."""

    def update(tensors):
        variables, gradients, means, squares = (
            tensors[i : i + 2] for i in range(0, 8, 2)
        )
        rate = tensors[8] * 0.5
        torch._foreach_mul_(means, beta_1)
        torch._foreach_add_(means, gradients, alpha=kept)
        torch._foreach_mul_(squares, 0.99)
        products = torch._foreach_mul(gradients, gradients)
        torch._foreach_add_(squares, products, alpha=1 - 0.99)
        steps = torch._foreach_mul(means, rate)
        roots = torch._foreach_add(torch._foreach_sqrt(squares), 1e-3)
        quotients = torch._foreach_div(steps, roots)
        torch._foreach_add_(variables, quotients, alpha=subtracted)
        return []

    return update


def make_tensors(dtype=torch.float32, turned=()):
    """Make what an update takes, some of it lying in memory the other way."""
    tensors = [make(3, 4) + i for i in range(8)]
    tensors[6:] = [tensor**2 for tensor in tensors[6:]]
    for place in turned:
        tensors[place] = tensors[place].t().contiguous().t()
    return [*(t.to(dtype) for t in tensors), torch.tensor(0.01, dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pytorchs_operation_is_in_the_place_of_kerass(updated, dtype):
    update = make_update(kept=1 - 0.9)
    agrees(update, *make_tensors(dtype))
    assert updated == [2, 2]


@pytest.mark.parametrize(
    "turned, count",
    [((0, 2, 4, 6), 2), ((2,), 2), ((0,), 1), ((5,), 1), ((4, 7), 0)],
)
def test_memory_may_lie_in_any_order(updated, turned, count):
    tensors = make_tensors(turned=turned)
    expected = [tensor.clone() for tensor in tensors]
    make_update(kept=1 - 0.9)(expected)
    columns = [tensors[i : i + 2] for i in range(0, 8, 2)]
    adam(*columns, tensors[8] * 0.5, 0.9, 0.99, 1e-3)
    for ours, own in zip(tensors, expected, strict=True):
        torch.testing.assert_close(ours, own)
    assert sum(updated) == count


def test_variable_with_gaps_in_its_memory_leaves_them_alone():
    whole = make(3, 8)
    columns = [
        [whole[:, ::2]],
        [make(3, 4)],
        *([w[:, ::2]] for w in (whole * 0, whole * 0)),
    ]
    before = whole.clone()
    adam(*columns, torch.tensor(0.01), 0.9, 0.99, 1e-3)
    assert torch.equal(whole[:, 1::2], before[:, 1::2])
    assert not torch.equal(whole[:, ::2], before[:, ::2])


@pytest.mark.parametrize(
    "options", [{"kept": 0.2}, {"subtracted": 1}, {"beta_1": 1.0, "kept": 0.0}]
)
def test_another_formula_stays(updated, options):
    agrees(make_update(**{"kept": 1 - 0.9, **options}), *make_tensors())
    assert not updated


def test_lists_that_share_memory_stay(updated):
    update = make_update(kept=1 - 0.9)

    def shared(tensors):
        variables, *others = tensors[:2], *tensors[2:]
        update([*variables, *variables, *others[2:]])
        return []

    agrees(shared, *make_tensors())
    assert not updated


def test_steps_that_something_else_reads_stay(updated):
    def read(tensors):
        variables, gradients, means, squares = (
            [tensors[i]] for i in range(0, 8, 2)
        )
        torch._foreach_mul_(means, 0.9)
        torch._foreach_add_(means, gradients, alpha=1 - 0.9)
        torch._foreach_mul_(squares, 0.99)
        products = torch._foreach_mul(gradients, gradients)
        torch._foreach_add_(squares, products, alpha=1 - 0.99)
        steps = torch._foreach_mul(means, tensors[8])
        roots = torch._foreach_add(torch._foreach_sqrt(squares), 1e-3)
        quotients = torch._foreach_div(steps, roots)
        torch._foreach_add_(variables, quotients, alpha=-1)
        return steps

    agrees(read, *make_tensors())
    assert not updated


MODELS = {
    "dense": lambda: [keras.layers.Dense(5), keras.layers.Dense(1)],
    "kernels": lambda: [
        keras.layers.Reshape([4, 4, 1]),
        keras.layers.Conv2D(3, 2),
        keras.layers.Conv2D(2, 2),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ],
}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize(
    "name, options",
    [
        ("Adam", {}),
        ("Adam", {"clipnorm": 0.1, "use_ema": True, "ema_momentum": 0.9}),
        ("AdamW", {"weight_decay": 0.1, "beta_1": 0.0}),
    ],
)
def test_keras_trains_to_the_same_weights(updated, layers, name, options, k):
    x = np.random.default_rng(0).normal(size=[24, 16]).astype("float32")

    def train(fit):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input([16]), *layers()])
        optimizer = getattr(keras.optimizers, name)(0.01, **options)
        fit(model, optimizer)
        return [*model.get_weights(), *map(np.array, optimizer.variables)]

    def fit_ours(model, optimizer):
        Trainer(model, optimizer, "mse", accumulation=k).fit(
            x, x[:, :1], batch_size=12 // k, epochs=3, shuffle=False, verbose=0
        )

    def fit_keras(model, optimizer):
        model.compile(optimizer, "mse")
        model.fit(
            x, x[:, :1], batch_size=12, epochs=3, shuffle=False, verbose=0
        )

    ours = train(fit_ours)
    assert len(updated) == 6
    for weight, expected in zip(ours, train(fit_keras), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-6)


def test_amsgrad_stays_kerass(updated):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(amsgrad=True)
    x = np.ones([4, 2], "float32")
    Trainer(model, optimizer, "mse").fit(x, x[:, :1], batch_size=4, verbose=0)
    assert not updated
