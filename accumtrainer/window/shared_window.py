"""A window that several replicas run: each its share, and one sum of all."""

from accumtrainer.keras_api import ops
from accumtrainer.window.hooks import context_of
from accumtrainer.window.objective import metric_variables
from accumtrainer.window.passes import join_uses, length
from accumtrainer.window.replicas import Merger, Share, in_row


class SharedWindow:
    """Runs the shares of a window on their replicas, and sums up.

    Args:
        hooks: `Hooks`, usually the Trainer.
        state: `TrainingState`.
        backend: the functions a backend must provide.
        passes: `Passes`.
        variables: `WindowVariables`.
    """

    def __init__(self, hooks, state, backend, passes, variables):
        self._hooks = hooks
        self._state = state
        self._backend = backend
        self._passes = passes
        self._variables = variables

    @property
    def _merger(self):
        rules = _merging_rules(
            self._hooks, self._state, self._passes, self._variables
        )
        return Merger(rules, self._backend)

    def totals(self, shares, share):
        """Measure the denominators of the window.

        Args:
            shares: `Shares` of tensors.
            share: what `share_of` says of them.

        Returns:
            Tensor `(losses,)`, float32.
        """
        return self._sum_over_replicas(
            lambda replica, shares: self._totals_of_one(
                shares, share._replace(replica=replica)
            ),
            shares,
        )

    def run(self, shares, share):
        """Run all shares, and merge what replicas did to variables.

        Args:
            shares: `Shares` of tensors.
            share: what `share_of` says of them, with weighing and totals.

        Returns:
            Triple: the sums of gradients, list of tensors, float32; a
            tensor `[k, n]` of the numbers of what was run, see `Passes.run`,
            added up over all replicas that count it; and which variables the
            window uses, see `passes.uses`.
        """
        merger, overwritten = self._merger, self._passes.overwritten

        used = None

        def run(replica, shares):
            nonlocal used
            before = merger.begin(replica)
            sums, rows, used = self._run_one(
                shares, share._replace(replica=replica)
            )
            for position in overwritten:
                sums[position] = in_row(
                    sums[position], replica, self._backend.replicas
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
        return sums, rows, used

    def _sum_over_replicas(self, function, shares):
        moving = [*self._merger.variables, *self._variables.start]
        ids = {id(variable) for variable in moving}
        reading = self._variables.read_by_passes
        return self._backend.sum_over_replicas(
            function,
            shares,
            reading=[v for v in reading if id(v) not in ids],
            moving=moving,
        )

    def _run_one(self, shares, share):
        """Run one replica's micro-batches.

        Returns:
            Triple: its sums of gradients, its rows `[k, n]` of numbers, and
            which variables it uses.
        """
        is_first = ops.equal(share.replica, 0)
        tally = self._variables.window
        sums, rows, begun = self._passes.no_sums(), [], 0
        used = []

        def run(stacked, begun, sums):
            return self._passes.scan(stacked, share, tally, sums, begun)

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

    def _totals_of_one(self, shares, share):
        begun, totals = 0, 0.0
        is_first = ops.equal(share.replica, 0)
        for is_copied, batches in enumerate(shares):
            for stacked in batches:
                added = self._passes.scan_weights(stacked, share, begun)
                if is_copied:
                    added = ops.where(is_first, added, ops.zeros_like(added))
                totals = totals + added
                begun += length(stacked)
        return totals


def share_of(shares, replicas):
    """Say what is the same of every replica's share of a window.

    Args:
        shares: `Shares` of tensors.
        replicas: int.

    Returns:
        Pair: `Share`, and whether all micro-batches have one shape.
    """
    split = sum(map(length, shares.split))
    micro_batches = split + sum(map(length, shares.copied))
    total = micro_batches + split * (replicas - 1)
    is_even = len(shares.split) == 1 and not shares.copied
    return Share(micro_batches, total, split=split), is_even


def _merging_rules(hooks, state, passes, window_variables):
    """Say how what replicas do to variables is put together."""
    tracked = {id(variable) for variable in context_of(hooks).tracked_metrics}
    others = [*window_variables.moved, state.rng.state]
    windowed = {
        id(weight)
        for layer in passes.window_layers
        for weight in layer.window_weights
    }
    return [
        *((v, "rows") for v in others if id(v) in windowed),
        *((variable, "sum") for variable in metric_variables(hooks.model)),
        *((v, "sum") for v in others if id(v) in tracked),
        *window_variables.window.merging_rules,
        *((v, "mean" if "float" in v.dtype else "first") for v in others),
    ]
