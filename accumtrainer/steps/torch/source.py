"""Recorded operations made into a function of Python, or a compiled one."""

import operator
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from accumtrainer import errors
from accumtrainer.keras_api.types import Tensor
from accumtrainer.steps.torch.changes import memory_of
from accumtrainer.steps.torch.schemas import takes_only_what_builtins_take

aten = torch.ops.aten

COMPILER = "inductor"
"""What `torch.compile` compiles with."""

Function = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Row:
    """Operations in a row, of which a function is made.

    Args:
        module: has the constants.
        nodes: the operations.
        reads: what the function takes.
        makes: what it returns.
    """

    module: fx.GraphModule
    nodes: Sequence[fx.Node]
    reads: Sequence[fx.Node]
    makes: Sequence[fx.Node]


def compiled(row: Row) -> Function:
    """Have `torch.compile` make a function of operations in a row."""
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in row.reads}
    for node in row.nodes:
        for constant in node.all_input_nodes:
            if constant.op == "get_attr" and constant not in copies:
                copies[constant] = graph.node_copy(constant)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[n] for n in row.makes])
    with warnings.catch_warnings():
        # PyTorch imports what it warns of itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        function = torch.compile(
            fx.GraphModule(row.module, graph), dynamic=False, backend=COMPILER
        )
    return _Compiled(function, lambda: emitted(row))


class _Compiled:
    """A compiled function, or another one where it cannot be compiled.

    Args:
        function: compiled when it is called first.
        otherwise: makes the other one.
    """

    def __init__(self, function: Function, otherwise: Callable[[], Function]):
        self._function = function
        self._otherwise: Callable[[], Function] | None = otherwise

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        if self._otherwise is None:
            return self._function(*tensors)
        otherwise, self._otherwise = self._otherwise, None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return self._function(*tensors)
        except Exception as error:
            reason = describe(error)
            self._function = otherwise()
        result = self._function(*tensors)  # or else what was wrong comes again
        warnings.warn(
            errors.WITHOUT_TORCH_COMPILE.format(error=reason), stacklevel=2
        )
        return result


def emitted(row: Row) -> Function:
    """Write a function of operations in a row, one line for each.

    That of `GraphModule` does the same, and takes longer to find what it
    calls and its constants. Operations that are alike and follow each other,
    one for every variable, become one of a list.
    """
    writer = _Writer(row.module)
    lines = [f"def run({', '.join(map(writer.name, row.reads))}):"]
    last = {
        n: place
        for place, node in enumerate(row.nodes)
        for n in node.all_input_nodes
    }
    kept, place = {*row.makes}, 0
    for group in _groups(row.nodes):
        lines.append(f"    {writer.line(group)}")
        place += len(group)
        done = dict.fromkeys(n for node in group for n in node.all_input_nodes)
        for node in [*done, *group]:
            is_value = node.op != "get_attr" and node not in kept
            if is_value and last.get(node, -1) < place:
                lines.append(f"    {writer.name(node)} = None")
    lines.append(f"    return [{', '.join(map(writer.name, row.makes))}]")
    exec("\n".join(lines), writer.names)
    return writer.names["run"]


IN_LISTS = {
    aten.add_.Tensor: "_foreach_add_",
    aten.zero_.default: "_foreach_zero_",
}
"""Operations that change one tensor, and those of PyTorch for a list.

It has no other names for them, under which it documents them too.
"""


def _groups(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Put operations that are alike together where they follow each other."""
    group: list[fx.Node] = []
    for node in nodes:
        if group and not _belongs(node, group):
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def _belongs(node: fx.Node, group: list[fx.Node]) -> bool:
    first = group[0]
    if node.target is not first.target or node.kwargs or first.kwargs:
        return False
    if node.target not in IN_LISTS:
        return False
    if not all(isinstance(a, fx.Node) for a in (*node.args, *first.args)):
        return False
    # A list is gone through in any order, and none may be in it twice.
    changed = memory_of(n.args[0] for n in group)
    read = memory_of(a for n in group for a in n.args)
    return not (
        changed & memory_of(node.args) or read & memory_of(node.args[:1])
    )


def quickest(operation: Any) -> Callable[..., Any]:
    """Find PyTorch's own function of an operation, or else its method.

    They do the same in half a microsecond less, as they are generated for their
    arguments. What PyTorch writes in Python is neither.
    """
    is_operation = getattr(operation, "namespace", None) == "aten"
    if is_operation and takes_only_what_builtins_take(operation):
        name = operation.overloadpacket.__name__
        function = getattr(torch, name, None)
        if isinstance(function, types.BuiltinFunctionType):
            return function
        method = getattr(torch.Tensor, name, None)
        if isinstance(method, types.MethodDescriptorType):
            return method
    return operation


class _Writer:
    """Writes lines of Python.

    Attributes:
        names: what they call, by name.
    """

    def __init__(self, module: fx.GraphModule):
        self._module = module
        self._known: dict[Any, str] = {}
        self.names: dict[str, Any] = {}

    def name(self, node: fx.Node) -> str:
        """Return the name of a value, or of a constant."""
        if node not in self._known:
            self._known[node] = f"v{len(self._known)}"
            if node.op == "get_attr":
                constant = getattr(self._module, node.target)
                self.names[self._known[node]] = constant
        return self._known[node]

    def line(self, group: list[fx.Node]) -> str:
        """Write what makes the values of operations that are alike."""
        node = group[0]
        if len(group) > 1:
            columns = zip(*(n.args for n in group), strict=True)
            call = self._constant(getattr(torch, IN_LISTS[node.target]))
            return f"{call}({', '.join(self._write(list(c)) for c in columns)})"
        if node.target is operator.getitem:
            value, index = map(self._write, node.args)
            return f"{self.name(node)} = {value}[{index}]"
        given = [self._write(a) for a in node.args]
        given += [f"{k}={self._write(v)}" for k, v in node.kwargs.items()]
        call = self._constant(quickest(node.target))
        return f"{self.name(node)} = {call}({', '.join(given)})"

    def _write(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return self.name(argument)
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(map(self._write, argument))}]"
        if argument is None or isinstance(argument, (bool, int)):
            return repr(argument)
        return self._constant(argument)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name


def describe(error: Exception) -> str:
    """Say in a line what an error says in many."""
    # Keras puts its own words in the place of those that some errors have.
    said = str(error).strip() or getattr(error, "cond", "")
    return textwrap.shorten(f"{type(error).__name__}: {said}", 300)
