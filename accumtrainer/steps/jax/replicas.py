"""Several devices and processes of JAX: who has what, and what they add up.

An array of the whole mesh is either split, each replica having some of its
rows, or copied, each having all of them.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from accumtrainer import errors
from accumtrainer.data.batches import Batch
from accumtrainer.keras_api.types import Nest, Tensor, Variable
from accumtrainer.steps.jax.programs import scope_of
from accumtrainer.window.backend import Replicas
from accumtrainer.window.weighing import Shares

# Up to how many numbers an array is exchanged together with others. Joining
# copies, so that a large one is left alone; where that pays was not measured.
LARGEST_JOINED = 2**20


class JaxReplicas(Replicas):
    """The replicas of a distribution.

    Args:
        distribution: `keras.distribution.Distribution`, or `None` to use one
            device.

    Attributes:
        everywhere: sharding of what every replica has a copy of, `None` where
            there is one device.
    """

    def __init__(self, distribution: Any = None):
        self._mesh: Any = None
        self._axis: Any = None
        self.everywhere: Any = None
        if distribution is not None:
            self._mesh = distribution.device_mesh.backend_mesh
            self._axis = distribution.batch_dim_name
            self.count = self._mesh.shape[self._axis]
            self.processes = jax.process_count()
            self.everywhere = NamedSharding(self._mesh, Spec())
        self.is_chief = self.processes == 1 or jax.process_index() == 0

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        return multihost_utils.process_allgather(np.asarray(numbers, "float32"))

    def place(self, shares: Shares, *, is_own: bool = False) -> Shares:
        """Make arrays of the whole mesh; see `Replicas`.

        Raises:
            ValueError: `is_own`, and a replica is in several processes.
        """
        if is_own:
            return shares._replace(split=self._put_own(shares.split))
        return type(shares)(
            self._put(shares.split, self._rows_of_shares),
            self._put(shares.copied, Spec()),
        )

    def spread(self, batch: Batch) -> Batch:
        sizes = {len(leaf) for leaf in jax.tree.leaves(batch)}
        if self.count == 1 or any(n % self.count for n in sizes):
            return batch
        return self._put(batch, Spec(self._axis))

    def copy(self, array: Tensor) -> Tensor:
        """Copy an array to all devices, unless it is on them."""
        if self._mesh is None or (
            array.sharding.device_set == set(self._mesh.devices.flat)
        ):
            return array
        return self._put(array, Spec())

    def sum(
        self,
        function: Callable[[Tensor, Shares], Nest],
        shares: Shares,
        *,
        known: list[Variable],
        reading: list[Variable],
        moving: list[Variable],
    ) -> Nest:
        del reading, moving  # they are among those known
        current = [v.value for v in known]

        def run(arrays: list[Tensor], shares: Shares) -> Nest:
            replica = jax.lax.axis_index(self._axis).astype("int32")
            with scope_of(known, arrays):
                outcome = function(replica, shares)
            return self._add_up(outcome)

        return jax.shard_map(
            run,
            mesh=self._mesh,
            in_specs=(Spec(), type(shares)(self._rows_of_shares, Spec())),
            out_specs=Spec(),
            axis_names={self._axis},
            check_vma=False,
        )(current, shares)

    def _add_up(self, nest: Nest) -> Nest:
        """Add up the arrays of all replicas, small ones together.

        Between processes every array is an exchange of its own, even where
        the program has one instruction for all: 64 of 13,000 floats took 325
        ms, one of as many floats 8 ms.
        """
        leaves, structure = jax.tree.flatten(nest)
        if self._mesh.size != self.count:
            # An array that lies on several devices must stay in its parts.
            return jax.lax.psum(nest, self._axis)
        groups = collections.defaultdict(list)
        for place, leaf in enumerate(leaves):
            is_small = leaf.size <= LARGEST_JOINED
            groups[leaf.dtype if is_small else place].append(place)
        joined, take_apart = zip(
            *(
                ravel_pytree([leaves[place] for place in places])
                for places in groups.values()
            ),
            strict=True,
        )
        sums = jax.lax.psum(joined, self._axis)
        for places, take, total in zip(
            groups.values(), take_apart, sums, strict=True
        ):
            for place, leaf in zip(places, take(total), strict=True):
                leaves[place] = leaf
        return jax.tree.unflatten(structure, leaves)

    @property
    def _rows_of_shares(self) -> Any:
        return Spec(None, self._axis)

    def _put_own(self, nest: Nest) -> Nest:
        """Put arrays of which each process has its own rows `[k, m, ...]`."""
        if self._has_replica_of_processes:
            raise ValueError(errors.REPLICA_OF_PROCESSES)
        sharding = NamedSharding(self._mesh, self._rows_of_shares)
        return jax.tree.map(
            functools.partial(jax.make_array_from_process_local_data, sharding),
            nest,
        )

    @functools.cached_property
    def _has_replica_of_processes(self) -> bool:
        axis = self._mesh.axis_names.index(self._axis)
        replicas = np.moveaxis(self._mesh.devices, axis, 0)
        return any(
            len({device.process_index for device in devices}) > 1
            for devices in replicas.reshape(self.count, -1)
        )

    def _put(self, nest: Nest, spec: Any) -> Any:
        """Put arrays that all processes have onto the devices."""
        sharding = NamedSharding(self._mesh, spec)
        if jax.process_count() == 1:
            return jax.device_put(nest, sharding)
        return jax.tree.map(
            lambda leaf: jax.make_array_from_callback(
                leaf.shape, sharding, np.asarray(leaf).__getitem__
            ),
            nest,
        )
