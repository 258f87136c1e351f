"""Recorded operations whose outcome is known while they are recorded.

Weights of losses and bounds of quotients are small constants, and what depends
on them alone need not be computed again in every window.
"""

from operator import getitem
from typing import Any

import torch
from torch import fx

from accumtrainer.keras_api.types import Tensor
from accumtrainer.steps.torch.marks import COLLECT, ITEM

aten = torch.ops.aten

CONSTANTS = {
    aten.lift_fresh_copy.default,
    aten.ones.default,
    aten.zeros.default,
    aten.full.default,
    aten.scalar_tensor.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
}
"""Operations that always make the same of nothing but numbers."""

LIKE = {
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
}
"""Operations of which only the shape of their first argument is known."""

MOST_CONSTANT = 4096
"""How many elements a tensor may have that is kept and not made anew."""


def is_zero(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a value is zero everywhere."""
    if node.op == "get_attr":
        return not getattr(module, node.target).any().item()
    if node.target in {aten.full.default, aten.full_like.default}:
        return bool(node.args[1] == 0)
    return node.target in {aten.zeros.default, aten.zeros_like.default}


def make_constant(module: fx.GraphModule, node: fx.Node) -> None:
    """Put a small tensor in the place of what makes it of constants."""
    inputs = node.all_input_nodes
    is_alike = node.target in LIKE
    if not is_alike and not all(n.op == "get_attr" for n in inputs):
        return
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return
    if not inputs and node.target not in CONSTANTS:
        return
    if node.target in (ITEM, COLLECT):
        return
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.numel() > MOST_CONSTANT:
        return

    def number(argument: fx.Node) -> Tensor:
        if argument.op == "get_attr":
            return getattr(module, argument.target)
        like = argument.meta["val"]  # which has no numbers
        return torch.empty_strided(
            like.shape, like.stride(), dtype=like.dtype, device=like.device
        )

    arguments = fx.node.map_arg((node.args, node.kwargs), number)
    with torch.no_grad():
        made = node.target(*arguments[0], **arguments[1])
    node.replace_all_uses_with(_constant(module, node, made))
    module.graph.erase_node(node)


def _constant(module: fx.GraphModule, node: fx.Node, made: Tensor) -> fx.Node:
    """Keep what a node makes, to be read in its place."""
    name = f"_made_{node.name}"
    module.register_buffer(name, made)
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    constant.meta = dict(node.meta)
    return constant


def same_as(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Find a value that an operation makes again, element for element.

    Args:
        module: has the constants.
        node: an operation.

    Returns:
        The value, which has the same shape and dtype; or else `None`.
    """
    rule = RULES.get(node.target)
    found = rule(module, node) if rule else None
    return found if found is not None and _is_alike(found, node) else None


def _is_alike(one: Any, other: fx.Node) -> bool:
    if not isinstance(one, fx.Node):
        return False
    first, second = one.meta.get("val"), other.meta.get("val")
    if not isinstance(first, torch.Tensor):
        return False
    is_alike = first.shape == second.shape and first.dtype == second.dtype
    return is_alike and first.stride() == second.stride()


def _times_one(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return what a product with ones, or a quotient by them, is made of."""
    first, by = node.args
    if node.target is aten.mul.Tensor and _all(module, first, 1):
        first, by = by, first
    is_own = isinstance(first, fx.Node) and first.op != "placeholder"
    return first if is_own and _all(module, by, 1) else None


def _plus_zero(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return what is added to zeros, as where a sum begins.

    A negative zero stays one, which is the same number.
    """
    first, second = node.args
    if node.kwargs or not all(isinstance(n, fx.Node) for n in node.args):
        return None
    if is_zero(module, second):
        first, second = second, first
    is_own = second.op != "placeholder"
    return second if is_own and is_zero(module, first) else None


def _sum_of_one(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return a scalar that is summed up by itself."""
    del module
    (source,) = node.args
    return source if not node.kwargs and source.op != "placeholder" else None


def _chosen(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the one side of a `where` that is always chosen."""
    condition, on_true, on_false = node.args
    if _all(module, condition, True):
        return on_true
    return on_false if _all(module, condition, False) else None


def _taken_apart(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return what was stacked to be taken apart again."""
    part = _part_of(node)
    if part is None:
        return None
    source, place = part
    if source.op == "get_attr":
        number = getattr(module, source.target)[place].clone()
        return _constant(module, node, number)
    is_stack = source.target is aten.stack.default and not source.args[1:]
    return source.args[0][place] if is_stack else None


def _put_together(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return what was taken apart to be stacked again."""
    del module
    parts = [_part_of(n) for n in node.args[0]]
    first = parts[0]
    if node.args[1:] or first is None:
        return None
    source = first[0]
    is_whole = parts == [(source, place) for place in range(len(parts))]
    return source if is_whole else None


def _part_of(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Find out of which value something was taken, and at which place.

    Of values that were joined, it is the one in which it was.
    """
    if node.target is not getitem:
        return None
    parts, place = node.args
    if parts.target is not aten.unbind.int or parts.args[1:] not in ((), (0,)):
        return None
    source = parts.args[0]
    if source.target is not aten.cat.default or source.args[1:]:
        return source, place
    for joined in source.args[0]:
        size = len(joined.meta["val"])
        if place < size:
            is_cast = joined.meta["val"].dtype != source.meta["val"].dtype
            return None if is_cast else (joined, place)
        place -= size
    return None


def _all(module: fx.GraphModule, value: Any, number: float) -> bool:
    if not isinstance(value, fx.Node):
        return bool(value == number)
    if value.op != "get_attr":
        return False
    constant = getattr(module, value.target)
    return torch.equal(constant, torch.full_like(constant, number))


RULES = {
    aten.add.Tensor: _plus_zero,
    aten.mul.Tensor: _times_one,
    aten.div.Tensor: _times_one,
    aten.where.self: _chosen,
    aten.stack.default: _put_together,
    aten.sum.default: _sum_of_one,
    getitem: _taken_apart,
}
"""Operations, and what finds the value that they make again."""
