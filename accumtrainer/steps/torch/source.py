"""Recorded operations made into a function of Python, or a compiled one."""

import contextlib
import operator
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from accumtrainer import errors
from accumtrainer.keras_api.types import Tensor
from accumtrainer.steps.torch.blocks import (
    Block,
    Branch,
    Loop,
    Row,
    without_constants,
)
from accumtrainer.steps.torch.changes import memory_of
from accumtrainer.steps.torch.schemas import takes_only_what_builtins_take

aten = torch.ops.aten

COMPILER = "inductor"
"""What `torch.compile` compiles with."""

Function = Callable[..., Sequence[Tensor]]


def compiled(
    module: fx.GraphModule,
    row: Row,
    reads: Sequence[fx.Node],
    makes: Sequence[fx.Node],
) -> Function:
    """Have `torch.compile` make a function of operations in a row.

    Args:
        module: has the constants.
        row: the operations.
        reads: what the function takes.
        makes: what it returns.
    """
    graph = fx.Graph()
    copies = {n: graph.placeholder(n.name) for n in reads}
    for node in row.nodes:
        for constant in node.all_input_nodes:
            if constant.op == "get_attr" and constant not in copies:
                copies[constant] = graph.node_copy(constant)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[n] for n in makes])
    with warnings.catch_warnings():
        # PyTorch imports what it warns of itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        function = torch.compile(
            fx.GraphModule(module, graph), dynamic=False, backend=COMPILER
        )
    return _Compiled(
        function,
        lambda: emitted(module, Block([row]), reads, makes, compiles=False),
    )


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


def emitted(
    module: fx.GraphModule,
    block: Block,
    given: Sequence[fx.Node],
    results: Sequence[fx.Node | None],
    *,
    compiles: bool,
) -> Function:
    """Write a function of operations, one line for each.

    That of `GraphModule` does the same, without branches and loops, and takes
    longer to find what it calls and its constants. Operations that are alike
    and follow each other, one for every variable, become one of a list. Every
    value is forgotten where it was read last.

    Args:
        module: has the constants.
        block: the operations.
        given: what the function takes.
        results: what it returns, as a list.
        compiles: whether `torch.compile` compiles what is in a row.
    """
    writer = _Writer(module, compiles=compiles)
    writer.line(f"def run({', '.join(map(writer.name, given))}):")
    with writer.indented():
        writer.block(block, {n for n in results if isinstance(n, fx.Node)})
        writer.line(f"return {writer.written(results)}")
    exec("\n".join(writer.lines), writer.names)
    return writer.names.pop("run")


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
    if not all(map(_is_value, (*node.args, *first.args))):
        return False
    # A list is gone through in any order, and none may be in it twice.
    changed = memory_of(n.args[0] for n in group)
    read = memory_of(a for n in group for a in n.args)
    return not (
        changed & memory_of(node.args) or read & memory_of(node.args[:1])
    )


def _is_value(argument: Any) -> bool:
    """Whether it is one value for each variable, and no number for all."""
    return isinstance(argument, fx.Node) and argument.op != "get_attr"


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

    Args:
        module: has the constants.
        compiles: whether `torch.compile` compiles what is in a row.

    Attributes:
        lines: what was written.
        names: what they call, and constants, by name.
    """

    def __init__(self, module: fx.GraphModule, *, compiles: bool):
        self._module = module
        self._compiles = compiles
        self._known: dict[fx.Node, str] = {}
        self._margin = ""
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}

    @contextlib.contextmanager
    def indented(self) -> Iterator[None]:
        """Write what belongs to the line before."""
        margin = self._margin
        self._margin += " "
        yield
        self._margin = margin

    def line(self, text: str) -> None:
        """Write a line; `pass` where a block may have no other."""
        self.lines.append(self._margin + text)

    def name(self, node: fx.Node) -> str:
        """Return the name of a value, or of a constant."""
        if node not in self._known:
            self._known[node] = f"v{len(self._known)}"
            if node.op == "get_attr":
                constant = getattr(self._module, node.target)
                self.names[self._known[node]] = constant
        return self._known[node]

    def block(self, block: Block, later: set[fx.Node]) -> None:
        """Write all of a block.

        Args:
            block: rows, branches and loops.
            later: what is read behind it.
        """
        after = []
        for part in reversed(block.parts):
            after.append(later)
            later = later | part.reads
        for part in block.parts:
            later = after.pop()
            if isinstance(part, Branch):
                self._branch(part, later)
            elif isinstance(part, Loop):
                self._loop(part, later)
            elif self._compiles:
                self._compiled(part, later)
            else:
                self._row(part, later)

    def _row(self, row: Row, later: set[fx.Node]) -> None:
        last = {
            n: place
            for place, node in enumerate(row.nodes)
            for n in node.all_input_nodes
        }
        place = 0
        for group in _groups(row.nodes):
            self._operation(group)
            place += len(group)
            read = {n for node in group for n in node.all_input_nodes}
            self._forget({n for n in read if last[n] < place} - later)

    def _compiled(self, row: Row, later: set[fx.Node]) -> None:
        reads = sorted(row.reads)
        makes = [node for node in row.nodes if node in later]
        call = self._constant(compiled(self._module, row, reads, makes))
        made = f"{self.written(makes)} = " if makes else ""
        self.line(f"{made}{call}({', '.join(map(self.name, reads))})")
        self._forget(row.reads - later)

    def _branch(self, branch: Branch, later: set[fx.Node]) -> None:
        ways = {f"if {self.name(branch.predicate)}:": branch.on_true}
        ways["else:"] = branch.on_false
        for word, way in ways.items():
            self.line(word)
            with self.indented():
                self.line("pass")
                self._forget(branch.reads - way.reads - later)
                self.block(way, later)

    def _loop(self, loop: Loop, later: set[fx.Node]) -> None:
        collected = [*map(self.name, loop.body.collected)]
        for name in collected:
            self.line(f"{name} = []")
        stacks = [f"{self.name(stack)}.unbind()" for stack in loop.stacks]
        items = "".join(f"{self.name(item)}, " for item in loop.body.items)
        turns = (
            f"zip({', '.join(stacks)})" if stacks else f"range({loop.turns})"
        )
        self.line(f"for {items or '_'} in {turns}:")
        # Every turn reads again what the first one has read.
        kept = later.union(loop.reads, loop.results)
        with self.indented():
            self.line("pass")
            self.block(loop.body, kept)
            for name, result in zip(collected, loop.results, strict=True):
                self.line(f"{name}.append({self.name(result)})")
        self._forget(loop.reads.union(loop.results) - later)
        for name in collected:
            self.line(f"{name} = {self._constant(torch.stack)}({name})")

    def _forget(self, nodes: set[fx.Node]) -> None:
        names = [f"{self.name(node)} = " for node in without_constants(nodes)]
        if names:
            self.line("".join(sorted(names)) + "None")

    def _operation(self, group: list[fx.Node]) -> None:
        """Write what makes the values of operations that are alike."""
        node = group[0]
        if len(group) > 1:
            columns = zip(*(n.args for n in group), strict=True)
            call = self._constant(getattr(torch, IN_LISTS[node.target]))
            given = [self.written(list(column)) for column in columns]
        elif node.target is operator.getitem:
            value, index = map(self.written, node.args)
            self.line(f"{self.name(node)} = {value}[{index}]")
            return
        else:
            call = self._constant(quickest(node.target))
            given = [self.written(a) for a in node.args]
            given += [f"{k}={self.written(v)}" for k, v in node.kwargs.items()]
        made = f"{self.name(node)} = " if node.users else ""
        self.line(f"{made}{call}({', '.join(given)})")

    def written(self, argument: Any) -> str:
        """Write what an operation is given."""
        if isinstance(argument, fx.Node):
            return self.name(argument)
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(map(self.written, argument))}]"
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
