"""What JAX must do itself: differentiate, loop, branch, compile, hold state.

Compiled functions take the values of a program's variables as arrays, which
are held in `programs` in between. The Keras variables are made current by
`write_back`, which whoever lets host code look must call first.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import jaxpr_as_fun

from accumtrainer import errors
from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import current_distribution
from accumtrainer.keras_api.types import Model, Nest, Tensor, Variable
from accumtrainer.steps.backend import Backend, HasVariables
from accumtrainer.steps.jax.programs import (
    Compiled,
    Eager,
    Holder,
    assign_changed,
    changed_positions,
    run_uncompiled,
    scope_of,
    to_spec,
    values_in,
)
from accumtrainer.steps.jax.recipes import recipes_of
from accumtrainer.steps.jax.replicas import JaxReplicas
from accumtrainer.window.backend import Recipe, Traced


class JaxBackend(Backend):
    """The functions of a backend, on JAX."""

    name = "jax"
    predicts_memory = True
    has_own_pipeline = False
    fit_hands_state_over = True
    compiles_evaluation = True
    gives_values = True
    runs_ahead = True

    @staticmethod
    def is_told_to_run_eagerly() -> bool:
        return jax.config.jax_disable_jit

    def __init__(
        self,
        model: Model | None,
        *,
        run_eagerly: bool,
        jit_compile: bool | Literal["auto"],
    ):
        # XLA is all there is.
        self._run_eagerly = run_eagerly or jit_compile is False
        distribution = None if model is None else current_distribution()
        self.replicas: JaxReplicas = JaxReplicas(distribution)
        self._holders: dict[int, Holder] = {}
        self._active: Holder | None = None
        self._has_warned = False

    def prefer(
        self, *, loops_badly: bool, supports_jit: bool
    ) -> tuple[Literal["fused", "streamed"], bool]:
        del supports_jit
        return "streamed" if loops_badly else "fused", True

    def trace(self, function: Callable[[Batch], Nest], batch: Batch) -> Traced:
        if self._run_eagerly:
            run_uncompiled(function, batch)
            return Traced(set(), fixes_sizes=False)
        specs = jax.tree.map(to_spec, batch)
        # What it has seen is looked at afterwards, which is no leak.
        with jax.check_tracer_leaks(False):
            traced = jax.make_jaxpr(function)(specs)
        return Traced(_primitives(traced.jaxpr))

    def recipes(
        self, function: Callable[[Batch], list[Tensor]], batch: Batch
    ) -> list[Recipe]:
        if self._run_eagerly:
            raise ValueError("Python may compute with numbers that it reads")
        specs = jax.tree.map(to_spec, batch)
        with jax.check_tracer_leaks(False):
            return recipes_of(jax.make_jaxpr(function)(specs))

    def compile(
        self,
        function: Callable[..., Nest],
        program: HasVariables,
        *,
        jit_compile: bool,
    ) -> Compiled | Eager:
        holder = self._holder_of(program)

        def pure(
            arrays: list[Tensor], arguments: tuple
        ) -> tuple[Nest, list[Tensor]]:
            self._traced = holder.variables
            with scope_of(holder.variables, arrays) as scope:
                result = function(*arguments)
            return result, values_in(scope, holder.variables)

        if jit_compile and not self._run_eagerly:
            warn = self._warn_of_many_shapes
            return Compiled(pure, holder, self._activate, warn)
        return Eager(pure, holder, self._activate)

    def check(self, was_applied: Callable[[], bool]) -> None:
        pass  # JAX refuses no index, nor does Keras on it

    def memory_limit_bytes(self) -> int | None:
        statistics = [d.memory_stats() for d in jax.local_devices()]
        limits = [s["bytes_limit"] for s in statistics if s]
        return 9 * min(limits) // 10 if limits else None

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, jax.errors.JaxRuntimeError) and (
            "RESOURCE_EXHAUSTED" in str(error)
        )

    def forget(self) -> None:
        for holder in self._holders.values():
            holder.arrays = None
        self._active = None

    @contextlib.contextmanager
    def with_float64(self) -> Iterator[None]:
        # Older versions of JAX have it among what they try out.
        owner = jax if hasattr(jax, "enable_x64") else jax.experimental
        # Numbers of the code are float32, and may be mixed with it.
        with owner.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            yield

    def constant(self, value: np.ndarray) -> Tensor:
        return jax.device_put(value)

    def write_back(self) -> None:
        if self._active is not None:
            self._active.write_back()
            self._active = None

    def next_batch(self, iterator: Iterator) -> Nest:
        return next(iterator)

    def next_batches(
        self, iterator: Iterator, count: int
    ) -> tuple[Iterable[Nest] | None, Nest]:
        first = next(iterator)
        rest = itertools.islice(iterator, count - 1)
        return itertools.chain([first], rest), None

    def hold(self, program: HasVariables, arrays: dict[int, Tensor]) -> Any:
        holder = self._holder_of(program)
        self._activate(holder)
        holder.replace(arrays)
        return holder

    def release(self, holder: Any, ids: set[int]) -> None:
        holder.write_back(without=ids)
        self._active = None

    def value_and_grad(
        self,
        objective: Callable[..., tuple[Tensor, Nest]],
        variables: list[Variable],
        tensors: Sequence[Tensor] = (),
        keeps_rows: bool = False,
    ) -> tuple[Nest, list[Tensor | None]]:
        # XLA adds the rows of an embedding alone where it can.
        del keeps_rows
        taken = {id(variable) for variable in variables}
        others = [v for v in self._traced if id(v) not in taken]
        current = [v.value for v in others]

        def pure(
            arrays: list[Tensor], tensors: list[Tensor]
        ) -> tuple[Tensor, Nest]:
            known = [*variables, *others]
            with scope_of(known, [*arrays, *current]) as scope:
                total, nest = objective(*tensors)
            return total, (nest, values_in(scope, others))

        (_, (nest, changed)), gradients = jax.value_and_grad(
            pure, argnums=(0, 1), has_aux=True
        )([variable.value for variable in variables], list(tensors))
        assign_changed(others, current, changed)
        return nest, [*gradients[0], *gradients[1]]

    def add_to(self, variable: Variable, gradient: Tensor) -> None:
        variable.assign(self.add(variable.value, gradient))

    def rarely(
        self,
        predicate: Tensor,
        function: Callable[[], list[Tensor]],
        otherwise: list[Tensor],
    ) -> list[Tensor]:
        if not isinstance(predicate, jax.core.Tracer):
            return function() if predicate else otherwise
        closed = jax.make_jaxpr(function)()
        closed = closed.replace(consts=[_in_rows(c) for c in closed.consts])
        return jax.lax.cond(
            predicate, jaxpr_as_fun(closed), lambda: list(otherwise)
        )

    def cond(
        self,
        predicate: Tensor,
        true_fn: Callable[[], None],
        false_fn: Callable[[], None],
    ) -> None:
        if not isinstance(predicate, jax.core.Tracer):
            (true_fn if predicate else false_fn)()
            return
        variables = self._traced
        current = [v.value for v in variables]

        def trace(function: Callable[[], None]) -> Any:
            def run(*arrays: Tensor) -> list[Tensor]:
                with scope_of(variables, arrays) as scope:
                    function()
                return values_in(scope, variables)

            return jax.make_jaxpr(run)(*current)

        # What neither changes does not pass through the branches, where it
        # could be copied.
        traced = [trace(true_fn), trace(false_fn)]
        changed = sorted(set().union(*map(changed_positions, traced)))

        def branch(closed: Any) -> Callable[[list[Tensor]], list[Tensor]]:
            closed = closed.replace(consts=[_in_rows(c) for c in closed.consts])

            def run(arrays: list[Tensor]) -> list[Tensor]:
                known = list(current)
                for position, array in zip(changed, arrays, strict=True):
                    known[position] = array
                outcome = jaxpr_as_fun(closed)(*known)
                return [outcome[position] for position in changed]

            return run

        before = [current[position] for position in changed]
        after = jax.lax.cond(predicate, *map(branch, traced), before)
        assign_changed([variables[i] for i in changed], before, after)

    def scan(
        self,
        body: Callable[[Tensor, Nest, list[Tensor]], tuple[Nest, list[Tensor]]],
        stacked: Nest,
        length: int | Tensor,
        carry: Sequence[Tensor] = (),
        dtypes: Nest = "float32",
    ) -> tuple[Nest, list[Tensor]]:
        del dtypes  # JAX finds out by itself
        carried = list(carry)
        if length == 1:
            item = jax.tree.map(lambda leaf: leaf[0], stacked)
            first = jax.numpy.zeros((), "int32")
            result, carried = body(first, item, carried)
            return jax.tree.map(lambda leaf: leaf[None], result), carried
        variables = self._traced
        current = [v.value for v in variables]

        def step(state: Nest, indexed: Nest) -> tuple[Nest, Nest]:
            (arrays, carried), (index, item) = state, indexed
            with scope_of(variables, arrays) as scope:
                result, carried = body(index, item, carried)
            return (values_in(scope, variables), carried), result

        indices = jax.numpy.arange(length, dtype="int32")
        (arrays, carried), results = jax.lax.scan(
            step, (current, carried), (indices, stacked)
        )
        assign_changed(variables, current, arrays)
        return results, carried

    def map(self, function: Callable[[Nest], Nest], stacked: Nest) -> Nest:
        return jax.vmap(function)(stacked)

    def on_its_own(self, function: Callable[..., Nest]) -> Callable[..., Nest]:
        # Else every operation is compiled, and a loop anew in every call.
        return function if self._run_eagerly else jax.jit(function)

    def sum_rows(self, stacked: Tensor) -> Tensor:
        if self.has_accelerator():
            return jax.numpy.sum(stacked, axis=0)
        # On a CPU, XLA computes anew for every sum what comes before it; not
        # what a product is made of.
        ones = jax.numpy.ones(stacked.shape[0], stacked.dtype)
        return jax.numpy.tensordot(ones, stacked, 1)

    def has_accelerator(self) -> bool:
        return jax.default_backend() != "cpu"

    def peak_memory_bytes(self) -> int | None:
        statistics = [d.memory_stats() for d in jax.local_devices()]
        peaks = [s["peak_bytes_in_use"] for s in statistics if s]
        return max(peaks, default=None)

    def start_trace(self, directory: str) -> None:
        jax.profiler.start_trace(directory)

    def stop_trace(self) -> None:
        jax.profiler.stop_trace()

    def mark_step(self, name: str, number: int) -> AbstractContextManager:
        return jax.profiler.StepTraceAnnotation(name, step_num=number)

    def _holder_of(self, program: HasVariables) -> Holder:
        return self._holders.setdefault(
            id(program), Holder(program, self.replicas)
        )

    def _activate(self, holder: Holder) -> None:
        if self._active is not holder:
            self.write_back()
            self._active = holder
        holder.take()

    def _warn_of_many_shapes(self, shapes: list[tuple[int, ...]]) -> None:
        """Say once that compiling goes on and on, and what helps."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(errors.MANY_SHAPES.format(shapes=shapes), stacklevel=2)


def _in_rows(array: Tensor) -> Tensor:
    """Lay an array out as the arrays that a program is given are.

    A gradient comes in the layout of the product that made it. A branch would
    be given it so, while the norm wants it otherwise: it would be written
    twice, and copied in the branch.
    """
    if not isinstance(array, jax.core.Tracer) or array.ndim < 2:
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def _primitives(jaxpr: Any) -> set[str]:
    """Collect the primitives of a program and the programs within it."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda leaf: (
                hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
            ),
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= _primitives(inner)
    return names


THE_BACKEND = JaxBackend
