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
from collections.abc import Callable, Sequence

import numpy as np

from accumtrainer.data.batches import (
    Batch,
    Window,
    count_samples,
    leaves,
    map_leaves,
)
from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Nest, Tensor, Variable
from accumtrainer.window.backend import WindowBackend
from accumtrainer.window.draws import drawing_again
from accumtrainer.window.gradients import Uses, join_uses
from accumtrainer.window.hooks import context_of
from accumtrainer.window.losses import WeightedLoss, sort_of
from accumtrainer.window.numbers import OfMicroBatch, OfPart
from accumtrainer.window.objective import (
    is_random_state,
    metric_variables,
)
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.passes import Passes, length
from accumtrainer.window.state import (
    EXTREMES,
    REPLICA_DISTANCE,
    shifted_seed,
)
from accumtrainer.window.variables import WindowVariables
from accumtrainer.window.weighing import Share, Shares


def share_out(window: Window, replicas: int) -> tuple[Shares, list[int]]:
    """Share the rows of a window out among replicas.

    Args:
        window: its micro-batches are those of all replicas together.
        replicas: how many.

    Returns:
        Pair. The shares; of a window that processes have shares of, those of
        this process's replicas. And for each of the micro-batches in them,
        in the order they are run in, of which micro-batch of the window it is
        a part.

    Examples:
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
    if window.stacked is not None and window.sizes[0] % replicas == 0:
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


def join_parts(
    rows: np.ndarray, indices: list[int], losses: Sequence[WeightedLoss]
) -> OfMicroBatch:
    """Put what replicas know of parts of micro-batches together.

    All of it has been chosen to add up. Losses are means by their weights, or
    sums; norms of gradients are root mean squares, their factors means.

    Args:
        rows: `[n, ...]`, packed `OfPart`s.
        indices: of which micro-batch each is a part.
        losses: of which only the kind counts.

    Returns:
        Arrays `(k,)`, float32.

    Examples:
        >>> rows = [[4, 4, 0, 4, 1], [6, 2, 0, 2, 1], [5, 1, 0, 1, 1]]
        >>> losses = [WeightedLoss(1.0, denominator=4.0)]
        >>> join_parts(rows, [0, 1, 1], losses).loss.round(2).tolist()
        [1.0, 3.67]
    """
    rows = np.asarray(rows, "float64")
    joined = np.zeros([max(indices) + 1, rows.shape[1]])
    np.add.at(joined, indices, rows)
    part = OfPart.unpack(joined, len(losses))
    loss = part.regularization / part.replicas
    for known, over, by in zip(
        losses, part.numerators.T, part.denominators.T, strict=True
    ):
        mean = np.divide(over, by, out=np.zeros_like(over), where=by != 0)
        is_sum = sort_of(known) == "sum"
        loss += known.coefficient * (over if is_sum else mean)
    columns = [loss, part.weight]
    if part.squared_norm is not None:
        columns += [
            np.sqrt(part.squared_norm / part.replicas),
            part.gradient_weight / part.replicas,
        ]
    return OfMicroBatch(*(column.astype("float32") for column in columns))


def _rows(batch: Batch, start: int, stop: int) -> Batch:
    return map_leaves(lambda leaf: leaf[start:stop], batch)


def _stack_alike(pairs: list[tuple[Batch, int]]) -> tuple[Batch, ...]:
    """Stack the batches that come one after another in the same shapes."""
    groups = itertools.groupby(
        [batch for batch, _ in pairs],
        key=lambda batch: [leaf.shape for leaf in leaves(batch)],
    )
    return tuple(
        map_leaves(lambda *rows: np.stack(rows), *group) for _, group in groups
    )


class SharedWindow:
    """Runs the shares of a window on their replicas, and sums up.

    Args:
        parts: whose windows they are.
        passes: what runs a micro-batch.
        variables: what a window moves.
    """

    def __init__(
        self, parts: WindowParts, passes: Passes, variables: WindowVariables
    ):
        self._parts = parts
        self._backend = parts.backend
        self._passes = passes
        self._variables = variables

    @property
    def _merger(self) -> "Merger":
        return Merger(self._merging_rules(), self._backend)

    def _totals(self, shares: Shares, share: Share) -> Tensor:
        """Measure the denominators `(losses,)` of the window."""
        return self._sum_over_replicas(
            lambda replica, shares: self._totals_of_one(
                shares, share._replace(replica=replica)
            ),
            shares,
        )

    def run(
        self, shares: Shares, share: Share
    ) -> tuple[Tensor, list[Tensor], Uses]:
        """Run all shares, and merge what replicas did to variables.

        Args:
            shares: of tensors.
            share: what `share_of` says of them, with weighing.

        Returns:
            Triple: the packed `OfPart`s `[k, n]` of what was run, added up
            over all replicas that count it; the sums of gradients, float32;
            and which variables the window uses.
        """
        if share.weighing.needs_totals:
            share = share._replace(totals=self._totals(shares, share))
        merger = self._merger
        overwritten = self._passes.gradients.overwritten

        used: Uses = ()

        def run(
            replica: Tensor, shares: Shares
        ) -> tuple[list[Tensor], Tensor, list[Tensor]]:
            nonlocal used
            before = merger.begin(replica)
            sums, rows, used = self._run_one(
                shares, share._replace(replica=replica)
            )
            for position in overwritten:
                sums[position] = in_row(
                    sums[position], replica, self._backend.replicas.count
                )
            return sums, rows, merger.changes(before, replica)

        sums, rows, changes = self._sum_over_replicas(run, shares)
        for position in overwritten:
            sums[position] = ops.max(sums[position], axis=0)
        known = merger.take_in(changes)
        for layer in self._passes.window_layers:
            weights = layer.window_weights
            if weights and all(id(weight) in known for weight in weights):
                layer.merge([known[id(weight)] for weight in weights])
        return rows, sums, used

    def _sum_over_replicas(
        self, function: Callable[[Tensor, Shares], Nest], shares: Shares
    ) -> Nest:
        moving = [*self._merger.variables, *self._variables.start]
        ids = {id(variable) for variable in moving}
        reading = self._variables.read_by_passes
        return self._backend.replicas.sum(
            function,
            shares,
            known=self._variables.all_variables,
            reading=[v for v in reading if id(v) not in ids],
            moving=moving,
        )

    def _run_one(
        self, shares: Shares, share: Share
    ) -> tuple[list[Tensor], Tensor, Uses]:
        """Run one replica's micro-batches.

        Returns:
            Triple: its sums of gradients, its rows `[k, n]` of numbers, and
            which variables it uses.
        """
        is_first = ops.equal(share.replica, 0)
        running = self._variables.window
        sums, rows, begun = self._passes.gradients.no_sums(), [], 0
        used = []

        def run(
            stacked: Batch, begun: Tensor | int, sums: list[Tensor]
        ) -> tuple[Tensor, list[Tensor], Uses]:
            return self._passes.scan(stacked, share, running, sums, begun)

        for stacked in shares.split:
            row, sums, marks = run(stacked, begun, sums)
            rows.append(row)
            used.append(marks)
            begun += length(stacked)
        before, others = sums, self._merger.added()
        for stacked in shares.copied:
            row, sums, marks = run(stacked, begun, sums)
            used.append(marks)
            rows.append(ops.where(is_first, row, ops.zeros_like(row)))
            begun += length(stacked)
        if shares.copied:
            self._merger.count_once(others, is_first)
            sums = [
                ops.where(is_first, new, old)
                for new, old in zip(sums, before, strict=True)
            ]
        return list(sums), ops.concatenate(rows, axis=0), join_uses(used)

    def _totals_of_one(self, shares: Shares, share: Share) -> Tensor:
        begun, totals = 0, 0.0
        is_first = ops.equal(share.replica, 0)
        with drawing_again(self._passes.variables):
            for is_copied, batches in enumerate(shares):
                for stacked in batches:
                    added = self._passes.scan_denominators(
                        stacked, share, begun
                    )
                    if is_copied:
                        added = ops.where(
                            is_first, added, ops.zeros_like(added)
                        )
                    totals = totals + added
                    begun += length(stacked)
        return totals

    def _merging_rules(self) -> list[tuple[Variable, str]]:
        """Say how what replicas do to variables is put together."""
        hooks, variables = self._parts.hooks, self._variables
        tracked = set(map(id, context_of(hooks).tracked_metrics))
        others = [*variables.moved, self._parts.state.rng.state]
        windowed = {
            id(weight)
            for layer in self._passes.window_layers
            for weight in layer.window_weights
        }
        return [
            *((v, "rows") for v in others if id(v) in windowed),
            *((v, "sum") for v in metric_variables(hooks.model)),
            *((v, "sum") for v in others if id(v) in tracked),
            *variables.window.merging_rules,
            *((v, "mean" if "float" in v.dtype else "first") for v in others),
        ]


def share_of(shares: Shares, replicas: int) -> tuple[Share, bool]:
    """Say what is the same of every replica's share of a window.

    Returns:
        Pair: that, and whether all micro-batches have one shape.
    """
    split = sum(map(length, shares.split))
    micro_batches = split + sum(map(length, shares.copied))
    total = micro_batches + split * (replicas - 1)
    is_even = len(shares.split) == 1 and not shares.copied
    return Share(micro_batches, total, split=split), is_even


class Merger:
    """Puts together what replicas made of variables that began alike.

    Args:
        rules: list of pairs of a variable and how: `"sum"`, its changes add
            up; `"mean"`, they are averaged; `"max"` or `"min"`; `"first"`,
            the first replica's counts; or `"rows"`, somebody else knows.
    """

    def __init__(
        self, rules: list[tuple[Variable, str]], backend: WindowBackend
    ):
        # The first rule for a variable holds.
        self._rules = list(
            {id(v): (v, rule) for v, rule in reversed(rules)}.values()
        )
        self._replicas = backend.replicas

    @property
    def variables(self) -> list[Variable]:
        """Those of the rules, in their order."""
        return [variable for variable, _ in self._rules]

    def begin(self, replica: Tensor) -> list[Tensor]:
        """Give layers on each replica random numbers of their own.

        Args:
            replica: scalar, int32.

        Returns:
            List of tensors, to be given to `changes`.
        """
        before = [variable.value for variable in self.variables]
        for variable in self.variables:
            if is_random_state(variable):
                seed = shifted_seed(variable, replica, REPLICA_DISTANCE)
                variable.assign(seed)
        return before

    def added(self) -> list[Tensor]:
        """List the values of what adds up, see `count_once`."""
        return [v.value for v, rule in self._rules if rule != "first"]

    def count_once(self, before: list[Tensor], is_first: Tensor) -> None:
        """Put back what `added` returned, except on the first replica."""
        changed = [v for v, rule in self._rules if rule != "first"]
        for variable, old in zip(changed, before, strict=True):
            variable.assign(ops.where(is_first, variable.value, old))

    def changes(self, before: list[Tensor], replica: Tensor) -> list[Tensor]:
        """Turn what a replica did into tensors that may be summed.

        Args:
            before: what `begin` returned.
            replica: scalar, int32.

        Returns:
            One per variable.
        """
        return [
            self._change(variable.value, old, rule, replica)
            for (variable, rule), old in zip(self._rules, before, strict=True)
        ]

    def _change(
        self, new: Tensor, old: Tensor, rule: str, replica: Tensor
    ) -> Tensor:
        if rule in ("sum", "mean"):
            # What is infinite and stays so has not changed.
            change = ops.where(
                ops.equal(new, old), ops.zeros_like(new), new - old
            )
            return change if rule == "sum" else change / self._replicas.count
        if rule == "first":
            return ops.where(ops.equal(replica, 0), new, ops.zeros_like(new))
        return in_row(new, replica, self._replicas.count)

    def take_in(self, summed: list[Tensor]) -> dict[int, Tensor]:
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
                (before,) = self._replicas.read([variable])
                total = before + total
            elif rule in EXTREMES:
                total = EXTREMES[rule][2](total, axis=0)
            self._replicas.write(variable, total)
        return rows


def in_row(tensor: Tensor, replica: Tensor, replicas: int) -> Tensor:
    """Put a replica's tensor where the sum over replicas keeps it apart.

    Args:
        tensor: `[...]`.
        replica: scalar, int32, its index.
        replicas: how many there are.

    Returns:
        `[replicas, ...]`, zero in all rows but one.
    """
    rows = ops.reshape(
        ops.equal(ops.arange(replicas), replica),
        [replicas] + [1] * len(tensor.shape),
    )
    return ops.where(rows, tensor, ops.zeros_like(tensor))
