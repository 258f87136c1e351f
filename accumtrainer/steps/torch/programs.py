"""Functions that change variables, recorded by PyTorch and run again."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import optree
import torch

from accumtrainer import errors
from accumtrainer.keras_api.types import Nest, Tensor, Variable
from accumtrainer.steps.backend import HasVariables
from accumtrainer.steps.torch.attributes import Made
from accumtrainer.steps.torch.gradients import how_differentiated
from accumtrainer.steps.torch.graphs import Graph
from accumtrainer.steps.torch.optimizers import RefusedError
from accumtrainer.steps.torch.scopes import Memory, Pending
from accumtrainer.steps.torch.source import describe
from accumtrainer.steps.torch.tensors import (
    autocast_dtype,
    to_tensor,
    without_autocast,
)

MOST_SHAPES = 8
"""For how many sets of shapes a function is recorded: those that come first."""


class _MissingError(Exception):
    """Code reads or changes further variables."""


class ChangedError(ValueError):
    """Code has changed, as it was recorded, what it will read."""


class Holder:
    """The memory of a program's variables, looked up once.

    Args:
        program: lists them.
        begin: called with them before they are used.
    """

    def __init__(
        self,
        program: HasVariables,
        begin: Callable[[Sequence[Variable]], None],
    ):
        self._program = program
        self._begin = begin
        self._memory: Memory | None = None
        self._state: list[tuple] = []
        self.variables: Sequence[Variable] = ()

    @property
    def memory(self) -> Memory:
        """The memory of the variables as they are now."""
        if self._memory is None:
            variables = self._program.all_variables
            state = [(id(v), *how_differentiated(v.value)) for v in variables]
            if state != self._state:
                self._state, self.variables = state, list(variables)
                self._begin(variables)
            self._memory = Memory(variables)
        return self._memory

    def forget(self) -> None:
        """Look the memory up anew, as the host may have changed it."""
        self._memory = None


class Program:
    """A function of nests, recorded once for each set of shapes.

    What cannot be recorded runs operation by operation: what looks at the
    numbers in a tensor to decide what comes next.

    Args:
        function: takes nests of tensors and returns one.
        holder: of the variables it may change.
        recording: makes the scope in which it is recorded, given what was
            made in the one before; `None` to run everything operation by
            operation.
        shapes: list of those that came first, as str, which grows up to one
            more than are recorded. A run that goes on has that of the run
            before: what is recorded computes other last bits.
        compiles: whether `torch.compile` compiles what was recorded.
    """

    def __init__(
        self,
        function: Callable[..., Nest],
        holder: Holder,
        recording: Callable[[Made], AbstractContextManager] | None,
        shapes: list[str],
        *,
        compiles: bool,
    ):
        self._function = function
        self._holder = holder
        self._recording = recording
        self._shapes = shapes
        self._compiles = compiles
        self._variables: Sequence[Variable] = ()
        self._recorded: dict[tuple, Recording | None] = {}

    def __call__(self, *arguments: Nest) -> Nest:
        leaves, treedef = _flatten(arguments)
        recorded = self._find(leaves, treedef)
        if recorded is not None:
            return recorded.run(self._holder.memory, leaves)
        return self._run_operations(leaves, treedef)

    def run_if_recorded(self, *arguments: Nest) -> Nest | None:
        """Run, but not operation by operation if that was not asked for.

        Returns:
            Nest, or `None` if it cannot be recorded, or there are more shapes.
        """
        leaves, treedef = _flatten(arguments)
        recorded = self._find(leaves, treedef, only_if_all=True)
        if recorded is not None:
            return recorded.run(self._holder.memory, leaves)
        if self._recording is not None:
            return None
        return self._run_operations(leaves, treedef)

    def _run_operations(self, leaves: list[Tensor], treedef: Any) -> Nest:
        memory = self._holder.memory
        tensors: Any = optree.tree_unflatten(treedef, _copied(leaves))
        with torch.no_grad(), Pending(memory) as scope:
            result = self._function(*tensors)
            result = optree.tree_map(functools.partial(_own, memory), result)
        for variable, value in scope.write():
            variable.assign(value)
        # A layer may have given a parameter other memory.
        self._holder.forget()
        return result

    def _find(
        self, leaves: list[Tensor], treedef: Any, *, only_if_all: bool = False
    ) -> "Recording | None":
        """Return what was recorded for such arguments, or record it."""
        if self._recording is None:
            return None
        _ = self._holder.memory  # looks the variables up
        variables = self._holder.variables
        if self._variables is not variables:
            self._variables, self._recorded = variables, {}
        shapes = ((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (treedef, autocast_dtype(), *shapes)
        if key not in self._recorded:
            self._recorded[key] = None
            if self._may_record(str(key), only_if_all):
                self._recorded[key] = self._record(leaves, treedef)
        return self._recorded[key]

    def _may_record(self, shapes: str, only_if_all: bool) -> bool:
        """Tell whether shapes are among the first, or if these are all."""
        seen = self._shapes
        if shapes not in seen and len(seen) <= MOST_SHAPES:
            seen.append(shapes)
        are_all = len(seen) <= MOST_SHAPES
        return are_all or (shapes in seen[:MOST_SHAPES] and not only_if_all)

    def _record(self, leaves: list[Tensor], treedef: Any) -> "Recording | None":
        made: Made = {}
        try:
            try:
                return self._record_once(leaves, treedef, made)
            except ChangedError:
                # What is made once for each shape is there by now.
                return self._record_once(leaves, treedef, made)
        except RefusedError:
            raise
        except Exception as error:
            reason = describe(error)
        if self._compiles:
            warnings.warn(
                errors.WITHOUT_TORCH_COMPILE.format(error=reason), stacklevel=2
            )
        return None

    def _record_once(
        self, leaves: list[Tensor], treedef: Any, made: Made
    ) -> "Recording":
        assert self._recording is not None
        further: list[Variable] = []
        with torch.no_grad(), self._recording(made):
            for _ in range(2):  # the first finds all that are further
                variables = [*self._holder.variables, *further]
                recorder = _Recorder(self._function, variables, treedef)
                given = [*Memory(variables).tensors, *leaves]
                with contextlib.suppress(_MissingError):
                    graph = Graph(recorder, given, compiles=self._compiles)
                    return Recording(graph, recorder.structure, further)
                further += recorder.missing
            raise ValueError("variables made in each call are not recorded")


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded of a function for arguments of some shapes.

    Args:
        graph: takes the memory of variables, and the leaves of arguments.
        structure: of what it returns.
        further: variables beside those that the program lists.
    """

    graph: Graph
    structure: Any
    further: Sequence[Variable]

    def run(self, memory: Memory, leaves: list[Tensor]) -> Nest:
        """Run it."""
        further = Memory(self.further).tensors if self.further else ()
        tensors = [*memory.tensors, *further, *leaves]
        # What is cast was recorded too.
        with torch.no_grad(), without_autocast():
            results = self.graph(tensors)
        return optree.tree_unflatten(self.structure, results)


class _Recorder:
    """A function of tensors alone, while it is recorded.

    Args:
        function: takes nests of tensors and returns one.
        variables: whose memory comes first among the tensors.
        treedef: the structure of the arguments, whose leaves come then.

    Attributes:
        structure: of what it has returned.
        missing: further variables that it reads or changes.
    """

    def __init__(
        self,
        function: Callable[..., Nest],
        variables: Sequence[Variable],
        treedef: Any,
    ):
        self._function = function
        self._variables = variables
        self._treedef = treedef
        self.structure: Any = None
        self.missing: list[Variable] = []

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        count = len(self._variables)
        memory = Memory(self._variables, tensors[:count])
        leaves = _copied(tensors[count:])
        arguments = optree.tree_unflatten(self._treedef, leaves)
        with Pending(memory) as scope:
            result = self._function(*arguments)
        results, self.structure = optree.tree_flatten(result)
        results = [_own(memory, leaf) for leaf in results]
        scope.write()
        self.missing = list(memory.missing.values())
        if self.missing:
            raise _MissingError
        return results


def _flatten(arguments: tuple[Nest, ...]) -> tuple[list[Tensor], Any]:
    leaves, treedef = optree.tree_flatten(cast(Any, arguments))
    return [_in_rows(to_tensor(leaf)) for leaf in leaves], treedef


def _in_rows(leaf: Tensor) -> Tensor:
    """Have a tensor lie as it does for all, as batches lie this way or that.

    What was recorded depends on it.
    """
    if leaf.layout is not torch.strided or leaf.is_contiguous():
        return leaf
    return leaf.contiguous()


def _copied(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Copy what is given, as a layer may change it in place.

    It is not ours, or is read again. Of what is recorded, copies that nobody
    changes are left out.
    """
    return [leaf.clone() for leaf in leaves]


def _own(memory: Memory, leaf: Any) -> Any:
    """Copy a result that is a variable's memory, which is written to."""
    is_tensor = isinstance(leaf, torch.Tensor)
    return leaf.clone() if is_tensor and memory.holds(leaf) else leaf
