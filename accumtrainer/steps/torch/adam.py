"""Adam, for which PyTorch has an operation of its own.

Keras's goes through the lists of all variables eight times, and what fits into
no cache is read and written as often. PyTorch's goes through them once. It is
put in the place of what is recognized here:

    mean *= beta_1
    mean += (1 - beta_1) * gradient
    square *= beta_2
    square += (1 - beta_2) * gradient^2
    variable -= rate * mean / (sqrt(square) + epsilon)

Keras has the corrections for the first updates in the rate. PyTorch counts
updates for them, and is told of infinitely many, after which they are 1.

Elsewhere than on a CPU, and in other dtypes than float32 and float64, Keras's
stay.
"""

import math
from collections.abc import Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from accumtrainer.keras_api.types import Tensor
from accumtrainer.steps.torch.changes import memory_of
from accumtrainer.steps.torch.fusions import on_lists
from accumtrainer.steps.torch.normalization import PRECISE

ROW = [
    on_lists("mul_", "Scalar"),
    on_lists("add_", "List"),
    on_lists("mul_", "Scalar"),
    on_lists("addcmul_", "Scalar"),
    on_lists("mul", "Tensor"),
    on_lists("sqrt", "default"),
    on_lists("add_", "Scalar"),
    on_lists("addcdiv_", "Scalar"),
]
"""The operations of an update, with fewer ways through memory."""

FUSED = "_fused_adam_"
"""What `torch.optim.Adam(fused=True)` calls. PyTorch has no other name for it
under which it takes means that somebody else keeps."""

OWN = getattr(torch, FUSED)

AFTER_ALL = torch.tensor(math.inf)
"""How many updates were made, by which nothing is corrected."""


class _Update(NamedTuple):
    """What an update is made of, as `adam` takes it."""

    variables: Sequence[fx.Node]
    gradients: Sequence[fx.Node]
    means: Sequence[fx.Node]
    squares: Sequence[fx.Node]
    rate: fx.Node
    beta_1: float
    beta_2: float
    epsilon: float


def shorten_adam(graph: fx.Graph) -> None:
    """Put PyTorch's Adam in the place of Keras's.

    Args:
        graph: of operations, with as few ways through memory as others allow.
    """
    row: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target is getitem:
            continue
        row = [*row, node][-len(ROW) :]
        update = _recognize(row)
        if update is None:
            continue
        with graph.inserting_before(node):
            graph.call_function(adam, tuple(update))
        for made in reversed(row):
            for item in list(made.users):
                graph.erase_node(item)
            graph.erase_node(made)


def _recognize(row: list[fx.Node]) -> _Update | None:
    """Find out whether operations are an update, and of what."""
    if [node.target for node in row] != ROW:
        return None
    (means, beta_1), (_, gradients), (squares, beta_2), _ = (
        node.args for node in row[:4]
    )
    steps, roots = _items_of(row[4], row), _items_of(row[5], row)
    rate, epsilon, variables = row[4].args[1], row[6].args[1], row[7].args[0]
    is_update = [(tuple(node.args), dict(node.kwargs)) for node in row] == [
        ((means, beta_1), {}),
        ((means, gradients), {"alpha": 1 - beta_1}),
        ((squares, beta_2), {}),
        ((squares, gradients, gradients), {"value": 1 - beta_2}),
        ((means, rate), {}),
        ((squares,), {}),
        ((roots, epsilon), {}),
        ((variables, steps, roots), {"value": -1}),
    ]
    if not is_update or not (0 <= beta_1 < 1 and 0 <= beta_2 < 1):
        return None
    update = _Update(
        *(variables, gradients, means, squares),
        *(rate, beta_1, beta_2, epsilon),
    )
    return update if _is_on_its_own(update) else None


def _items_of(made: fx.Node, row: list[fx.Node]) -> list[fx.Node] | None:
    """Return the items of a list of which nothing else is made."""
    items = list(made.users)
    places = [n.args[1] for n in items if n.target is getitem]
    readers = {reader for item in items for reader in item.users}
    is_whole = places == list(range(len(items))) and readers <= set(row)
    return items if is_whole else None


def _is_on_its_own(update: _Update) -> bool:
    """Whether PyTorch's operation takes it, and nothing changes meanwhile."""
    changed = [*update.variables, *update.means, *update.squares]
    read = [*update.gradients, update.rate]
    memory = memory_of(changed)
    if len(memory) != len(changed) or memory & memory_of(read):
        return False
    values = [n.meta["val"] for n in (*changed, *update.gradients)]
    dtypes = {value.dtype for value in values}
    places = {value.device.type for value in values}
    return len(dtypes) == 1 and dtypes <= PRECISE and places == {"cpu"}


def adam(
    variables: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    rate: Tensor,
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> None:
    """Update variables, and the means of their gradients and of the squares.

    PyTorch's operation goes through memory as it lies: four tensors that lie
    otherwise than each other it would mix up.

    Args:
        variables: tensors.
        gradients: of their shapes.
        means: the same.
        squares: the same.
        rate: scalar tensor.
        beta_1: what of the means stays.
        beta_2: what of the means of squares stays.
        epsilon: added to their roots.
    """
    columns = []
    for variable, gradient, mean, square in zip(
        variables, gradients, means, squares, strict=True
    ):
        row = (variable, gradient, mean, square)
        if all(tensor.is_contiguous() for tensor in row):
            columns.append(row)
            continue
        if not _is_dense(variable) or not _lie_alike(variable, mean, square):
            mean.lerp_(gradient, 1 - beta_1)
            square.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
            root = square.sqrt().add_(epsilon)
            variable.addcdiv_(mean * rate, root, value=-1)
            continue
        if not _lie_alike(variable, gradient):
            gradient = torch.empty_like(variable).copy_(gradient)
        columns.append((variable, gradient, mean, square))
    if columns:
        OWN(
            *map(list, zip(*columns, strict=True)),
            [],
            [AFTER_ALL] * len(columns),
            lr=rate,
            beta1=beta_1,
            beta2=beta_2,
            weight_decay=0.0,
            eps=epsilon,
            amsgrad=False,
            maximize=False,
        )


def _lie_alike(*tensors: Any) -> bool:
    first, *others = (tensor.stride() for tensor in tensors)
    return all(other == first for other in others)


def _is_dense(tensor: Any) -> bool:
    """Whether its elements lie in memory without gaps, in any order."""
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * stride for length, stride in lengths)
    return tensor.is_contiguous() or last + 1 == tensor.numel()
