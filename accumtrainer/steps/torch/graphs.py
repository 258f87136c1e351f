"""Graphs of PyTorch operations: recorded, tidied up, and run again.

`make_fx` records what a function does with tensors, its derivatives too, as a
list of operations without the Python around them. Where a function branches,
both ways are recorded, one after the other, between `mark`s, and where it loops
one turn is.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import optree
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from accumtrainer.keras_api.types import Tensor
from accumtrainer.steps.torch.adam import shorten_adam
from accumtrainer.steps.torch.blocks import read_block
from accumtrainer.steps.torch.changes import (
    changed_by,
    changed_later,
    is_view,
    leave_out_unread,
    memory_of,
)
from accumtrainer.steps.torch.constants import (
    is_zero,
    make_constant,
    same_as,
)
from accumtrainer.steps.torch.fusions import fuse
from accumtrainer.steps.torch.marks import LOOP, MARK
from accumtrainer.steps.torch.normalization import normalize
from accumtrainer.steps.torch.scalars import give_tensors
from accumtrainer.steps.torch.schemas import (
    can_run_again,
    returns_its_first,
)
from accumtrainer.steps.torch.shapes import simplify
from accumtrainer.steps.torch.source import emitted
from accumtrainer.steps.torch.tensors import without_autocast
from accumtrainer.steps.torch.unseen import (
    ALIAS,
    NoneFromOutside,
    OnlyWhatIsSeen,
)

aten = torch.ops.aten

ALIASES = {aten.detach.default, ALIAS}
"""Operations whose result is what they are given."""


class Graph:
    """What a function of tensors computes.

    Args:
        function: takes a list of tensors and returns one; may change those
            that it is given, in place.
        tensors: like those that it will be given.
        compiles: whether `torch.compile` compiles it.
    """

    def __init__(
        self,
        function: Callable[[list[Tensor]], list[Tensor]],
        tensors: list[Tensor],
        *,
        compiles: bool,
    ):
        with OnlyWhatIsSeen(), NoneFromOutside() as outside:
            record = make_fx(
                function, tracing_mode="fake", _allow_non_fake_inputs=True
            )
            module = record(tensors)
        for node in module.graph.nodes:
            if not can_run_again(node.target) or _has_open_size(node):
                raise ValueError(f"{node.target} is not recorded")
        self._outside = outside.read
        _give_aliased(module)
        with without_autocast():  # what is cast was recorded
            _tidy(module)
        if not compiles:  # the compiler goes through memory once by itself
            shorten_adam(module.graph)
            give_tensors(module)
        *nodes, output = module.graph.nodes
        places = [n for n in nodes if n.op == "placeholder"]
        body = (n for n in nodes if n.op not in ("placeholder", "get_attr"))
        block = read_block(module, body)
        # Of what it is given it needs what it reads.
        needed = block.reads.union(output.all_input_nodes)
        given = {n: place for place, n in enumerate(places) if n in needed}
        self._places = list(given.values())
        self._run = emitted(
            module, block, list(given), output.args[0], compiles=compiles
        )

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        tensors = [*tensors, *self._outside]
        return self._run(*[tensors[place] for place in self._places])


def _give_aliased(module: fx.GraphModule) -> None:
    """Have the graph be given, after all others, what it has aliases of.

    Tensors that were there before are no constants: whoever keeps them may
    change them, also where PyTorch does not count it, as through `data`.
    """
    graph = module.graph
    for node in graph.find_nodes(op="call_function", target=ALIAS):
        if node.args[0].op == "get_attr":
            with graph.inserting_before(node):
                given = graph.placeholder(f"outside_{node.name}")
            given.meta = node.meta
            node.replace_all_uses_with(given)


def _has_open_size(node: fx.Node) -> bool:
    """Whether it is numbers in a tensor that say how large a value is."""
    return any(
        isinstance(size, torch.SymInt)
        for value in optree.tree_leaves(node.meta.get("val"))
        if isinstance(value, torch.Tensor)
        for size in value.shape
    )


def _tidy(module: fx.GraphModule) -> None:
    """Leave out what has no effect, and make constants beforehand."""
    graph = module.graph
    changed = memory_of(changed_by(graph.nodes))
    for node in list(graph.nodes):
        target = node.target
        is_copy = target is aten.copy_.default and node.args[1] not in changed
        if is_copy and is_zero(module, node.args[1]):
            with graph.inserting_before(node):
                zero = graph.call_function(aten.zero_.default, node.args[:1])
            zero.meta = node.meta
            node.replace_all_uses_with(zero)
            graph.erase_node(node)
            zero.replace_all_uses_with(zero.args[0])
        elif target in ALIASES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif returns_its_first(target):
            # What it returns is what it was given.
            node.replace_all_uses_with(node.args[0])
    _leave_alone_what_is_put_back(graph)
    # What is changed, and what it may be a view of.
    changed = memory_of(changed_by(graph.nodes))
    needed = changed | memory_of(graph.output_node().all_input_nodes)
    shown = changed_later(graph)  # a copy would not show it
    made: set[fx.Node] = set()  # in this turn of a loop
    for node in list(graph.nodes):
        if node.target is MARK and node.args[1] == LOOP:
            made.clear()
        made.add(node)
        if _copies_what_is_lost(node) and node.args[0] in made:
            for kind in (changed, needed):
                if node in kind:
                    kind.add(node.args[0])
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_function" and node not in changed:
            if node.target is aten.view.default and node not in shown:
                # Memory may lie otherwise than foretold while recording.
                node.target = aten.reshape.default
            _compare_once(node, changed)
            same = None
            if node not in needed:  # whose memory is its own
                same = _copied_by(node, needed) or same_as(module, node)
            read = [same, *node.all_input_nodes] if same else []
            if same is not None and not changed & memory_of(read):
                node.replace_all_uses_with(same)
                graph.erase_node(node)
            elif node not in needed:  # who gets a result may change it
                make_constant(module, node)
    leave_out_unread(graph)
    simplify(module, changed)
    normalize(graph, changed)
    fuse(graph, changed)


def _leave_alone_what_is_put_back(graph: fx.Graph) -> None:
    """Copy nothing to where it came from, if nothing else changes that."""
    changes = Counter(
        value for n in graph.nodes for value in memory_of(changed_by([n]))
    )
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        value, source, *_ = node.args
        while source.target is aten.clone.default and source not in changes:
            source = source.args[0]
        is_only_change = all(changes[n] == 1 for n in memory_of([value]))
        if source is value and is_only_change:
            graph.erase_node(node)


def _copies_what_is_lost(node: fx.Node) -> bool:
    """Whether nothing but a copy is left of a value with its own memory."""
    if node.target is not aten.clone.default:
        return False
    (source,) = node.all_input_nodes
    values = [n.meta.get("val") for n in (source, node)]
    return (
        source.op == "call_function"
        and all(u is node or _is_over(u, node) for u in source.users)
        and not is_view(source)
        and all(isinstance(value, torch.Tensor) for value in values)
        and values[0].stride() == values[1].stride()
    )


def _compare_once(node: fx.Node, changed: set[fx.Node]) -> None:
    """Find out by one comparison what is finite: NaN is not less either."""
    if node.target is not aten.mul.Tensor:
        return
    itself, bounded = node.args
    targets = [getattr(factor, "target", None) for factor in node.args]
    if targets != [aten.eq.Tensor, aten.ne.Scalar]:
        return
    value, (size, bound) = itself.args[0], bounded.args
    is_size = size.target is aten.abs.default and size.args == (value,)
    is_test = is_size and itself.args == (value, value) and bound == math.inf
    if is_test and not changed & memory_of([value, size, itself, bounded]):
        is_root = value.target is aten.sqrt.default  # which is not below zero
        is_real = not value.meta["val"].is_complex()
        node.target = aten.lt.Scalar
        node.args = (value if is_root and is_real else size, bound)


def _is_over(reader: fx.Node, node: fx.Node) -> bool:
    """Whether a value is read before an operation, and is not kept by it."""
    is_operation = reader.op == "call_function" and not is_view(reader)
    return is_operation and reader < node


def _copied_by(node: fx.Node, needed: set[fx.Node]) -> fx.Node | None:
    """Return what is copied, if it is only read."""
    if node.target is not aten.clone.default:
        return None
    source = node.args[0]
    if needed & memory_of([source]) or "val" not in source.meta:
        return None
    lies_alike = source.meta["val"].stride() == node.meta["val"].stride()
    return source if lies_alike else None
