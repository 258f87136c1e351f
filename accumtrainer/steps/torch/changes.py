"""What recorded operations change in place, and what may be a view of it."""

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from accumtrainer.steps.torch.marks import END, IF, ITEM, LOOP, MARK
from accumtrainer.steps.torch.schemas import arguments_changed_by

aten = torch.ops.aten

VIEW_OF_PRODUCT = "_unsafe_view"
"""What shapes a product of more axes; it has no other name."""

RESHAPES = {
    aten.view.default,
    getattr(aten, VIEW_OF_PRODUCT).default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
}
"""Operations that keep all elements in their order."""

UNSAFE_SPLITS = {
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
}
"""Operations whose results are views, which they do not say."""


def changed_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Find the values that operations change in place."""
    changed: set[fx.Node] = set()
    for node in nodes:
        arguments = arguments_changed_by(node.target, node.args, node.kwargs)
        fx.node.map_arg(arguments, changed.add)
    return changed


def leave_out_unread(graph: fx.Graph) -> None:
    """Leave out what nobody reads and what changes nothing.

    PyTorch itself goes by what operations say of themselves.
    """
    graph.eliminate_dead_code(
        lambda node: node.is_impure() or bool(changed_by([node]))
    )


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """List what reads a value, or a view of it."""
    for user in node.users:
        yield user
        if user.op != "output" and is_view(user):
            yield from readers_of(user)


def memory_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Find the values of which some may be views, and these."""
    found, left = set(), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes if is_view(node) else ()
    return found


def first_changes(graph: fx.Graph) -> dict[fx.Node, int]:
    """Find where values change first, or where a loop begins that does it."""
    found: dict[fx.Node, int] = {}
    around: list[tuple[int, int]] = []
    for place, node in enumerate(graph.nodes):
        if node.target is MARK:
            part = node.args[1]
            if part in (IF, LOOP):
                around.append((part, place))
            elif part == END:
                around.pop()
        loops = [begun for part, begun in around if part == LOOP]
        for value in memory_of(changed_by([node])):
            found.setdefault(value, loops[0] if loops else place)
    return found


def changed_later(graph: fx.Graph) -> set[fx.Node]:
    """Find the views of what changes after they were made.

    What changes in a loop changes until that ends.
    """
    last: dict[fx.Node, int] = {}
    in_loop: set[fx.Node] = set()
    around: list[int] = []
    for place, node in enumerate(graph.nodes):
        if node.target is MARK and node.args[1] in (IF, LOOP):
            around.append(node.args[1])
        elif node.target is MARK and node.args[1] == END:
            around.pop()
        in_loop |= memory_of(changed_by([node]))
        if LOOP not in around:
            last.update(dict.fromkeys(in_loop, place))
            in_loop.clear()
    return {
        node
        for place, node in enumerate(graph.nodes)
        if is_view(node)
        and any(last.get(n, -1) > place for n in memory_of([node]))
    }


def is_view(node: fx.Node) -> bool:
    """Whether a value may be in the memory of what it is made of."""
    # What is no operation may be anything, an element of a list of views too.
    if node.target in RESHAPES or node.target in UNSAFE_SPLITS:
        return True
    if node.target is ITEM:
        return True
    return getattr(node.target, "is_view", True)
