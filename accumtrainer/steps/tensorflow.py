"""What TensorFlow must do itself: differentiate, loop, branch, compile.

Variables are updated in place; `tf.function` orders reads and writes as they
are written.
"""

import contextlib
import functools
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import optree
import tensorflow as tf

from accumtrainer import errors
from accumtrainer.keras_api import keras, tree
from accumtrainer.memory import Backup

STATUS = Path("/proc/self/status")


class TensorFlowBackend:
    """The functions of a backend, on TensorFlow.

    Args:
        run_eagerly: bool, whether to run everything as plain Python.
        strategy: `tf.distribute.Strategy` whose replicas share windows out,
            or `None` to use one device.
    """

    name = "tensorflow"

    def __init__(self, *, run_eagerly=False, strategy=None):
        self._run_eagerly = run_eagerly
        self._strategy = strategy
        # What loops have to carry, since it is no variable meanwhile.
        self._reading, self._moving = [], []
        self._jit_compile = False

    def trace(self, function, batch):
        """Run a function on abstract tensors like a batch of arrays.

        Returns:
            Set of the names of the operations it consists of.
        """
        with self.scope():
            return self._trace(function, batch)

    def _trace(self, function, batch):
        if self._run_eagerly:
            function(tree.map_structure(_to_tensor, batch))
            return set()
        traced = tf.function(function, autograph=False)
        specs = tree.map_structure(_to_spec, batch)
        return _operations(traced.get_concrete_function(specs).graph)

    def compile(self, function, program, *, jit_compile):
        """Compile a function of tensors that may change variables.

        Args:
            function: takes nests of tensors, returns a nest of tensors.
            program: object whose `variables` the function may change; they
                are changed in place.
            jit_compile: bool, whether XLA compiles it.

        Returns:
            Function of the same arguments.
        """
        del program
        if self._run_eagerly:
            return lambda *args: function(
                *(tree.map_structure(_to_tensor, arg) for arg in args)
            )
        if self.replicas > 1:
            # XLA compiles what a replica runs, see `sum_over_replicas`.
            self._jit_compile, jit_compile = jit_compile, False
        return _Compiled(function, jit_compile)

    @property
    def replicas(self):
        """How many replicas share a window out."""
        if self._strategy is None:
            return 1
        return self._strategy.num_replicas_in_sync

    @property
    def _members(self):
        """List the processes of the strategy, pairs of their job and index."""
        resolver = self._strategy and self._strategy.cluster_resolver
        cluster = resolver and resolver.cluster_spec()
        return [
            (job, index)
            for job in ("chief", "worker")
            if cluster and job in cluster.jobs
            for index in cluster.task_indices(job)
        ]

    @property
    def processes(self):
        """How many processes the replicas are in."""
        return max(1, len(self._members))

    @property
    def is_chief(self):
        """Whether this is the process that writes."""
        return self.processes == 1 or self._index == 0

    @property
    def _index(self):
        resolver = self._strategy.cluster_resolver
        return self._members.index((resolver.task_type, resolver.task_id))

    def gather(self, numbers):
        """Let every process know some numbers of all.

        Args:
            numbers: list of n numbers.

        Returns:
            Array `[processes, n]`, float32, the chief's first.
        """
        rows = np.zeros([self.processes, len(numbers)], "float32")
        rows[self._index] = numbers
        # Each of the process's own replicas adds the same.
        rows /= self.replicas // self.processes
        return self._add_up(tf.constant(rows)).numpy()

    @functools.cached_property
    def _add_up(self):
        def add_up(rows):
            every = self._strategy.run(tf.identity, (rows,))
            return self._strategy.reduce("SUM", every, axis=None)

        return tf.function(add_up, autograph=False)

    def scope(self):
        """Make a scope in which variables have a copy on every replica."""
        if self._strategy is None:
            return contextlib.nullcontext()
        return self._strategy.scope()

    def place(self, shares):
        """Leave a window where it is; every replica takes its share."""
        return shares

    def spread(self, batch):
        """Leave a batch where it is; one replica computes with it."""
        return batch

    def sum_over_replicas(self, function, shares, *, reading, moving=()):
        """Run a function on every replica, and add up what they return.

        What it writes to variables is forgotten.

        Args:
            function: function of the replica's index, a scalar int32, and
                of its `Shares`; returns a nest of tensors.
            shares: `Shares` of tensors of all replicas.
            reading: list of the Keras variables it only reads; others that
                it reads have one value for all replicas.
            moving: list of the Keras variables it may write to.

        Returns:
            The nest of sums.
        """
        size = self.replicas

        # Traced outside of the strategy, where Keras leaves losses alone; a
        # replica would have it divide them by the number of replicas.
        @functools.partial(
            tf.function, jit_compile=self._jit_compile, autograph=False
        )
        def run(replica, shares, read, moved):
            self._reading = list(zip(reading, read, strict=True))
            self._moving = list(moving)
            try:
                with self._scope_of(moved):
                    return function(replica, shares)
            finally:
                self._reading, self._moving = [], []

        def run_on_replica(shares, moved):
            replica = _replica_index()
            split = tree.map_structure(
                lambda leaf: _share_of(leaf, replica, size), shares.split
            )
            read = [tf.convert_to_tensor(v.value) for v in reading]
            return program(replica, shares._replace(split=split), read, moved)

        moved = [tf.convert_to_tensor(v.value) for v in moving]
        split = tree.map_structure(
            lambda leaf: _share_of(leaf, 0, size), shares.split
        )
        program = run.get_concrete_function(
            tf.constant(0),
            shares._replace(split=split),
            [tf.convert_to_tensor(v.value) for v in reading],
            moved,
        )
        return _sum(
            self._strategy.run(run_on_replica, (shares, moved)), self._strategy
        )

    def _scope_of(self, values):
        """Make a scope in which what moves on a replica has other values."""
        if not self._moving:
            return contextlib.nullcontext()
        moved = zip(self._moving, values, strict=True)
        return keras.StatelessScope(
            [*self._reading, *moved], collect_losses=True
        )

    def constant(self, value):
        """Put a NumPy array on the device, to be passed again and again."""
        return tf.constant(value)

    def publish(self):
        """Make the Keras variables current; here they always are."""

    def next_batch(self, iterator):
        """Return the next batch that `Model.fit` would train on.

        A part that a generator leaves out arrives as an empty optional.
        """
        return tree.map_structure(
            lambda leaf: (
                None if isinstance(leaf, tf.experimental.Optional) else leaf
            ),
            next(iterator),
        )

    def next_batches(self, iterator, count):
        """Take the next batches that `Model.fit` would train on.

        Where only their sizes can differ, one compiled call takes them all.

        Args:
            iterator: what `fit` hands over.
            count: int, how many to take if there are as many.

        Returns:
            Pair: list of at least one batch, and `None`; or `None`, and a
            nest of tensors `[count, m, ...]` where all have the same size.

        Raises:
            StopIteration: there is none.
        """
        if not _can_join(iterator.element_spec):
            return _take_one_by_one(self.next_batch, iterator, count), None
        joined, sizes = _take_joined(iterator, tf.constant(count))
        sizes = sizes.numpy().tolist()
        if not sizes:
            raise StopIteration
        if len(sizes) == count and len(set(sizes)) == 1:
            shape = [count, sizes[0]]
            return None, tree.map_structure(
                lambda leaf: tf.reshape(leaf, shape + leaf.shape[1:]), joined
            )
        parts = tree.map_structure(lambda leaf: tf.split(leaf, sizes), joined)
        return [
            tree.map_structure_up_to(joined, lambda p, i=i: p[i], parts)
            for i in range(len(sizes))
        ], None

    def is_distributed(self, model):
        """Whether `Model.fit` runs the model by a `tf.distribute` strategy."""
        if tf.distribute.has_strategy():
            return True
        return model.distribute_strategy is not tf.distribute.get_strategy()

    def value_and_grad(
        self, objective, variables, tensors=(), keeps_rows=False
    ):
        """Differentiate a scalar by Keras variables, and by tensors.

        Args:
            objective: function of `tensors`, returns a scalar tensor and a
                nest of tensors.
            variables: list of Keras variables.
            tensors: list of tensors.
            keeps_rows: whether float32 gradients of embeddings may come as
                those rows that are not zero, for `add` and `add_to`.

        Returns:
            That nest, and a list of gradients, `None` where unused: first by
            the variables, then by the tensors. They are dense, repeated rows
            of embedding gradients added up, unless `keeps_rows`.
        """
        values = [*(variable.value for variable in variables), *tensors]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            total, nest = objective(*tensors)
        gradients = tape.gradient(total, values)
        return nest, [
            g
            if g is None or (keeps_rows and g.dtype == tf.float32)
            else tf.convert_to_tensor(g)
            for g in gradients
        ]

    def add(self, total, gradient):
        """Return the sum of a tensor and a gradient."""
        gradient = _in_float32(gradient)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.tensor_scatter_nd_add(
                total, gradient.indices[:, None], gradient.values
            )
        return total + gradient

    def add_to(self, variable, gradient):
        """Add a gradient to a Keras variable in place."""
        gradient = _in_float32(gradient)
        if isinstance(gradient, tf.IndexedSlices):
            variable.value.scatter_add(gradient)
        else:
            variable.value.assign_add(gradient)

    def cond(self, predicate, true_fn, false_fn):
        """Run one of two functions that change variables."""

        def without_result(function):
            def run():
                function()
                return tf.constant(0)

            return run

        tf.cond(predicate, without_result(true_fn), without_result(false_fn))

    def scan(self, body, stacked, length, carry=(), dtypes="float32"):
        """Run `body(index, item, carry)` over the first axis, in order.

        Args:
            body: function of a scalar int32, a nest of tensors, and what is
                carried; may change variables; returns a nest of tensors of
                fixed shapes, and what to carry on.
            stacked: nest of tensors `[length, ...]`.
            length: scalar int32.
            carry: list of tensors, given to the first call.
            dtypes: nest of the dtypes of what `body` returns.

        Returns:
            Pair: nest of tensors `[length, ...]`, the results in order; and
            what the last call carries on.
        """

        def take(index):
            return tree.map_structure(
                lambda leaf: None if leaf is None else leaf[index], stacked
            )

        static = tf.get_static_value(length)
        if static == 1 or tf.executing_eagerly():
            results = []
            for index in range(static):
                result, carry = body(tf.constant(index), take(index), carry)
                results.append(result)
            return tree.map_structure(_stack, *results), carry

        moving = self._moving

        def step(index, arrays, values, carry):
            with self._scope_of(values):
                result, carry = body(index, take(index), carry)
                values = [variable.value for variable in moving]
            arrays = [
                array.write(index, leaf)
                for array, leaf in zip(arrays, _present(result), strict=True)
            ]
            return index + 1, arrays, values, list(carry)

        # One at a time, since micro-batches that overlap have all their
        # activations in memory.
        _, arrays, values, carry = tf.while_loop(
            lambda index, *_: index < length,
            step,
            [
                tf.constant(0),
                [tf.TensorArray(d, size=length) for d in _present(dtypes)],
                [variable.value for variable in moving],
                list(carry),
            ],
            parallel_iterations=1,
        )
        for variable, value in zip(moving, values, strict=True):
            variable.assign(value)
        stacked = iter([array.stack() for array in arrays])
        return tree.map_structure(lambda d: d and next(stacked), dtypes), carry

    def has_accelerator(self):
        """Whether there is a device other than the CPU."""
        devices = tf.config.list_logical_devices()
        return any(device.device_type != "CPU" for device in devices)

    predicts_memory = False
    """Whether compiled functions know how much memory they take."""

    def measure_peak(self, run, variables):
        """Measure the most memory that a trial takes.

        Args:
            run: function without arguments; what it writes to variables is
                put back.
            variables: list of the Keras variables that it may read or write.

        Returns:
            int: the variables, and what was needed beside them.
        """
        backup = Backup(variables)
        held = sum(
            int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables
        )
        try:
            run()  # compiles
            with Peak(self._accelerators()) as peak:
                run()
        finally:
            backup.put_back()
        return held + peak.bytes

    def memory_limit_bytes(self):
        """Nine tenths of a device's memory; TensorFlow does not tell."""
        return None

    def is_out_of_memory(self, error):
        """Whether an error says that a device ran out of memory."""
        return isinstance(error, tf.errors.ResourceExhaustedError)

    def forget(self):
        """Forget nothing; variables outlive a call that fails."""

    def _accelerators(self):
        count = len(tf.config.list_logical_devices("GPU"))
        return [f"GPU:{index}" for index in range(count)]

    def peak_memory_bytes(self):
        """Most bytes in use so far on the fullest device, `None` if unknown."""
        read = tf.config.experimental.get_memory_info
        peaks = [read(device)["peak"] for device in self._accelerators()]
        return max(peaks, default=None)

    def start_trace(self, directory):
        """Begin to record what host and device do."""
        tf.profiler.experimental.start(directory)

    def stop_trace(self):
        """Write what was recorded."""
        tf.profiler.experimental.stop()

    def mark_step(self, name, number):
        """Make a context manager that names a step in a trace."""
        return tf.profiler.experimental.Trace(name, step_num=number, _r=1)


class Peak:
    """Measures by how much memory in use grows inside of it, at most.

    Args:
        devices: list of names of accelerators; none for the process's memory.

    Attributes:
        bytes: int, known at the end.

    Raises:
        RuntimeError: the system does not tell.
    """

    def __init__(self, devices):
        self._devices = devices
        self.bytes = 0

    def __enter__(self):
        for device in self._devices:
            tf.config.experimental.reset_memory_stats(device)
        if not self._devices:
            if not STATUS.exists():
                raise RuntimeError(errors.MEMORY_IS_SECRET)
            # The peak begins anew.
            STATUS.with_name("clear_refs").write_text("5")
        self._before = self._read("current", "VmRSS")
        return self

    def __exit__(self, *_):
        after = self._read("peak", "VmHWM")
        self.bytes = max(
            late - early
            for late, early in zip(after, self._before, strict=True)
        )

    def _read(self, of_device, of_process):
        if self._devices:
            read = tf.config.experimental.get_memory_info
            return [read(device)[of_device] for device in self._devices]
        found = re.search(
            rf"^{of_process}:\s+(\d+) kB$", STATUS.read_text(), re.M
        )
        return [1024 * int(found[1])] if found else [0]


class _Compiled:
    """A `tf.function` that looks its programs up by shape and type alone.

    `tf.function` itself takes longer to find the program for some nested
    arguments than a small model takes to run it.
    """

    def __init__(self, function, jit_compile):
        self._function = function
        self._jit_compile = jit_compile
        self._programs = {}
        self._structures = {}

    def __call__(self, *arguments):
        leaves, treedef = optree.tree_flatten(cast(Any, arguments))
        key = (treedef, *((leaf.shape, leaf.dtype) for leaf in leaves))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._trace(leaves, treedef)
        return program(*map(tf.convert_to_tensor, leaves))

    def _trace(self, leaves, treedef):
        # What reduces retracing joins shapes of different ranks into one of
        # unknown rank, with which a loss can do nothing.
        structure = treedef, *(len(leaf.shape) for leaf in leaves)
        if structure not in self._structures:
            self._structures[structure] = tf.function(
                functools.partial(self._run, treedef),
                jit_compile=self._jit_compile,
                reduce_retracing=True,
                autograph=False,
            )
        specs = map(_to_spec, leaves)
        return self._structures[structure].get_concrete_function(*specs)

    def _run(self, treedef, *leaves):
        return self._function(*optree.tree_unflatten(treedef, leaves))


def _can_join(spec):
    """Whether the batches of an iterator differ in nothing but their sizes."""
    return all(
        isinstance(leaf, tf.TensorSpec)
        and leaf.shape.rank
        and leaf.shape[1:].is_fully_defined()
        for leaf in tree.flatten(spec)
    )


def _take_one_by_one(next_batch, iterator, count):
    batches = [next_batch(iterator)]
    with contextlib.suppress(StopIteration):
        while len(batches) < count:
            batches.append(next_batch(iterator))
    return batches


@functools.partial(tf.function, autograph=False, reduce_retracing=True)
def _take_joined(iterator, count):
    """Join up to `count` batches row by row, and return their sizes."""
    spec = iterator.element_spec
    leaf_specs = tf.nest.flatten(spec)

    def step(index, optional, arrays, sizes):
        leaves = tf.nest.flatten(optional.get_value())
        arrays = [
            a.write(index, v) for a, v in zip(arrays, leaves, strict=True)
        ]
        sizes = sizes.write(index, tf.shape(leaves[0])[0])
        optional = tf.cond(
            index + 1 < count,
            iterator.get_next_as_optional,
            lambda: tf.experimental.Optional.empty(spec),
        )
        return index + 1, optional, arrays, sizes

    arrays = [
        tf.TensorArray(
            leaf.dtype,
            size=0,
            dynamic_size=True,
            infer_shape=False,
            element_shape=tf.TensorShape([None]).concatenate(leaf.shape[1:]),
        )
        for leaf in leaf_specs
    ]
    sizes = tf.TensorArray(tf.int32, size=0, dynamic_size=True)
    *_, arrays, sizes = tf.while_loop(
        lambda index, optional, arrays, sizes: optional.has_value(),
        step,
        [tf.constant(0), iterator.get_next_as_optional(), arrays, sizes],
        parallel_iterations=1,
    )
    joined = tf.nest.pack_sequence_as(spec, [a.concat() for a in arrays])
    return joined, sizes.stack()


def _replica_index():
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, "int32")


def _share_of(leaf, replica, count):
    """Take a replica's rows of `[k, count * m, ...]`."""
    if leaf is None:
        return None
    size = tf.shape(leaf)[1] // count
    share = leaf[:, replica * size : (replica + 1) * size]
    known = leaf.shape[1]
    share.set_shape([leaf.shape[0], known and known // count, *leaf.shape[2:]])
    return share


def _sum(outcome, strategy):
    """Add up a nest of values of each replica, in one reduction per dtype.

    Args:
        outcome: nest of tensors of every replica.
        strategy: `tf.distribute.Strategy`.

    Returns:
        The nest of sums, tensors of one device.
    """
    leaves = tree.flatten(outcome)
    kinds = [strategy.experimental_local_results(v)[0].dtype for v in leaves]
    sums = {}
    for kind in dict.fromkeys(kinds):
        alike = [i for i, dtype in enumerate(kinds) if dtype == kind]
        with strategy.scope():
            reduced = strategy.extended.batch_reduce_to(
                tf.distribute.ReduceOp.SUM,
                # Back onto all devices, since only then are they packed.
                [(leaves[i], leaves[i]) for i in alike],
            )
        for position, value in zip(alike, reduced, strict=True):
            sums[position] = strategy.experimental_local_results(value)[0]
    return tree.pack_sequence_as(outcome, [sums[i] for i in range(len(sums))])


def _in_float32(gradient):
    if gradient.dtype == tf.float32:
        return gradient
    return tf.cast(tf.convert_to_tensor(gradient), tf.float32)


def _present(nest):
    """List the leaves that are there."""
    return [leaf for leaf in tree.flatten(nest) if leaf is not None]


def _stack(*leaves):
    return None if leaves[0] is None else tf.stack(leaves)


def _to_tensor(leaf):
    return None if leaf is None else tf.convert_to_tensor(leaf)


def _to_spec(leaf):
    return None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype)


def _operations(graph):
    """Collect the operation types of a graph and its functions."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes.extend(function.node_def)
    return {node.op for node in nodes}
