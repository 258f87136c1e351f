"""Indices that are outside of what they index, of which XLA does not tell.

Without XLA, TensorFlow on a CPU refuses an id that an embedding has no row for,
and a label that is no class. XLA takes another row, or makes a loss of NaN. Nor
does it run assertions, or refuse to divide an integer by zero.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from accumtrainer import errors
from accumtrainer.keras_api import tree
from accumtrainer.keras_api.types import Nest, Tensor

POSITIONS = {
    "GatherV2": 1,
    "GatherNd": 1,
    "ResourceGather": 1,
    "ResourceGatherNd": 1,
    "ScatterNd": 0,
    "SparseSoftmaxCrossEntropyWithLogits": 1,
    "TensorScatterAdd": 1,
    "TensorScatterMax": 1,
    "TensorScatterMin": 1,
    "TensorScatterSub": 1,
    "TensorScatterUpdate": 1,
    "UnsortedSegmentMax": 1,
    "UnsortedSegmentMin": 1,
    "UnsortedSegmentProd": 1,
    "UnsortedSegmentSum": 1,
}
"""The operations that index, and which of their inputs are the indices."""

UNSEEN = {
    "Assert": (0,),
    "Bincount": (0,),
    "CheckNumerics": (0,),
    "DenseBincount": (0,),
    "Div": (1,),
    "DynamicPartition": (1,),
    "FloorDiv": (1,),
    "FloorMod": (1,),
    "InvertPermutation": (0,),
    "MatrixBandPart": (1, 2),
    "MatrixInverse": (0,),
    "MatrixSolve": (0,),
    "Mod": (1,),
    "ParameterizedTruncatedNormal": (1, 2, 3, 4),
    "Pow": (1,),
    "QuantizeAndDequantizeV2": (1, 2),
    "QuantizeAndDequantizeV3": (1, 2, 3),
    "QuantizeAndDequantizeV4": (1, 2),
    "RandomUniformInt": (1, 2),
    "ReverseSequence": (1,),
    "SelfAdjointEigV2": (0,),
    "Slice": (1,),
    "SparseToDense": (0,),
    "StatelessParameterizedTruncatedNormal": (2, 3, 4, 5),
    "StatelessRandomUniformInt": (2, 3),
    "StatelessRandomUniformIntV2": (4, 5),
    "StridedSlice": (1,),
    "TruncateDiv": (1,),
    "TruncateMod": (1,),
} | {
    f"ResourceScatter{dimensions}{change}": (1,)
    for dimensions in ("", "Nd")
    for change in ("Add", "Div", "Max", "Min", "Mul", "Sub", "Update")
}
"""Others that refuse values without XLA alone, and which of their inputs."""

OF_INTEGERS = ("Div", "FloorDiv", "FloorMod", "Mod", "Pow")
"""Those that refuse integers, and take any float."""

SIZES = ("Rank", "Shape", "ShapeN", "Size", "VariableShape")
"""Operations of which data decide nothing."""

READS = (
    "ReadVariableOp",
    "ResourceGather",
    "ResourceGatherNd",
    "VariableShape",
)
"""Operations that read variables, and change nothing."""

SINGLE = "shrink_axis_mask"
"""The axes on which a slice takes a single number, bit by bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """An operation that indexes.

    Args:
        name: of the operation.
        indices: int, of any shape.
        size: how many there are to choose from; int, one, or one for each
            column of the indices. A tensor if nobody knows it yet.
        is_of_data: whether data decide the indices, not sizes alone.
        takes_negative: whether it leaves negative ones out.
    """

    name: str
    indices: Tensor
    size: np.ndarray | Tensor
    is_of_data: bool
    takes_negative: bool = False

    @property
    def is_inside(self) -> bool:
        """Whether no index is outside, as is known while it is traced."""
        known = tf.get_static_value(self.indices)
        if known is None or tf.is_tensor(self.size):
            return False
        is_high_enough = self.takes_negative or np.all(known >= 0)
        return bool(is_high_enough and np.all(known < self.size))

    @property
    def range(self) -> str:
        """The indices it takes, in words."""
        if tf.is_tensor(self.size) or np.ndim(self.size):
            return "numbers of what it is given"
        return f"0 to {self.size - 1}"

    def is_outside(self) -> Tensor:
        """Tell whether any index is of nothing, scalar bool."""
        size = tf.cast(self.size, self.indices.dtype)
        is_outside = self.indices >= size
        if not self.takes_negative:
            is_outside |= self.indices < 0
        return tf.reduce_any(is_outside)


class Indices:
    """Looks for indices outside while a window runs, and tells of them after.

    Of the operations that index, the number of one that was given an index
    outside is kept on the device, from 1; 0 says that none was.

    Args:
        leave_xla: function that is called where operations index that cannot
            be looked at.
    """

    def __init__(self, leave_xla: Callable[[], None]) -> None:
        self._leave_xla = leave_xla
        # Their names, and in words what they take.
        self._operations: list[tuple[str, str]] = []
        self._outside = tf.Variable(0, trainable=False, name="outside")
        # How many operations of a graph have been looked at.
        self._looked_at: Any = weakref.WeakKeyDictionary()
        # Graphs, and the names of operations that nobody read in them.
        self._unread: list[tuple[Any, set[str]]] = []

    def upcoming(self, graph: Any) -> list[Any]:
        """List the operations of a graph that have not been looked at.

        Where they cannot be, XLA is left.

        Args:
            graph: `tf.Graph` that is being traced; all of it runs under XLA.
        """
        operations = graph.get_operations()[self._looked_at.get(graph, 0) :]
        is_unseen = any(map(is_unseen_by_xla, operations))
        if is_unseen or calls_indexing(graph, operations):
            self._leave_xla()
        return operations

    def note(self, number: Tensor) -> None:
        """Keep the number of an operation, 0 for none."""
        self._outside.assign(tf.maximum(self._outside.read_value(), number))

    def find(
        self, operations: list[Any], results: Nest, *, can_keep: bool
    ) -> Tensor | None:
        """Find the operation that was given an index outside.

        Args:
            operations: at least one, as `upcoming` has listed them.
            results: tensors, what is read of them and of what came after.
            can_keep: whether what is found can be noted.

        Returns:
            Its number, scalar int32, 0 for none; `None` where none indexes.
        """
        graph = operations[0].graph
        outside = [o for o in lookups(operations) if not o.is_inside]
        read = read_in(graph, results)
        found = [lookup for lookup in outside if lookup.name in read]
        unread = {lookup.name for lookup in outside} - read
        if unread:
            self._unread.append((graph, unread))
        if any(lookup.is_of_data for lookup in found) and not can_keep:
            self._leave_xla()
        if not (found and can_keep):
            return None
        first = len(self._operations) + 1
        self._operations += [(lookup.name, lookup.range) for lookup in found]
        numbers = [
            tf.where(lookup.is_outside(), first + position, 0)
            for position, lookup in enumerate(found)
        ]
        return functools.reduce(tf.maximum, numbers)

    def confirm(self, results: Nest) -> None:
        """Leave XLA if what nobody read has been read since.

        A hook may have kept it for a later one.

        Args:
            results: tensors, what a traced function returns.
        """
        for graph, unread in self._unread:
            if unread & read_in(graph, [graph.outputs, results]):
                self._leave_xla()

    def forget_unread(self) -> None:
        """Leave out of `confirm` what has been traced by now."""
        self._unread.clear()

    def pass_over(self, graph: Any) -> None:
        """Leave out what a graph holds by now."""
        self._looked_at[graph] = len(graph.get_operations())

    def accept(self, is_finite: Tensor) -> Tensor:
        """Whether to apply a window: it is finite, and no index outside."""
        if not self._operations:
            return is_finite
        return is_finite & (self._outside.read_value() == 0)

    def check(self, was_applied: Callable[[], bool]) -> None:
        """Refuse a window with an index outside; see `Backend.check`."""
        # What is reported is read sooner or later; the variable need not be.
        if not self._operations or was_applied():
            return
        number = int(self._outside.numpy())
        if number:
            self._outside.assign(0)
            name, taken = self._operations[number - 1]
            raise errors.DataError(
                errors.INDEX_OUTSIDE.format(name=name, range=taken)
            )


def lookups(operations: list[Any]) -> Iterator[Lookup]:
    """Find operations that look something up by indices.

    Args:
        operations: of one graph, without the functions that it calls.
    """
    for operation in operations:
        position = POSITIONS.get(operation.type)
        if position is None or _ignores(operation.node_def):
            continue
        indices = operation.inputs[position]
        yield Lookup(
            name=operation.name,
            indices=indices,
            size=_size(operation, indices),
            is_of_data=is_of_data(indices),
            takes_negative=operation.type.startswith("UnsortedSegment"),
        )


def _ignores(node: Any) -> bool:
    """Whether an operation was told to pass over indices outside."""
    return node.attr["bad_indices_policy"].s == b"IGNORE"


def read_in(graph: Any, results: Nest) -> set[str]:
    """Name the operations of a graph that somebody reads.

    TensorFlow leaves out the others, and those of which no more is read than
    the size.

    Args:
        graph: `tf.Graph`, without the functions that it calls.
        results: tensors, what is read of it.
    """
    leaves = tf.nest.flatten(tree.flatten(results), expand_composites=True)
    waiting = [
        leaf.op
        for leaf in leaves
        if tf.is_symbolic_tensor(leaf) and leaf.graph is graph
    ]
    waiting += filter(_has_effect, graph.get_operations())
    read: set[str] = set()
    while waiting:
        operation = waiting.pop()
        if operation.name in read:
            continue
        read.add(operation.name)
        waiting += operation.control_inputs
        if operation.type not in SIZES:
            waiting += [tensor.op for tensor in operation.inputs]
    return read


def _has_effect(operation: Any) -> bool:
    """Whether an operation does more than to return something."""
    return operation.op_def.is_stateful and operation.type not in READS


def is_unseen_by_xla(operation: Any) -> bool:
    """Tell whether an operation refuses values of which XLA takes any."""
    node = operation.node_def
    if _ignores(node):
        return True
    if operation.type not in UNSEEN:
        return False
    values = [operation.inputs[position] for position in _unseen(node)]
    # Of numbers that are put together a slice refuses the single ones.
    if node.op == "StridedSlice" and values and values[0].op.type == "Pack":
        single = node.attr[SINGLE].i
        parts = enumerate(values[0].op.inputs)
        values = [part for axis, part in parts if single >> axis & 1]
    return any(map(is_of_data, values))


def _unseen(node: Any) -> tuple[int, ...]:
    """Say which inputs of a node XLA takes any values of; see `UNSEEN`."""
    kind = node.op
    if kind in OF_INTEGERS and not tf.as_dtype(node.attr["T"].type).is_integer:
        return ()
    # A slice refuses single numbers alone, and cuts ranges off.
    if kind == "StridedSlice" and not node.attr[SINGLE].i:
        return ()
    return UNSEEN.get(kind, ())


def is_of_data(tensor: Tensor) -> bool:
    """Tell whether data decide what a tensor holds, not sizes alone."""
    if tf.get_static_value(tensor) is not None:
        return False
    return _reaches(
        tensor.op,
        lambda operation: operation.type,
        lambda operation: [t.op for t in operation.inputs],
    )


def _reaches(
    node: Any,
    kind_of: Callable[[Any], str],
    inputs_of: Callable[[Any], list[Any]],
) -> bool:
    """Look from where an operation has its values, through all before it.

    Args:
        node: an operation of a graph or a function; `None` for what the
            function is given.

    Returns:
        Whether there is anything but constants and sizes.
    """
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is None:
            return True
        kind = kind_of(node)
        if node.name in seen or kind in SIZES:
            continue
        seen.add(node.name)
        inputs = inputs_of(node)
        if not inputs and kind != "Const":
            return True
        waiting += inputs
    return False


def _size(operation: Any, indices: Tensor) -> np.ndarray | Tensor:
    """Say how many there are to choose from; see `Lookup`."""
    kind, inputs = operation.type, operation.inputs
    if kind.startswith("UnsortedSegment"):
        return inputs[2]
    if kind == "SparseSoftmaxCrossEntropyWithLogits":
        return _shape_of(inputs[0])[-1]
    if kind == "GatherV2":
        axis = tf.get_static_value(inputs[2])
        return _shape_of(inputs[0])[inputs[2] if axis is None else int(axis)]
    if kind == "ScatterNd":
        shape = inputs[2]
    elif kind.startswith("Resource"):
        shape = tf.raw_ops.VariableShape(input=inputs[0])
    else:
        shape = _shape_of(inputs[0])
    if kind == "ResourceGather":
        return shape[operation.get_attr("batch_dims")]
    return shape[: indices.shape[-1]]


def _shape_of(tensor: Tensor) -> Any:
    """Return the shape of a tensor, an array where it is known."""
    is_known = tensor.shape.is_fully_defined()
    return np.array(tensor.shape) if is_known else tf.shape(tensor)


def calls_indexing(graph: Any, operations: list[Any]) -> bool:
    """Tell whether operations call functions that look something up or check.

    What these are given can be looked at only in themselves.

    Args:
        graph: `tf.Graph`, whose functions are looked through.
        operations: those of it that count.
    """
    if not any(map(_calls, operations)):
        return False
    return any(map(_indexes, graph.as_graph_def().library.function))


def _indexes(function: Any) -> bool:
    """Tell whether a function looks something up or checks, by data."""
    nodes = {node.name: node for node in function.node_def}

    def inputs_of(node: Any) -> list[Any]:
        names = (i.split(":")[0] for i in node.input if i[:1] != "^")
        return [nodes.get(name) for name in names]

    for node in function.node_def:
        position = POSITIONS.get(node.op)
        positions = _unseen(node) if position is None else (position,)
        for value in map(inputs_of(node).__getitem__, positions):
            if _reaches(value, lambda node: node.op, inputs_of):
                return True
    return False


def _calls(operation: Any) -> bool:
    return any(a.type in ("func", "list(func)") for a in operation.op_def.attr)
