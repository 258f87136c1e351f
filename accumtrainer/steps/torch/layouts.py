"""How kernels lie in memory: as PyTorch's convolutions read them.

Keras keeps the kernel of a convolution as `[H, W, I, O]`, PyTorch wants it as
`[O, H, W, I]`, and makes its gradient so. It is copied in every forward pass
then, element by element, and its gradient is added up just as slowly. Where the
memory has PyTorch's order neither is needed; shapes and numbers stay.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from accumtrainer.keras_api.types import Tensor, Variable

aten = torch.ops.aten

TO_DTYPE = "_to_copy"
"""What casts; it has no other name."""

COPIES = {aten.clone.default, getattr(aten, TO_DTYPE).default}
"""Operations that give a value other memory."""

UNSAFE_VIEW = "_unsafe_view"
"""Another view by a shape; it has no other name."""

VIEWS = {aten.view.default, getattr(aten, UNSAFE_VIEW).default}
"""Operations that PyTorch has for some orders of memory alone."""

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""In which order images are that have their channels last, by their axes."""

Order = tuple[int, ...]
"""Axes of a shape from the outermost to that whose elements lie together."""


class Kernels:
    """Which variables convolutions read while a function runs.

    Args:
        variables: that may be kernels.
    """

    def __init__(self, variables: Iterable[Variable]):
        self._values = {_memory(v.value): v.value for v in variables}
        self._read: list[tuple[Tensor, Tensor]] = []
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}
        self._viewed: list[Tensor] = []

    def _is_known(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided:
            return False  # it has no single memory
        memory = _memory(tensor)
        return memory in self._values or memory in self._copied

    def watch(self, function: Any, args: Sequence[Any], result: Any) -> None:
        """Look at an operation that has run."""
        # Of activations nothing is kept, as they would stay in memory.
        if function in COPIES and self._is_known(args[0]):
            self._copied[_memory(result)] = args[0], result
        elif function in VIEWS and self._is_known(args[0]):
            self._viewed.append(args[0])
        elif function is aten.convolution.default and self._is_known(args[1]):
            image, kernel = args[:2]
            layout = CHANNELS_LAST.get(image.dim(), torch.contiguous_format)
            if not image.is_contiguous(memory_format=layout):
                layout = torch.contiguous_format
            # Only how it lies is asked for.
            wanted = torch.empty_like(
                kernel, device="meta", memory_format=layout
            )
            self._read.append((kernel, wanted))

    def orders(self) -> dict[torch.Size, Order]:
        """Say in which order the variables of those shapes had best lie."""
        orders: dict[torch.Size, Order] = {}
        for kernel, wanted in self._read:
            source, copy = self._copied.get(_memory(kernel), (kernel, kernel))
            if copy.stride() == kernel.stride():
                kernel = source
            value = self._source_of(kernel)
            order = _order(value, kernel, wanted)
            if order is not None:
                orders[value.shape] = order
        for tensor in self._viewed:
            # PyTorch gives no such view of memory that lies otherwise.
            orders.pop(self._source_of(tensor).shape, None)
        return orders

    def _source_of(self, tensor: Tensor) -> Tensor:
        """Find the variable's value whose memory this is, or a copy of it."""
        memory = _memory(tensor)
        while memory not in self._values:
            memory = _memory(self._copied[memory][0])
        return self._values[memory]


def lay_out(
    variables: Iterable[Variable], orders: dict[torch.Size, Order]
) -> bool:
    """Give variables of some shapes memory in which they lie in an order.

    Alike in shape are a kernel, the sum of its gradients and what the optimizer
    keeps for it, which are computed with each other.

    Returns:
        Whether one has other memory now.
    """
    is_changed = False
    for variable in variables:
        value = variable.value
        order = orders.get(value.shape)
        if order is None or value.permute(order).is_contiguous():
            continue
        places = [order.index(axis) for axis in range(len(order))]
        value.data = value.detach().permute(order).contiguous().permute(places)
        is_changed = True
    return is_changed


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _order(value: Tensor, view: Tensor, wanted: Tensor) -> Order | None:
    """Find the order in which a value lies if a view of it lies as wanted."""
    axes = [axis for axis, size in enumerate(value.shape) if size > 1]
    # By their steps, which differ, the axes of a value are found in a view.
    by_step = {value.stride(axis): axis for axis in axes}
    steps = {
        by_step.get(view.stride(place)): wanted.stride(place)
        for place, size in enumerate(view.shape)
        if size > 1
    }
    if set(steps) != set(axes) or math.prod(view.shape) != value.numel():
        return None
    of_one = [axis for axis, size in enumerate(value.shape) if size <= 1]
    return (*of_one, *sorted(axes, key=steps.__getitem__, reverse=True))
