"""Functions that change variables, run by PyTorch operation by operation."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import optree
import torch

from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Nest, Tensor, Variable
from accumtrainer.steps.backend import HasVariables
from accumtrainer.steps.torch.graphs import Graph
from accumtrainer.steps.torch.scopes import Memory, Pending

MOST_SHAPES = 8
"""For how many sets of shapes a function is recorded."""


class Holder:
    """The memory of a program's variables, looked up once.

    Args:
        program: lists them.
    """

    def __init__(self, program: HasVariables):
        self._program = program
        self._memory: Memory | None = None
        self.variables: Sequence[Variable] = ()

    @property
    def memory(self) -> Memory:
        """The memory of the variables as they are now."""
        if self._memory is None:
            variables = self._program.all_variables
            if list(map(id, variables)) != list(map(id, self.variables)):
                self.variables = variables
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
        recording: makes the scope in which it is recorded; `None` to run
            everything operation by operation.
        compiles: whether `torch.compile` compiles what was recorded.
    """

    def __init__(
        self,
        function: Callable[..., Nest],
        holder: Holder,
        recording: Callable[[], AbstractContextManager] | None,
        *,
        compiles: bool,
    ):
        self._function = function
        self._holder = holder
        self._recording = recording
        self._compiles = compiles
        self._variables: Sequence[Variable] = ()
        self._recorded: dict[tuple, tuple[Graph, Any] | None] = {}

    def __call__(self, *arguments: Nest) -> Nest:
        leaves, treedef = optree.tree_flatten(arguments)
        leaves = list(map(to_tensor, leaves))
        memory = self._holder.memory
        if self._recording is not None:
            found = self._find(memory, leaves, treedef)
            if found is not None:
                graph, structure = found
                with torch.no_grad():
                    results = graph([*memory.tensors, *leaves])
                return optree.tree_unflatten(structure, results)
        arguments = optree.tree_unflatten(treedef, leaves)
        with torch.no_grad(), Pending(memory) as scope:
            result = self._function(*arguments)
            result = optree.tree_map(functools.partial(_own, memory), result)
        for variable, value in scope.write():
            variable.assign(value)
        return result

    def _find(
        self, memory: Memory, leaves: list[Tensor], treedef: Any
    ) -> tuple[Graph, Any] | None:
        """Return what was recorded for such arguments, or record it."""
        if self._variables is not self._holder.variables:
            self._variables, self._recorded = self._holder.variables, {}
        key = (treedef, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._recorded:
            self._recorded[key] = None
            if len(self._recorded) <= MOST_SHAPES:
                self._recorded[key] = self._record(memory, leaves, treedef)
        return self._recorded[key]

    def _record(
        self, memory: Memory, leaves: list[Tensor], treedef: Any
    ) -> tuple[Graph, Any] | None:
        structure, count = None, len(self._variables)

        def run(tensors: list[Tensor]) -> list[Tensor]:
            nonlocal structure
            own = Memory(self._variables, tensors[:count])
            arguments = optree.tree_unflatten(treedef, tensors[count:])
            with Pending(own) as scope:
                result = self._function(*arguments)
            results, structure = optree.tree_flatten(result)
            results = [_own(own, leaf) for leaf in results]
            if scope.write():
                raise NotImplementedError("unknown variables change")
            return results

        try:
            with torch.no_grad(), self._recording():
                given = [*memory.tensors, *leaves]
                return Graph(run, given, compiles=self._compiles), structure
        except Exception as error:
            if DEBUG:
                print(
                    "NOT RECORDED",
                    self._function,
                    type(error),
                    str(error)[:500],
                )
            return None


DEBUG = bool(__import__("os").environ.get("DEBUG_REC"))


def _own(memory: Memory, leaf: Any) -> Any:
    """Copy a result that is a variable's memory, which is written to."""
    is_tensor = isinstance(leaf, torch.Tensor)
    return leaf.clone() if is_tensor and memory.holds(leaf) else leaf


def to_tensor(leaf: Any) -> Tensor:
    """Make a tensor of an array, which shares its memory where it can."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if not isinstance(leaf, np.ndarray) or not _can_share(leaf):
        return ops.convert_to_tensor(leaf)
    return torch.from_numpy(leaf).to(default_device())


def _can_share(array: np.ndarray) -> bool:
    # PyTorch computes little with unsigned integers, and warns where memory
    # is not to be written to.
    is_known = array.dtype.kind in "ifb" or array.dtype == np.uint8
    return is_known and array.dtype.isnative and array.flags.writeable


def default_device() -> torch.device:
    """Return the device on which Keras puts tensors."""
    return ops.zeros(()).device
