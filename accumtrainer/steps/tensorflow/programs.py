"""TensorFlow programs of functions, found by the shapes of what they take."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import optree
import tensorflow as tf

from accumtrainer import errors
from accumtrainer.data.batches import ALIGNMENT, empty_for_device
from accumtrainer.keras_api.types import Nest, Tensor
from accumtrainer.steps.tensorflow.replicas import outside_of_strategies
from accumtrainer.window.backend import FIXED_DRAW

MANY_SHAPES = 4
"""Compiled by XLA for that many shapes, a function is worth a warning."""


XLA_SHAPES = 8
"""For how many sets of shapes XLA compiles a function, if it may choose.

Each takes 1 to 6 seconds to compile for a small text model on two cores, and
then saves 0.002 to 0.1 seconds a window: those that come after so many others
will hardly come often enough.
"""


def warn_of_many_shapes(shapes: str) -> None:
    """Warn of how many shapes XLA has compiled for, and what helps."""
    warnings.warn(
        errors.MANY_SHAPES.format(shapes=shapes)
        + errors.MANY_SHAPES_XLA.format(count=XLA_SHAPES),
        stacklevel=2,
    )


class XlaShapes:
    """The shapes that XLA compiles for: the first few of each kind.

    Args:
        limit: how many; `None` for all.
        warn: function that is given the latest shapes once there are many.
    """

    def __init__(self, limit: int | None, warn: Callable[..., None]):
        self._limit = limit
        self._warn = warn
        self._seen: dict[str, list[str]] = {}
        self._may_close = limit is not None
        self._is_closed = False

    def close(self) -> None:
        """Admit nothing more, unless all were to be admitted."""
        self._is_closed = self._may_close

    def close_for(self, error: Exception) -> bool:
        """Admit nothing more after an error, and tell whether that is so.

        XLA compiles a program before it runs any of it, and refuses what it
        has no operation for, or no size known beforehand: Python functions,
        tables of words, loops that nothing bounds. Keras on a CPU asks for no
        XLA. If XLA is not to blame the same comes up again without it.
        """
        self.close()
        return self._is_closed and not isinstance(
            error, tf.errors.ResourceExhaustedError
        )

    def admit(self, kind: str, leaves: list[Any]) -> bool:
        """Decide whether XLA compiles a function for what it is given.

        Args:
            kind: what all such arguments have in common.
            leaves: list of arrays or tensors.

        Returns:
            The same whenever such shapes come again, until `close`.
        """
        if self._is_closed:
            return False
        seen = self._seen.setdefault(kind, [])
        shapes = str([tuple(leaf.shape) for leaf in leaves])
        if shapes in seen:
            return True
        if self._limit is not None and len(seen) >= self._limit:
            return False
        seen.append(shapes)
        if self._limit is None and len(seen) == MANY_SHAPES:
            self._warn(shapes)
        return True

    @contextlib.contextmanager
    def on_trial(self) -> Iterator[None]:
        """Make a scope that admits all shapes, and forgets them."""
        limit, seen = self._limit, self.as_dict()
        self._limit = sys.maxsize
        try:
            yield
        finally:
            self._limit = limit
            self.load(seen)

    def as_dict(self) -> dict[str, list[str]]:
        """Return what has been admitted, dict of lists of str."""
        return {kind: list(shapes) for kind, shapes in self._seen.items()}

    def load(self, seen: dict[str, list[str]]) -> None:
        """Go on from what `as_dict` returned."""
        self._seen = {kind: list(shapes) for kind, shapes in seen.items()}


class Compiled:
    """A `tf.function` that looks its programs up by shape and type alone.

    `tf.function` itself takes longer to find the program for some nested
    arguments than a small model takes to run it.

    A program for XLA is for one set of shapes. It would compile one whose
    sizes are left open for each of them all the same; and of some such
    programs, as of a recurrent layer behind an embedding in a loop, XLA does
    not survive the compilation. Without XLA one program serves all sizes.

    Args:
        function: function of whether it is traced for XLA, a bool, and of
            nests of tensors.
        jit_compile: whether XLA may compile it.
        shapes: for which XLA does.
        is_outside: whether only a part that the function compiles itself is for
            XLA.
        shares_memory: whether to compute with arrays where they are.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        jit_compile: bool,
        shapes: XlaShapes,
        *,
        is_outside: bool,
        shares_memory: bool,
    ):
        self._function = function
        self._jit_compile = jit_compile
        self._shapes = shapes
        self._is_outside = is_outside
        self._to_tensor = to_tensor if shares_memory else tf.convert_to_tensor
        self._programs: dict[tuple, Callable[..., Nest]] = {}
        self._functions: dict[tuple, Any] = {}

    def expect(self, calls: Sequence[tuple]) -> None:
        """Trace one program for calls to come, whose shapes differ.

        The first of them would be traced by itself, for its own shape alone.
        """
        strangers, kinds = {}, set()
        for arguments in calls:
            leaves, treedef = optree.tree_flatten(cast(Any, arguments))
            key = _key(leaves, treedef)
            if key in self._programs or self._uses_xla(leaves, treedef):
                continue
            strangers[key] = leaves
            kinds.add((treedef, *map(_kind, leaves)))
        if len(strangers) > 1 and len(kinds) == 1:
            alike = zip(*strangers.values(), strict=True)
            specs = list(map(_joint_spec, alike))
            with outside_of_strategies():
                program = self._trace(specs, treedef, uses_xla=False)
            self._programs |= dict.fromkeys(strangers, program)

    def __call__(self, *arguments: Nest) -> Nest:
        leaves, treedef = optree.tree_flatten(cast(Any, arguments))
        key = _key(leaves, treedef)
        with outside_of_strategies():
            program = self._programs.get(key)
            if program is None:
                uses_xla = self._uses_xla(leaves, treedef)
                program = self._trace(leaves, treedef, uses_xla)
                if uses_xla and not self._uses_xla(leaves, treedef):
                    # Tracing has shown something that XLA would not tell of.
                    uses_xla = False
                    program = self._trace(leaves, treedef, uses_xla)
                self._programs[key] = program
                if uses_xla:
                    return self._run_first(key, leaves, treedef)
            return program(*map(self._to_tensor, leaves))

    def _run_first(self, key: tuple, leaves: list[Any], treedef: Any) -> Nest:
        """Run a program for XLA, or where it cannot compile it one without."""
        tensors = [self._to_tensor(leaf) for leaf in leaves]
        try:
            return self._programs[key](*tensors)
        except tf.errors.OpError as error:
            if not self._shapes.close_for(error):
                raise
            refusal = str(error.message).split("\n")[0]
        program = self._trace(leaves, treedef, uses_xla=False)
        self._programs[key] = program
        result = program(*tensors)
        warnings.warn(errors.WITHOUT_XLA.format(error=refusal), stacklevel=2)
        return result

    def _uses_xla(self, leaves: list[Any], treedef: Any) -> bool:
        if not self._jit_compile:
            return False
        kind = f"{treedef} {[_kind(leaf) for leaf in leaves]}"
        return self._shapes.admit(kind, leaves)

    def _trace(
        self, leaves: Sequence[Any], treedef: Any, uses_xla: bool
    ) -> Any:
        # What reduces retracing joins shapes of different ranks into one of
        # unknown rank, with which a loss can do nothing.
        structure = treedef, uses_xla, *(len(leaf.shape) for leaf in leaves)
        if structure not in self._functions:
            self._functions[structure] = tf.function(
                functools.partial(self._run, treedef, uses_xla),
                jit_compile=uses_xla and not self._is_outside,
                reduce_retracing=not uses_xla,
                autograph=False,
            )
        specs = map(to_spec, leaves)
        return self._functions[structure].get_concrete_function(*specs)

    def _run(self, treedef: Any, uses_xla: bool, *leaves: Any) -> Nest:
        return self._function(uses_xla, *optree.tree_unflatten(treedef, leaves))


def _key(leaves: list[Any], treedef: Any) -> tuple:
    return (treedef, *((leaf.shape, leaf.dtype) for leaf in leaves))


def _kind(leaf: Any) -> tuple[int, str]:
    return len(leaf.shape), tf.as_dtype(leaf.dtype).name


def _joint_spec(leaves: Sequence[Any]) -> Any:
    """Describe tensors of one rank and type, whatever their sizes."""
    sizes = zip(*(leaf.shape for leaf in leaves), strict=True)
    shape = [n if {n} == set(others) else None for n, *others in sizes]
    return tf.TensorSpec(shape, leaves[0].dtype)


def to_tensor(leaf: Any) -> Tensor:
    """Make a tensor of an array, which shares the memory of large windows.

    Nobody writes to that any more. `tf.convert_to_tensor` would copy it, and
    takes ten times as long to find out that it is an array.
    """
    if not isinstance(leaf, np.ndarray) or not _can_share(leaf.dtype):
        return tf.convert_to_tensor(leaf)
    flags = leaf.flags
    is_sharable = flags.c_contiguous and flags.writeable
    # TensorFlow does not look where memory begins, and fails later.
    if not is_sharable or leaf.ctypes.data % ALIGNMENT:
        copied = empty_for_device(leaf.shape, leaf.dtype)
        copied[...] = leaf
        leaf = copied
    return tf.experimental.dlpack.from_dlpack(leaf.__dlpack__())


def _can_share(dtype: np.dtype) -> bool:
    return dtype.kind in "iuf" and dtype.isnative


def to_spec(leaf: Any) -> Any:
    """Describe an array or tensor by shape and type, `None` by `None`."""
    return None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype)


def operations_of(graph: Any) -> set[str]:
    """Collect the operation types of a graph and its functions.

    `FIXED_DRAW` is among them where it draws by a seed that is a constant.
    """
    definition = graph.as_graph_def()
    bodies = [list(definition.node)]
    bodies += [list(f.node_def) for f in definition.library.function]
    found = {node.op for nodes in bodies for node in nodes}
    if SEEDING in found and any(map(_has_fixed_seed, bodies)):
        found.add(FIXED_DRAW)
    return found


SEEDING = "StatelessRandomGetKeyCounter"
"""What makes of a seed what operations that draw are given."""


def _has_fixed_seed(nodes: list[Any]) -> bool:
    """Whether nothing but constants is behind one of the seeds."""
    known = {node.name: node for node in nodes}

    def is_fixed(node: Any) -> bool:
        if node is None or not node.input:
            return node is not None and node.op == "Const"
        names = [n.split(":")[0] for n in node.input if n[0] != "^"]
        return all(is_fixed(known.get(name)) for name in names)

    return any(is_fixed(node) for node in nodes if node.op == SEEDING)
