"""Claims about numbers of Python that recorded operations are given."""

import math
import os

import pytest

if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("It records with PyTorch.", allow_module_level=True)

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from accumtrainer.steps.torch.graphs import Graph
from accumtrainer.steps.torch.scalars import give_tensors

FUNCTIONS = {
    "eq": lambda x, n: x == n,
    "ne": lambda x, n: x != n,
    "lt": lambda x, n: x < n,
    "le": lambda x, n: x <= n,
    "gt": lambda x, n: x > n,
    "ge": lambda x, n: x >= n,
    "from": lambda x, n: n - x,
    "add": lambda x, n: x + n,
    "sub": lambda x, n: x - n,
    "mul": lambda x, n: x * n,
    "div": lambda x, n: x / n,
    "add_": lambda x, n: x.add_(n),
    "mul_": lambda x, n: x.mul_(n),
    "twice": lambda x, n: torch.add(x, n, alpha=2),
}

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_numbers_have_the_effect_that_they_have_in_pytorch(name, dtype, shape):
    x = torch.tensor([0.1, 1.0, 3.0]).to(dtype)[: math.prod(shape)]
    x = x.reshape(shape)
    for number in (0, 1, 7, 0.1, True, math.inf, -math.inf, math.nan, 2.0**40):
        function = computing(name, number)
        try:
            (expected,) = function([x])
        except RuntimeError:  # PyTorch cannot compute that
            continue
        (result,) = Graph(function, [x], compiles=False)([x])
        assert result.dtype == expected.dtype
        torch.testing.assert_close(
            result, expected, rtol=0, atol=0, equal_nan=True
        )


def computing(name, number):
    return lambda given: [FUNCTIONS[name](given[0].clone(), number)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"twice"}))
def test_operations_are_given_tensors(name, dtype):
    def function(given):
        return [FUNCTIONS[name](given[0], 3)]

    module = make_fx(function, tracing_mode="fake")([torch.ones(2).to(dtype)])
    give_tensors(module)
    (node,) = (n for n in module.graph.nodes if n.op == "get_attr")
    assert getattr(module, node.target).item() == 3
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    assert [len(n.all_input_nodes) for n in calls] == [2]
