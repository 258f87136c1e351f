"""Graphs of PyTorch operations: recorded, tidied up, and run again.

`make_fx` records what a function does with tensors, its derivatives too, as a
list of operations without the Python around them. Where a function branches,
both ways are recorded, one after the other, between `mark`s, and where it loops
one turn is; such a graph is run in pieces.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from accumtrainer.keras_api.types import Tensor
from accumtrainer.steps.torch.adam import shorten_adam
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
from accumtrainer.steps.torch.marks import COLLECT, IF, ITEM, LOOP, MARK
from accumtrainer.steps.torch.normalization import normalize
from accumtrainer.steps.torch.schemas import (
    can_run_again,
    returns_its_first,
)
from accumtrainer.steps.torch.shapes import simplify
from accumtrainer.steps.torch.source import Row, compiled, emitted
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
        *nodes, output = module.graph.nodes
        places = [n for n in nodes if n.op == "placeholder"]
        body = [n for n in nodes if n.op not in ("placeholder", "get_attr")]
        self._results = [_constant_of(module, r) for r in output.args[0]]
        self._pieces = _Pieces(module, iter(body), compiles=compiles)
        made = {r for r in self._results if isinstance(r, fx.Node)}
        self._pieces.forget_early(made)
        # Of what it is given it needs what it reads.
        needed = self._pieces.needed | made
        self._given = [(i, n) for i, n in enumerate(places) if n in needed]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        tensors = [*tensors, *self._outside]
        values = {node: tensors[i] for i, node in self._given}
        self._pieces.run(values)
        return [
            values[r] if isinstance(r, fx.Node) else r for r in self._results
        ]


class _Run:
    """Operations in a row, without a branch."""

    def __init__(
        self, module: fx.GraphModule, nodes: list[fx.Node], *, compiles: bool
    ):
        self._module = module
        self._nodes = nodes
        self._compiles = compiles
        inside = set(nodes)
        reads = dict.fromkeys(i for n in nodes for i in n.all_input_nodes)
        self.reads = [
            n for n in reads if n not in inside and n.op != "get_attr"
        ]
        self._makes = [
            n for n in nodes if any(u not in inside for u in n.users)
        ]
        self._forgets: list[fx.Node] = []

    def finish(self, later: set[fx.Node]) -> None:
        """Make the function, once it is known what is read later."""
        self._forgets = [n for n in self.reads if n not in later]
        makes = self._makes = [n for n in self._makes if n in later]
        row = Row(self._module, self._nodes, self.reads, makes)
        self._function = compiled(row) if self._compiles else emitted(row)

    def run(self, values: dict[fx.Node, Tensor]) -> None:
        """Run, and change what is known."""
        made = self._function(*[values[n] for n in self.reads])
        for node in self._forgets:
            values.pop(node, None)
        values.update(zip(self._makes, made, strict=True))


class _Branch:
    """Two lists of pieces, one of which is run."""

    def __init__(self, predicate: fx.Node, ways: "tuple[_Pieces, _Pieces]"):
        self._predicate = predicate
        self._ways = ways
        self.reads = {predicate}.union(*(way.needed for way in ways))

    def finish(self, later: set[fx.Node]) -> None:
        """Make the functions, once it is known what is read later."""
        for way in self._ways:
            way.forget_early(later)

    def run(self, values: dict[fx.Node, Tensor]) -> None:
        """Run one of them, and change what is known."""
        on_true, on_false = self._ways
        (on_true if values[self._predicate] else on_false).run(values)


class _Loop:
    """A list of pieces that is run for every item."""

    def __init__(
        self, module: fx.GraphModule, indices: fx.Node, body: "_Pieces"
    ):
        self._module = module
        self._turns = len(indices.meta["val"])
        self._body = body
        self._results = [node.args[0] for node in body.collected]
        stacks = [node.args[0] for node in body.items]
        read = body.needed.union(stacks, self._results) - body.made
        self.reads = {node for node in read if node.op != "get_attr"}
        self._forgets: set[fx.Node] = set()

    def finish(self, later: set[fx.Node]) -> None:
        """Make the functions, once it is known what is read later."""
        # Every turn reads again what the first one has read.
        self._body.forget_early(later.union(self.reads, self._results))
        self._forgets = (self.reads | set(self._results)) - later

    def run(self, values: dict[fx.Node, Tensor]) -> None:
        """Run turn by turn, and change what is known."""
        body = self._body
        stacks = [self._value(item.args[0], values) for item in body.items]
        parts = [stack.unbind() for stack in stacks]
        columns: list[list[Tensor]] = [[] for _ in body.collected]
        for turn in range(self._turns):
            for item, column in zip(body.items, parts, strict=True):
                values[item] = column[turn]
            body.run(values)
            for result, column in zip(self._results, columns, strict=True):
                column.append(self._value(result, values))
        for node in self._forgets:
            values.pop(node, None)
        for node, column in zip(body.collected, columns, strict=True):
            values[node] = torch.stack(column)

    def _value(self, node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor:
        constant = _constant_of(self._module, node)
        return values[node] if constant is node else constant


class _Pieces:
    """The pieces of a graph in their order.

    Attributes:
        made: everything that is made by them.
        items: what a loop goes through, of which these are the pieces.
        collected: what it makes.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        nodes: Iterator[fx.Node],
        *,
        compiles: bool,
    ):
        self._pieces: list[_Run | _Branch | _Loop] = []
        self.made: set[fx.Node] = set()
        self.items: list[fx.Node] = []
        self.collected: list[fx.Node] = []
        row: list[fx.Node] = []
        kinds = {ITEM: self.items, COLLECT: self.collected}
        for node in nodes:
            if node.target is not MARK:
                self.made.add(node)
                kinds.get(node.target, row).append(node)
                continue
            if row:
                self._pieces.append(_Run(module, row, compiles=compiles))
            row = []
            predicate, part = node.args
            if part == LOOP:
                body = _Pieces(module, nodes, compiles=compiles)
                self.made |= body.made
                self._pieces.append(_Loop(module, predicate, body))
                continue
            if part != IF:
                break  # who has begun it goes on behind it
            on_true = _Pieces(module, nodes, compiles=compiles)
            on_false = _Pieces(module, nodes, compiles=compiles)
            self.made |= on_true.made | on_false.made
            if predicate.op == "get_attr":  # always the same way
                always = getattr(module, predicate.target)
                self._pieces += (on_true if always else on_false)._pieces
            else:
                self._pieces.append(_Branch(predicate, (on_true, on_false)))
        if row:
            self._pieces.append(_Run(module, row, compiles=compiles))

    @property
    def needed(self) -> set[fx.Node]:
        """What is read, of what is known before or made in here."""
        return set().union(*(piece.reads for piece in self._pieces))

    def forget_early(self, later: set[fx.Node]) -> None:
        """Have every value forgotten where it was read last.

        Args:
            later: what is read after these.
        """
        later = set(later)
        for piece in reversed(self._pieces):
            piece.finish(later)
            later.update(piece.reads)

    def run(self, values: dict[fx.Node, Tensor]) -> None:
        """Run all, and change what is known."""
        for piece in self._pieces:
            piece.run(values)


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


def _constant_of(module: fx.GraphModule, result: Any) -> Any:
    is_constant = isinstance(result, fx.Node) and result.op == "get_attr"
    return getattr(module, result.target) if is_constant else result


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


def _copies_what_is_lost(node: fx.Node) -> bool:
    """Whether nothing but a copy reads a value, which has its own memory."""
    if node.target is not aten.clone.default:
        return False
    (source,) = node.all_input_nodes
    values = [n.meta.get("val") for n in (source, node)]
    return (
        source.op == "call_function"
        and len(source.users) == 1
        and not is_view(source)
        and all(isinstance(value, torch.Tensor) for value in values)
        and values[0].stride() == values[1].stride()
    )


def _copied_by(node: fx.Node, needed: set[fx.Node]) -> fx.Node | None:
    """Return what is copied, if it is only read."""
    if node.target is not aten.clone.default:
        return None
    source = node.args[0]
    if needed & memory_of([source]) or "val" not in source.meta:
        return None
    lies_alike = source.meta["val"].stride() == node.meta["val"].stride()
    return source if lies_alike else None
