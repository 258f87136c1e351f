"""Functions of JAX that change variables, and the arrays they do it with.

A function takes the values of a program's variables as arrays. Those it
changes it is given for good (donated), and it returns the new ones; the others
it only reads. In between a `Holder` has the arrays.
"""

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from accumtrainer import errors
from accumtrainer.keras_api import keras
from accumtrainer.keras_api.types import Nest, Tensor, Variable

# Compiled for that many shapes, a function is worth a warning.
MANY_SHAPES = 4


class KnowsDevices(Protocol):
    """Replicas, of which each needs every array."""

    everywhere: Any

    def copy(self, array: Tensor) -> Tensor:
        """Copy an array to all devices, unless it is on them."""


class Compiled:
    """A function that is compiled anew for arguments of other shapes.

    Args:
        function: takes the arrays of all variables and a nest of arguments,
            returns a nest of arrays and the new arrays of all variables.
        holder: of the variables.
        activate: function of a holder, which is to have the arrays now.
        warn_of_many_shapes: function that is given the latest shapes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        holder: "Holder",
        activate: "Callable[[Holder], None]",
        warn_of_many_shapes: Callable[[list[tuple[int, ...]]], None],
    ):
        self._function = function
        self._holder = holder
        self._activate = activate
        self._warn_of_many_shapes = warn_of_many_shapes
        self._variables: list[Variable] = []
        self._programs: dict[tuple, tuple[Any, list[int], list[int]]] = {}

    def __call__(self, *arguments: Nest) -> Nest:
        leaves, treedef = jax.tree.flatten(arguments)
        holder = self._holder
        self._activate(holder)
        self._look_at_variables()
        key = (treedef, *((leaf.shape, leaf.dtype) for leaf in leaves))
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) + 1 == MANY_SHAPES:
                self._warn_of_many_shapes([leaf.shape for leaf in leaves])
            program = self._trace(leaves, treedef)
            self._programs[key] = program
        run, changed, kept = program
        given = holder.donate(changed)
        read = [holder.arrays[i] for i in kept]
        # That batches of the host move to the device here is meant; it takes
        # a sixth of the time that `device_put` takes.
        with jax.transfer_guard_host_to_device("allow"):
            result, arrays = run(given, read, leaves)
        for position, array in zip(changed, arrays, strict=True):
            holder.arrays[position] = array
        return result

    def _look_at_variables(self) -> None:
        """Forget what was compiled for other variables."""
        variables = self._holder.variables
        if self._variables is not variables:
            if not _begins_with(variables, self._variables):
                self._programs = {}
            self._variables = variables

    def peak_bytes(self, *arguments: Nest) -> int:
        """Ask the compiler for the most memory that a call takes.

        Returns:
            Of one device: all variables, arguments, results and what is needed
            in between.
        """
        leaves, treedef = jax.tree.flatten(arguments)
        self._activate(self._holder)
        self._look_at_variables()
        run, changed, kept = self._trace(leaves, treedef)
        arrays = self._holder.arrays
        lowered = run.lower(
            [to_spec(arrays[position]) for position in changed],
            [to_spec(arrays[position]) for position in kept],
            [to_spec(leaf) for leaf in leaves],
        )
        needs = lowered.compile().memory_analysis()
        new = needs.output_size_in_bytes - needs.alias_size_in_bytes
        held = sum(map(_bytes_of_device, [*arrays, *leaves]))
        return held + needs.temp_size_in_bytes + max(0, new)

    def _trace(
        self, leaves: list[Tensor], treedef: Any
    ) -> tuple[Any, list[int], list[int]]:
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
        changed = changed_positions(closed, count)
        kept = sorted(read_positions(closed, count).difference(changed))
        function, structure = jaxpr_as_fun(closed), jax.tree.structure(result)

        def run(
            given: list[Tensor], read: list[Tensor], leaves: list[Tensor]
        ) -> tuple[Nest, list[Tensor]]:
            arrays: list[Tensor] = [None] * count
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
        everywhere = self._holder.replicas.everywhere
        if everywhere is not None:
            # What changes stays where it is, and everybody is told the rest.
            arrays = self._holder.arrays
            kinds = [arrays[position].sharding for position in changed]
            options["out_shardings"] = (everywhere, kinds)
        return jax.jit(run, donate_argnums=0, **options), changed, kept


class Eager:
    """A function that runs operation by operation, its loops in Python.

    Args:
        function: as for `Compiled`.
        holder: of the variables.
        activate: as there.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        holder: "Holder",
        activate: "Callable[[Holder], None]",
    ):
        self._function = function
        self._holder = holder
        self._activate = activate

    def peak_bytes(self, *arguments: Nest) -> NoReturn:
        """Refuse to answer: no compiler has planned anything."""
        raise ValueError(errors.EAGER_MEMORY)

    def __call__(self, *arguments: Nest) -> Nest:
        self._activate(self._holder)
        result, self._holder.arrays = run_uncompiled(
            self._function, self._holder.arrays, arguments
        )
        return result


class Holder:
    """The arrays of one program's variables, until they are written back.

    Args:
        program: lists them, see `HasVariables`.
    """

    def __init__(self, program: Any, replicas: KnowsDevices):
        self._program = program
        self.replicas = replicas
        self._elsewhere: set[int] = set()
        self._shared: dict[int, Tensor] = {}
        self.variables: list[Variable] = []
        self.arrays: Any = None  # a list, until they are written back

    def take(self) -> None:
        """Read the arrays afresh if the host could have written."""
        if self.arrays is not None:
            return
        variables = self._program.all_variables
        if list(map(id, variables)) != list(map(id, self.variables)):
            self.variables = variables
        self.arrays = [self.replicas.copy(_read(v)) for v in variables]
        self._elsewhere = set(range(len(variables)))

    def donate(self, positions: Iterable[int]) -> list[Tensor]:
        """Return arrays that whoever receives them may destroy.

        Those that programs have returned, or that were given for good, are
        this holder's own. Those that were read from variables may be in use
        elsewhere: two variables may share one after an assignment, and host
        code may have kept one that it has seen. Who sees one need not keep it,
        and to copy all that could have been seen takes two thirds of a small
        update, if a callback looks at each. So it is counted who holds them.
        """
        if self._elsewhere:
            for position in self._elsewhere.intersection(positions):
                if _holders_of(self.arrays, position) > _holders_of_one_alone():
                    self.arrays[position] = self.arrays[position].copy()
            self._elsewhere.difference_update(positions)
        return [self.arrays[position] for position in positions]

    def replace(self, arrays: dict[int, Tensor]) -> None:
        """Hold other arrays for some variables, given for good.

        Args:
            arrays: dict of arrays by their variable's id.
        """
        for position, variable in enumerate(self.variables):
            if id(variable) in arrays:
                self.arrays[position] = arrays[id(variable)]
                self._elsewhere.discard(position)

    def share(self, positions: Iterable[int]) -> None:
        """Read some variables afresh, whose arrays are left to them.

        As it is kept here what is theirs, `donate` copies it.
        """
        self._shared = {
            position: self.replicas.copy(_read(self.variables[position]))
            for position in positions
        }
        for position, array in self._shared.items():
            self.arrays[position] = array
        self._elsewhere.update(self._shared)

    def write_shared(self) -> None:
        """Make those variables current, once, and go on holding all arrays."""
        shared, self._shared = self._shared, {}
        for position, array in shared.items():
            if self.arrays[position] is not array:
                self.variables[position].assign(self.arrays[position])

    def write_back(self, without: Collection[int] = ()) -> None:
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


def _holders_of(arrays: list[Tensor], position: int) -> int:
    """Count who holds an array that a variable and a list have."""
    return sys.getrefcount(arrays[position])


@functools.cache
def _holders_of_one_alone() -> int:
    """Count the same of an array that nobody else has.

    Which references an interpreter counts is its own affair.
    """
    variable = keras.Variable(np.zeros([1], "float32"), trainable=False)
    return _holders_of([_read(variable)], 0)


def _read(variable: Variable) -> Tensor:
    array = variable.value
    return array if isinstance(array, jax.Array) else jax.numpy.asarray(array)


def _begins_with(variables: list[Variable], first: list[Variable]) -> bool:
    """Whether a list of variables begins with those of another."""
    pairs = zip(variables, first, strict=False)
    return len(first) <= len(variables) and all(a is b for a, b in pairs)


def run_uncompiled(function: Callable[..., Any], *arguments: Nest) -> Any:
    """Call a function with arrays, which then runs operation by operation."""
    leaves, treedef = jax.tree.flatten(arguments)
    arguments = jax.tree.unflatten(treedef, _to_device(leaves))
    with jax.disable_jit():
        return function(*arguments)


def _to_device(leaves: list[Tensor]) -> list[Tensor]:
    """Move the leaves that are not there yet, in one call."""
    host = [i for i, v in enumerate(leaves) if not isinstance(v, jax.Array)]
    moved = jax.device_put([leaves[i] for i in host])
    for position, array in zip(host, moved, strict=True):
        leaves[position] = array
    return leaves


def scope_of(variables: list[Variable], arrays: Sequence[Tensor]) -> Any:
    """Make a scope in which Keras variables have arrays as their values."""
    return keras.StatelessScope(
        list(zip(variables, arrays, strict=True)), collect_losses=True
    )


def values_in(scope: Any, variables: list[Variable]) -> list[Tensor]:
    """List the values that variables have at the end of a scope."""
    return [scope.get_current_value(variable) for variable in variables]


def assign_changed(
    variables: list[Variable], before: list[Tensor], after: list[Tensor]
) -> None:
    """Assign new values to those variables whose old ones they are not."""
    for variable, old, new in zip(variables, before, after, strict=True):
        if new is not old:
            variable.assign(new)


def read_positions(closed: Any, count: int) -> set[int]:
    """Find the arguments that a program reads.

    Dispatching one that it does not takes time all the same; Adam's moments,
    for example, in a program that only adds up gradients.

    Args:
        closed: closed jaxpr, which returns as many values more as it takes
            variables.
        count: how many arguments are variables.

    Returns:
        Set of ints. One that is only returned as it came is not among them.
    """
    jaxpr = closed.jaxpr
    split = len(jaxpr.outvars) - count
    read = {id(v) for equation in jaxpr.eqns for v in equation.invars}
    read |= {id(v) for v in jaxpr.outvars[:split]}
    for variable, out in zip(
        jaxpr.invars[:count], jaxpr.outvars[split:], strict=True
    ):
        if out is not variable:
            read.add(id(out))
    return {i for i, v in enumerate(jaxpr.invars[:count]) if id(v) in read}


def changed_positions(closed: Any, count: int | None = None) -> list[int]:
    """Find the arguments that a program returns otherwise than they came.

    Args:
        closed: closed jaxpr.
        count: how many of its first arguments are its last results; `None` for
            all.
    """
    before, after = closed.jaxpr.invars, closed.jaxpr.outvars
    count = len(after) if count is None else count
    pairs = zip(before[:count], after[len(after) - count :], strict=True)
    return [i for i, (a, b) in enumerate(pairs) if a is not b]


def to_spec(leaf: Any) -> Any:
    """Describe an array by shape, dtype and where it is."""
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


def _bytes_of_device(array: Tensor) -> int:
    """Count what an array takes of one of the devices it is on."""
    if not isinstance(array, jax.Array):
        return array.nbytes
    return int(np.prod(array.sharding.shard_shape(array.shape))) * (
        array.dtype.itemsize
    )
