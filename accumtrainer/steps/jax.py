"""What JAX must do itself: differentiate, loop, branch, compile, hold state.

Compiled functions take the values of a program's variables as arrays. Those
they change they are given for good (donated), and they return the new ones;
the others they only read. In between the arrays are held here; the Keras
variables are made current by `publish`, which whoever lets host code look must
call first.
"""

import contextlib
import itertools
import sys
import warnings

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as Spec

from accumtrainer import errors
from accumtrainer.keras_api import keras

# Compiled for that many shapes, a function is worth a warning.
MANY_SHAPES = 4


class JaxBackend:
    """The functions of a backend, on JAX.

    Args:
        run_eagerly: bool, whether to run everything operation by operation.
        distribution: `keras.distribution.Distribution`, or `None` to use one
            device.
    """

    name = "jax"

    def __init__(self, *, run_eagerly=False, distribution=None):
        self._run_eagerly = run_eagerly
        self._mesh = self._axis = None
        if distribution is not None:
            self._mesh = distribution.device_mesh.backend_mesh
            self._axis = distribution.batch_dim_name
        self._holders = {}
        self._active = None
        self._has_warned = False

    def trace(self, function, batch):
        """Run a function on abstract arrays like a batch of arrays.

        Returns:
            Set of the names of the primitives it consists of.
        """
        specs = jax.tree.map(_to_spec, batch)
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
        holder = self._holders.setdefault(
            id(program), _Holder(program, self._mesh)
        )

        def pure(arrays, arguments):
            self._traced = holder.variables
            with _scope(holder.variables, arrays) as scope:
                result = function(*arguments)
            return result, _values(scope, holder.variables)

        is_compiled = jit_compile and not self._run_eagerly
        run = (
            _Compiled(pure, holder, self._warn_of_many_shapes)
            if is_compiled
            else _Eager(pure, holder)
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

    @property
    def replicas(self):
        """How many replicas share a window out."""
        return 1 if self._mesh is None else self._mesh.shape[self._axis]

    @property
    def processes(self):
        """How many processes the replicas are in."""
        return 1 if self._mesh is None else jax.process_count()

    @property
    def is_chief(self):
        """Whether this is the process that writes."""
        return self.processes == 1 or jax.process_index() == 0

    def gather(self, numbers):
        """Let every process know some numbers of all.

        Args:
            numbers: list of n numbers.

        Returns:
            Array `[processes, n]`, float32, the chief's first.
        """
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(np.asarray(numbers, "float32"))

    def scope(self):
        """Make a scope in which variables have a copy on every replica.

        Here they get theirs when a program first takes them.
        """
        return contextlib.nullcontext()

    def place(self, shares):
        """Put the rows of a window where their replicas are.

        Args:
            shares: `Shares` of arrays.

        Returns:
            `Shares` of arrays of the whole mesh.
        """
        return type(shares)(
            _put(shares.split, self._mesh, self._rows_of_shares()),
            _put(shares.copied, self._mesh, Spec()),
        )

    def spread(self, batch):
        """Put the rows of a batch on several devices, if that can be.

        Args:
            batch: `Batch` of arrays `[m, ...]`.

        Returns:
            The same, whatever computes with it.
        """
        sizes = {len(leaf) for leaf in jax.tree.leaves(batch)}
        if self.replicas == 1 or any(n % self.replicas for n in sizes):
            return batch
        return _put(batch, self._mesh, Spec(self._axis))

    def _rows_of_shares(self):
        return Spec(None, self._axis)

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
        variables = self._traced
        current = [v.value for v in variables]

        def run(arrays, shares):
            replica = jax.lax.axis_index(self._axis).astype("int32")
            with _scope(variables, arrays):
                outcome = function(replica, shares)
            return jax.lax.psum(outcome, self._axis)

        return jax.shard_map(
            run,
            mesh=self._mesh,
            in_specs=(Spec(), type(shares)(self._rows_of_shares(), Spec())),
            out_specs=Spec(),
            axis_names={self._axis},
            check_vma=False,
        )(current, shares)

    def constant(self, value):
        """Put a NumPy array on the device, to be passed again and again."""
        return jax.device_put(value)

    def publish(self):
        """Make the Keras variables current, for host code that can look."""
        if self._active is not None:
            self._active.publish()
            self._active = None

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
            program: object whose functions have been compiled here.
            arrays: dict of arrays by their variable's id.

        Returns:
            `_Holder`, whose `arrays` belong to its `variables`.
        """
        holder = self._holders[id(program)]
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
            with _scope(known, [*arrays, *current]) as scope:
                total, nest = objective(*tensors)
            return total, (nest, _values(scope, others))

        (_, (nest, changed)), gradients = jax.value_and_grad(
            pure, argnums=(0, 1), has_aux=True
        )([variable.value for variable in variables], list(tensors))
        _assign(others, current, changed)
        return nest, [*gradients[0], *gradients[1]]

    def add(self, total, gradient):
        """Return the sum of an array and a gradient."""
        return total + gradient.astype("float32")

    def add_to(self, variable, gradient):
        """Add a gradient to a Keras variable."""
        variable.assign(self.add(variable.value, gradient))

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
                with _scope(variables, arrays) as scope:
                    function()
                return _values(scope, variables)

            return jax.make_jaxpr(run)(*current)

        traced = [trace(true_fn), trace(false_fn)]
        changed = sorted(set().union(*map(_changed_positions, traced)))

        def branch(closed):
            def run(arrays):
                known = list(current)
                for position, array in zip(changed, arrays, strict=True):
                    known[position] = array
                outcome = jaxpr_as_fun(closed)(*known)
                return [outcome[position] for position in changed]

            return run

        before = [current[position] for position in changed]
        after = jax.lax.cond(predicate, *map(branch, traced), before)
        _assign([variables[i] for i in changed], before, after)

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
            with _scope(variables, arrays) as scope:
                result, carry = body(*indexed, carry)
            return (_values(scope, variables), carry), result

        indices = jax.numpy.arange(length, dtype="int32")
        (arrays, carry), results = jax.lax.scan(
            step, (current, carry), (indices, stacked)
        )
        _assign(variables, current, arrays)
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


class _Compiled:
    """A function that is compiled anew for arguments of other shapes.

    Args:
        function: takes the arrays of all variables and a nest of arguments,
            returns a nest of arrays and the new arrays of all variables.
        holder: `_Holder` of the variables.
        warn_of_many_shapes: function that is given the latest shapes.
    """

    def __init__(self, function, holder, warn_of_many_shapes):
        self._function = function
        self._holder = holder
        self._warn_of_many_shapes = warn_of_many_shapes
        self._variables = []
        self._programs = {}

    def __call__(self, leaves, treedef):
        holder = self._holder
        self._look_at_variables()
        key = (treedef, *((leaf.shape, leaf.dtype) for leaf in leaves))
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) + 1 == MANY_SHAPES:
                self._warn_of_many_shapes([leaf.shape for leaf in leaves])
            program = self._trace(leaves, treedef)
            self._programs[key] = program
        run, changed, kept = program
        given = holder.give(changed)
        read = [holder.arrays[i] for i in kept]
        # That batches of the host move to the device here is meant; it takes
        # a sixth of the time that `device_put` takes.
        with jax.transfer_guard_host_to_device("allow"):
            result, arrays = run(given, read, leaves)
        for position, array in zip(changed, arrays, strict=True):
            holder.arrays[position] = array
        return result

    def _look_at_variables(self):
        """Forget what was compiled for other variables."""
        variables = self._holder.variables
        if self._variables is not variables:
            if not _begins_with(variables, self._variables):
                self._programs = {}
            self._variables = variables

    def peak_bytes(self, leaves, treedef):
        """Ask the compiler for the most memory that a call takes.

        Returns:
            int, of one device: all variables, arguments, results and what is
            needed in between.
        """
        self._look_at_variables()
        run, changed, kept = self._trace(leaves, treedef)
        arrays = self._holder.arrays
        lowered = run.lower(
            [_to_spec(arrays[position]) for position in changed],
            [_to_spec(arrays[position]) for position in kept],
            [_to_spec(leaf) for leaf in leaves],
        )
        needs = lowered.compile().memory_analysis()
        new = needs.output_size_in_bytes - needs.alias_size_in_bytes
        held = sum(map(_bytes_of_device, [*arrays, *leaves]))
        return held + needs.temp_size_in_bytes + max(0, new)

    def _trace(self, leaves, treedef):
        """Find out which arrays the function changes, and compile it.

        Returns:
            The compiled function of the arrays it is given for good, of those
            it reads, and of the leaves of the arguments; and the positions of
            both among the variables.
        """
        count = len(self._variables)
        closed, (result, _) = jax.make_jaxpr(self._function, return_shape=True)(
            self._holder.arrays, jax.tree.unflatten(treedef, leaves)
        )
        changed = _changed_positions(closed, count)
        kept = sorted(set(range(count)).difference(changed))
        function, structure = jaxpr_as_fun(closed), jax.tree.structure(result)

        def run(given, read, leaves):
            arrays = [None] * count
            for position, array in zip(changed, given, strict=True):
                arrays[position] = array
            for position, array in zip(kept, read, strict=True):
                arrays[position] = array
            out = function(*arrays, *leaves)
            split = len(out) - count
            return (
                jax.tree.unflatten(structure, out[:split]),
                [out[split + position] for position in changed],
            )

        options = {}
        if self._holder.mesh is not None:
            # What changes stays where it is, and everybody is told the rest.
            arrays = self._holder.arrays
            kinds = [arrays[position].sharding for position in changed]
            everywhere = jax.sharding.NamedSharding(self._holder.mesh, Spec())
            options["out_shardings"] = (everywhere, kinds)
        return jax.jit(run, donate_argnums=0, **options), changed, kept


class _Eager:
    """A function that runs operation by operation, its loops in Python.

    Args:
        function: as for `_Compiled`.
        holder: `_Holder` of the variables.
    """

    def __init__(self, function, holder):
        self._function = function
        self._holder = holder

    def peak_bytes(self, leaves, treedef):
        """Refuse to answer: no compiler has planned anything."""
        raise ValueError(errors.EAGER_MEMORY)

    def __call__(self, leaves, treedef):
        arguments = jax.tree.unflatten(treedef, _to_device(leaves))
        with jax.disable_jit():
            result, arrays = self._function(self._holder.arrays, arguments)
        self._holder.arrays = arrays
        return result


class _Holder:
    """The arrays of one program's variables, while they are not published.

    Args:
        program: object with `variables`.
        mesh: mesh of devices that every array has to be on, or `None`.
    """

    def __init__(self, program, mesh=None):
        self._program = program
        self.mesh = mesh
        self._borrowed = set()
        self.variables = []
        self.arrays = None

    def take(self):
        """Read the arrays afresh if the host could have written."""
        if self.arrays is not None:
            return
        variables = self._program.variables
        if list(map(id, variables)) != list(map(id, self.variables)):
            self.variables = variables
        self.arrays = [_on_mesh(_read(v), self.mesh) for v in variables]
        self._borrowed = set(range(len(variables)))

    def give(self, positions):
        """Return arrays that whoever receives them may destroy.

        An array that is given away must not be needed elsewhere: two variables
        may share one after an assignment, and host code may have kept one.
        What programs have returned since is known to nobody else.
        """
        if self._borrowed:
            for position in self._borrowed.intersection(positions):
                array = self.arrays[position]
                if sys.getrefcount(array) > HOLDERS:
                    self.arrays[position] = array.copy()
            self._borrowed.difference_update(positions)
        return [self.arrays[position] for position in positions]

    def replace(self, arrays):
        """Hold other arrays for some variables, given for good.

        Args:
            arrays: dict of arrays by their variable's id.
        """
        for position, variable in enumerate(self.variables):
            if id(variable) in arrays:
                self.arrays[position] = arrays[id(variable)]
                self._borrowed.discard(position)

    def publish(self, without=()):
        """Put the arrays into the variables, without a copy.

        Args:
            without: ids of variables to leave alone.
        """
        if self.arrays is not None:
            for variable, array in zip(
                self.variables, self.arrays, strict=True
            ):
                if id(variable) not in without:
                    variable.assign(array)
        self.arrays = None


# A variable, the list and the local name above, and the call that counts.
HOLDERS = 4


def _read(variable):
    array = variable.value
    return array if isinstance(array, jax.Array) else jax.numpy.asarray(array)


def _on_mesh(array, mesh):
    """Copy an array to all devices of a mesh, unless it is on them."""
    if mesh is None or array.sharding.device_set == set(mesh.devices.flat):
        return array
    return _put(array, mesh, Spec())


def _put(nest, mesh, spec):
    """Put arrays that all processes have onto the devices of a mesh."""
    sharding = jax.sharding.NamedSharding(mesh, spec)
    if jax.process_count() == 1:
        return jax.device_put(nest, sharding)
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(
            leaf.shape, sharding, np.asarray(leaf).__getitem__
        ),
        nest,
    )


def _begins_with(variables, first):
    """Whether a list of variables begins with those of another."""
    pairs = zip(variables, first, strict=False)
    return len(first) <= len(variables) and all(a is b for a, b in pairs)


def _to_device(leaves):
    """Move the leaves that are not there yet, in one call."""
    host = [i for i, v in enumerate(leaves) if not isinstance(v, jax.Array)]
    moved = jax.device_put([leaves[i] for i in host])
    for position, array in zip(host, moved, strict=True):
        leaves[position] = array
    return leaves


def _scope(variables, arrays):
    return keras.StatelessScope(
        list(zip(variables, arrays, strict=True)), collect_losses=True
    )


def _values(scope, variables):
    return [scope.get_current_value(variable) for variable in variables]


def _assign(variables, before, after):
    for variable, old, new in zip(variables, before, after, strict=True):
        if new is not old:
            variable.assign(new)


def _changed_positions(closed, count=None):
    """Find the arguments that a program returns otherwise than they came.

    Args:
        closed: closed jaxpr.
        count: int, how many of its first arguments are its last results;
            `None` for all.

    Returns:
        List of int.
    """
    before, after = closed.jaxpr.invars, closed.jaxpr.outvars
    count = len(after) if count is None else count
    pairs = zip(before[:count], after[len(after) - count :], strict=True)
    return [i for i, (a, b) in enumerate(pairs) if a is not b]


def _to_spec(leaf):
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


def _bytes_of_device(array):
    """Count what an array takes of one of the devices it is on."""
    if not isinstance(array, jax.Array):
        return array.nbytes
    return int(np.prod(array.sharding.shard_shape(array.shape))) * (
        array.dtype.itemsize
    )


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
