"""What was recorded in blocks: operations in a row, branches and loops."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import fx

from accumtrainer.steps.torch.marks import COLLECT, IF, ITEM, LOOP, MARK


@dataclass(frozen=True, slots=True)
class Row:
    """Operations in a row.

    Args:
        nodes: the operations.
    """

    nodes: Sequence[fx.Node]

    @property
    def reads(self) -> set[fx.Node]:
        """What they are made of, constants apart."""
        inputs = (i for node in self.nodes for i in node.all_input_nodes)
        return without_constants(inputs).difference(self.nodes)


@dataclass(frozen=True, slots=True)
class Branch:
    """Two blocks, one of which runs.

    Args:
        predicate: decides between them.
        on_true: a block.
        on_false: a block.
    """

    predicate: fx.Node
    on_true: "Block"
    on_false: "Block"

    @property
    def reads(self) -> set[fx.Node]:
        """What both are made of, and what decides."""
        return {self.predicate, *self.on_true.reads, *self.on_false.reads}


@dataclass(frozen=True, slots=True)
class Loop:
    """A block that runs for every item.

    Args:
        indices: have an element for every turn.
        body: the block.
    """

    indices: fx.Node
    body: "Block"

    @property
    def turns(self) -> int:
        """How often it runs."""
        return len(self.indices.meta["val"])

    @property
    def stacks(self) -> list[fx.Node]:
        """What it goes through."""
        return [cast(fx.Node, item.args[0]) for item in self.body.items]

    @property
    def results(self) -> list[fx.Node]:
        """Of which value of every turn it makes a stack."""
        return [cast(fx.Node, node.args[0]) for node in self.body.collected]

    @property
    def reads(self) -> set[fx.Node]:
        """What it goes through, and what every turn is made of."""
        around = without_constants([*self.stacks, *self.results])
        return self.body.reads | around.difference(self.body.made)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows, branches and loops in their order.

    Args:
        parts: of these.
        made: everything that is made by them.
        items: what a loop goes through, of which this is the body.
        collected: what that loop makes.
    """

    parts: Sequence[Row | Branch | Loop]
    made: set[fx.Node] = field(default_factory=set)
    items: Sequence[fx.Node] = ()
    collected: Sequence[fx.Node] = ()

    @property
    def reads(self) -> set[fx.Node]:
        """What they are made of, constants and what they make apart."""
        return set().union(*(p.reads for p in self.parts)) - self.made


def without_constants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Leave out what is the same in every run."""
    return {node for node in nodes if node.op != "get_attr"}


def read_block(module: fx.GraphModule, nodes: Iterator[fx.Node]) -> Block:
    """Read a block, up to the mark that ends it.

    Args:
        module: has the constants.
        nodes: what was recorded, from the first of the block on.
    """
    parts: list[Row | Branch | Loop] = []
    made: set[fx.Node] = set()
    row: list[fx.Node] = []
    kinds: dict[object, list[fx.Node]] = {ITEM: [], COLLECT: []}
    for node in nodes:
        if node.target is not MARK:
            made.add(node)
            kinds.get(node.target, row).append(node)
            continue
        if row:
            parts.append(Row(row))
        row = []
        decides, part = node.args
        if part not in (IF, LOOP):
            break  # who has begun it goes on behind it
        blocks = [read_block(module, nodes)]
        if part == LOOP:
            parts.append(Loop(decides, *blocks))
        else:
            blocks.append(read_block(module, nodes))
            parts += _branch(module, decides, *blocks)
        made.update(*(block.made for block in blocks))
    if row:
        parts.append(Row(row))
    return Block(parts, made, kinds[ITEM], kinds[COLLECT])


def _branch(
    module: fx.GraphModule, predicate: fx.Node, on_true: Block, on_false: Block
) -> Sequence[Row | Branch | Loop]:
    """Make a branch, or what it always is."""
    if predicate.op != "get_attr":
        return [Branch(predicate, on_true, on_false)]
    always = getattr(module, predicate.target)
    return (on_true if always else on_false).parts
