"""Loops, of which one turn is recorded for all."""

from collections.abc import Callable, Sequence

import optree
import torch

from accumtrainer.keras_api.types import Nest, Tensor
from accumtrainer.steps.torch.marks import COLLECT, END, ITEM, LOOP, MARK
from accumtrainer.steps.torch.scopes import Pending, innermost
from accumtrainer.steps.torch.tensors import default_device


def record_scan(
    body: Callable[[Tensor, Nest, list[Tensor]], tuple[Nest, list[Tensor]]],
    stacked: Nest,
    length: int,
    carry: Sequence[Tensor],
) -> tuple[Nest, list[Tensor]]:
    """Record one turn of what `TorchBackend.scan` runs.

    What is carried on, and what is assigned to variables, is written to memory
    at the end of every turn.
    """
    leaves, treedef = optree.tree_flatten(stacked)
    carried = [tensor.clone() for tensor in carry]
    # Nobody else has a hold of what is written to.
    innermost().renew()
    indices = torch.arange(length, dtype=torch.int32, device=default_device())
    stacks = [indices, *leaves]
    MARK(stacks[0], LOOP)
    index, *items = [ITEM(stack).clone() for stack in stacks]
    with Pending(None) as scope:
        item = optree.tree_unflatten(treedef, items)
        result, following = body(index, item, carried)
    results, structure = optree.tree_flatten(result)
    written = {tensor.untyped_storage() for tensor in carried}

    def own(tensor: Tensor) -> Tensor:
        is_written = tensor.untyped_storage() in written or scope.holds(tensor)
        return tensor.clone() if is_written else tensor

    results = [COLLECT(own(tensor), length) for tensor in results]
    kept = [
        before if after is before else own(after)
        for before, after in zip(carried, following, strict=True)
    ]
    for before, after in zip(carried, kept, strict=True):
        if after is not before:
            before.copy_(after)
    scope.write()
    MARK(stacks[0], END)
    return optree.tree_unflatten(structure, results), carried
