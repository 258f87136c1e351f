"""What JAX must do itself: differentiate, loop, branch, compile, hold state.

Compiled functions take the values of a program's variables as arrays, which
are held in `programs` in between. The Keras variables are made current by
`publish`, which whoever lets host code look must call first.
"""

import contextlib
import itertools
import warnings

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import jaxpr_as_fun

from accumtrainer import errors
from accumtrainer.keras_api import current_distribution
from accumtrainer.steps.backend import Backend
from accumtrainer.steps.jax.programs import (
    Compiled,
    Eager,
    Holder,
    assign_changed,
    changed_positions,
    scope_of,
    to_spec,
    values_in,
)
from accumtrainer.steps.jax.replicas import JaxReplicas


class JaxBackend(Backend):
    """The functions of a backend, on JAX.

    Args:
        run_eagerly: bool, whether to run everything operation by operation.
        distribution: `keras.distribution.Distribution`, or `None` to use one
            device.
    """

    name = "jax"
    predicts_memory = True
    has_own_pipeline = False
    fit_hands_state_over = True
    compiles_evaluation = True
    runs_ahead = True

    def __init__(self, *, run_eagerly=False, distribution=None):
        self._run_eagerly = run_eagerly
        self._devices = JaxReplicas(distribution)
        self.replicas = self._devices.count
        self.processes = self._devices.processes
        self.is_chief = self._devices.is_chief
        self._holders = {}
        self._active = None
        self._has_warned = False

    @classmethod
    def of_model(cls, model, *, run_eagerly, compiles_all_shapes):
        del compiles_all_shapes  # XLA is all there is
        distribution = None if model is None else current_distribution()
        return cls(run_eagerly=run_eagerly, distribution=distribution)

    def prefer(self, *, loops_badly, supports_jit):
        del supports_jit
        return "streamed" if loops_badly else "fused", True

    def trace(self, function, batch):
        specs = jax.tree.map(to_spec, batch)
        return _primitives(jax.make_jaxpr(function)(specs).jaxpr)

    def compile(self, function, program, *, jit_compile):
        holder = self._holder_of(program)

        def pure(arrays, arguments):
            self._traced = holder.variables
            with scope_of(holder.variables, arrays) as scope:
                result = function(*arguments)
            return result, values_in(scope, holder.variables)

        if jit_compile and not self._run_eagerly:
            warn = self._warn_of_many_shapes
            return Compiled(pure, holder, self._activate, warn)
        return Eager(pure, holder, self._activate)

    def accepts(self, is_finite):
        return is_finite

    def check(self, was_applied):
        pass  # JAX refuses no index, nor does Keras on it

    def memory_limit_bytes(self):
        statistics = [d.memory_stats() for d in jax.local_devices()]
        limits = [s["bytes_limit"] for s in statistics if s]
        return 9 * min(limits) // 10 if limits else None

    def is_out_of_memory(self, error):
        return isinstance(error, jax.errors.JaxRuntimeError) and (
            "RESOURCE_EXHAUSTED" in str(error)
        )

    def forget(self):
        for holder in self._holders.values():
            holder.arrays = None
        self._active = None

    def gather(self, numbers):
        return self._devices.gather(numbers)

    def place(self, shares, *, is_own=False):
        return self._devices.place(shares, is_own=is_own)

    def spread(self, batch):
        return self._devices.spread(batch)

    def read(self, variables):
        return [variable.value for variable in variables]

    def write(self, variable, tensor):
        variable.assign(tensor)

    def sum_over_replicas(self, function, shares, *, reading, moving=()):
        del reading, moving  # all variables are known here
        return self._devices.sum(function, shares, self._traced)

    @contextlib.contextmanager
    def with_float64(self):
        # Older versions of JAX have it among what they try out.
        owner = jax if hasattr(jax, "enable_x64") else jax.experimental
        # Numbers of the code are float32, and may be mixed with it.
        with owner.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            yield

    def constant(self, value):
        return jax.device_put(value)

    def publish(self):
        if self._active is not None:
            self._active.publish()
            self._active = None

    def next_batch(self, iterator):
        return next(iterator)

    def next_batches(self, iterator, count):
        first = next(iterator)
        rest = itertools.islice(iterator, count - 1)
        return itertools.chain([first], rest), None

    def is_distributed(self, model):
        del model
        return False

    def hold(self, program, arrays):
        holder = self._holder_of(program)
        self._activate(holder)
        holder.replace(arrays)
        return holder

    def let_go(self, holder, ids):
        holder.publish(without=ids)
        self._active = None

    def value_and_grad(
        self, objective, variables, tensors=(), keeps_rows=False
    ):
        # XLA adds the rows of an embedding alone where it can.
        del keeps_rows
        taken = {id(variable) for variable in variables}
        others = [v for v in self._traced if id(v) not in taken]
        current = [v.value for v in others]

        def pure(arrays, tensors):
            known = [*variables, *others]
            with scope_of(known, [*arrays, *current]) as scope:
                total, nest = objective(*tensors)
            return total, (nest, values_in(scope, others))

        (_, (nest, changed)), gradients = jax.value_and_grad(
            pure, argnums=(0, 1), has_aux=True
        )([variable.value for variable in variables], list(tensors))
        assign_changed(others, current, changed)
        return nest, [*gradients[0], *gradients[1]]

    def add(self, total, gradient):
        return total + gradient.astype("float32")

    def add_to(self, variable, gradient):
        variable.assign(self.add(variable.value, gradient))

    def sum_of_squares(self, gradient):
        return jax.numpy.sum(jax.numpy.square(gradient))

    def apply(self, optimizer, gradients, variables):
        optimizer.apply(gradients, variables)

    def rarely(self, predicate, function, otherwise):
        if not isinstance(predicate, jax.core.Tracer):
            return function() if predicate else otherwise
        closed = jax.make_jaxpr(function)()
        closed = closed.replace(consts=[_in_rows(c) for c in closed.consts])
        return jax.lax.cond(
            predicate, jaxpr_as_fun(closed), lambda: list(otherwise)
        )

    def cond(self, predicate, true_fn, false_fn):
        if not isinstance(predicate, jax.core.Tracer):
            (true_fn if predicate else false_fn)()
            return
        variables = self._traced
        current = [v.value for v in variables]

        def trace(function):
            def run(*arrays):
                with scope_of(variables, arrays) as scope:
                    function()
                return values_in(scope, variables)

            return jax.make_jaxpr(run)(*current)

        # What neither changes does not pass through the branches, where it
        # could be copied.
        traced = [trace(true_fn), trace(false_fn)]
        changed = sorted(set().union(*map(changed_positions, traced)))

        def branch(closed):
            closed = closed.replace(consts=[_in_rows(c) for c in closed.consts])

            def run(arrays):
                known = list(current)
                for position, array in zip(changed, arrays, strict=True):
                    known[position] = array
                outcome = jaxpr_as_fun(closed)(*known)
                return [outcome[position] for position in changed]

            return run

        before = [current[position] for position in changed]
        after = jax.lax.cond(predicate, *map(branch, traced), before)
        assign_changed([variables[i] for i in changed], before, after)

    def scan(self, body, stacked, length, carry=(), dtypes="float32"):
        del dtypes  # JAX finds out by itself
        carry = list(carry)
        if length == 1:
            item = jax.tree.map(lambda leaf: leaf[0], stacked)
            result, carry = body(jax.numpy.zeros((), "int32"), item, carry)
            return jax.tree.map(lambda leaf: leaf[None], result), carry
        variables = self._traced
        current = [v.value for v in variables]

        def step(state, indexed):
            arrays, carry = state
            with scope_of(variables, arrays) as scope:
                result, carry = body(*indexed, carry)
            return (values_in(scope, variables), carry), result

        indices = jax.numpy.arange(length, dtype="int32")
        (arrays, carry), results = jax.lax.scan(
            step, (current, carry), (indices, stacked)
        )
        assign_changed(variables, current, arrays)
        return results, carry

    def has_accelerator(self):
        return jax.default_backend() != "cpu"

    def peak_memory_bytes(self):
        statistics = [d.memory_stats() for d in jax.local_devices()]
        peaks = [s["peak_bytes_in_use"] for s in statistics if s]
        return max(peaks, default=None)

    def start_trace(self, directory):
        jax.profiler.start_trace(directory)

    def stop_trace(self):
        jax.profiler.stop_trace()

    def mark_step(self, name, number):
        return jax.profiler.StepTraceAnnotation(name, step_num=number)

    def _holder_of(self, program):
        return self._holders.setdefault(
            id(program), Holder(program, self._devices)
        )

    def _activate(self, holder):
        if self._active is not holder:
            self.publish()
            self._active = holder
        holder.take()

    def _warn_of_many_shapes(self, shapes):
        """Say once that compiling goes on and on, and what helps."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(errors.MANY_SHAPES.format(shapes=shapes), stacklevel=2)


def _in_rows(array):
    """Lay an array out as the arrays that a program is given are.

    A gradient comes in the layout of the product that made it. A branch would
    be given it so, while the norm wants it otherwise: it would be written
    twice, and copied in the branch.
    """
    if not isinstance(array, jax.core.Tracer) or array.ndim < 2:
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def _primitives(jaxpr):
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
