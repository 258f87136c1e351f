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


class JaxBackend:
    """The functions of a backend, on JAX.

    Args:
        run_eagerly: bool, whether to run everything operation by operation.
        distribution: `keras.distribution.Distribution`, or `None` to use one
            device.

    Attributes:
        replicas: int, how many replicas share a window out.
        processes: int, how many processes they are in.
        is_chief: bool, whether this is the process that writes.
    """

    name = "jax"

    def __init__(self, *, run_eagerly=False, distribution=None):
        self._run_eagerly = run_eagerly
        self._devices = JaxReplicas(distribution)
        self.replicas = self._devices.count
        self.processes = self._devices.processes
        self.is_chief = self._devices.is_chief
        self._holders = {}
        self._active = None
        self._has_warned = False

    def trace(self, function, batch):
        """Run a function on abstract arrays like a batch of arrays.

        Returns:
            Set of the names of the primitives it consists of.
        """
        specs = jax.tree.map(to_spec, batch)
        return _primitives(jax.make_jaxpr(function)(specs).jaxpr)

    def compile(self, function, program, *, jit_compile):
        """Compile a function of arrays that may change variables.

        Args:
            function: takes nests of arrays, returns a nest of arrays.
            program: object whose `variables` the function may change.
            jit_compile: bool.

        Returns:
            Function of the same arguments.
        """
        holder = self._holder_of(program)

        def pure(arrays, arguments):
            self._traced = holder.variables
            with scope_of(holder.variables, arrays) as scope:
                result = function(*arguments)
            return result, values_in(scope, holder.variables)

        is_compiled = jit_compile and not self._run_eagerly
        run = (
            Compiled(pure, holder, self._warn_of_many_shapes)
            if is_compiled
            else Eager(pure, holder)
        )

        def call(*arguments):
            leaves, treedef = jax.tree.flatten(arguments)
            self._activate(holder)
            return run(leaves, treedef)

        def peak_bytes(*arguments):
            leaves, treedef = jax.tree.flatten(arguments)
            self._activate(holder)
            return run.peak_bytes(leaves, treedef)

        call.peak_bytes = peak_bytes  # type: ignore[attr-defined]
        return call

    def expect(self, function, calls):
        """Prepare for nothing; a program has one shape here."""

    runs_ahead = True
    """Whether programs are still running when a call of them returns."""

    predicts_memory = True
    """Whether compiled functions know how much memory they take."""

    def memory_limit_bytes(self):
        """Nine tenths of a device's memory, `None` if it does not tell."""
        statistics = [d.memory_stats() for d in jax.local_devices()]
        limits = [s["bytes_limit"] for s in statistics if s]
        return 9 * min(limits) // 10 if limits else None

    def is_out_of_memory(self, error):
        """Whether an error says that a device ran out of memory."""
        return isinstance(error, jax.errors.JaxRuntimeError) and (
            "RESOURCE_EXHAUSTED" in str(error)
        )

    def forget(self):
        """Forget arrays that a call has eaten before it failed.

        The variables must be assigned anew.
        """
        for holder in self._holders.values():
            holder.arrays = None
        self._active = None

    def gather(self, numbers):
        """Let every process know the n numbers of all, `[processes, n]`."""
        return self._devices.gather(numbers)

    def scope(self):
        """Make a scope in which variables have a copy on every replica.

        Here they get theirs when a program first takes them.
        """
        return contextlib.nullcontext()

    def place(self, shares, *, is_own=False):
        """Put the rows of a window, `Shares`, where their replicas are."""
        return self._devices.place(shares, is_own=is_own)

    def spread(self, batch):
        """Put the rows of a batch on several devices, if that can be."""
        return self._devices.spread(batch)

    def read(self, variables):
        """Read variables that have one value for all replicas, `[array]`."""
        return [variable.value for variable in variables]

    def write(self, variable, tensor):
        """Assign a variable, so that all replicas know its one value."""
        variable.assign(tensor)

    def holding(self, variables):
        """Make a scope in which variables may be read again and again."""
        del variables
        return contextlib.nullcontext()

    def sum_over_replicas(self, function, shares, *, reading, moving=()):
        """Run a function on every replica, and add up what they return.

        What it writes to variables is forgotten.

        Args:
            function: function of the replica's index, a scalar int32, and
                of its `Shares`; returns a nest of arrays.
            shares: `Shares` of arrays of all replicas.
            reading: ignored, since all variables are known here.
            moving: ignored too.

        Returns:
            The nest of sums.
        """
        del reading, moving
        return self._devices.sum(function, shares, self._traced)

    def constant(self, value):
        """Put a NumPy array on the device, to be passed again and again."""
        return jax.device_put(value)

    def publish(self):
        """Make the Keras variables current, for host code that can look."""
        if self._active is not None:
            self._active.publish()
            self._active = None

    has_own_pipeline = False
    """Whether `Model.fit` trains on what threads of the backend make."""

    def next_batch(self, iterator):
        """Return the next batch that `Model.fit` would train on."""
        return next(iterator)

    def next_batches(self, iterator, count):
        """Take the next batches that `Model.fit` would train on.

        Returns:
            Pair: list of up to `count` batches, at least one, and `None`.

        Raises:
            StopIteration: there is none.
        """
        first = next(iterator)
        return [first, *itertools.islice(iterator, count - 1)], None

    def is_distributed(self, model):
        """Whether `Model.fit` runs the model by a strategy of the backend."""
        del model
        return False

    def hold(self, program, arrays):
        """Take arrays for good, instead of those of a program's variables.

        Args:
            program: object whose functions are compiled here.
            arrays: dict of arrays by their variable's id.

        Returns:
            `Holder`, whose `arrays` belong to its `variables`.
        """
        holder = self._holder_of(program)
        self._activate(holder)
        holder.replace(arrays)
        return holder

    def let_go(self, holder, ids):
        """Make a holder's variables current, but for those with given ids."""
        holder.publish(without=ids)
        self._active = None

    def value_and_grad(
        self, objective, variables, tensors=(), keeps_rows=False
    ):
        """Differentiate a scalar by Keras variables, and by arrays.

        Args:
            objective: function of `tensors`, returns a scalar array and a
                nest of arrays.
            variables: list of Keras variables.
            tensors: list of arrays.
            keeps_rows: ignored, since XLA adds the rows of an embedding alone
                where it can.

        Returns:
            That nest, and a list of gradients: first by the variables, then
            by the arrays.
        """
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
        """Return the sum of an array and a gradient."""
        return total + gradient.astype("float32")

    def add_to(self, variable, gradient):
        """Add a gradient to a Keras variable."""
        variable.assign(self.add(variable.value, gradient))

    def sum_of_squares(self, gradient):
        """Add up the squares of an array, float32."""
        return jax.numpy.sum(jax.numpy.square(gradient))

    def apply(self, optimizer, gradients, variables):
        """Have an optimizer change variables by gradients."""
        optimizer.apply(gradients, variables)

    def cond(self, predicate, true_fn, false_fn):
        """Run one of two functions that change variables.

        Those that neither changes do not pass through the branches, where
        they could be copied.
        """
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
        """Run `body(index, item, carry)` over the first axis, in order.

        Args:
            body: function of a scalar int32, a nest of arrays, and what is
                carried; may change variables; returns a nest of arrays of
                fixed shapes, and what to carry on.
            stacked: nest of arrays `[length, ...]`.
            length: int.
            carry: list of arrays, given to the first call.
            dtypes: ignored, since JAX finds out by itself.

        Returns:
            Pair: nest of arrays `[length, ...]`, the results in order; and
            what the last call carries on.
        """
        del dtypes
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
        """Whether there is a device other than the CPU."""
        return jax.default_backend() != "cpu"

    def peak_memory_bytes(self):
        """Most bytes in use so far on the fullest device, `None` if unknown."""
        statistics = [d.memory_stats() for d in jax.local_devices()]
        peaks = [s["peak_bytes_in_use"] for s in statistics if s]
        return max(peaks, default=None)

    def start_trace(self, directory):
        """Begin to record what host and device do."""
        jax.profiler.start_trace(directory)

    def stop_trace(self):
        """Write what was recorded."""
        jax.profiler.stop_trace()

    def mark_step(self, name, number):
        """Make a context manager that names a step in a trace."""
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
