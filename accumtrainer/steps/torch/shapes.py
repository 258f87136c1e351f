"""Recorded operations, simplified without another result.

Keras multiplies tensors by `einsum`, which moves axes to and fro and puts axes
of length one between them until a product of matrices is left. Read one by one
these steps are views and copies; together, most are nothing but another shape.
What is computed twice is computed once, biases are added to products as these
are made, and images are pooled as they lie.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from accumtrainer.steps.torch.changes import (
    RESHAPES,
    first_changes,
    is_view,
    leave_out_unread,
    memory_of,
)
from accumtrainer.steps.torch.marks import END, IF, LOOP, MARK

aten = torch.ops.aten

MOVES = {aten.permute.default, aten.transpose.int, aten.t.default}
"""Operations that change the order of axes."""

POOLS = {
    aten.max_pool2d_with_indices.default: 0,
    aten.max_pool2d_with_indices_backward.default: 1,
    aten.avg_pool2d.default: 0,
    aten.avg_pool2d_backward.default: 1,
}
"""Which argument of what pools is the image."""

READ_LAYOUTS = {
    aten.view.default,
    aten.view.dtype,
    aten.view_as_complex.default,
    aten.as_strided.default,
    aten.as_strided_.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
}
"""Operations that depend on how memory lies. A view that may be copied instead
is a `reshape` by then."""

SMALL = 4096
"""How many elements a value may have that is kept rather than made again."""


def simplify(module: fx.GraphModule, changed: set[fx.Node]) -> None:
    """Put fewer operations in the place of those that only change shapes.

    Products of matrices in a batch of one become products of matrices, to
    which a bias is added at once; what is computed twice is computed once.

    Args:
        module: what was recorded.
        changed: values that operations change in place.
    """
    graph = module.graph
    for rules in (SHAPES, LAYOUTS, SUMS):
        rewriter = _Rewriter(graph, changed)
        for node in list(graph.nodes):
            rewriter.rewrite(node, rules)
        leave_out_unread(graph)
        if rules is SHAPES:
            _foresee_layouts(graph)


def _foresee_layouts(graph: fx.Graph) -> None:
    """Find out how values will lie in memory, of which only shapes are kept."""
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and all(map(_is_foretold, inputs)):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
            node.meta["val"] = node.target(*args, **kwargs)


class _Rewriter:
    """Rewrites the operations of a graph in their order.

    Args:
        graph: of operations.
        changed: values that operations change in place. From there on they
            stay where they are, and so does what may be a view of them, or
            reads them.

    Attributes:
        fixed: what reads them, and can be made nowhere else.
    """

    def __init__(self, graph: fx.Graph, changed: set[fx.Node]):
        self._graph = graph
        # Who gets results may change them.
        self._returned = memory_of(graph.output_node().all_input_nodes)
        self._is_returned = False
        self._laid_out = _laid_out(graph)
        self._places = {node: i for i, node in enumerate(graph.nodes)}
        self._place = 0
        self._unsafe = set(changed)
        self._ends = first_changes(graph)
        self.fixed: set[fx.Node] = set()
        self._known: list[dict[str, fx.Node]] = [{}]

    def rewrite(self, node: fx.Node, rules: "Rules") -> None:
        """Put something simpler, or what is there, in the place of a node."""
        self._place = self._places[node]
        if node.target is MARK:
            self._enter(node.args[1])
        self._foresee_change(node)
        unsafe = [i for i in node.all_input_nodes if i in self._unsafe]
        if unsafe and not self._is_early(node, unsafe):
            self.fixed.add(node)
            if is_view(node):
                self._unsafe.add(node)
            return
        if node in self._unsafe or not _is_simple(node):
            return
        self._is_returned = node in self._returned
        with self._graph.inserting_before(node):
            rule = rules.get(node.target)
            simpler = rule(self, node) if rule else node
        if simpler is node:
            simpler = self._known_as(node.target, node.args, node.kwargs, node)
        if simpler is not node:
            node.replace_all_uses_with(simpler)
            self._graph.erase_node(node)

    def _foresee_change(self, node: fx.Node) -> None:
        """Note where what a view shows changes first."""
        if is_view(node):
            shown = (node, *node.all_input_nodes)
            ends = [self._ends[n] for n in shown if n in self._ends]
            if ends:
                self._ends[node] = min(ends)

    def _is_early(self, node: fx.Node, read: Sequence[fx.Node]) -> bool:
        """Whether it is over with what it reads when that changes first."""
        end = min(self._ends.get(n, 0) for n in read)
        left, seen = [node], {node}
        while left:
            follower = left.pop()
            if self._places.get(follower, end) >= end:
                return False
            if is_view(follower) or follower.target is aten.clone.default:
                left += follower.users.keys() - seen
                seen |= follower.users.keys()
        return True

    def changes(self, node: fx.Node) -> bool:
        """Whether a value is changed in place, sooner or later."""
        return node in self._ends

    def lies_freely(self, node: fx.Node) -> bool:
        """Whether nobody depends on how a value lies in memory."""
        return node not in self._laid_out

    def is_returned(self, node: fx.Node) -> bool:
        """Whether a value's memory is given away."""
        return node in self._returned

    def can_wait(self, node: fx.Node) -> bool:
        """Whether what a value is made of stays until where it is rewritten."""
        ends = [self._ends[n] for n in node.all_input_nodes if n in self._ends]
        return all(end > self._place for end in ends)

    def _enter(self, part: int) -> None:
        """Begin with a part of a branch, or with a loop.

        Only what is in it can use it.
        """
        if part not in (IF, LOOP):
            self._known.pop()
        if part != END:
            self._known.append({})

    def move(self, node: fx.Node) -> fx.Node:
        """Move axes, of which those of length one need not be moved."""
        source, shape = node.args[0], _shape(node.args[0])
        order = _order_of(node)
        longer = [axis for axis, size in enumerate(shape) if size != 1]
        source = self.reshape(source, [shape[axis] for axis in longer])
        kept = [longer.index(axis) for axis in order if axis in longer]
        if source.target is aten.permute.default:
            before, source = _order_of(source), source.args[0]
            kept = [before[axis] for axis in kept]
        if kept != sorted(kept):
            source = self.call(aten.permute.default, source, kept)
        return self.reshape(source, [shape[axis] for axis in order])

    def reshape(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """Give a value another shape, from where it first had one."""
        while node.target is aten.reshape.default and _is_free(node):
            node = node.args[0]
        if list(_shape(node)) == list(shape):
            return node
        return self.call(aten.reshape.default, node, list(shape))

    def uncopied(self, node: fx.Node) -> fx.Node:
        """Return what was copied for the sake of how it lies in memory."""
        while (
            node.target is aten.clone.default
            and "memory_format" in node.kwargs
            and node not in self.fixed
        ):
            node = node.args[0]
        return node

    def call(self, target: Callable, *args: Any, **options: Any) -> fx.Node:
        """Add an operation, or find it."""
        return self._known_as(target, args, options, None)

    def _known_as(
        self, target: Any, args: tuple, kwargs: dict, node: fx.Node | None
    ) -> fx.Node:
        """Return the node that has computed the same of the same."""
        key = repr((target, args, kwargs))
        for known in self._known:
            if key in known and self._is_kept(known[key]):
                if self._can_be_returned(known[key]):
                    return known[key]
        if node is None:
            node = self._graph.call_function(target, args, kwargs)
            node.meta["val"] = target(*fx.node.map_arg(args, _value), **kwargs)
            self._foresee_change(node)
            if self._is_returned:
                self._returned.add(node)
        self._known[-1][key] = node
        return node

    def _can_be_returned(self, known: fx.Node) -> bool:
        """Whether no two results would be in the same memory by it."""
        is_copy = known.target is aten.reshape.default and not _is_free(known)
        if not self._is_returned or (is_view(known) and not is_copy):
            return True
        is_first = known not in self._returned
        self._returned.add(known)
        return is_first

    def _is_kept(self, known: fx.Node) -> bool:
        """Whether a value takes no memory that would not be taken anyway.

        What is rematerialized is computed again so as not to be kept.
        """
        value = known.meta["val"]
        values = value if isinstance(value, (tuple, list)) else [value]
        if is_view(known) or sum(v.numel() for v in values) <= SMALL:
            return True
        return self._is_read_later(known)

    def _is_read_later(self, value: fx.Node) -> bool:
        return any(
            self._places.get(user, 0) > self._place
            or (is_view(user) and self._is_read_later(user))
            for user in value.users
        )


def _reshape(rewriter: _Rewriter, node: fx.Node) -> fx.Node:
    return rewriter.reshape(node.args[0], _shape(node))


def _multiply(rewriter: _Rewriter, node: fx.Node) -> fx.Node:
    """Multiply matrices instead of a batch of one."""
    if _shape(node)[0] != 1:
        return node
    factors = [rewriter.reshape(a, _shape(a)[1:]) for a in node.args]
    return rewriter.reshape(
        rewriter.call(aten.mm.default, *factors), _shape(node)
    )


def _copy(rewriter: _Rewriter, node: fx.Node) -> fx.Node:
    """Leave out a copy of what lies as it shall already."""
    source = rewriter.uncopied(node.args[0])
    layout = node.kwargs.get("memory_format")
    if source.op != "call_function" or layout in (None, torch.preserve_format):
        return node
    is_alike = _value(source).is_contiguous(memory_format=layout)
    if is_alike and not rewriter.is_returned(node):
        return source
    if source is not node.args[0]:
        node.args = (source,)
    return node


def _pool(rewriter: _Rewriter, node: fx.Node) -> fx.Node:
    """Pool where channels lie together, if they do, which is faster."""
    arguments = fx.node.map_arg(node.args, rewriter.uncopied)
    image = arguments[POOLS[node.target]]
    lies_so = _value(image).is_contiguous(memory_format=torch.channels_last)
    if lies_so and rewriter.lies_freely(node):
        node.args = arguments
    return node


def _add(rewriter: _Rewriter, node: fx.Node) -> fx.Node:
    """Add a bias to a product of matrices while it is made."""
    product, bias = node.args
    is_plain = all(
        isinstance(n, fx.Node) and "val" in n.meta for n in node.args
    )
    if node.kwargs or not is_plain:
        return node
    shape, is_read_once = _shape(bias), len(product.users) == 1
    dtypes = {_value(each).dtype for each in (product, bias, node)}
    if _shape(product) != _shape(node) or len(dtypes) > 1:
        return node
    if product.target is aten.reshape.default:
        product = product.args[0]
        is_read_once = is_read_once and len(product.users) == 1
    if product.target is not aten.mm.default or not is_read_once:
        return node
    if product in rewriter.fixed or not rewriter.can_wait(product):
        return node
    columns = _shape(product)[1]
    is_row = _shape(node)[-len(shape) :] == shape and shape.numel() == columns
    if not shape or not is_row:
        return node
    row = rewriter.reshape(bias, [columns])
    made = rewriter.call(aten.addmm.default, row, *product.args)
    return rewriter.reshape(made, _shape(node))


def _scale(rewriter: _Rewriter, node: fx.Node) -> fx.Node:
    """Compute with a number before a value is repeated, not after."""
    repeated, number = node.args
    if repeated.target is not aten.expand.default or _is_cast(node):
        return node
    if rewriter.is_returned(node) or not rewriter.lies_freely(node):
        return node  # whose elements are not one another
    scaled = rewriter.call(node.target, repeated.args[0], number)
    return rewriter.call(aten.expand.default, scaled, repeated.args[1])


def _drop_power_of_one(rewriter: _Rewriter, node: fx.Node) -> fx.Node:
    """Leave out the power of one, which derivatives of squares have."""
    base, exponent = node.args
    if rewriter.changes(base) or rewriter.is_returned(node):
        return node
    return base if exponent == 1 and not _is_cast(node) else node


def _is_cast(node: fx.Node) -> bool:
    """Whether a value has another dtype than what it is made of."""
    return _value(node).dtype != _value(node.args[0]).dtype


Rules = dict[Any, Callable[[_Rewriter, fx.Node], fx.Node]]

LAYOUTS: Rules = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(MOVES, _Rewriter.move),
    aten.clone.default: _copy,
}
SHAPES: Rules = {
    **LAYOUTS,
    **dict.fromkeys(POOLS, _pool),
    aten.bmm.default: _multiply,
    aten.mul.Scalar: _scale,
    aten.div.Scalar: _scale,
    aten.pow.Tensor_Scalar: _drop_power_of_one,
}
SUMS: Rules = {aten.add.Tensor: _add}


def _laid_out(graph: fx.Graph) -> set[fx.Node]:
    """Find what operations are made of that depend on how memory lies."""
    left = [node for node in graph.nodes if node.target in READ_LAYOUTS]
    found = set(left)
    while left:
        inputs = left.pop().all_input_nodes
        left += [node for node in inputs if node not in found]
        found.update(inputs)
    return found


def _is_simple(node: fx.Node) -> bool:
    """Whether a node makes the same of the same tensors, and nothing else."""
    is_pure = (
        getattr(node.target, "namespace", None) == "aten"
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )
    inputs = node.all_input_nodes
    is_of_tensors = all(
        isinstance(n.meta.get("val"), torch.Tensor) for n in inputs
    )
    return is_pure and is_of_tensors and all(map(_is_foretold, inputs))


def _is_foretold(node: fx.Node) -> bool:
    """Whether a value has a fake tensor, so that its strides are known."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return bool(tensors) and all(hasattr(t, "fake_mode") for t in tensors)


def name_of(target: Any) -> str:
    """Name an operation without its overload; `""` for other functions."""
    is_operation = hasattr(target, "overloadpacket")
    return target.name().split("::")[1].split(".")[0] if is_operation else ""


def _is_free(node: fx.Node) -> bool:
    """Whether a shape is another view of memory, and not a copy."""
    try:
        _value(node.args[0]).view(node.args[1])
    except (RuntimeError, ValueError):  # of a fake tensor
        return False
    return True


def _value(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]


def _shape(node: fx.Node) -> torch.Size:
    return _value(node).shape


def _order_of(node: fx.Node) -> list[int]:
    """In which order an operation puts the axes that it is given."""
    rank = len(_shape(node))
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [axis % rank for axis in node.args[1]]
    first, second = node.args[1:] or (0, -1)
    if rank:
        order[first], order[second] = order[second], order[first]
    return order
