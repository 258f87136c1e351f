"""What TensorFlow must do itself: differentiate, loop, branch, compile.

Variables are updated in place; `tf.function` orders reads and writes as they
are written.
"""

import functools
from typing import Any, cast

import optree
import tensorflow as tf

from accumtrainer.keras_api import tree


class TensorFlowBackend:
    """The functions of a backend, on TensorFlow.

    Args:
        run_eagerly: bool, whether to run everything as plain Python.
    """

    name = "tensorflow"

    def __init__(self, *, run_eagerly=False):
        self._run_eagerly = run_eagerly

    def trace(self, function, batch):
        """Run a function on abstract tensors like a batch of arrays.

        Returns:
            Set of the names of the operations it consists of.
        """
        if self._run_eagerly:
            function(tree.map_structure(_to_tensor, batch))
            return set()
        traced = tf.function(function, autograph=False)
        specs = tree.map_structure(_to_spec, batch)
        return _operations(traced.get_concrete_function(specs).graph)

    def compile(self, function, program, *, jit_compile, donate):
        """Compile a function of tensors that may change variables.

        Args:
            function: takes nests of tensors, returns a nest of tensors.
            program: object whose `variables` the function may change; they
                are changed in place.
            jit_compile: bool, whether XLA compiles it.
            donate: ignored, since nothing is copied.

        Returns:
            Function of the same arguments.
        """
        del program, donate
        if self._run_eagerly:
            return lambda *args: function(
                *(tree.map_structure(_to_tensor, arg) for arg in args)
            )
        return _Compiled(function, jit_compile)

    def publish(self):
        """Make the Keras variables current; here they always are."""

    def value_and_grad(self, objective, variables):
        """Differentiate a scalar by Keras variables.

        Args:
            objective: function without arguments, returns a scalar tensor
                and a nest of tensors.
            variables: list of Keras variables.

        Returns:
            That nest, and a list of dense gradients, `None` where unused.
            Repeated rows of embedding gradients are added up.
        """
        values = [variable.value for variable in variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            total, nest = objective()
        gradients = tape.gradient(total, values)
        return nest, [
            None if g is None else tf.convert_to_tensor(g) for g in gradients
        ]

    def add_to(self, variable, value):
        """Add to a Keras variable in place."""
        variable.value.assign_add(value)

    def cond(self, predicate, true_fn, false_fn):
        """Run one of two functions that change variables."""

        def without_result(function):
            def run():
                function()
                return tf.constant(0)

            return run

        tf.cond(predicate, without_result(true_fn), without_result(false_fn))

    def scan(self, body, stacked, length):
        """Run `body(index, item)` over the first axis, in order.

        Args:
            body: function of a scalar int32 and a nest of tensors; may change
                variables; returns one float32 tensor of fixed shape.
            stacked: nest of tensors `[length, ...]`.
            length: scalar int32.

        Returns:
            Tensor `[length, ...]`, the results in order.
        """

        def take(index):
            return tree.map_structure(
                lambda leaf: None if leaf is None else leaf[index], stacked
            )

        static = tf.get_static_value(length)
        if static == 1 or tf.executing_eagerly():
            results = [body(tf.constant(i), take(i)) for i in range(static)]
            return tf.stack(results)

        def step(index, results):
            result = body(index, take(index))
            return index + 1, results.write(index, result)

        results = tf.TensorArray(tf.float32, size=length)
        _, results = tf.while_loop(
            lambda index, _: index < length,
            step,
            [tf.constant(0), results],
            parallel_iterations=1,
        )
        return results.stack()

    def has_accelerator(self):
        """Whether there is a device other than the CPU."""
        devices = tf.config.list_logical_devices()
        return any(device.device_type != "CPU" for device in devices)


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
        if treedef not in self._structures:
            self._structures[treedef] = tf.function(
                functools.partial(self._run, treedef),
                jit_compile=self._jit_compile,
                reduce_retracing=True,
                autograph=False,
            )
        specs = map(_to_spec, leaves)
        return self._structures[treedef].get_concrete_function(*specs)

    def _run(self, treedef, *leaves):
        return self._function(*optree.tree_unflatten(treedef, leaves))


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
