"""Several devices and processes of TensorFlow: who has what, what they add up.

Variables have a copy on every replica. Of the rows of a window that its process
has, every replica takes its share by itself.
"""

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from accumtrainer import errors
from accumtrainer.data.batches import map_leaves
from accumtrainer.keras_api import keras, strategy_of, tree
from accumtrainer.keras_api.types import Nest, Tensor, Variable
from accumtrainer.window.backend import Replicas
from accumtrainer.window.weighing import Shares

LINGER_SECS = 1.0
"""How long a process stays when its program has ended."""


class TensorFlowReplicas(Replicas):
    """The replicas of a strategy.

    Args:
        strategy: `tf.distribute.Strategy`, or `None` to use one device.

    Attributes:
        moving: list of the Keras variables that loops have to carry, since
            they are no variables while a replica runs.
        jit_compile: whether what is being traced, or a replica runs of it, is
            for XLA.
    """

    def __init__(self, strategy: Any = None):
        self._strategy = strategy
        self.count = strategy.num_replicas_in_sync if strategy else 1
        members = _members(strategy)
        self.processes = max(1, len(members))
        self._index = 0
        if self.processes > 1:
            resolver = strategy.cluster_resolver
            self._index = members.index((resolver.task_type, resolver.task_id))
            _linger_at_exit()
        self.is_chief = self._index == 0
        self._reading: list[tuple[Variable, Tensor]] = []
        self.moving: list[Variable] = []
        self.jit_compile = False

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        rows = np.zeros([self.processes, len(numbers)], "float32")
        rows[self._index] = numbers
        # Each of the process's own replicas adds the same.
        rows /= self.count // self.processes
        return self._add_up(tf.constant(rows)).numpy()

    @functools.cached_property
    def _add_up(self) -> Callable[..., Nest]:
        def add_up(rows: Tensor) -> Tensor:
            every = self._strategy.run(tf.identity, (rows,))
            return self._strategy.reduce("SUM", every, axis=None)

        # Traced once, however many numbers there are.
        signature = [tf.TensorSpec([self.processes, None])]
        return tf.function(add_up, autograph=False, input_signature=signature)

    def place(self, shares: Shares, *, is_own: bool = False) -> Shares:
        if is_own or self.processes == 1:
            return shares

        def take(leaf: Any) -> Tensor:
            size = leaf.shape[1] // self.processes
            return leaf[:, self._index * size : (self._index + 1) * size]

        split = tuple(map_leaves(take, batch) for batch in shares.split)
        return shares._replace(split=split)

    def read(self, variables: Sequence[Variable]) -> list[Tensor]:
        return list(map(_read, variables))

    def write(self, variable: Variable, tensor: Tensor) -> None:
        value = variable.value
        if not _is_in_parts(value):
            variable.assign(tensor)
            return
        part = tensor / _parts_of(value, tensor.dtype)
        for copy in strategy_of(value).experimental_local_results(value):
            # To read it, as `assign` does otherwise, is an exchange.
            copy.assign(tf.cast(part, copy.dtype), read_value=False)

    def holding(self, variables: Sequence[Variable]) -> AbstractContextManager:
        # Those in parts are read by an exchange otherwise, each time.
        in_parts = [v for v in variables if _is_in_parts(v.value)]
        if not in_parts:
            return contextlib.nullcontext()
        return keras.StatelessScope([(v, _read(v)) for v in in_parts])

    def scope(self) -> AbstractContextManager:
        """Make the strategy's scope, or that of no strategy.

        Raises:
            ValueError: the caller is in the scope of another strategy, which
                would have a hand in making them.
        """
        if self._strategy is None:
            return outside_of_strategies()
        current = tf.distribute.get_strategy()
        if current is self._strategy:
            return contextlib.nullcontext()
        if tf.distribute.has_strategy():
            raise ValueError(
                errors.OTHER_STRATEGY.format(strategy=type(current).__name__)
            )
        return self._strategy.scope()

    def sum(
        self,
        function: Callable[[Tensor, Shares], Nest],
        shares: Shares,
        *,
        known: list[Variable],
        reading: list[Variable],
        moving: list[Variable],
    ) -> Nest:
        del known  # others are read where they are
        size = self.count // self.processes

        # Traced outside of the strategy, where Keras leaves losses alone; a
        # replica would have it divide them by the number of replicas.
        @functools.partial(
            tf.function, jit_compile=self.jit_compile, autograph=False
        )
        def run(
            replica: Tensor,
            shares: Shares,
            read: list[Tensor],
            moved: list[Tensor],
        ) -> Nest:
            self._reading = list(zip(reading, read, strict=True))
            self.moving = moving
            try:
                with self.scope_of(moved):
                    return function(replica, shares)
            finally:
                self._reading, self.moving = [], []

        def run_on_replica(shares: Shares, moved: list[Tensor]) -> Nest:
            replica = _replica_index()
            split = tree.map_structure(
                lambda leaf: _share_of(leaf, replica % size, size),
                shares.split,
            )
            read = [
                whole
                if _is_in_parts(v.value)
                else tf.convert_to_tensor(v.value)
                for v, whole in zip(reading, read_once, strict=True)
            ]
            return program(replica, shares._replace(split=split), read, moved)

        read_once = self.read(reading)
        moved = self.read(moving)
        split = tree.map_structure(
            lambda leaf: _share_of(leaf, 0, size), shares.split
        )
        program = run.get_concrete_function(
            tf.constant(0),
            shares._replace(split=split),
            read_once,
            moved,
        )
        return _sum(
            self._strategy.run(run_on_replica, (shares, moved)), self._strategy
        )

    def scope_of(self, values: Iterable[Tensor]) -> AbstractContextManager:
        """Make a scope in which what moves on a replica has other values."""
        if not self.moving:
            return contextlib.nullcontext()
        moved = zip(self.moving, values, strict=True)
        return keras.StatelessScope(
            [*self._reading, *moved], collect_losses=True
        )


def outside_of_strategies() -> AbstractContextManager:
    """Make a scope that is in no strategy's, wherever the caller is.

    Programs say themselves what runs on which replica. Amid a strategy's scope
    they could not read variables or update them, and Keras would divide their
    losses by the number of replicas.
    """
    if not tf.distribute.has_strategy():
        return contextlib.nullcontext()
    return _context_without_strategy()


@functools.cache
def _context_without_strategy() -> Any:
    # Scopes belong to graphs: a new one is in none.
    with tf.Graph().as_default():
        return tf.distribute.get_replica_context()


@functools.cache
def _linger_at_exit() -> None:
    """Have this process wait before it leaves.

    Its last answer to another one may be on its way, and would be lost: the
    other one, amid what both computed last, would fail with "Socket closed".
    """
    atexit.register(time.sleep, LINGER_SECS)


def _members(strategy: Any) -> list[tuple[str, Any]]:
    """List the processes of a strategy, pairs of their job and index."""
    resolver = strategy and strategy.cluster_resolver
    cluster = resolver and resolver.cluster_spec()
    return [
        (job, index)
        for job in ("chief", "worker")
        if cluster and job in cluster.jobs
        for index in cluster.task_indices(job)
    ]


def _read(variable: Variable) -> Tensor:
    """Read a variable that has one value for all replicas.

    The variables of Keras's metrics are in parts, which whoever reads them
    has the replicas add up. Between updates all parts are equal, as
    TensorFlow and `write` leave them, and one tells what all are.
    """
    value = variable.value
    if not _is_in_parts(value):
        return tf.convert_to_tensor(value)
    part = strategy_of(value).experimental_local_results(value)[0]
    return part * _parts_of(value, part.dtype)


def _is_in_parts(value: Any) -> bool:
    """Whether a variable's value is what its copies make together."""
    return isinstance(value, tf.distribute.DistributedValues) and (
        value.synchronization == tf.VariableSynchronization.ON_READ
    )


def _parts_of(value: Any, dtype: Any) -> Tensor:
    is_sum = value.aggregation == tf.VariableAggregation.SUM
    count = strategy_of(value).num_replicas_in_sync if is_sum else 1
    return tf.cast(count, dtype)


def _replica_index() -> Tensor:
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, "int32")


def _share_of(leaf: Any, replica: Tensor, count: int) -> Tensor | None:
    """Take a replica's rows of `[k, count * m, ...]`."""
    if leaf is None:
        return None
    size = tf.shape(leaf)[1] // count
    share = leaf[:, replica * size : (replica + 1) * size]
    known = leaf.shape[1]
    share.set_shape([leaf.shape[0], known and known // count, *leaf.shape[2:]])
    return share


def _sum(outcome: Nest, strategy: Any) -> Nest:
    """Add up a nest of values of each replica, in one reduction per dtype.

    Args:
        outcome: nest of tensors of every replica.
        strategy: `tf.distribute.Strategy`.

    Returns:
        The nest of sums, tensors of one device.
    """
    leaves = tree.flatten(outcome)
    dtypes = [strategy.experimental_local_results(v)[0].dtype for v in leaves]
    kinds = [_summed_as(dtype) for dtype in dtypes]
    leaves = strategy.run(
        lambda leaves: list(map(tf.cast, leaves, kinds)), (leaves,)
    )
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
            total = strategy.experimental_local_results(value)[0]
            sums[position] = tf.cast(total, dtypes[position])
    return tree.pack_sequence_as(outcome, [sums[i] for i in range(len(sums))])


def _summed_as(dtype: Any) -> Any:
    """Choose a dtype that TensorFlow can add up over devices."""
    if not dtype.is_bool and not dtype.is_integer:
        return dtype
    return tf.int32 if dtype.size < 4 or dtype == tf.int32 else tf.int64
