"""What is left of functions that PyTorch records, and what they compute."""

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from accumtrainer.steps.torch import graphs


def names_of(function, *tensors):
    """Return the names of the operations that are left of a function."""
    with torch.no_grad():
        module = make_fx(function, tracing_mode="fake")(list(tensors))
        graphs._tidy(module)
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    return [str(n.target).removeprefix("aten.").split(".")[0] for n in calls]


def agrees(function, *tensors):
    """Compare what is recorded with what the function does itself, twice."""
    with torch.no_grad():
        graph = graphs.Graph(function, list(tensors), compiles=False)
        for _ in range(2):
            one = [t.clone() for t in tensors]
            two = [t.clone() for t in tensors]
            results = (*graph(one), *one), (*function(two), *two)
            for ours, own in zip(*results, strict=True):
                np.testing.assert_allclose(ours, own, rtol=1e-5, atol=1e-6)


def make(*shape):
    """Make a tensor of random numbers."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


def note_graphs(monkeypatch):
    """Return a list that gets every graph that is recorded from here on."""
    recorded = []
    init = graphs.Graph.__init__

    def note(graph, *arguments, **options):
        init(graph, *arguments, **options)
        recorded.append(graph)

    monkeypatch.setattr(graphs.Graph, "__init__", note)
    return recorded
