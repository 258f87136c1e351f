"""Several processes of PyTorch: who has what, what they add up.

Every process has one device and a whole model, and is a replica. They know of
each other by the default group of `torch.distributed`.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from accumtrainer.data.batches import map_leaves
from accumtrainer.keras_api import ops, tree
from accumtrainer.keras_api.types import Nest, Tensor, Variable
from accumtrainer.steps.torch.scopes import Pending
from accumtrainer.window.backend import Replicas
from accumtrainer.window.weighing import Shares

CHIEF = 0


class TorchReplicas(Replicas):
    """The processes of the default group, where there is one.

    Args:
        is_alone: whether to keep to this process, whatever others there are.
    """

    def __init__(self, *, is_alone: bool = False):
        self._index = 0
        if not is_alone and has_group():
            self._index = torch.distributed.get_rank()
            self.count = torch.distributed.get_world_size()
        self.processes = self.count
        self.is_chief = self._index == CHIEF
        self._shared: dict[int, Variable] = {}

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        rows = np.zeros([self.processes, len(numbers)], "float32")
        rows[self._index] = numbers
        if self.processes > 1:
            # Of the exchanges, that one can be had on every device.
            total = ops.convert_to_tensor(rows)
            torch.distributed.all_reduce(total)
            rows = ops.convert_to_numpy(total)
        return rows

    def place(self, shares: Shares, *, is_own: bool = False) -> Shares:
        if is_own or self.processes == 1:
            return shares

        def take(leaf: Any) -> Any:
            size = leaf.shape[1] // self.processes
            rows = leaf[:, self._index * size : (self._index + 1) * size]
            # What is compiled counts on how the rows lie in memory.
            return np.ascontiguousarray(rows)

        split = tuple(map_leaves(take, batch) for batch in shares.split)
        return shares._replace(split=split)

    def read(self, variables: Sequence[Variable]) -> list[Tensor]:
        # Values that stay, whatever is assigned.
        return [variable.value.clone() for variable in variables]

    def begin_alike(self, variables: Sequence[Variable]) -> None:
        """Give variables the values of the chief, those that are new here."""
        if self.processes == 1:
            return
        for variable in variables:
            if id(variable) not in self._shared:
                # Kept, since ids are given again.
                self._shared[id(variable)] = variable
                _broadcast(variable.value.detach())

    def sum(
        self,
        function: Callable[[Tensor, Shares], Nest],
        shares: Shares,
        *,
        known: list[Variable],
        reading: list[Variable],
        moving: list[Variable],
    ) -> Nest:
        del known, reading  # they are where they always are
        replica = ops.convert_to_tensor(self._index, "int32")
        values = [variable.value.clone() for variable in moving]
        with Pending(None, zip(moving, values, strict=True)):
            outcome = function(replica, shares)
        return _add_up(outcome)


def has_group() -> bool:
    """Whether this process has joined others."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def _broadcast(tensor: Tensor) -> None:
    """Overwrite a tensor by that of the chief, as bytes of any dtype."""
    if not tensor.numel():
        return
    whole = tensor.contiguous()
    octets = whole.reshape(-1).view(torch.uint8)
    torch.distributed.broadcast(octets, CHIEF)
    if whole is not tensor:
        tensor.copy_(whole)


def _add_up(nest: Nest) -> Nest:
    """Add up a nest of tensors of each process, in one exchange per dtype."""
    leaves = tree.flatten(nest)
    groups = collections.defaultdict(list)
    for place, leaf in enumerate(leaves):
        groups[_summed_as(leaf.dtype)].append(place)
    sums = list(leaves)
    for dtype, places in groups.items():
        alike = [leaves[place] for place in places]
        joined = torch.cat([leaf.to(dtype).reshape(-1) for leaf in alike])
        torch.ops.accumtrainer.add_up(joined)
        parts = torch.split(joined, [leaf.numel() for leaf in alike])
        for place, leaf, part in zip(places, alike, parts, strict=True):
            sums[place] = part.reshape(leaf.shape).to(leaf.dtype)
    return tree.pack_sequence_as(nest, sums)


def _summed_as(dtype: torch.dtype) -> torch.dtype:
    """Choose a dtype that every device can add up, and adds up well."""
    if dtype.is_complex:
        return dtype
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32


def _add_up_in_place(joined: torch.Tensor) -> None:
    """Add up a tensor `[n]` over the processes, an operation for graphs."""
    torch.distributed.all_reduce(joined)


_operation = torch.library.custom_op(
    "accumtrainer::add_up", _add_up_in_place, mutates_args=("joined",)
)
_operation.register_fake(lambda joined: None)
