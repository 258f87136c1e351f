"""Gradients by PyTorch, of a micro-batch or of many examples at once."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import optree
import torch

from accumtrainer.keras_api import tree
from accumtrainer.keras_api.types import Nest, Tensor, Variable
from accumtrainer.steps.torch.scopes import Pending, Repeating, innermost

Objective = Callable[..., tuple[Tensor, Nest]]


def gradients(
    objective: Objective,
    variables: Sequence[Variable],
    values: Sequence[Tensor],
) -> tuple[Nest, list[Tensor | None]]:
    """Differentiate a scalar; see `WindowBackend.value_and_grad`.

    Args:
        values: of the variables, and then what the objective takes.
    """
    count = len(variables)
    leaves = [
        *_of_each_key(variables, map(_leaf, variables, values[:count])),
        *(value.detach().requires_grad_() for value in values[count:]),
    ]
    given = list(zip(variables, leaves[:count], strict=True))
    with torch.enable_grad(), Pending(None, given) as scope:
        total, nest = objective(*leaves[count:])
    found: list[Tensor | None] = [None] * len(leaves)
    if total.requires_grad:
        places = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        wanted = [leaves[i] for i in places]
        # What is rematerialized runs again, and finds what it has found.
        with Repeating(None, given):
            differentiate = _collect if _collects(total) else _by
            by = differentiate(total, wanted)
        for place, gradient in zip(places, by, strict=True):
            found[place] = gradient
    scope.assign()
    return tree.map_structure(_detached, nest), found


def _of_each_key(
    variables: Sequence[Variable], tensors: Iterable[Tensor]
) -> list[Tensor]:
    """Take the first tensor for all variables that are one parameter."""
    keys = map(innermost().key, variables)
    first: dict[int, Tensor] = {}
    return [
        first.setdefault(key, tensor)
        for key, tensor in zip(keys, tensors, strict=True)
    ]


def _by(total: Tensor, leaves: list[Tensor]) -> Sequence[Tensor | None]:
    return torch.autograd.grad(total, leaves, allow_unused=True)


def _collect(total: Tensor, leaves: list[Tensor]) -> Sequence[Tensor | None]:
    """Differentiate by all that there is, as each leaf collects its own."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    total.backward()
    found = [leaf.grad for leaf in leaves]
    for leaf, gradient in zip(leaves, before, strict=True):
        leaf.grad = gradient
    return found


REENTRANT = "CheckpointFunctionBackward"
"""What `torch.utils.checkpoint` with `use_reentrant=True` is called."""


def _collects(total: Tensor) -> bool:
    """Whether a part is differentiated inside of differentiating the whole.

    What it finds is only collected in leaves, never returned.
    """
    seen, left = set(), [total.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name() == REENTRANT:
            return True
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return False


HOOKS = "_backward_hooks"
"""Where a tensor keeps what changes its gradient; PyTorch lists it nowhere."""


def how_differentiated(value: Tensor) -> tuple:
    """Say whether there is a gradient by a parameter, and what changes it."""
    return value.requires_grad, *(getattr(value, HOOKS) or ())


def hooks_of(parameter: Tensor | None) -> list[Callable[[Tensor], Any]]:
    """List the functions that change the gradient by a parameter."""
    return list((getattr(parameter, HOOKS, None) or {}).values())


def _leaf(variable: Variable, value: Tensor) -> Tensor:
    """Return a tensor by which to differentiate, of a variable's value.

    Of a parameter that PyTorch has frozen there is no gradient.
    """
    scope = innermost()
    parameter = scope.parameter(variable)
    if parameter is not None:
        return parameter
    leaf, original = value.detach(), scope.original(variable)
    if original is None or original.requires_grad:
        leaf.requires_grad_()
        for hook in hooks_of(original):
            leaf.register_hook(hook)
    return leaf


def gradients_of_rows(
    objective: Objective,
    variables: Sequence[Variable],
    values: Sequence[Tensor],
) -> tuple[Nest, list[Tensor | None]]:
    """Differentiate a scalar inside of `map_rows`; unused ones are zeros."""
    count = len(variables)
    structure: Any = None
    written: list[Variable] = []

    def run(leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        nonlocal structure, written
        first = _of_each_key(variables, leaves[:count])
        scope = Pending(None, zip(variables, first, strict=True))
        with scope:
            total, nest = objective(*leaves[count:])
        results, structure = optree.tree_flatten(nest)
        updates = list(scope.updates())
        written = [variable for variable, _ in updates]
        return total, [*results, *(value for _, value in updates)]

    found, (_, results) = torch.func.grad_and_value(run, has_aux=True)(
        [value.detach() for value in values]
    )
    split = len(results) - len(written)
    for variable, value in zip(written, results[split:], strict=True):
        variable.assign(value)
    by = [
        _hooked(innermost().original(variable), gradient)
        for variable, gradient in zip(
            variables, _of_each_key(variables, found[:count]), strict=True
        )
    ]
    nest = optree.tree_unflatten(structure, results[:split])
    return nest, [*by, *found[count:]]


def _hooked(parameter: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Do to a gradient what is hooked; `None` if the parameter is frozen."""
    if parameter is None:
        return gradient
    if not parameter.requires_grad:
        return None
    for hook in hooks_of(parameter):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def map_rows(function: Callable[[Nest], Nest], stacked: Nest) -> Nest:
    """Run a function on all rows at once; see `WindowBackend.map`."""
    leaves, treedef = optree.tree_flatten(cast(Any, stacked))
    structure: Any = None

    def run(leaves: list[Tensor]) -> list[Tensor]:
        nonlocal structure
        result = function(optree.tree_unflatten(treedef, leaves))
        results, structure = optree.tree_flatten(result)
        return results

    results = torch.func.vmap(run)(leaves)
    return optree.tree_unflatten(structure, results)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
