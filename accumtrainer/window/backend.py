"""What the window algorithm asks of a backend: to differentiate, loop, branch.

It is the lower part of the one interface that all backends implement; what
runs windows adds the rest in `steps/backend.py`. Tensors are the backend's
own, variables are Keras's, and a *nest* is made of tuples, lists and dicts,
with `None` where a part is missing.
"""

import abc
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import (
    Model,
    Nest,
    Optimizer,
    Tensor,
    Variable,
)
from accumtrainer.window.weighing import Shares

UNKNOWN = "unknown"
"""What stands for a recipe where nobody can tell whether a batch goes in."""

Recipe = int | str | None
"""How something is computed: a number, `UNKNOWN`, or `None` of a batch."""

MAX_COMPARED = 2**16
"""How many numbers a constant may have that is told from others by them."""


def recipe_of(parts: Sequence[Any], given: Sequence[Recipe]) -> Recipe:
    """Tell how an operation computes from what it is given."""
    if None in given:
        return None
    return UNKNOWN if UNKNOWN in given else hash((*parts, *given))


class Replicas:
    """Who runs a share of each window: here one device, in one process.

    A backend that knows of several has a class of its own.

    Attributes:
        count: how many there are.
        processes: how many processes they are in.
        is_chief: whether this is the process that writes.
    """

    count: int = 1
    processes: int = 1
    is_chief: bool = True

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """Let every process know n numbers of all.

        Returns:
            `[processes, n]`, float32, the chief's first.
        """
        return np.asarray([numbers], "float32")

    def any(self, flag: bool) -> bool:
        """Whether a flag is set in any process, which all ask together."""
        if self.processes == 1:
            return flag
        return bool(self.gather([flag]).any())

    def scope(self) -> AbstractContextManager:
        """Make a scope in which variables have a copy on every replica."""
        return contextlib.nullcontext()

    def place(self, shares: Shares, *, is_own: bool = False) -> Shares:
        """Put the rows of a window where their replicas are.

        Args:
            shares: arrays, those of all replicas.
            is_own: whether they are those of this process's replicas alone.
        """
        del is_own
        return shares

    def spread(self, batch: Batch) -> Batch:
        """Put the rows of a batch on several devices, if that can be."""
        return batch

    def read(self, variables: Sequence[Variable]) -> list[Tensor]:
        """Read variables that have one value for all replicas."""
        return [variable.value for variable in variables]

    def write(self, variable: Variable, tensor: Tensor) -> None:
        """Assign a variable, so that all replicas know its one value."""
        variable.assign(tensor)

    def holding(self, variables: Sequence[Variable]) -> AbstractContextManager:
        """Make a scope in which variables may be read again and again."""
        del variables
        return contextlib.nullcontext()

    def sum(
        self,
        function: Callable[[Tensor, Shares], Nest],
        shares: Shares,
        *,
        known: list[Variable],
        reading: list[Variable],
        moving: list[Variable],
    ) -> Nest:
        """Run a function on every replica, and add up what they return.

        What it writes to variables is forgotten.

        Args:
            function: function of the replica's index, a scalar int32, and of
                its shares.
            shares: tensors, of the replicas of this process; on JAX of all.
            known: all variables of the program that runs.
            reading: variables it only reads; others that it reads have one
                value for all replicas.
            moving: variables it may write to.

        Returns:
            The nest of sums.
        """
        raise AssertionError(f"one device adds up nothing: {function}")


FIXED_DRAW = "a draw by a constant seed"
"""Stands for one among operations. XLA draws other numbers by the same seed."""


class Traced(NamedTuple):
    """What a function was seen to do.

    Attributes:
        operations: the names of those it consists of.
        fixes_sizes: whether its tensors have the same sizes for every batch
            of these shapes, as far as their shapes are known at all. Some
            drop rows by the numbers in them.
    """

    operations: set[str]
    fixes_sizes: bool = True


def dtype_of_sum(number: Variable | Tensor) -> str:
    """Say in what numbers gradients are added up.

    Args:
        number: a gradient, or the variable it is of.

    Returns:
        `"float32"`, or `"complex64"` for complex ones.
    """
    return "complex64" if "complex" in str(number.dtype) else "float32"


class WindowBackend(abc.ABC):
    """The functions that windows are computed with.

    Attributes:
        replicas: who shares a window out.
    """

    replicas: Replicas

    def variables_beside(self, model: Model) -> list[Variable]:
        """List variables for what layers keep that Keras does not know of.

        Args:
            model: built.
        """
        del model
        return []

    @abc.abstractmethod
    def trace(self, function: Callable[[Batch], Nest], batch: Batch) -> Traced:
        """Run a function on abstract tensors like a batch of arrays."""

    @abc.abstractmethod
    def recipes(
        self, function: Callable[[Batch], list[Tensor]], batch: Batch
    ) -> list[Recipe]:
        """Tell how results are computed that owe nothing to a batch.

        Args:
            function: function of a batch, which `trace` has run before.
            batch: of arrays.

        Returns:
            Of each result a number, the same wherever the same operations
            compute it, of the same constants, or large ones of the same shape;
            `UNKNOWN` where nobody can tell; or `None` where numbers of the
            batch may go into it.

        Raises:
            Exception: nobody can tell, as Python may read numbers.
        """

    def accepts(self, is_finite: Tensor) -> Tensor:
        """Say whether a window may be applied, which `check` may refuse.

        Args:
            is_finite: scalar, bool, whether its gradients are finite.

        Returns:
            Scalar, bool.
        """
        return is_finite

    @abc.abstractmethod
    def value_and_grad(
        self,
        objective: Callable[..., tuple[Tensor, Nest]],
        variables: list[Variable],
        tensors: Sequence[Tensor] = (),
        keeps_rows: bool = False,
    ) -> tuple[Nest, list[Tensor | None]]:
        """Differentiate a scalar by variables, and by tensors.

        Args:
            objective: function of `tensors`; returns the scalar and a nest.
            variables: by which to differentiate.
            tensors: further ones.
            keeps_rows: whether float32 gradients of embeddings may come as
                those rows that are not zero, for `add` and `add_to`.

        Returns:
            That nest, and the gradients, `None` where unused: first by the
            variables, then by the tensors. They are dense, repeated rows of
            embedding gradients added up, unless `keeps_rows`.
        """

    def full_like(self, variable: Variable, number: float) -> Tensor:
        """Begin a sum of a variable's gradients with one number throughout."""
        return ops.full(variable.shape, number, dtype_of_sum(variable))

    def add(self, total: Tensor, gradient: Tensor) -> Tensor:
        """Return a sum of gradients to which one is added."""
        return total + ops.cast(gradient, dtype_of_sum(gradient))

    @abc.abstractmethod
    def add_to(self, variable: Variable, gradient: Tensor) -> None:
        """Add a gradient to a variable that holds a sum of such."""

    def sum_of_squares(self, gradient: Tensor) -> Tensor:
        """Add up the squares of a tensor, float32."""
        return ops.sum(ops.square(gradient))

    def rate_of(self, optimizer: Optimizer) -> Any:
        """Ask an optimizer for its learning rate, which a function tells.

        Where `Model.fit` compiles nothing, every update asks anew.
        """
        return optimizer.learning_rate

    def apply(
        self,
        optimizer: Any,
        gradients: list[Tensor | None],
        variables: list[Variable],
    ) -> None:
        """Have a Keras optimizer change variables by gradients."""
        optimizer.apply(gradients, variables)

    @abc.abstractmethod
    def cond(
        self,
        predicate: Tensor,
        true_fn: Callable[[], None],
        false_fn: Callable[[], None],
    ) -> None:
        """Run one of two functions that change variables.

        Both may be run, and what one of them has changed be kept. The first is
        the one that does much.
        """

    @abc.abstractmethod
    def rarely(
        self,
        predicate: Tensor,
        function: Callable[[], list[Tensor]],
        otherwise: list[Tensor],
    ) -> list[Tensor]:
        """Return what a function returns, or otherwise what is there.

        Where the predicate does not hold the function takes no time, but on
        devices that run whatever is recorded.
        """

    @abc.abstractmethod
    def scan(
        self,
        body: Callable[[Tensor, Nest, list[Tensor]], tuple[Nest, list[Tensor]]],
        stacked: Nest,
        length: int | Tensor,
        carry: Sequence[Tensor] = (),
        dtypes: Nest = "float32",
    ) -> tuple[Nest, list[Tensor]]:
        """Run `body(index, item, carry)` over the first axis, in order.

        Args:
            body: function of a scalar int32, a nest of tensors, and what is
                carried; may change variables; returns a nest of tensors of
                fixed shapes, and what to carry on.
            stacked: nest of tensors `[length, ...]`.
            length: scalar int32.
            carry: given to the first call.
            dtypes: nest of the dtypes of what `body` returns.

        Returns:
            Pair: nest of tensors `[length, ...]`, the results in order; and
            what the last call carries on.
        """

    @abc.abstractmethod
    def map(self, function: Callable[[Nest], Nest], stacked: Nest) -> Nest:
        """Run a function over the first axis, all at once.

        Args:
            function: takes a nest of tensors and returns one; writes to no
                variable.
            stacked: nest of tensors `[length, ...]`.

        Returns:
            Nest of tensors `[length, ...]`.
        """

    def on_its_own(self, function: Callable[..., Nest]) -> Callable[..., Nest]:
        """Make what computes the same, for calls outside of windows.

        A backend may compile it, for each set of shapes.

        Args:
            function: of nests of tensors, on which alone its result depends;
                writes to no variable.
        """
        return function

    @abc.abstractmethod
    def sum_rows(self, stacked: Tensor) -> Tensor:
        """Add up a float32 tensor, large as it may be, over its first axis."""

    @abc.abstractmethod
    def write_back(self) -> None:
        """Make the Keras variables current, for host code that can look."""
