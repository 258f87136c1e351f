"""Batch normalization, for which PyTorch has operations of its own.

Keras writes it out, and PyTorch differentiates what is written: some 25
operations go through all of the activations. PyTorch's own need eight passes,
and subtract the mean before they square. They are put in the place of what is
recognized here, with means over all axes but one, of n elements each:

    mean = E[x]
    variance = E[x^2] - mean^2
    root = rsqrt(variance + epsilon)
    y = x - mean  # then in place, with a copy for the derivatives between
    y *= root * gamma
    y += beta

and of their derivatives by x, gamma and beta, where `c` are the cotangents of
y and `d = x - mean`:

    by_gamma = root * sum(c * d)
    by_beta = sum(c)
    by_variance = -1/2 * root^3 * gamma * sum(c * d)
    by_mean = sum(-c * root * gamma) - by_variance * 2 * mean
    by_x = c * root * gamma + by_variance / n * 2 * x + by_mean / n

Elsewhere than on a CPU, in other dtypes than float32 and float64, and of memory
that is not contiguous, Keras's stay.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from accumtrainer.steps.torch.batch_norm import (
    ADD,
    MEAN,
    MULTIPLY,
    SCALE,
    SUBTRACT,
    SUM,
    Backward,
    Forward,
    Writer,
)
from accumtrainer.steps.torch.changes import (
    changed_by,
    leave_out_unread,
    memory_of,
)
from accumtrainer.steps.torch.marks import ELSE, END, IF, LOOP, MARK
from accumtrainer.steps.torch.shapes import name_of

aten = torch.ops.aten

EXPAND, DIVIDE = aten.expand.default, aten.div.Scalar
POWER, NEGATE = aten.pow.Tensor_Scalar, aten.neg.default
PRECISE = {torch.float32, torch.float64}


def normalize(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """Put PyTorch's batch normalization in the place of Keras's.

    Args:
        graph: of operations, simplified.
        changed: values that operations change in place.
    """
    for node in list(graph.nodes):
        if node.target is SUBTRACT and node in changed:
            forward = _forward(node)
            if forward and _is_plain(forward, changed):
                _replace(graph, forward, changed)
    leave_out_unread(graph)


def _find(target: Any, *args: Any) -> fx.Node | None:
    """Find the operation that makes something of values, if all are there.

    Args:
        target: of the operation.
        args: its arguments, the first of them a value; nothing is found where
            one is `None`.
    """
    if None in args or not isinstance(args[0], fx.Node):
        return None
    key = _key(target, args)
    for node in args[0].users:
        is_it = node.target is target and _key(target, node.args) == key
        if is_it and node.users and not node.kwargs:
            return node
    return None


def _changes(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """List what changes values between two operations, and branches."""
    node = first
    while node is not last:
        if node.target is MARK or changed_by([node]):
            yield node
        node = node.next


def _key(target: Any, args: Sequence[Any]) -> tuple:
    if target in (ADD, MULTIPLY):
        return target, frozenset(args)
    return target, *(tuple(a) if isinstance(a, list) else a for a in args)


def _forward(deviation: fx.Node) -> Forward | None:
    """Recognize what becomes a normalized value in place."""
    x, mean = deviation.args
    if not isinstance(mean, fx.Node) or mean.target is not MEAN:
        return None
    users = sorted(deviation.users)
    names = [name_of(user.target) for user in users]
    saved = users[:1] if names[:1] == ["clone"] else []
    if names[len(saved) :][:2] != ["mul_", "add_"]:
        return None
    multiply, add = users[len(saved) :][:2]
    scale, beta = multiply.args[1], add.args[1]
    axes = mean.args[1]
    squares = _find(MEAN, _find(POWER, x, 2), axes, True)
    variance = _find(SUBTRACT, squares, _find(POWER, mean, 2))
    is_mean = variance and _find(MEAN, x, axes, True) is mean
    if not is_mean or getattr(scale, "target", None) is not MULTIPLY:
        return None
    root, gamma = scale.args
    if not isinstance(root, fx.Node) or root.target is not ADD:
        return None
    if root.args[0] is not variance or isinstance(root.args[1], fx.Node):
        return None
    return Forward(
        x=x,
        mean=mean,
        variance=variance,
        root=root,
        gamma=gamma,
        beta=beta,
        deviation=deviation,
        multiply=multiply,
        add=add,
        saved=saved,
    )


def _is_plain(forward: Forward, changed: set[fx.Node]) -> bool:
    """Whether it normalizes as PyTorch does, and nothing comes between."""
    nodes = [forward.x, forward.mean, forward.gamma, forward.beta]
    if not all(isinstance(n, fx.Node) and "val" in n.meta for n in nodes):
        return False
    x, mean, *others = (n.meta["val"] for n in nodes)
    is_alike = all(v.shape == mean.shape and v.dtype == x.dtype for v in others)
    is_known = x.dtype in PRECISE and x.device.type == "cpu"
    is_batch = len(forward.axes) == x.dim() - 1 and x.numel() > mean.numel()
    # The root is taken in place before it is read.
    root = min(forward.root.users)
    own = [root, forward.multiply]
    squares = forward.variance.args
    made_of = {*squares, squares[0].args[0]}
    given = [forward.deviation, forward.root, forward.multiply, forward.add]
    return (
        is_alike
        and is_known
        and is_batch
        and x.is_contiguous()
        and name_of(root.target) == "rsqrt_"
        and not any(node.kwargs for node in given)
        and own == list(_changes(forward.mean, forward.add))
        and not changed & made_of.union(memory_of([forward.x]))
    )


def _replace(graph: fx.Graph, forward: Forward, changed: set[fx.Node]) -> None:
    """Put PyTorch's operations in the place of Keras's, if it is all there."""
    backward = None
    if forward.saved:
        backward = _backward(forward)
        if backward is None or not _is_untouched(forward, backward, changed):
            return
    writer = Writer(graph, forward)
    changed.add(writer.write_forward())
    if backward is not None:
        writer.write_backward(backward)


def _backward(forward: Forward) -> Backward | None:
    """Recognize the derivatives."""
    x, mean, root, gamma = (
        forward.x,
        forward.mean,
        forward.root,
        forward.gamma,
    )
    (saved,) = forward.saved
    product = next(iter(saved.users))
    if len(saved.users) > 1 or product.target is not MULTIPLY:
        return None
    cotangents = product.args[product.args[0] is saved]
    if not _is_alike(cotangents, x):
        return None
    shape = x.meta["val"].shape
    count = shape.numel() // mean.meta["val"].numel()
    axes = [axis for axis in forward.axes if shape[axis] != 1]
    total = _find(SUM, product, axes, True)
    scaled = _find(MULTIPLY, cotangents, _find(MULTIPLY, root, gamma))
    half = _find(SCALE, _find(MULTIPLY, total, gamma), -0.5)
    by_variance = _find(MULTIPLY, half, _find(POWER, root, 3))
    by_mean = _find(
        ADD,
        _find(SUM, _find(NEGATE, scaled), axes, True),
        _find(MULTIPLY, _find(NEGATE, by_variance), _find(SCALE, mean, 2.0)),
    )
    spread, moved = (
        _find(EXPAND, _find(DIVIDE, by, count), list(shape))
        for by in (by_variance, by_mean)
    )
    by_square = _find(MULTIPLY, spread, _find(SCALE, x, 2.0))
    whole, others = _sum_of({scaled, by_square, moved}, by_square)
    made = (
        whole,
        _find(MULTIPLY, total, root),
        _find(SUM, cotangents, axes, True),
    )
    if total is None or (by_variance is not None and made[0] is None):
        return None
    readers = [n for n in (product, scaled, made[2]) if n is not None]
    first = min(readers)
    if not all(_is_alike(other, x) for other in others):
        return None
    return Backward(first, cotangents, made, others)


def _sum_of(
    terms: set[fx.Node | None], node: Any
) -> tuple[fx.Node | None, list[Any]]:
    """Find what adds some values, one of which is given, and what else."""
    while None not in terms and len(node.users) == 1:
        (node,) = node.users
        if node.target is not ADD or node.kwargs:
            break
        others = _terms(node)
        if terms.issubset(others):
            for term in terms:
                others.remove(term)  # once, as it may be added twice
            return node, others
    return None, []


def _is_alike(value: Any, x: fx.Node) -> bool:
    known, like = getattr(value, "meta", {}).get("val"), x.meta["val"]
    if not isinstance(known, torch.Tensor):
        return False
    return (known.shape, known.dtype) == (like.shape, like.dtype)


def _terms(whole: fx.Node) -> list[Any]:
    """List what a sum adds, without the sums that nothing else reads."""
    terms: list[Any] = []
    for term in whole.args:
        is_sum = isinstance(term, fx.Node) and term.target is ADD
        is_inner = is_sum and not term.kwargs and len(term.users) == 1
        terms += _terms(term) if is_inner else [term]
    return terms


def _is_untouched(
    forward: Forward, backward: Backward, changed: set[fx.Node]
) -> bool:
    """Whether what derivatives are computed from stays what it is."""
    made = [n for n in backward.made if n is not None]
    last = max(made, default=None)
    is_later = backward.first > forward.add
    if last is None or not is_later:
        return False
    if changed & memory_of([backward.cotangents, *backward.others]):
        return False
    if not _is_one_block(forward.add, backward.first):
        return False
    read = memory_of(_read_for(made, forward, backward))
    return not any(
        node.target is MARK and node >= backward.first
        for node in _changes(forward.add, last)
    ) and not any(
        read & memory_of(changed_by([node]))
        for node in _changes(forward.add.next, last)
    )


def _read_for(
    made: Sequence[fx.Node], forward: Forward, backward: Backward
) -> set[fx.Node]:
    """List what derivatives are computed from that may change before."""
    given = {forward.x, backward.cotangents, *backward.others}
    known = {forward.mean, forward.variance, forward.gamma, *forward.saved}
    found, left = set(known), list(made)
    while left:
        inputs = set(left.pop().all_input_nodes) - given - found
        found |= inputs
        left += inputs
    return found


def _is_one_block(first: fx.Node, last: fx.Node) -> bool:
    """Whether branches and loops that begin between two operations end."""
    depth, node = 0, first
    while node is not last:
        part = node.args[1] if node.target is MARK else None
        if depth == 0 and part in (ELSE, END):
            return False
        depth += (part in (IF, LOOP)) - (part == END)
        node = node.next
    return depth == 0
