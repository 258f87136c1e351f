"""What TensorFlow must do itself: differentiate, loop, branch, compile.

Variables are updated in place; `tf.function` orders reads and writes as they
are written.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import strategy_of, tree
from accumtrainer.keras_api.types import Model, Nest, Tensor, Variable
from accumtrainer.steps.backend import Backend, HasVariables
from accumtrainer.steps.memory import Backup
from accumtrainer.steps.process_memory import ProcessPeak
from accumtrainer.steps.tensorflow.fit import next_batch, next_batches
from accumtrainer.steps.tensorflow.indices import Indices
from accumtrainer.steps.tensorflow.mapping import map_rows
from accumtrainer.steps.tensorflow.memory import (
    DevicePeak,
    accelerators,
    measured_devices,
)
from accumtrainer.steps.tensorflow.programs import (
    XLA_SHAPES,
    Compiled,
    XlaShapes,
    operations_of,
    to_spec,
    warn_of_many_shapes,
)
from accumtrainer.steps.tensorflow.recipes import recipes_of
from accumtrainer.steps.tensorflow.replicas import (
    TensorFlowReplicas,
    outside_of_strategies,
)
from accumtrainer.steps.tensorflow.squares import is_worth_a_loop, sum_in_rows
from accumtrainer.window.backend import Recipe, Traced, dtype_of_sum


class TensorFlowBackend(Backend):
    """The functions of a backend, on TensorFlow."""

    name = "tensorflow"
    has_ragged = True
    predicts_memory = False
    has_own_pipeline = True
    fit_hands_state_over = False
    gives_values = False

    @staticmethod
    def is_told_to_run_eagerly() -> bool:
        return tf.config.functions_run_eagerly()

    def __init__(
        self,
        model: Model | None,
        *,
        run_eagerly: bool,
        jit_compile: bool | Literal["auto"],
    ):
        self._run_eagerly = run_eagerly
        strategy = None if model is None else strategy_of(model)
        self.replicas: TensorFlowReplicas = TensorFlowReplicas(strategy)
        self._xla_shapes = XlaShapes(
            None if jit_compile is True else XLA_SHAPES, warn_of_many_shapes
        )
        self._indices = Indices(self._xla_shapes.close)
        # Whether what is being traced is for XLA.
        self._is_for_xla = False
        # What rows that a function is mapped over have found of indices.
        self._found_in_row: list[Tensor] | None = None

    def prefer(
        self, *, loops_badly: bool, supports_jit: bool
    ) -> tuple[Literal["fused", "streamed"], bool]:
        return "fused", supports_jit and not loops_badly

    @property
    def compiles_evaluation(self) -> bool:
        # Where nothing loops a CPU is as fast without waiting for XLA.
        return self.has_accelerator()

    def trace(self, function: Callable[[Batch], Nest], batch: Batch) -> Traced:
        with self.replicas.scope():
            if self._run_eagerly:
                function(tree.map_structure(_to_tensor, batch))
                return Traced(set(), fixes_sizes=False)
            traced = tf.function(function, autograph=False)
            specs = tree.map_structure(to_spec, batch)
            graph = traced.get_concrete_function(specs).graph
            return Traced(operations_of(graph))

    def recipes(
        self, function: Callable[[Batch], list[Tensor]], batch: Batch
    ) -> list[Recipe]:
        if self._run_eagerly:
            raise ValueError("Python may compute with numbers that it reads")
        results: list[Tensor] = []

        def run(batch: Batch) -> None:
            # Returned they would wait for all that the graph has to do.
            results.extend(map(tf.convert_to_tensor, function(batch)))

        with self.replicas.scope():
            specs = tree.map_structure(to_spec, batch)
            traced = tf.function(run, autograph=False)
            graph = traced.get_concrete_function(specs).graph
        return recipes_of(graph, results)

    def compile(
        self,
        function: Callable[..., Nest],
        program: HasVariables,
        *,
        jit_compile: bool,
    ) -> Any:
        if self._run_eagerly:
            return functools.partial(_run_eagerly, function)
        # XLA compiles what a replica runs, see `TensorFlowReplicas.sum`.
        is_outside = self.replicas.count > 1
        if not is_outside:
            # It would have to write to other devices than its own.
            jit_compile = jit_compile and not _has_copies(program.all_variables)

        def traced(uses_xla: bool, *arguments: Nest) -> Nest:
            self.replicas.jit_compile = uses_xla
            self._is_for_xla = uses_xla and not is_outside
            try:
                result = function(*arguments)
                self._indices.confirm(result)
            finally:
                self._indices.forget_unread()
            return result

        return Compiled(
            traced,
            jit_compile,
            self._xla_shapes,
            is_outside=is_outside,
            # An accelerator may still be reading when the host goes on.
            shares_memory=not self.has_accelerator(),
        )

    def compiled_shapes(self) -> dict[str, list[str]]:
        return self._xla_shapes.as_dict()

    def expect_shapes(self, shapes: dict[str, list[str]]) -> None:
        self._xla_shapes.load(shapes)

    def expect(self, function: Any, calls: Sequence[tuple]) -> None:
        if isinstance(function, Compiled):
            function.expect(calls)

    def constant(self, value: np.ndarray) -> Tensor:
        return tf.constant(value)

    def write_back(self) -> None:
        pass  # the Keras variables always are current

    def join_ragged(self, arrays: Sequence[np.ndarray]) -> Tensor:
        shapes = np.array([array.shape[1:] for array in arrays])
        differs = (shapes != shapes[0]).any(axis=0)
        rank = int(np.flatnonzero(differs)[-1]) + 1
        return tf.concat(
            [
                tf.RaggedTensor.from_tensor(array, ragged_rank=rank)
                for array in arrays
            ],
            axis=0,
        )

    def next_batch(self, iterator: Iterator) -> Nest:
        return next_batch(iterator)

    def next_batches(
        self, iterator: Iterator, count: int
    ) -> tuple[Iterable[Nest] | None, Nest]:
        return next_batches(iterator, count)

    def is_distributed(self, model: Model) -> bool:
        if tf.distribute.has_strategy():
            return True
        return model.distribute_strategy is not tf.distribute.get_strategy()

    def value_and_grad(
        self,
        objective: Callable[..., tuple[Tensor, Nest]],
        variables: list[Variable],
        tensors: Sequence[Tensor] = (),
        keeps_rows: bool = False,
    ) -> tuple[Nest, list[Tensor | None]]:
        values = [*(variable.value for variable in variables), *tensors]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            total, nest = objective(*tensors)
        operations = self._upcoming()
        gradients = tape.gradient(total, values)
        self._look_at_indices(operations, (total, nest, gradients))
        return nest, [
            g
            if g is None or (keeps_rows and g.dtype == tf.float32)
            else tf.convert_to_tensor(g)
            for g in gradients
        ]

    def _upcoming(self) -> list[Any]:
        """List the operations whose indices are to be looked at."""
        if not self.replicas.jit_compile or self.has_accelerator():
            return []
        return self._indices.upcoming(tf.constant(0).graph)

    def _look_at_indices(self, operations: list[Any], results: Nest) -> None:
        if not operations:
            return
        number = self._indices.find(
            operations, results, can_keep=self._is_for_xla
        )
        if number is not None:
            if self._found_in_row is None:
                self._indices.note(number)
            else:
                self._found_in_row.append(number)
        self._indices.pass_over(operations[0].graph)

    def accepts(self, is_finite: Tensor) -> Tensor:
        return (
            self._indices.accept(is_finite) if self._is_for_xla else is_finite
        )

    def check(self, was_applied: Callable[[], bool]) -> None:
        self._indices.check(was_applied)

    def add(self, total: Tensor, gradient: Tensor) -> Tensor:
        gradient = _to_be_added(gradient)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.tensor_scatter_nd_add(
                total, gradient.indices[:, None], gradient.values
            )
        return total + gradient

    def add_to(self, variable: Variable, gradient: Tensor) -> None:
        gradient = _to_be_added(gradient)
        if isinstance(gradient, tf.IndexedSlices):
            variable.value.scatter_add(gradient)
        else:
            variable.value.assign_add(gradient)

    def sum_of_squares(self, gradient: Tensor) -> Tensor:
        loops = self._is_for_xla and not self.has_accelerator()
        if loops and is_worth_a_loop(gradient):
            return sum_in_rows(gradient)
        return super().sum_of_squares(gradient)

    def apply(
        self,
        optimizer: Any,
        gradients: list[Tensor | None],
        variables: list[Variable],
    ) -> None:
        # Keras has TensorFlow add gradients up over replicas first, even if
        # there is no strategy; and whatever graph does so, TensorFlow keeps
        # for good, with all that it holds (`all_reduce` registers a gradient
        # of its own each time). In a merge call Keras leaves that out.

        def apply(_: Any = None) -> None:
            pairs = list(zip(gradients, variables, strict=True))
            if pairs:  # as Keras does there; a user's optimizer may override it
                optimizer.apply_gradients(pairs)
            else:
                optimizer.apply(gradients, variables)

        if tf.distribute.has_strategy():
            apply()
        else:
            tf.distribute.get_replica_context().merge_call(apply)

    def rarely(
        self,
        predicate: Tensor,
        function: Callable[[], list[Tensor]],
        otherwise: list[Tensor],
    ) -> list[Tensor]:
        if not self._is_for_xla:
            return tf.cond(predicate, function, lambda: list(otherwise))
        # A loop, for the reason that `cond` gives.
        _, *tensors = tf.while_loop(
            lambda pending, *_: pending,
            lambda *_: [tf.constant(False), *function()],
            [predicate, *otherwise],
        )
        return tensors

    def cond(
        self,
        predicate: Tensor,
        true_fn: Callable[[], None],
        false_fn: Callable[[], None],
    ) -> None:

        def without_result(
            function: Callable[[], None],
        ) -> Callable[..., Tensor]:
            def run(*_: Any) -> Tensor:
                function()
                return tf.constant(False)

            return run

        first, second = map(without_result, (true_fn, false_fn))
        if self._is_for_xla:
            # Of branches that only compute, XLA runs both and selects, for
            # which whatever they change must exist twice. It leaves loops as
            # they are: this one runs once or not at all.
            tf.while_loop(lambda pending: pending, first, [predicate])
            tf.cond(predicate, lambda: tf.constant(False), second)
        else:
            tf.cond(predicate, first, second)

    def scan(
        self,
        body: Callable[[Tensor, Nest, list[Tensor]], tuple[Nest, list[Tensor]]],
        stacked: Nest,
        length: int | Tensor,
        carry: Sequence[Tensor] = (),
        dtypes: Nest = "float32",
    ) -> tuple[Nest, list[Tensor]]:

        def take(index: Tensor) -> Nest:
            return tree.map_structure(
                lambda leaf: None if leaf is None else leaf[index], stacked
            )

        carried = list(carry)
        static = tf.get_static_value(length)
        if static == 1 or tf.executing_eagerly():
            results = []
            for index in range(static):
                result, carried = body(tf.constant(index), take(index), carried)
                results.append(result)
            return tree.map_structure(_stack, *results), carried

        moving = self.replicas.moving

        def step(
            index: Tensor,
            arrays: list[Any],
            values: list[Tensor],
            carried: list[Tensor],
        ) -> tuple:
            taken = take(index)
            self._indices.pass_over(index.graph)
            with self.replicas.scope_of(values):
                result, carried = body(index, taken, carried)
                values = [variable.value for variable in moving]
            arrays = [
                array.write(index, leaf)
                for array, leaf in zip(arrays, _present(result), strict=True)
            ]
            return index + 1, arrays, values, list(carried)

        # One at a time, since micro-batches that overlap have all their
        # activations in memory.
        _, arrays, values, carried = tf.while_loop(
            lambda index, *_: index < length,
            step,
            [
                tf.constant(0),
                [tf.TensorArray(d, size=length) for d in _present(dtypes)],
                [variable.value for variable in moving],
                carried,
            ],
            parallel_iterations=1,
        )
        for variable, value in zip(moving, values, strict=True):
            variable.assign(value)
        stacked = iter([array.stack() for array in arrays])
        return tree.map_structure(
            lambda d: d and next(stacked), dtypes
        ), carried

    def map(self, function: Callable[[Nest], Nest], stacked: Nest) -> Nest:
        def run(item: Nest) -> tuple[Nest, list[Tensor]]:
            self._found_in_row = []
            result = function(item), self._found_in_row
            # What is made of this for all rows at once has other names.
            self._indices.confirm(result)
            return result

        operations = self._upcoming()
        self._look_at_indices(operations, [o.outputs for o in operations])
        try:
            result, numbers = map_rows(run, stacked)
        finally:
            self._found_in_row = None
        for number in numbers:
            self._indices.note(tf.reduce_max(number))
        if not tf.executing_eagerly():
            self._indices.pass_over(tf.constant(0).graph)
        return result

    def sum_rows(self, stacked: Tensor) -> Tensor:
        if not self._is_for_xla or self.has_accelerator():
            return tf.reduce_sum(stacked, axis=0)
        # As on JAX, see there.
        return tf.tensordot(tf.ones(tf.shape(stacked)[:1]), stacked, 1)

    def has_accelerator(self) -> bool:
        devices = tf.config.list_logical_devices()
        return any(device.device_type != "CPU" for device in devices)

    def measure_peak(
        self, run: Callable[[], Any], variables: list[Variable]
    ) -> int:
        backup = Backup(variables)
        held = sum(
            int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables
        )
        try:
            with self._xla_shapes.on_trial():
                run()  # compiles
            devices = measured_devices()
            with DevicePeak(devices) if devices else ProcessPeak() as peak:
                run()
        finally:
            backup.put_back()
        return held + peak.bytes

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, tf.errors.ResourceExhaustedError)

    def peak_memory_bytes(self) -> int | None:
        read = tf.config.experimental.get_memory_info
        peaks = [read(device)["peak"] for device in accelerators()]
        return max(peaks, default=None)

    def start_trace(self, directory: str) -> None:
        tf.profiler.experimental.start(directory)

    def stop_trace(self) -> None:
        tf.profiler.experimental.stop()

    def mark_step(self, name: str, number: int) -> AbstractContextManager:
        return tf.profiler.experimental.Trace(name, step_num=number, _r=1)


def _has_copies(variables: list[Variable]) -> bool:
    """Whether any of some Keras variables is on several devices."""
    values = (variable.value for variable in variables)
    return any(
        isinstance(value, tf.distribute.DistributedValues)
        and len(strategy_of(value).extended.worker_devices) > 1
        for value in values
    )


def _to_be_added(gradient: Tensor) -> Tensor:
    dtype = dtype_of_sum(gradient)
    if gradient.dtype == dtype:
        return gradient
    return tf.cast(tf.convert_to_tensor(gradient), dtype)


def _present(nest: Nest) -> list[Any]:
    """List the leaves that are there."""
    return [leaf for leaf in tree.flatten(nest) if leaf is not None]


def _stack(*leaves: Tensor) -> Tensor | None:
    return None if leaves[0] is None else tf.stack(leaves)


def _run_eagerly(function: Callable[..., Any], *arguments: Nest) -> Nest:
    with outside_of_strategies():
        return function(*tree.map_structure(_to_tensor, arguments))


def _to_tensor(leaf: Any) -> Tensor | None:
    return None if leaf is None else tf.convert_to_tensor(leaf)


THE_BACKEND = TensorFlowBackend
