"""What the rest asks of a backend, beside what the window algorithm does.

A backend is a folder beside this file, named as Keras names it, whose
`backend.py` defines a subclass of `Backend` with the name `THE_BACKEND`;
nothing else in the package needs to know of it. Tensors are the backend's own,
variables are Keras's, and a *nest* is made of tuples, lists and dicts, with
`None` where a part is missing.
"""

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from accumtrainer.keras_api.types import Model, Nest, Tensor, Variable
from accumtrainer.steps.looks import Followed, Looks
from accumtrainer.window.backend import WindowBackend


class HasVariables(Protocol):
    """Whose functions are compiled: it lists what variables they change."""

    @property
    def all_variables(self) -> list[Variable]:
        """Every variable that compiled functions read or change, each once."""


class Compiled(Protocol):
    """A compiled function of nests of tensors or arrays."""

    def __call__(self, *arguments: Nest) -> Nest:
        """Run it."""

    def peak_bytes(self, *arguments: Nest) -> int:
        """Predict the most memory of a device that a call takes.

        Asked only where the backend `predicts_memory`.
        """


class Backend(WindowBackend):
    """The functions of a backend: those of `WindowBackend`, and these.

    Args:
        model: the one whose replicas share windows out, if it has several;
            `None` to keep to one device.
        run_eagerly: whether nothing is compiled, for debugging.
        jit_compile: whether XLA is to compile; under `"auto"` it may do so for
            the first few shapes only, where others can run without it.
    """

    name: ClassVar[str]
    """As in `KERAS_BACKEND`."""

    predicts_memory: ClassVar[bool]
    """Whether compiled functions know how much memory they take."""

    has_own_pipeline: ClassVar[bool]
    """Whether `Model.fit` trains on what threads of the backend make."""

    fit_hands_state_over: ClassVar[bool]
    """Whether `Model.fit` takes the values out of the variables as it runs."""

    fit_compiles: ClassVar[bool] = True
    """Whether `Model.fit` compiles its step, unless it is to run eagerly."""

    fit_hands_batches: ClassVar[bool] = False
    """Whether `Model.fit` hands over batches, and no iterator of them."""

    @staticmethod
    def is_told_to_run_eagerly() -> bool:
        """Whether the user has the whole backend compile nothing."""
        return False

    @abc.abstractmethod
    def __init__(
        self,
        model: Model | None,
        *,
        run_eagerly: bool,
        jit_compile: bool | Literal["auto"],
    ): ...

    # Which plan suits it.

    @abc.abstractmethod
    def prefer(
        self, *, loops_badly: bool, supports_jit: bool
    ) -> tuple[Literal["fused", "streamed"], bool]:
        """Choose the plan that is fastest where nobody asks for another.

        Args:
            loops_badly: whether XLA would run the model's operations slowly
                inside a loop.
            supports_jit: whether all layers say that XLA can compile them.

        Returns:
            Pair: the plan's name, and whether XLA compiles it.
        """

    @abc.abstractmethod
    def has_accelerator(self) -> bool:
        """Whether there is a device other than the CPU."""

    has_ragged: bool = False
    """Whether arrays that differ in length can be joined, by `join_ragged`."""

    def join_ragged(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """Join arrays along the first axis that differ on other ones.

        Asked only where `has_ragged`.

        Returns:
            Ragged tensor.
        """
        raise AssertionError(f"{self.name} joins no ragged ones: {arrays}")

    @property
    @abc.abstractmethod
    def compiles_evaluation(self) -> bool:
        """Whether it pays to compile what runs once per batch."""

    @property
    @abc.abstractmethod
    def gives_values(self) -> bool:
        """Whether compiled functions are given the values of variables.

        Of those that they read, all must be known then.
        """

    @property
    def runs_ahead(self) -> bool:
        """Whether programs are still running when a call of them returns."""
        return self.has_accelerator()

    followed = Followed(lambda: Looks([]))
    """What is told of code that runs, for whoever wants to know."""

    def looks_of(self, model: Model, beside: list[Any]) -> Looks:
        """Note what compiled functions were made from, as far as Keras does.

        What else Python code reads stays as it was where Keras compiles too.

        Args:
            model: `keras.Model` that is trained.
            beside: what else a window's code reads.
        """
        del beside
        return Looks(model.variables)

    # To trace and to compile.

    @abc.abstractmethod
    def compile(
        self,
        function: Callable[..., Nest],
        program: HasVariables,
        *,
        jit_compile: bool,
    ) -> Compiled:
        """Compile a function of tensors that may change variables.

        Args:
            function: takes nests of tensors and returns one.
            program: the function changes only its variables.
            jit_compile: whether XLA compiles it.
        """

    def fused(self, function: Compiled) -> Callable[[Nest], Nest | None]:
        """Return what runs a compiled function that consumes a whole window.

        That returns `None` where it has run nothing, and the window had better
        be streamed.
        """
        return function

    def expect(self, function: Compiled, calls: Sequence[tuple]) -> None:
        """Prepare a compiled function for arguments of different shapes."""
        del function, calls  # a program has one shape

    @abc.abstractmethod
    def check(self, was_applied: Callable[[], bool]) -> None:
        """Refuse what a window was given, where its programs have noticed.

        Nothing of that window has been applied.

        Args:
            was_applied: reads whether the window was; waits for the device.

        Raises:
            DataError: an index is outside of what it indexes.
        """

    def compiled_shapes(self) -> dict[str, list[str]]:
        """Tell which shapes have programs, while others run without.

        Returns:
            What `expect_shapes` takes, in another process too.
        """
        return {}  # all have

    def expect_shapes(self, shapes: dict[str, list[str]]) -> None:
        """Have programs made for shapes as if they had come already."""
        del shapes

    def with_float64(self) -> AbstractContextManager:
        """Make a scope in which float64 can be computed."""
        return contextlib.nullcontext()  # it always can

    @abc.abstractmethod
    def constant(self, value: np.ndarray) -> Tensor:
        """Put an array on the device, to be passed again and again."""

    # Variables, between compiled functions.

    def forget(self) -> None:
        """Forget values that a call has destroyed before it failed.

        The variables must be assigned anew.
        """
        return  # variables outlive it

    # Memory.

    def memory_limit_bytes(self) -> int | None:
        """Nine tenths of a device's memory, `None` if it does not tell."""
        return None

    @abc.abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Most bytes in use so far on the fullest device, `None` if unknown."""

    @abc.abstractmethod
    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error says that a device ran out of memory."""

    def measure_peak(
        self, run: Callable[[], Any], variables: list[Variable]
    ) -> int:
        """Measure the most memory that a trial takes.

        Asked only where the backend does not predict it.

        Args:
            run: what it writes to variables is put back.
            variables: those that it may read or write.

        Returns:
            Bytes: the variables, and what was needed beside them.
        """
        raise AssertionError(f"{self.name} predicts memory: {run}, {variables}")

    # Inside `Model.fit`.

    @abc.abstractmethod
    def next_batch(self, iterator: Iterator) -> Nest:
        """Return the next batch that `Model.fit` would train on.

        A part that a generator leaves out is `None`.
        """

    @abc.abstractmethod
    def next_batches(
        self, iterator: Iterator, count: int
    ) -> tuple[Iterable[Nest] | None, Nest]:
        """Take the next batches that `Model.fit` would train on.

        Returns:
            Pair: up to `count` batches, at least one, and `None`; or `None`,
            and a nest of tensors `[count, m, ...]`. Each batch is to be read
            before the next, which may be in the same memory.

        Raises:
            StopIteration: there is none.
        """

    def hold(self, program: HasVariables, arrays: dict[int, Tensor]) -> Any:
        """Take arrays for good, instead of those of a program's variables.

        Asked, like `release`, only where `fit_hands_state_over`.

        Args:
            program: its functions have been compiled here.
            arrays: by the id of their variable.

        Returns:
            Holder, whose `arrays` belong to its `variables`. By positions
            among them its `share` reads some afresh, and leaves them what they
            have; its `write_shared` makes these current.
        """
        raise AssertionError(f"{self.name} keeps state: {program}, {arrays}")

    def release(self, holder: Any, ids: set[int]) -> None:
        """Make a holder's variables current, but for those with given ids."""
        raise AssertionError(f"{self.name} keeps state: {holder}, {ids}")

    def is_distributed(self, model: Model) -> bool:
        """Whether `Model.fit` runs the model by a strategy of the backend."""
        del model
        return False

    # To look at what it does.

    @abc.abstractmethod
    def start_trace(self, directory: str) -> None:
        """Begin to record what host and device do."""

    @abc.abstractmethod
    def stop_trace(self) -> None:
        """Write what was recorded."""

    @abc.abstractmethod
    def mark_step(self, name: str, number: int) -> AbstractContextManager:
        """Make a context manager that names a step in a trace."""
