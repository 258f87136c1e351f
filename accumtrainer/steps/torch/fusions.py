"""Recorded operations that go through memory once, in the place of several.

Large variables fit into no cache: an update takes as long as they take to be
read and written. Gradients are made only to be added up; that of an embedding
is as large as the embedding, though few of its rows are not zero. Keras's
optimizers make a list of new tensors for each term of their formulas.
"""

from collections.abc import Iterable
from operator import getitem
from typing import Any

import torch
from torch import fx

from accumtrainer.steps.torch.changes import (
    changed_by,
    leave_out_unread,
    memory_of,
    readers_of,
)
from accumtrainer.steps.torch.marks import LOOP, MARK
from accumtrainer.steps.torch.normalization import PRECISE

aten = torch.ops.aten

FOREACH = "_foreach_"
"""How operations on lists begin. PyTorch has no other names for them, under
which it documents them too."""


def on_lists(name: str, overload: str) -> Any:
    """Return an operation of PyTorch on lists of tensors."""
    return getattr(getattr(aten, FOREACH + name), overload)


MULTIPLY, DIVIDE = (
    on_lists("mul", "List"),
    on_lists("div", "List"),
)
ADD, ADD_IN_PLACE = (
    on_lists("add", "Scalar"),
    on_lists("add_", "Scalar"),
)
ADD_LIST = on_lists("add_", "List")
ADDING = {
    MULTIPLY: on_lists("addcmul_", "Scalar"),
    DIVIDE: on_lists("addcdiv_", "Scalar"),
}
"""Operations on two lists, and those that add their results to a third."""

MAKE_NEW = {on_lists("sqrt", "default"), MULTIPLY, DIVIDE}
"""Operations whose results have memory of their own."""


def fuse(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """Have fewer operations go through the memory of large tensors.

    Args:
        graph: of operations, simplified.
        changed: values that operations change in place.
    """
    for node in list(graph.nodes):
        if node.target is aten.copy_.default:
            _add_to_itself(graph, node)
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is aten.add_.Tensor:
            _add_gradient(graph, node, changed, places)
        elif node.target is ADD_LIST:
            _add_products(node)
        elif node.target is ADD:
            _add_in_place(graph, node)
    leave_out_unread(graph)


def _add_to_itself(graph: fx.Graph, node: fx.Node) -> None:
    """Add in place what is added to a value to be written over it."""
    total, made, *_ = node.args
    if not _is_read_once(made) or made.target is not aten.add.Tensor:
        return
    if made.kwargs or made.args[0] is not total or node.kwargs:
        return
    if not _is_alike(total, made) or not _stays(made, node):
        return
    if memory_of([total]) & memory_of(made.all_input_nodes[1:]):
        return  # a view of it would change while it is added
    with graph.inserting_before(node):
        added = graph.call_function(aten.add_.Tensor, made.args)
    added.meta = dict(total.meta)
    graph.erase_node(node)
    graph.erase_node(made)


def _add_gradient(
    graph: fx.Graph,
    node: fx.Node,
    changed: set[fx.Node],
    places: dict[fx.Node, int],
) -> None:
    """Add to a total what is made for nothing else, while it is made."""
    total, made, *_ = node.args
    if _is_read_once(made) and made.target is aten.reshape.default:
        made = made.args[0]
    if node.kwargs or not _is_read_once(made):
        return
    if changed & memory_of(made.all_input_nodes):
        return
    with graph.inserting_before(_place_of(made, node, places)):
        if made.target is aten.embedding_dense_backward.default:
            is_added = _add_rows(graph, total, made)
        else:
            is_added = made.target is aten.mm.default and _add_matrix(
                graph, total, made
            )
    if is_added:
        graph.erase_node(node)


def _is_alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    is_known = a is not None and b is not None
    return is_known and (a.shape, a.dtype) == (b.shape, b.dtype)


def _is_read_once(value: Any) -> bool:
    return isinstance(value, fx.Node) and len(value.users) == 1


def _place_of(
    made: fx.Node, node: fx.Node, places: dict[fx.Node, int]
) -> fx.Node:
    """Find where to add a value: early, as what it is made of takes memory."""
    total = node.args[0]
    later = made
    while later is not node and later.target is not MARK:
        later = later.next
    if later is not node or memory_of([total]) != {total}:
        return node
    # The total is not made meanwhile, nor does anybody read it.
    first = places[made]
    others = {total, *readers_of(total)} - {node}
    is_read = any(first <= places.get(n, first) < places[node] for n in others)
    return node if is_read else made


def _add_rows(graph: fx.Graph, total: fx.Node, made: fx.Node) -> bool:
    """Add the rows that an embedding's gradient has, without its zeros."""
    rows, indices, _, padding, is_by_frequency = made.args
    # Elsewhere rows are added in another order every time.
    is_on_host = total.meta["val"].device.type == "cpu"
    if not is_on_host or is_by_frequency or padding >= 0:
        return False
    whole = _view_like(graph, total, made)
    if whole is None:
        return False
    places = graph.call_function(aten.reshape.default, (indices, [-1]))
    shape = [-1, made.meta["val"].shape[-1]]
    rows = graph.call_function(aten.reshape.default, (rows, shape))
    graph.call_function(aten.index_add_.default, (whole, 0, places, rows))
    return True


def _add_matrix(graph: fx.Graph, total: fx.Node, made: fx.Node) -> bool:
    """Add a product of matrices."""
    whole = _view_like(graph, total, made)
    if whole is None:
        return False
    graph.call_function(aten.addmm_.default, (whole, *made.args))
    return True


def _view_like(
    graph: fx.Graph, total: fx.Node, made: fx.Node
) -> fx.Node | None:
    """View a total in the shape of what is added; `None` if that cannot be."""
    value, own = total.meta["val"], made.meta["val"]
    is_alike = value.dtype == own.dtype and value.numel() == own.numel()
    if not is_alike or not value.is_contiguous():
        return None
    if value.shape == own.shape:
        return total
    shape = list(own.shape)
    return graph.call_function(aten.view.default, (total, shape))


def _add_products(node: fx.Node) -> None:
    """Add the products or quotients of two lists as they are computed."""
    totals, addends = node.args
    source = _only_source(addends)
    if source is None or source.target not in ADDING:
        return
    factors = source.all_input_nodes
    dtypes = {n.meta["val"].dtype for n in (*totals, *factors)}
    # Others are rounded, or too large, before they are added.
    if len(dtypes) > 1 or not dtypes <= PRECISE or not _stays(source, node):
        return
    if memory_of(totals) & memory_of(factors):
        return  # one of them would change while others are computed of it
    node.target = ADDING[source.target]
    node.args = (totals, *source.args)
    node.kwargs = {"value": node.kwargs.get("alpha", 1)}


def _add_in_place(graph: fx.Graph, node: fx.Node) -> None:
    """Add a number to a list of which nothing else is made."""
    values, number = node.args
    source = _only_source(values)
    if source is None or source.target not in MAKE_NEW:
        return
    made = [value.dtype for value in node.meta["val"]]
    is_cast = made != [value.meta["val"].dtype for value in values]
    if is_cast or not _stays(source, node):
        return
    with graph.inserting_before(node):
        graph.call_function(ADD_IN_PLACE, (values, number))
    for item in list(node.users):
        item.replace_all_uses_with(values[item.args[1]])
        graph.erase_node(item)
    graph.erase_node(node)


def _only_source(items: Iterable[fx.Node]) -> fx.Node | None:
    """Return what has made a list, if the whole of it is read once."""
    items = list(items)
    sources = {n.args[0] for n in items if n.target is getitem}
    if len(sources) != 1 or any(len(n.users) > 1 for n in items):
        return None
    (source,) = sources
    places = [n.args[1] for n in items if n.target is getitem]
    is_whole = places == list(range(len(items))) and len(source.users) == len(
        items
    )
    return source if is_whole else None


def _stays(source: fx.Node, node: fx.Node) -> bool:
    """Whether an operation would make the same in the place of a later one.

    What it reads is the same there, and it would be run as often.
    """
    between, later = [], source.next
    while later is not node:
        between.append(later)
        later = later.next
    if any(n.target is MARK and n.args[1] == LOOP for n in between):
        return False
    changed = memory_of(changed_by(between))
    return not changed & memory_of(source.all_input_nodes)
