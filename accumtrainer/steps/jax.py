"""What JAX must do itself: differentiate, loop, branch, compile, hold state.

Compiled functions take the values of a program's variables as arrays, which
they are given for good (donated), and return the new ones. In between the
arrays are held here; the Keras variables are made current by `publish`, which
whoever lets host code look must call first.
"""

import sys

import jax
import numpy as np

from accumtrainer.keras_api import keras


class JaxBackend:
    """The functions of a backend, on JAX.

    Args:
        run_eagerly: bool, whether to run everything operation by operation.
    """

    name = "jax"

    def __init__(self, *, run_eagerly=False):
        self._run_eagerly = run_eagerly
        self._holders = {}
        self._active = None

    def trace(self, function, batch):
        """Run a function on abstract arrays like a batch of arrays.

        Returns:
            Set of the names of the primitives it consists of.
        """
        specs = jax.tree.map(_to_spec, batch)
        return _primitives(jax.make_jaxpr(function)(specs).jaxpr)

    def compile(self, function, program, *, jit_compile, donate):
        """Compile a function of arrays that may change variables.

        Args:
            function: takes nests of arrays, returns a nest of arrays.
            program: object whose `variables` the function may change.
            jit_compile: bool.
            donate: bool, whether the function is given the variables' arrays
                for good. Where it changes few of them it should not be.

        Returns:
            Function of the same arguments.
        """
        holder = self._holders.setdefault(id(program), _Holder(program))

        def pure(arrays, arguments):
            self._traced = holder.variables
            with _scope(holder.variables, arrays) as scope:
                result = function(*arguments)
            return result, _values(scope, holder.variables)

        if jit_compile and not self._run_eagerly:
            run = jax.jit(pure, donate_argnums=0 if donate else ())
        else:
            run = _eagerly(pure)

        def call(*arguments):
            arguments = jax.device_put(arguments)
            self._activate(holder)
            result, holder.arrays = run(holder.take(), arguments)
            return result

        return call

    def publish(self):
        """Make the Keras variables current, for host code that can look."""
        if self._active is not None:
            self._active.publish()
            self._active = None

    def value_and_grad(self, objective, variables):
        """Differentiate a scalar by Keras variables.

        Args:
            objective: function without arguments, returns a scalar array and
                a nest of arrays.
            variables: list of Keras variables.

        Returns:
            That nest, and a list of gradients.
        """
        taken = {id(variable) for variable in variables}
        others = [v for v in self._traced if id(v) not in taken]
        current = [v.value for v in others]

        def pure(arrays):
            known = [*variables, *others]
            with _scope(known, [*arrays, *current]) as scope:
                total, nest = objective()
            return total, (nest, _values(scope, others))

        (_, (nest, changed)), gradients = jax.value_and_grad(
            pure, has_aux=True
        )([variable.value for variable in variables])
        _assign(others, current, changed)
        return nest, gradients

    def add_to(self, variable, value):
        """Add to a Keras variable."""
        variable.assign(variable.value + value)

    def cond(self, predicate, true_fn, false_fn):
        """Run one of two functions that change variables.

        Both are computed and the outcome is selected, which fuses with the
        update itself; `lax.cond` would copy every variable instead.
        """
        variables = self._traced
        current = [v.value for v in variables]
        outcomes = []
        for function in (true_fn, false_fn):
            with _scope(variables, current) as scope:
                function()
            outcomes.append(_values(scope, variables))
        chosen = [
            a if a is b else jax.numpy.where(predicate, a, b)
            for a, b in zip(*outcomes, strict=True)
        ]
        _assign(variables, current, chosen)

    def scan(self, body, stacked, length):
        """Run `body(index, item)` over the first axis, in order.

        Args:
            body: function of a scalar int32 and a nest of arrays; may change
                variables; returns one float32 array of fixed shape.
            stacked: nest of arrays `[length, ...]`.
            length: int.

        Returns:
            Array `[length, ...]`, the results in order.
        """
        if length == 1:
            item = jax.tree.map(lambda leaf: leaf[0], stacked)
            return body(jax.numpy.zeros((), "int32"), item)[None]
        variables = self._traced
        current = [v.value for v in variables]

        def step(arrays, indexed):
            with _scope(variables, arrays) as scope:
                result = body(*indexed)
            return _values(scope, variables), result

        indices = jax.numpy.arange(length, dtype="int32")
        arrays, results = jax.lax.scan(step, current, (indices, stacked))
        _assign(variables, current, arrays)
        return results

    def has_accelerator(self):
        """Whether there is a device other than the CPU."""
        return jax.default_backend() != "cpu"

    def _activate(self, holder):
        if self._active is not holder:
            self.publish()
            self._active = holder


class _Holder:
    """The arrays of one program's variables, while they are not published."""

    def __init__(self, program):
        self._program = program
        self.variables = []
        self.arrays = None

    def take(self):
        """Return the arrays, read afresh if the host could have written."""
        if self.arrays is None:
            self.variables = self._program.variables
            self.arrays = [_own(v) for v in self.variables]
        return self.arrays

    def publish(self):
        """Put the arrays into the variables, without a copy."""
        if self.arrays is not None:
            for variable, array in zip(
                self.variables, self.arrays, strict=True
            ):
                variable.assign(array)
        self.arrays = None


# A variable, the local name below and the call that counts hold an array.
HOLDERS = 3


def _own(variable):
    """Take a variable's array, or a copy where somebody else holds it too.

    An array that is given away must not be needed elsewhere: two variables
    may share one after an assignment, and host code may have kept one.
    """
    array = variable.value
    if not isinstance(array, jax.Array):
        return jax.numpy.asarray(array)
    return array.copy() if sys.getrefcount(array) > HOLDERS else array


def _eagerly(function):
    """Run a function operation by operation, its loops in Python."""

    def run(*arguments):
        with jax.disable_jit():
            return function(*arguments)

    return run


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


def _to_spec(leaf):
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


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
