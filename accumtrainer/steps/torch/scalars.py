"""Numbers of Python that operations are given, made tensors beforehand.

PyTorch makes a tensor of such a number in every call, which takes longer than
what small operations do with it. On an accelerator the number is better off.
"""

import math
from typing import Any

import torch
from torch import fx

from accumtrainer.steps.torch.layouts import TO_DTYPE
from accumtrainer.steps.torch.normalization import PRECISE

aten = torch.ops.aten

WITH_TENSOR = {
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.rsub.Scalar: aten.sub.Tensor,
    **{
        operation.Tensor: operation.Tensor
        for operation in (aten.add, aten.sub, aten.mul, aten.div)
    },
    aten.add_.Tensor: aten.add_.Tensor,
    aten.mul_.Tensor: aten.mul_.Tensor,
}
"""Operations on a tensor and a number, and on two tensors."""

WHOLE = {torch.int32, torch.int64}


def give_tensors(module: fx.GraphModule) -> None:
    """Give tensors to operations that were given numbers.

    Args:
        module: recorded operations, as none of them will be put in the place
            of others any more.
    """
    for node in list(module.graph.nodes):
        if node.target is getattr(aten, TO_DTYPE).default:
            is_tensor = isinstance(node.args[0], fx.Node)
            if is_tensor and set(node.kwargs) == {"dtype"}:
                # The method that does it takes half the time.
                node.target = torch.Tensor.to
                node.kwargs = {**node.kwargs, "copy": True}
        elif node.target in WITH_TENSOR and not node.kwargs:
            _give_tensor(module, node)


def _give_tensor(module: fx.GraphModule, node: fx.Node) -> None:
    value, number, *further = node.args
    made = None if further else _as_tensor(number, value)
    if made is None:
        return
    name = f"_number_of_{node.name}"
    module.register_buffer(name, made)
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    constant.meta["val"] = made
    is_turned = node.target is aten.rsub.Scalar
    node.args = (constant, value) if is_turned else (value, constant)
    node.target = WITH_TENSOR[node.target]


def _as_tensor(number: Any, value: Any) -> torch.Tensor | None:
    """Make a tensor of a number, if it has the same effect.

    Args:
        number: what an operation is given beside a value.
        value: the node of a tensor.

    Returns:
        Scalar tensor of the value's dtype; `None` where that could be another
        number, or where there is none.
    """
    like = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(like, torch.Tensor) or like.device.type != "cpu":
        return None
    dtype = like.dtype
    if type(number) is int and dtype in WHOLE:
        is_same = abs(number) <= torch.iinfo(dtype).max
    elif type(number) in (int, float) and dtype in PRECISE:
        is_same = abs(number) <= torch.finfo(dtype).max or math.isinf(number)
    else:
        return None
    return torch.tensor(number, dtype=dtype) if is_same else None
