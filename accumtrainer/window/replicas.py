"""A window shared out among replicas, and what they did put together again.

Under data parallelism every replica, a device with the whole model, runs its
share of the micro-batches by itself. Nothing is exchanged meanwhile; then one
sum over the replicas takes in everything at once: gradients, weights and
losses, metrics, batch statistics. In plain Python,

    for replica in replicas:                      # at the same time
        for micro_batch in share(window, replica):
            sums[replica] += weight * gradients
    gradients = sum(sums) / total_weight

A micro-batch is split evenly or not at all. Rows that are too few for all
replicas are run by every one of them and counted by the first alone.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np

from accumtrainer.data.batches import Batch, count_samples, leaves, map_leaves
from accumtrainer.keras_api import ops
from accumtrainer.window.objective import coefficient_of, is_random_state
from accumtrainer.window.state import EXTREMES

STREAM_DISTANCE = 0x3C6EF35F
"""By how much the seeds of neighbouring replicas differ."""


class Shares(NamedTuple):
    """The micro-batches of a window, as replicas run them.

    Args:
        split: tuple of `Batch`es of arrays `[k, replicas * m, ...]`; of each
            micro-batch every replica runs m rows.
        copied: tuple of `Batch`es of arrays `[k, m, ...]`, which every
            replica runs whole, and which count once.
    """

    split: tuple[Batch, ...]
    copied: tuple[Batch, ...]


def share_out(window, replicas):
    """Share the rows of a window out among replicas.

    Args:
        window: `Window`, its micro-batches those of all replicas together.
        replicas: int.

    Returns:
        Pair. `Shares`; of a window that processes have shares of, those of
        this process's replicas. And for each of the micro-batches in them,
        in the order they are run in, of which micro-batch of the window it is
        a part, list of int.

    Example:
        >>> from accumtrainer.data.batches import window_of_rows
        >>> window = window_of_rows(Batch(np.zeros([11, 2])), (4, 4, 3))
        >>> shares, indices = share_out(window, 2)
        >>> [batch.x.shape for batch in shares.split]
        [(2, 4, 2), (1, 2, 2)]
        >>> [batch.x.shape for batch in shares.copied]
        [(1, 1, 2)]
        >>> indices
        [0, 1, 2, 2]
    """
    if window.is_even and window.sizes[0] % replicas == 0:
        return Shares((window.stacked,), ()), list(range(window.micro_batches))
    own = replicas // window.processes
    shares = [size // replicas for size in window.sizes]
    split, copied = [], []
    for index, (batch, share) in enumerate(
        zip(window.split(), shares, strict=True)
    ):
        if share:
            split.append((_rows(batch, 0, share * own), index))
        # What a replica has memory for.
        size = max(*shares, 1)
        for start in range(share * own, count_samples(batch), size):
            copied.append((_rows(batch, start, start + size), index))
    indices = [index for _, index in split + copied]
    return Shares(_stack_alike(split), _stack_alike(copied)), indices


def join_parts(rows, indices, losses):
    """Put what replicas know of parts of micro-batches together.

    All of it has been chosen to add up. Losses are means by their weights, or
    sums; norms of gradients are root mean squares, their factors means.

    Args:
        rows: array `[n, 2 * l + 3]` or `[n, 2 * l + 5]`, float32: numerators
            and denominators of l losses; the regularization, the weight, and
            the number of replicas that have added to them; also the squared
            norm of the gradient, and by what that was multiplied.
        indices: list of n int, of which micro-batch each is a part.
        losses: list of l `WeightedLoss`, of which only the kind counts.

    Returns:
        Array `[k, 2]` or `[k, 4]`, float32, see `Passes.run`.

    Example:
        >>> from accumtrainer.window.losses import WeightedLoss
        >>> rows = [[4, 4, 0, 4, 1], [6, 2, 0, 2, 1], [5, 1, 0, 1, 1]]
        >>> losses = [WeightedLoss(1.0, denominator=4.0)]
        >>> join_parts(rows, [0, 1, 1], losses).round(2).tolist()
        [[1.0, 4.0], [3.67, 3.0]]
    """
    rows = np.asarray(rows, "float64")
    joined = np.zeros([max(indices) + 1, rows.shape[1]])
    np.add.at(joined, indices, rows)
    numerators, denominators, others = np.split(
        joined, [len(losses), 2 * len(losses)], axis=1
    )
    regularization, weight, count, *rest = others.T
    loss = regularization / count
    for known, over, by in zip(
        losses, numerators.T, denominators.T, strict=True
    ):
        mean = np.divide(over, by, out=np.zeros_like(over), where=by != 0)
        coefficient = float(ops.convert_to_numpy(coefficient_of(known)))
        loss += coefficient * (over if known.is_sum else mean)
    columns = [loss, weight]
    if rest:
        squared_norm, factor = rest
        columns += [np.sqrt(squared_norm / count), factor / count]
    return np.stack(columns, axis=1).astype("float32")


def _rows(batch, start, stop):
    return map_leaves(lambda leaf: leaf[start:stop], batch)


def _stack_alike(pairs):
    """Stack the batches that come one after another in the same shapes."""
    groups = itertools.groupby(
        [batch for batch, _ in pairs],
        key=lambda batch: [leaf.shape for leaf in leaves(batch)],
    )
    return tuple(
        map_leaves(lambda *rows: np.stack(rows), *group) for _, group in groups
    )


class Share(NamedTuple):
    """What a replica knows of the window it runs a part of.

    Args:
        micro_batches: scalar tensor, int32, how many it runs.
        total: scalar tensor, int32, how many all replicas run, copies
            counted once.
        replica: scalar tensor, int32, its index.
        split: scalar tensor, int32, how many it runs that are not copies.
        weighing: `Weighing` of the window.
        totals: tensor `(losses,)`, float32, the denominators of the window,
            where the weighing needs them.
    """

    micro_batches: Any
    total: Any
    replica: Any = 0
    split: Any = None
    weighing: Any = None
    totals: Any = None

    @classmethod
    def whole(cls, micro_batches, weighing=None, totals=None):
        """Make the share of one who runs all micro-batches."""
        return cls(
            micro_batches, micro_batches, weighing=weighing, totals=totals
        )

    def seat(self, index):
        """Give a micro-batch its number among those of all replicas.

        Args:
            index: scalar tensor, int32, its place in this share.

        Returns:
            Scalar tensor, int32, below `total`; the same for each copy.
        """
        if self.split is None:
            return index
        beyond = self.total - self.micro_batches
        before = self.replica * self.split
        return index + ops.where(index < self.split, before, beyond)


class Merger:
    """Puts together what replicas made of variables that began alike.

    Args:
        rules: list of pairs of a variable and how: `"sum"`, its changes add
            up; `"mean"`, they are averaged; `"max"` or `"min"`; `"first"`,
            the first replica's counts; or `"rows"`, somebody else knows.
        backend: the backend's functions.
    """

    def __init__(self, rules, backend):
        # The first rule for a variable holds.
        self._rules = list(
            {id(v): (v, rule) for v, rule in reversed(rules)}.values()
        )
        self._backend = backend
        self._replicas = backend.replicas

    @property
    def variables(self):
        """Those of the rules, in their order."""
        return [variable for variable, _ in self._rules]

    def begin(self, replica):
        """Give layers on each replica random numbers of their own.

        Args:
            replica: scalar tensor, int32.

        Returns:
            List of tensors, to be given to `changes`.
        """
        before = [variable.value for variable in self.variables]
        for variable in self.variables:
            if is_random_state(variable):
                seed, *rest = ops.unstack(variable.value, 2)
                distance = ops.cast(STREAM_DISTANCE, variable.dtype)
                seed = seed + ops.cast(replica, variable.dtype) * distance
                variable.assign(ops.stack([seed, *rest]))
        return before

    def added(self):
        """List the values of what adds up, see `count_once`."""
        return [v.value for v, rule in self._rules if rule != "first"]

    def count_once(self, before, is_first):
        """Put back what `added` returned, except on the first replica."""
        changed = [v for v, rule in self._rules if rule != "first"]
        for variable, old in zip(changed, before, strict=True):
            variable.assign(ops.where(is_first, variable.value, old))

    def changes(self, before, replica):
        """Turn what a replica did into tensors that may be summed.

        Args:
            before: what `begin` returned.
            replica: scalar tensor, int32.

        Returns:
            List of tensors, one per variable.
        """
        return [
            self._change(variable.value, old, rule, replica)
            for (variable, rule), old in zip(self._rules, before, strict=True)
        ]

    def _change(self, new, old, rule, replica):
        if rule in ("sum", "mean"):
            # What is infinite and stays so has not changed.
            change = ops.where(
                ops.equal(new, old), ops.zeros_like(new), new - old
            )
            return change if rule == "sum" else change / self._replicas
        if rule == "first":
            return ops.where(ops.equal(replica, 0), new, ops.zeros_like(new))
        return in_row(new, replica, self._replicas)

    def take_in(self, summed):
        """Assign what all replicas did together.

        Args:
            summed: list of the sums over replicas of what `changes` returned.

        Returns:
            Dict of tensors `[replicas, ...]` by the id of their variable,
            where the rule is `"rows"`.
        """
        rows = {}
        for (variable, rule), total in zip(self._rules, summed, strict=True):
            if rule == "rows":
                rows[id(variable)] = total
                continue
            if rule in ("sum", "mean"):
                (before,) = self._backend.read([variable])
                total = before + total
            elif rule in EXTREMES:
                total = EXTREMES[rule][2](total, axis=0)
            self._backend.write(variable, total)
        return rows


def in_row(tensor, replica, replicas):
    """Put a replica's tensor where the sum over replicas keeps it apart.

    Args:
        tensor: tensor `[...]`.
        replica: scalar tensor, int32, its index.
        replicas: int, how many there are.

    Returns:
        Tensor `[replicas, ...]`, zero in all rows but one.
    """
    rows = ops.reshape(
        ops.equal(ops.arange(replicas), replica),
        [replicas] + [1] * len(tensor.shape),
    )
    return ops.where(rows, tensor, ops.zeros_like(tensor))
