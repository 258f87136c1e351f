"""What PyTorch must do itself: differentiate, loop, branch, hold state.

Functions are recorded once for each set of shapes, and run from what was
recorded; variables are updated in place.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from accumtrainer import errors
from accumtrainer.data.batches import Batch, leaves
from accumtrainer.keras_api import KERAS_NAME, flatten_layers, keras, ops, tree
from accumtrainer.keras_api.types import (
    Model,
    Nest,
    Optimizer,
    Tensor,
    Variable,
)
from accumtrainer.steps.backend import Backend, HasVariables
from accumtrainer.steps.looks import Looks
from accumtrainer.steps.memory import Backup
from accumtrainer.steps.torch import memory
from accumtrainer.steps.torch.attributes import Made
from accumtrainer.steps.torch.gradients import (
    gradients,
    gradients_of_rows,
    map_rows,
)
from accumtrainer.steps.torch.layouts import Order, lay_out
from accumtrainer.steps.torch.looks import attributes_of, describe_attribute
from accumtrainer.steps.torch.loops import record_scan
from accumtrainer.steps.torch.marks import record_branch
from accumtrainer.steps.torch.modules import Modules, show_parameters
from accumtrainer.steps.torch.optimizers import refuse_optimizers_of_torch
from accumtrainer.steps.torch.programs import ChangedError, Holder, Program
from accumtrainer.steps.torch.recipes import Recipes
from accumtrainer.steps.torch.replicas import TorchReplicas
from accumtrainer.steps.torch.scopes import Copied, Pending, ToldRate, innermost
from accumtrainer.steps.torch.seeds import (
    draw_from_own_states,
    recorded_draws,
)
from accumtrainer.steps.torch.squares import MANY, sum_in_rows
from accumtrainer.steps.torch.tensors import default_device, to_tensor
from accumtrainer.steps.torch.trials import Trial, UnwatchedTrial, unchanged
from accumtrainer.window.backend import Recipe, Traced, dtype_of_sum

AnyTrial = TypeVar("AnyTrial", Trial, UnwatchedTrial)

IS_PROFILING = "_is_profiler_enabled"
"""What tells whether a profiler is running; it has no public name."""


class TorchBackend(Backend):
    """The functions of a backend, on PyTorch."""

    name = "torch"
    predicts_memory = False
    has_own_pipeline = False
    fit_hands_state_over = False
    fit_compiles = False
    fit_hands_batches = True
    compiles_evaluation = False

    def __init__(
        self,
        model: Model | None,
        *,
        run_eagerly: bool,
        jit_compile: bool | Literal["auto"],
    ):
        del jit_compile  # each program is told
        if KERAS_NAME != "keras":
            raise ImportError(errors.KERAS_CORE_ON_TORCH)
        if model is not None:
            draw_from_own_states(model)
        self._run_eagerly = run_eagerly
        self._model = model
        self.replicas: TorchReplicas = TorchReplicas(is_alone=model is None)
        self._holders: dict[int, Holder] = {}
        self._orders: dict[torch.Size, Order] = {}
        self._rates: dict[int, ToldRate] = {}
        self._shapes: dict[str, list[str]] = {}
        self._is_recording = False
        self._is_mapping = False
        self._keeps_numbers = False
        self._is_unwatched = False
        self._modules = Modules(None)

    def prefer(
        self, *, loops_badly: bool, supports_jit: bool
    ) -> tuple[Literal["fused", "streamed"], bool]:
        del loops_badly, supports_jit
        return "fused", False

    def has_accelerator(self) -> bool:
        return default_device().type != "cpu"

    @property
    def gives_values(self) -> bool:
        return not self._run_eagerly

    def variables_beside(self, model: Model) -> list[Variable]:
        if not model.built or self._modules.model is not model:
            self._modules = Modules(model)
        return self._modules.buffers

    def looks_of(self, model: Model, beside: list[Any]) -> Looks:
        owners = [*flatten_layers(model), *beside]
        describe = functools.partial(describe_attribute, owners)
        return Looks(attributes_of(owners), describe)

    def trace(self, function: Callable[[Batch], Nest], batch: Batch) -> Traced:
        made: Made = {}
        try:
            trial: Trial | UnwatchedTrial
            for trial in self._trials(Trial, made):
                with self._trying(trial, made):
                    function(tree.map_structure(_to_tensor, batch))
        except Exception:
            # Not everything can be watched: `torch.cond` is no operation.
            unwatched = self._try_unwatched(function, batch, made)
            if unwatched is None:
                raise
            trial, self._is_unwatched = unwatched, True
        return Traced(trial.operations, trial.fixes_sizes)

    def recipes(
        self, function: Callable[[Batch], list[Tensor]], batch: Batch
    ) -> list[Recipe]:
        if self._is_unwatched:
            raise ValueError("a layer, loss or metric cannot be watched")
        tensors = tree.map_structure(_to_tensor, batch)
        recipes = Recipes(tensors)
        trial = Trial(self._variables, recipes.watch)
        with recorded_draws(), self._trying(trial, None):
            results = function(tensors)
        if not trial.fixes_sizes:
            raise ValueError("Python may compute with numbers that it reads")
        return list(map(recipes.of, results))

    @property
    def _variables(self) -> list[Variable]:
        return [] if self._model is None else self._model.variables

    def _try_unwatched(
        self,
        function: Callable[[Batch], Nest],
        batch: Batch,
        made: Made,
    ) -> UnwatchedTrial | None:
        """Run a function that fails while it is watched.

        Returns:
            What is known of it, or `None` if it fails all the same.
        """
        # What PyTorch has compiled of it under watch would fail now.
        torch.compiler.reset()
        with contextlib.suppress(Exception):
            for trial in self._trials(UnwatchedTrial, made):
                with self._trying(trial, made):
                    function(tree.map_structure(_to_tensor, batch))
            return trial
        return None

    def _trials(self, kind: type[AnyTrial], made: Made) -> Iterator[AnyTrial]:
        """Make a trial, and another one where something was made in it.

        What is made again then is no cache, but grows in every step.
        """
        yield kind(self._variables)
        if made:
            yield kind(self._variables)

    @contextlib.contextmanager
    def _trying(
        self, trial: Trial | UnwatchedTrial, made: Made | None
    ) -> Iterator[None]:
        """Make a scope in which code runs of which nothing stays."""
        model = self._model or self._modules.model
        with (
            torch.no_grad(),
            torch.random.fork_rng(),
            self.followed.trying() as looks,
            unchanged(model, looks, made) as numbers,
            trial,
            self._modules.computing(is_trial=True),
        ):
            with Pending(None) as scope:
                yield
            self._orders.update(trial.kernels.orders())
            # Whoever asks what was assigned is to hear of it.
            for variable in trial.changed():
                variable.assign(variable.value.clone())
            scope.assign()
        if made is not None:  # else a table for a shape is among them
            self._keeps_numbers = self._keeps_numbers or bool(numbers)

    def compile(
        self,
        function: Callable[..., Nest],
        program: HasVariables,
        *,
        jit_compile: bool,
    ) -> Any:
        holder = self._holders.setdefault(
            id(program), Holder(program, self._begin)
        )
        recording = None if self._run_eagerly else self._recording

        has_run = False

        def run(*arguments: Nest) -> Nest:
            nonlocal has_run
            if not self._is_recording:
                self.followed.note_run()
            with self._modules.computing(is_recording=self._is_recording):
                result = function(*arguments)
            if self._is_recording or not has_run:
                # It may have been made in there.
                refuse_optimizers_of_torch(self._model or self._modules.model)
            has_run = has_run or not self._is_recording
            return result

        name = getattr(function, "func", function).__qualname__
        shapes = self._shapes.setdefault(name, [])
        return Program(run, holder, recording, shapes, compiles=jit_compile)

    def compiled_shapes(self) -> dict[str, list[str]]:
        return {name: list(some) for name, some in self._shapes.items()}

    def expect_shapes(self, shapes: dict[str, list[str]]) -> None:
        for name, some in shapes.items():
            self._shapes.setdefault(name, [])[:] = some

    def fused(self, function: Any) -> Callable[[Nest], Nest | None]:
        # Of what is streamed, the update can be recorded at least.
        return function.run_if_recorded

    def _begin(self, variables: Sequence[Variable]) -> None:
        """Get variables ready that a program has not used before."""
        refuse_optimizers_of_torch(self._model or self._modules.model)
        self.replicas.begin_alike(variables)
        show_parameters(self._modules.model)
        # What a module keeps for itself stays where the module finds it.
        kept = set(map(id, self._modules.buffers))
        movable = [v for v in variables if id(v) not in kept]
        if lay_out(movable, self._orders):
            for holder in self._holders.values():
                holder.forget()

    @contextlib.contextmanager
    def _recording(self, made: Made) -> Iterator[None]:
        if self.followed.pace.is_fast:
            raise ValueError("what is recorded changes every few windows")
        if self._is_unwatched:
            raise ValueError("a layer, loss or metric cannot be watched")
        if self._keeps_numbers:
            # What it makes of them reads no tensor, and would stay as it is.
            raise ValueError("a layer, loss or metric counts")
        self._is_recording = True
        try:
            model = self._model or self._modules.model  # the latter in `fit`
            with (
                self.followed.recording() as looks,
                recorded_draws(),
                unchanged(model, looks, made) as numbers,
            ):
                yield
        finally:
            self._is_recording = False
        if numbers:
            raise ValueError(f"{numbers[0]} counts")
        if self.followed.changed_by_code is not None:
            raise ChangedError(f"{self.followed.changed_by_code} changes")

    def check(self, was_applied: Callable[[], bool]) -> None:
        pass  # PyTorch raises where an index is outside

    def constant(self, value: np.ndarray) -> Tensor:
        return to_tensor(value)

    def write_back(self) -> None:
        self._modules.settle()
        for holder in self._holders.values():
            holder.forget()

    def value_and_grad(
        self,
        objective: Callable[..., tuple[Tensor, Nest]],
        variables: list[Variable],
        tensors: Sequence[Tensor] = (),
        keeps_rows: bool = False,
    ) -> tuple[Nest, list[Tensor | None]]:
        del keeps_rows  # an embedding's rows are added by `fusions.py`
        values = [*(variable.value for variable in variables), *tensors]
        if self._is_mapping:
            return gradients_of_rows(objective, variables, values)
        return gradients(objective, variables, values)

    def full_like(self, variable: Variable, number: float) -> Tensor:
        # A sum lies as what is added to it does.
        dtype = getattr(torch, dtype_of_sum(variable))
        return torch.full_like(variable.value, number, dtype=dtype)

    def add_to(self, variable: Variable, gradient: Tensor) -> None:
        variable.value.add_(gradient)

    def sum_of_squares(self, gradient: Tensor) -> Tensor:
        if gradient.device.type == "cpu" and gradient.numel() >= MANY:
            return sum_in_rows(gradient)
        return super().sum_of_squares(gradient)

    def rate_of(self, optimizer: Optimizer) -> Any:
        rate = super().rate_of(optimizer)
        is_tensor = isinstance(rate, (torch.Tensor, keras.Variable))
        if is_tensor or not self._is_recording:
            return rate
        told = self._rates.setdefault(id(optimizer), ToldRate(optimizer))
        return innermost().get_current_value(told)

    def cond(
        self,
        predicate: Tensor,
        true_fn: Callable[[], None],
        false_fn: Callable[[], None],
    ) -> None:
        if not self._is_recording:
            (true_fn if predicate else false_fn)()
        elif self.has_accelerator():
            _select(predicate, true_fn, false_fn)
        else:
            innermost().renew()
            record_branch(predicate, _written(true_fn), _written(false_fn))

    def rarely(
        self,
        predicate: Tensor,
        function: Callable[[], list[Tensor]],
        otherwise: list[Tensor],
    ) -> list[Tensor]:
        if not self._is_recording:
            return function() if predicate else otherwise
        if self.has_accelerator():
            pairs = zip(function(), otherwise, strict=True)
            return [torch.where(predicate, one, other) for one, other in pairs]
        results = [tensor.clone() for tensor in otherwise]

        def fill() -> None:
            for result, tensor in zip(results, function(), strict=True):
                result.copy_(tensor)

        record_branch(predicate, fill, lambda: None)
        return results

    def scan(
        self,
        body: Callable[[Tensor, Nest, list[Tensor]], tuple[Nest, list[Tensor]]],
        stacked: Nest,
        length: int | Tensor,
        carry: Sequence[Tensor] = (),
        dtypes: Nest = "float32",
    ) -> tuple[Nest, list[Tensor]]:
        del dtypes  # known from the results
        if self._is_recording and int(length) > 1:
            return record_scan(body, stacked, int(length), carry)
        carried, results = list(carry), []
        for position in range(int(length)):
            item = tree.map_structure(
                lambda leaf, i=position: (
                    # It is read again by who loops twice.
                    None if leaf is None else leaf[i].clone()
                ),
                stacked,
            )
            index = ops.convert_to_tensor(position, "int32")
            result, carried = body(index, item, carried)
            results.append(result)
        return tree.map_structure(_stack, *results), carried

    def map(self, function: Callable[[Nest], Nest], stacked: Nest) -> Nest:
        self._is_mapping = True
        try:
            return map_rows(function, stacked)
        except Exception as error:
            # What the function itself raises comes again, as it was raised.
            reason = str(error).strip().splitlines()[-1]
        finally:
            self._is_mapping = False
        result, _ = self.scan(
            lambda index, item, carry: (function(item), []),
            stacked,
            len(leaves(stacked)[0]),
        )
        warnings.warn(errors.NOT_VECTORIZED.format(reason=reason), stacklevel=2)
        return result

    def sum_rows(self, stacked: Tensor) -> Tensor:
        return torch.sum(stacked, dim=0)

    # Memory.

    def memory_limit_bytes(self) -> int | None:
        return memory.limit_bytes()

    def peak_memory_bytes(self) -> int | None:
        return memory.peak_bytes()

    def is_out_of_memory(self, error: Exception) -> bool:
        return memory.is_out_of_memory(error)

    def measure_peak(
        self, run: Callable[[], Any], variables: list[Variable]
    ) -> int:
        backup = Backup(variables)
        held = sum(v.value.nbytes for v in variables)
        try:
            run()  # records
            devices = memory.devices()
            with memory.DevicePeak() if devices else memory.TensorPeak() as p:
                run()
        finally:
            backup.put_back()
        return held + p.bytes

    # Inside `Model.fit`.

    def next_batch(self, iterator: Iterator) -> Nest:
        return next(iter(iterator))

    def next_batches(
        self, iterator: Iterator, count: int
    ) -> tuple[Iterable[Nest] | None, Nest]:
        return list(iterator)[:count], None

    # To look at what it does.

    def start_trace(self, directory: str) -> None:
        # Of two at once the second one ends the process.
        if getattr(torch.autograd.profiler, IS_PROFILING):
            raise RuntimeError("A profiler of PyTorch is running already.")
        self._profile = torch.profiler.profile(
            on_trace_ready=torch.profiler.tensorboard_trace_handler(directory)
        )
        self._profile.start()

    def stop_trace(self) -> None:
        self._profile.stop()

    def mark_step(self, name: str, number: int) -> AbstractContextManager:
        return torch.profiler.record_function(f"{name} {number}")


def _written(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function write what it assigns before others are recorded."""

    def run() -> None:
        with Pending(None) as scope:
            function()
        scope.write()

    return run


def _select(
    predicate: Tensor,
    true_fn: Callable[[], None],
    false_fn: Callable[[], None],
) -> None:
    """Run both functions, and keep what one of them has made of variables."""
    scopes = []
    for function in (true_fn, false_fn):
        with Copied(None) as scope:
            function()
        scopes.append(scope)
    one, other = scopes
    updates = [*one.updates(), *other.updates()]
    for variable in {id(v): v for v, _ in updates}.values():
        values = [s.get_current_value(variable) for s in (one, other)]
        variable.assign(torch.where(predicate, *values))


def _to_tensor(leaf: Any) -> Tensor | None:
    return None if leaf is None else to_tensor(leaf)


def _stack(*leaves: Tensor) -> Tensor | None:
    return None if leaves[0] is None else torch.stack(leaves)


THE_BACKEND = TorchBackend
