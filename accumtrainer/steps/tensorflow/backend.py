"""What TensorFlow must do itself: differentiate, loop, branch, compile.

Variables are updated in place; `tf.function` orders reads and writes as they
are written.
"""

import numpy as np
import tensorflow as tf

from accumtrainer.keras_api import tree
from accumtrainer.steps.memory import Backup
from accumtrainer.steps.tensorflow.fit import next_batch, next_batches
from accumtrainer.steps.tensorflow.memory import Peak
from accumtrainer.steps.tensorflow.programs import Compiled, to_spec
from accumtrainer.steps.tensorflow.replicas import TensorFlowReplicas

# How many squares are added up side by side, and from how many rows on.
ROW = 12_800
ROWS_WORTH_A_LOOP = 20


class TensorFlowBackend:
    """The functions of a backend, on TensorFlow.

    Args:
        run_eagerly: bool, whether to run everything as plain Python.
        strategy: `tf.distribute.Strategy` whose replicas share windows out,
            or `None` to use one device.

    Attributes:
        replicas: int, how many replicas share a window out.
        processes: int, how many processes they are in.
        is_chief: bool, whether this is the process that writes.
    """

    name = "tensorflow"

    def __init__(self, *, run_eagerly=False, strategy=None):
        self._run_eagerly = run_eagerly
        self._devices = TensorFlowReplicas(strategy)
        self.replicas = self._devices.count
        self.processes = self._devices.processes
        self.is_chief = self._devices.is_chief
        self._jit_compile = False
        # Whether what is being traced is for XLA.
        self._is_for_xla = False

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
        specs = tree.map_structure(to_spec, batch)
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
            # XLA compiles what a replica runs, see `TensorFlowReplicas.sum`.
            self._jit_compile, jit_compile = jit_compile, False

        def traced(*arguments):
            self._is_for_xla = jit_compile
            return function(*arguments)

        # An accelerator may still be reading when the host goes on.
        shares_memory = not self.has_accelerator()
        return Compiled(traced, jit_compile, shares_memory=shares_memory)

    def expect(self, function, calls):
        """Prepare a compiled function for arguments of different shapes."""
        if isinstance(function, Compiled):
            function.expect(calls)

    def gather(self, numbers):
        """Let every process know the n numbers of all, `[processes, n]`."""
        return self._devices.gather(numbers)

    def scope(self):
        """Make a scope in which variables have a copy on every replica."""
        return self._devices.scope()

    def place(self, shares, *, is_own=False):
        """Take the rows of a window, `Shares`, that this process needs."""
        return shares if is_own else self._devices.own(shares)

    def spread(self, batch):
        """Leave a batch where it is; one replica computes with it."""
        return batch

    def read(self, variables):
        """Read variables that have one value for all replicas, `[tensor]`."""
        return [self._devices.read(variable) for variable in variables]

    def write(self, variable, tensor):
        """Assign a variable, so that all replicas know its one value."""
        self._devices.write(variable, tensor)

    def holding(self, variables):
        """Make a scope in which variables may be read again and again."""
        return self._devices.holding(variables)

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
        return self._devices.sum(
            function,
            shares,
            reading=reading,
            moving=moving,
            jit_compile=self._jit_compile,
        )

    def constant(self, value):
        """Put a NumPy array on the device, to be passed again and again."""
        return tf.constant(value)

    def publish(self):
        """Make the Keras variables current; here they always are."""

    has_own_pipeline = True
    """Whether `Model.fit` trains on what threads of the backend make."""

    def next_batch(self, iterator):
        """Return the next batch that `Model.fit` would train on.

        A part that a generator leaves out is `None`.
        """
        return next_batch(iterator)

    def next_batches(self, iterator, count):
        """Take the next batches that `Model.fit` would train on.

        Returns:
            Pair: list of up to `count` batches, at least one, and `None`; or
            `None`, and a nest of tensors `[count, m, ...]`.

        Raises:
            StopIteration: there is none.
        """
        return next_batches(iterator, count)

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

    def sum_of_squares(self, gradient):
        """Add up the squares of a tensor, float32.

        On a CPU, XLA writes the squares of a large one to memory, and adds
        them up window by window; rows that are added to one row stay near.
        """
        size = gradient.shape.num_elements()
        rows = size // ROW
        if (
            not self._is_for_xla
            or self.has_accelerator()
            or rows < ROWS_WORTH_A_LOOP
        ):
            return tf.reduce_sum(tf.square(gradient))
        flat = tf.reshape(gradient, [-1])
        table = tf.reshape(flat[: rows * ROW], [rows, ROW])
        _, total = tf.while_loop(
            lambda row, total: row < rows,
            lambda row, total: (row + 1, total + tf.square(table[row])),
            [tf.constant(0), tf.zeros([ROW])],
        )
        rest = tf.square(flat[rows * ROW :])
        return tf.reduce_sum(total) + tf.reduce_sum(rest)

    def apply(self, optimizer, gradients, variables):
        """Have an optimizer change variables by gradients.

        Keras has TensorFlow add them up over replicas first, even if there is
        no strategy; and whatever graph does so, TensorFlow keeps for good, with
        all that it holds (`all_reduce` registers a gradient of its own each
        time). In a merge call Keras leaves that out.
        """

        def merged(_):
            optimizer.apply(gradients, variables)

        if tf.distribute.has_strategy():
            optimizer.apply(gradients, variables)
        else:
            tf.distribute.get_replica_context().merge_call(merged)

    def cond(self, predicate, true_fn, false_fn):
        """Run one of two functions that change variables.

        The first of them is the one that does much.
        """

        def without_result(function):
            def run(*_):
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

        moving = self._devices.moving

        def step(index, arrays, values, carry):
            with self._devices.scope_of(values):
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

    @property
    def runs_ahead(self):
        """Whether programs are still running when a call of them returns."""
        return self.has_accelerator()

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


def _operations(graph):
    """Collect the operation types of a graph and its functions."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes.extend(function.node_def)
    return {node.op for node in nodes}
