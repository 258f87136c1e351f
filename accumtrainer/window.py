"""The window algorithm, told once for every backend.

In plain Python, the update of a window is

    for index, batch in enumerate(window):
        batch = on_micro_batch(batch)
        losses = compute_loss(batch)
        gradients = on_accumulate(differentiate(losses))
        sums += weight * gradients
    gradients = on_apply(sums / total_weight)
    if is_finite(gradients):
        optimizer.apply(gradients)
        after_apply()  # of layers that know about windows, then of the Trainer
    else:
        forget the window; lower the loss scale

A loss that couples the examples of a window needs to look ahead: see
`accumtrainer.gradient_cache`.

The code below is that loop over Keras variables. A backend runs it in place
(TensorFlow) or as a function of the variables' values (JAX); what must differ
is asked of the backend: to differentiate, to loop, to branch, to compile.
"""

import contextlib
import functools
from dataclasses import replace

import numpy as np

from accumtrainer import errors
from accumtrainer.accumulation import (
    choose_weighing,
    gradient_divisor,
    gradient_weight,
    loss_factors,
    window_means,
)
from accumtrainer.clipping import clipped_norm, clips, global_norm
from accumtrainer.construction import computes_in_float16
from accumtrainer.gradient_cache import (
    GradientCache,
    join,
    join_rows,
    split,
    split_rows,
)
from accumtrainer.hooks import HOOK_NAMES, Info, check_batch, check_gradients
from accumtrainer.keras_api import flatten_layers, keras, ops, tree
from accumtrainer.layers import WindowLayer
from accumtrainer.loss_scale import next_scale
from accumtrainer.objective import (
    Objective,
    is_random_state,
    metric_results,
    metric_variables,
    named_losses,
    total_loss,
)
from accumtrainer.replicas import Merger, Share
from accumtrainer.state import Scratch, Tally


class WindowProgram:
    """Consumes the micro-batches of a window and applies one update.

    Args:
        hooks: `Hooks`, usually the Trainer.
        state: `TrainingState`.
        backend: the functions a backend must provide.
        combine: `"exact"`, `"mean"` or `"sum"`.
        loss_scale: `LossScale`, or `None` to leave the loss as it is.
        tracked: list of variables that a skipped window undoes.
        training: whether layers and hooks are told that this is training.

    Attributes:
        measures_gradients: whether to report the norm of each micro-batch's
            gradient too. What has been compiled does not notice a change.
    """

    def __init__(
        self,
        hooks,
        state,
        backend,
        *,
        combine,
        loss_scale,
        tracked,
        training=True,
    ):
        self._hooks = hooks
        self._model = hooks.model
        self._optimizer = hooks.optimizer
        self._state = state
        self._backend = backend
        self._combine = combine
        self._loss_scale = loss_scale
        self._tracked = list(tracked)
        self._training = training
        self._objective = Objective(hooks)
        self._cache = None
        if hooks.has_window_loss:
            self._cache = GradientCache(hooks, state, backend)
        self._clips = hooks.overrides("on_apply") or clips(self._optimizer)
        self._may_draw = any(map(hooks.overrides, HOOK_NAMES))
        self._may_weigh_losses = not (
            loss_scale is not None
            or hooks.overrides("on_accumulate")
            or computes_in_float16(self._model)
        )
        self._used = set()
        self._accumulators = []
        self.measures_gradients = False

    # Before the first window.

    def build(self, batch):
        """Learn from one micro-batch what a window has to keep.

        Runs every hook once without effect, so that a hook that returns
        something of the wrong structure is refused before training starts.

        Args:
            batch: `Batch` of arrays, one micro-batch.
        """
        book = self._hooks._log_book
        book.reductions.clear()
        self._window_layers = [
            layer
            for layer in flatten_layers(self._model)
            if isinstance(layer, WindowLayer)
        ]
        with Scratch(self._known_variables()) as scope:
            self.operations = self._backend.trace(self._survey, batch)
            written = [
                v
                for v in self._model.non_trainable_variables
                if scope.has_written(v)
            ]
        if not self._optimizer.built:
            self._optimizer.build(self._model.trainable_variables)
        self._borrowed = self._find_borrowed(scope)
        self._make_variables(written)
        self._merger = Merger(self._merging_rules(), self._backend.replicas)

    def _find_borrowed(self, scope):
        """List what hooks read that is no part of the training.

        Raises:
            ValueError: they write to it, which nothing would save or put back.
        """
        ours = [
            *self._known_variables(),
            *self._optimizer.variables,
            *self._hooks.variables_of_loss,
        ]
        known = {id(variable) for variable in ours}
        for key, variable in scope.strangers_written.items():
            if key not in known:
                raise ValueError(
                    errors.NOT_TRACKED.format(variable=variable.path)
                )
        read = scope.strangers_read.items()
        return [variable for key, variable in read if key not in known]

    def _survey(self, batch):
        book = self._hooks._log_book
        book.open()
        movable = [*self._model.non_trainable_variables, *self._tracked]
        before = [variable.value for variable in movable]
        share = Share.whole(ops.ones((), "int32"))
        info = self._info(ops.zeros((), "int32"), share)
        changed = self._hooks.on_micro_batch(batch, info)
        check_batch(batch, changed)
        with self._layers_in_window(info.index):
            measured = self._objective.measure(changed, info)
        self._losses = measured.weighted
        self._is_sum = np.array([loss.is_sum for loss in self._losses])
        self.loss_names = list(measured.losses)
        zeros = [
            ops.zeros(v.shape, "float32")
            for v in self._model.trainable_variables
        ]
        loss = ops.zeros((), "float32")
        info = replace(info, loss=loss, weight=measured.weight)
        gradients = self._hooks.on_accumulate(zeros, info)
        check_gradients("on_accumulate", zeros, gradients)
        self._moved_by_passes = [
            variable
            for variable, value in zip(movable, before, strict=True)
            if variable.value is not value
        ]
        info = replace(
            info, index=None, is_last=None, weight=None, total_weight=loss
        )
        gradients = self._hooks.on_apply(zeros, info)
        check_gradients("on_apply", zeros, gradients)
        self._hooks.after_apply(info)
        book.take()
        if self._cache is not None:
            with self._layers_in_window(0):
                self._cache.learn(changed, self._info(0, Share.whole(1)))
        return total_loss(
            measured.means(), self._losses, measured.regularization
        )

    def _make_variables(self, written):
        tally = {
            "losses": len(self._losses),
            "reductions": self._hooks._log_book.reductions,
        }
        self._window = Tally(name="window", **tally)
        self._epoch = Tally(name="epoch", **tally)
        self._window.clear()
        self._epoch.clear()
        undoable = [
            *(v for v in written if not is_random_state(v)),
            *metric_variables(self._model),
            *(v for v in self._tracked if not is_random_state(v)),
        ]
        self._undoable = list({id(v): v for v in undoable}.values())
        # A window that is run through twice draws the same numbers twice.
        self._kept = [*self._undoable]
        if self._cache is not None:
            self._kept += [v for v in written if is_random_state(v)]
        self._start = [
            keras.Variable(
                ops.convert_to_tensor(v),
                dtype=v.dtype,
                trainable=False,
                name=f"start_{position}",
            )
            for position, v in enumerate(self._kept)
        ]

    def _merging_rules(self):
        """Say how what replicas do to variables is put together."""
        tracked = {id(variable) for variable in self._hooks._tracked_metrics}
        others = [*self._moved_by_passes, self._state.rng.state]
        windowed = {
            id(weight)
            for layer in self._window_layers
            for weight in layer.window_weights
        }
        return [
            *((v, "rows") for v in others if id(v) in windowed),
            *((variable, "sum") for variable in metric_variables(self._model)),
            *((v, "sum") for v in others if id(v) in tracked),
            *self._window.merging_rules,
            *((v, "mean" if "float" in v.dtype else "first") for v in others),
        ]

    def make_accumulators(self):
        """Make what gradients are added to from one call to the next.

        Windows that run in one call need no such memory.
        """
        if self._accumulators:
            return
        self._backend.publish()
        self._accumulators = [
            keras.Variable(
                lambda shape, dtype: ops.zeros(shape, dtype),
                shape=v.shape,
                dtype="float32",
                trainable=False,
                name=f"accumulator_{position}",
            )
            for position, v in enumerate(self._model.trainable_variables)
        ]

    def _known_variables(self):
        return [
            *self._model.trainable_variables,
            *self._model.non_trainable_variables,
            *metric_variables(self._model),
            *self._tracked,
            *self._state.variables,
        ]

    @property
    def _read_by_passes(self):
        """What micro-batches may read; of the optimizer, its numbers."""
        numbers = [v for v in self._optimizer.variables if not v.shape]
        return [
            *self._known_variables(),
            *self._hooks.variables_of_loss,
            *self._borrowed,
            *numbers,
        ]

    @property
    def parts(self):
        """What lasts from one window to the next, by part; see `PARTS`."""
        return {
            "model": [
                *self._model.trainable_variables,
                *self._model.non_trainable_variables,
            ],
            "optimizer": list(self._optimizer.variables),
            "state": self._state.variables,
            "tracked": self._tracked,
            "metrics": metric_variables(self._model),
            "means": self._epoch.variables,
        }

    @property
    def moved_by_micro_batches(self):
        """What micro-batches change before the window is applied."""
        return [
            *self._model.non_trainable_variables,
            *metric_variables(self._model),
            *self._tracked,
            *self._state.variables,
        ]

    @property
    def variables(self):
        """Every variable a window may change, each once.

        The accumulators come last, since they may be made last.
        """
        lasting = (v for part in self.parts.values() for v in part)
        variables = [
            *lasting,
            *self._window.variables,
            *self._start,
            *self._borrowed,
            *self._accumulators,
        ]
        return list({id(v): v for v in variables}.values())

    def start_epoch(self, epoch):
        """Begin an epoch's running means, and forget a broken-off window."""
        self._state.epoch.assign(epoch)
        self._epoch.clear()
        self._window.clear()
        self._clear_accumulators()
        for metric in self._model.metrics:
            metric.reset_state()

    # The programs a backend compiles.

    def run_window(self, stacked):
        """Consume a whole window of equally shaped micro-batches.

        Stands for: the loop at the top of this module.

        Args:
            stacked: `Batch` of tensors `[k, m, ...]`.

        Returns:
            Report of the update, see `apply`.
        """
        micro_batches = _length(stacked)
        share = Share.whole(micro_batches)
        weighing = self._weighing(is_even=True)
        totals = None
        if weighing.needs_totals:
            totals = self._scan_totals(stacked, share)
        self._keep_start()
        sums = self._zeros()
        ahead = None
        if self.looks_ahead(micro_batches):
            ahead = self._look_ahead(stacked, share, self._adder(sums))
        per_micro_batch, sums = self._run_passes(
            stacked, 0, share, totals, weighing, sums, ahead
        )
        report = self._apply(
            ops.cast(micro_batches, "int32"), weighing, list(sums)
        )
        return report | {"per_micro_batch": per_micro_batch}

    def run_shares(self, shares):
        """Consume a window that is shared out among replicas.

        Args:
            shares: `Shares` of tensors.

        Returns:
            Report of the update, see `apply`. The loss of each micro-batch
            is that of all replicas, and so is its weight.
        """
        backend, merger = self._backend, self._merger
        moving = [*merger.variables, *self._start]
        ids = {id(variable) for variable in moving}
        sum_over_replicas = functools.partial(
            backend.sum_over_replicas,
            reading=[v for v in self._read_by_passes if id(v) not in ids],
            moving=moving,
        )
        split = sum(map(_length, shares.split))
        micro_batches = split + sum(map(_length, shares.copied))
        total = micro_batches + split * (backend.replicas - 1)
        is_even = len(shares.split) == 1 and not shares.copied
        weighing = self._weighing(is_even=is_even)
        share = Share(micro_batches, total, split=split)
        totals = None
        if weighing.needs_totals:
            totals = sum_over_replicas(
                lambda replica, shares: self._share_of_totals(
                    shares, share._replace(replica=replica)
                ),
                shares,
            )
        self._keep_start()

        def run(replica, shares):
            before = merger.begin(replica)
            sums, rows = self._run_share(
                shares, share._replace(replica=replica), totals, weighing
            )
            return sums, rows, merger.changes(before, replica)

        sums, rows, changes = sum_over_replicas(run, shares)
        known = merger.take_in(changes)
        for layer in self._window_layers:
            weights = layer.window_weights
            if weights and all(id(weight) in known for weight in weights):
                layer.merge([known[id(weight)] for weight in weights])
        report = self._apply(ops.cast(total, "int32"), weighing, sums)
        rows = _mean_rows(rows, backend.replicas)
        return report | {"per_micro_batch": rows}

    def _run_share(self, shares, share, totals, weighing):
        """Run one replica's micro-batches.

        Returns:
            Pair: its sums of gradients, and its rows `[k, n]` of numbers,
            ready to be summed.
        """
        is_first = ops.equal(share.replica, 0)
        sums, rows, begun = self._zeros(), [], 0
        for stacked in shares.split:
            row, sums = self._run_passes(
                stacked, begun, share, totals, weighing, sums
            )
            rows.append(row)
            begun += _length(stacked)
        before, others = sums, self._merger.added()
        for stacked in shares.copied:
            row, sums = self._run_passes(
                stacked, begun, share, totals, weighing, sums
            )
            rows.append(ops.where(is_first, row, ops.zeros_like(row)))
            begun += _length(stacked)
        if shares.copied:
            self._merger.count_once(others, is_first)
            sums = [
                ops.where(is_first, new, old)
                for new, old in zip(sums, before, strict=True)
            ]
        return list(sums), _weighed_rows(ops.concatenate(rows, axis=0))

    def _share_of_totals(self, shares, share):
        begun, totals = 0, 0.0
        is_first = ops.equal(share.replica, 0)
        for is_copied, batches in enumerate(shares):
            for stacked in batches:
                added = self._scan_totals(stacked, share, begun)
                if is_copied:
                    added = ops.where(is_first, added, ops.zeros_like(added))
                totals = totals + added
                begun += _length(stacked)
        return totals

    def _run_passes(
        self, stacked, begun, share, totals, weighing, sums, ahead=None
    ):
        """Run micro-batches of one shape, and add up their gradients.

        Args:
            stacked: `Batch` of tensors `[k, m, ...]`.
            begun: int, or scalar tensor, how many have run before.
            share: `Share` they belong to.
            totals: tensor `(losses,)`, float32, see `measure_weights`.
            weighing: `Weighing`.
            sums: list of tensors, float32.
            ahead: what `_look_ahead` returns, if it was called.

        Returns:
            Pair: tensor `[k, n]`, see `run_micro_batch`; and the new sums.
        """
        cotangents, loss = ahead or (None, None)

        def body(index, item, sums):
            batch, cotangents = item
            sums = list(sums)
            row = self._accumulate(
                batch,
                index + begun,
                share,
                totals,
                weighing,
                ahead=(cotangents, loss) if ahead else None,
                add=self._adder(sums),
            )
            return row, sums

        return self._backend.scan(
            body, (stacked, cotangents), _length(stacked), sums
        )

    def _zeros(self):
        return [
            ops.zeros(v.shape, "float32")
            for v in self._model.trainable_variables
        ]

    def _adder(self, sums):
        """Make a function that adds a gradient to its place in a list."""

        def add(position, gradient):
            sums[position] = self._backend.add(sums[position], gradient)

        return add

    def _add_to_accumulator(self, position, gradient):
        self._backend.add_to(self._accumulators[position], gradient)

    def run_micro_batch(
        self, batch, index, micro_batches, totals, is_even, ahead=None
    ):
        """Consume one micro-batch of a window.

        Args:
            batch: `Batch` of tensors `[m, ...]`.
            index: scalar tensor, int32.
            micro_batches: scalar tensor, int32, k.
            totals: tensor `(losses,)`, float32, see `measure_weights`.
            is_even: Python bool, whether all have this one's shape.
            ahead: what `differentiate` returns for it, if it was called.

        Returns:
            Tensor, float32: its loss and its weight; with
            `measures_gradients` also the norm of its gradient, as it is
            added, and by what that is multiplied before.
        """
        self._keep_start(is_first=ops.equal(index, 0))
        weighing = self._weighing(is_even=is_even)
        return self._accumulate(
            batch,
            index,
            Share.whole(micro_batches),
            totals,
            weighing,
            ahead=ahead,
            add=self._add_to_accumulator,
        )

    def embed(self, batch, index, micro_batches):
        """Embed one micro-batch, to look ahead; no gradient is taken.

        Args:
            batch: `Batch` of tensors `[m, ...]`.
            index: scalar tensor, int32.
            micro_batches: scalar tensor, int32, k.

        Returns:
            Pair: nest of tensors `[m, ...]`, float32, and the `Batch`
            without its inputs, as `on_micro_batch` has left it.
        """
        self._keep_start(is_first=ops.equal(index, 0))
        return self._embed(batch, index, Share.whole(micro_batches))

    def differentiate(self, parts, micro_batches):
        """Differentiate the loss of a window by its embeddings.

        Forgets what `embed` has changed, so that embedding again repeats it.

        Args:
            parts: list of k results of `embed`.
            micro_batches: scalar tensor, int32, k.

        Returns:
            List of k pairs, what `run_micro_batch` takes as `ahead`.
        """
        cotangents, loss = self._differentiate(
            join(parts), micro_batches, self._add_to_accumulator
        )
        embeddings = [embedding for embedding, _ in parts]
        return [(c, loss) for c in split(cotangents, embeddings)]

    def apply(self, micro_batches, is_even):
        """Apply what `run_micro_batch` has accumulated.

        Args:
            micro_batches: scalar tensor, int32, k.
            is_even: Python bool, as given to `run_micro_batch`.

        Returns:
            Dict of scalar tensors under `"window"` (this window alone),
            `"running"` (the epoch so far) and `"counters"`.
        """
        sums = [accumulator.value for accumulator in self._accumulators]
        weighing = self._weighing(is_even=is_even)
        report = self._apply(micro_batches, weighing, sums)
        self._clear_accumulators()
        return report

    def take_gradients(self, micro_batches, is_even):
        """Average what `run_micro_batch` has accumulated, and apply nothing.

        Args:
            micro_batches: scalar tensor, int32, k.
            is_even: Python bool, as given to `run_micro_batch`.

        Returns:
            Pair: the window's loss without regularization, a scalar tensor,
            float32; and its gradients, list of tensors, float32.
        """
        count = ops.cast(micro_batches, "float32")
        means, _, _, weight, _ = self._window_sums(count)
        divisor = gradient_divisor(
            self._weighing(is_even=is_even),
            total_weight=weight,
            micro_batches=count,
        )
        sums = [accumulator.value for accumulator in self._accumulators]
        gradients = _divide(sums, divisor)
        self._window.clear()
        self._clear_accumulators()
        return total_loss(means, self._losses, 0.0), gradients

    def count_micro_batches(self, micro_batches):
        """Count micro-batches whose window is not applied.

        Args:
            micro_batches: int.
        """
        counter = self._state.micro_batches
        counter.assign(counter.value + micro_batches)

    def measure_weights(self, batch, index, micro_batches):
        """Measure a micro-batch's denominators, without effect.

        Args:
            batch: `Batch` of tensors `[m, ...]`.
            index: scalar tensor, int32.
            micro_batches: scalar tensor, int32.

        Returns:
            Tensor `(losses,)`, float32.
        """
        return self._measure_weights(batch, index, Share.whole(micro_batches))

    def _measure_weights(self, batch, index, share):
        with Scratch(self._known_variables()):
            self._hooks._log_book.open()
            info = self._info(index, share)
            batch = self._prepare(batch, index, share, info)
            self._hooks._log_book.open()
            info = replace(info, training=False)
            denominators = self._objective.measure(batch, info).denominators()
            self._hooks._log_book.take()
        return denominators

    def looks_ahead(self, micro_batches):
        """Whether a window has to be embedded before its first gradient.

        Args:
            micro_batches: k, an int or a tensor.
        """
        is_one = isinstance(micro_batches, int) and micro_batches == 1
        return self._cache is not None and not is_one

    def needs_totals(self, is_even):
        """Whether `run_micro_batch` wants the window's denominators."""
        return self._weighing(is_even=is_even).needs_totals

    @property
    def can_stream(self):
        """Whether micro-batches can run before their window is known.

        Losses with denominators of their own cannot: what each counts depends
        on the whole window.
        """
        return self._weighing(is_even=False).rule != "balance"

    # The parts of the algorithm.

    def _weighing(self, is_even):
        return choose_weighing(
            self._losses, combine=self._combine, is_even=is_even
        )

    def _scan_totals(self, stacked, share, begun=0):
        def body(index, batch, carry):
            return self._measure_weights(batch, index + begun, share), carry

        measured, _ = self._backend.scan(body, stacked, _length(stacked))
        return ops.sum(measured, axis=0)

    def _keep_start(self, is_first=None):
        """Remember what a skipped window has to put back."""
        for variable, start in zip(self._kept, self._start, strict=True):
            value = ops.convert_to_tensor(variable)
            if is_first is not None:
                value = ops.where(is_first, value, start.value)
            start.assign(value)

    def _put_back(self, variables):
        """Put back variables as the window's start has found them."""
        ids = {id(variable) for variable in variables}
        for variable, start in zip(self._kept, self._start, strict=True):
            if id(variable) in ids:
                variable.assign(start.value)

    def _look_ahead(self, stacked, share, add):
        """Embed a whole window, and differentiate its loss by that."""

        def body(index, batch, carry):
            return self._embed(batch, index, share), carry

        parts, _ = self._backend.scan(
            body, stacked, share.micro_batches, dtypes=self._cache.dtypes
        )
        cotangents, loss = self._differentiate(
            join_rows(parts), share.micro_batches, add
        )
        return split_rows(cotangents, parts[0]), loss

    def _embed(self, batch, index, share):
        info = self._info(index, share)
        self._hooks._log_book.open()
        batch = self._prepare(batch, index, share, info)
        with self._layers_in_window(index):
            return self._cache.embed(batch, info)

    def _differentiate(self, joined, micro_batches, add):
        self._put_back(self._kept)
        info = self._info(0, Share.whole(micro_batches))
        info = replace(info, index=None, is_last=None)
        embeddings, batch = joined
        loss, cotangents, gradients, logs = self._cache.differentiate(
            embeddings, batch, info
        )
        self._window.add_logs(logs)
        # As large as a gradient that counts k times and is divided by k.
        count = ops.cast(micro_batches, "float32")
        for position, gradient in enumerate(gradients):
            if gradient is not None:
                self._used.add(position)
                add(position, gradient * count)
        return cotangents, loss

    def _info(self, index, share):
        return Info(
            update=self._state.updates.value,
            epoch=self._state.epoch.value,
            index=index,
            micro_batches=share.micro_batches,
            is_last=ops.equal(index + 1, share.micro_batches),
            loss_scale=self._state.loss_scale.value,
            training=self._training,
        )

    def _prepare(self, batch, index, share, info):
        if self._may_draw:
            self._state.seat_rng(share.seat(index))
        return self._hooks.on_micro_batch(batch, info)

    @contextlib.contextmanager
    def _layers_in_window(self, index):
        with contextlib.ExitStack() as stack:
            for layer in self._window_layers:
                stack.enter_context(layer.micro_batch(ops.equal(index, 0)))
            yield

    def _accumulate(self, batch, index, share, totals, weighing, *, ahead, add):
        index = ops.cast(index, "int32")
        micro_batches = ops.cast(share.micro_batches, "int32")
        share = share._replace(micro_batches=micro_batches)
        info = self._info(index, share)
        book = self._hooks._log_book
        book.open()
        batch = self._prepare(batch, index, share, info)
        before = book.take()

        compute_loss = None
        if ahead is not None:
            cotangents, loss = ahead

            def compute_loss(batch, info):
                return self._cache.replay(batch, info, cotangents, loss)

        def objective():
            book.open()
            measured = self._objective.measure(batch, info, compute_loss)
            factors = loss_factors(
                measured.weighted,
                weighing,
                micro_batches=ops.cast(share.total, "float32"),
                totals=totals,
            )
            scaled = [
                factor * ops.cast(loss.mean, "float32")
                for factor, loss in zip(factors, measured.weighted, strict=True)
            ]
            total = total_loss(
                scaled, measured.weighted, measured.regularization
            )
            if self._loss_scale is not None:
                total = total * self._state.loss_scale.value
            summary = self._summary(measured, weighing, book.take())
            if self._weighs_losses:
                # A denominator may depend on the weights, as a count of what
                # is predicted does, and is a constant nevertheless.
                weight = ops.stop_gradient(summary["gradient_weight"])
                total = total * weight
            return total, summary

        # Layers may run again while their gradients are taken.
        with self._layers_in_window(index):
            summary, gradients = self._backend.value_and_grad(
                objective,
                self._model.trainable_variables,
                keeps_rows=self._weighs_losses,
            )
        info = replace(info, loss=summary["loss"], weight=summary["weight"])
        book.open()
        weight = summary["gradient_weight"]
        norm = self._add_gradients(gradients, weight, info, add)
        self._tally(summary, before | summary["logs"] | book.take())
        numbers = [summary["loss"], summary["weight"]]
        if self.measures_gradients:
            numbers += [norm, weight]
        return ops.stack(numbers)

    def _summary(self, measured, weighing, logs):
        """Gather what must leave the differentiated function, as tensors."""
        means = measured.means()
        return {
            "loss": total_loss(
                means, measured.weighted, measured.regularization
            ),
            "means": means,
            "denominators": measured.denominators(),
            "regularization": measured.regularization,
            "weight": measured.weight,
            "gradient_weight": gradient_weight(measured.weighted, weighing),
            "samples": measured.samples,
            "logs": logs,
        }

    @property
    def _weighs_losses(self):
        """Whether to multiply losses by their weights, not their gradients.

        That is the same, but a gradient that is added as it comes need not
        pass through memory once more, and the few rows of an embedding that
        have one can be added alone. Not where somebody looks at gradients,
        nor in float16, whose range the weights would leave.
        """
        return self._may_weigh_losses and not self.measures_gradients

    def _add_gradients(self, gradients, weight, info, add):
        if self._weighs_losses:
            for position, gradient in enumerate(gradients):
                if gradient is not None:
                    self._used.add(position)
                    add(position, gradient)
            return None
        factor = weight
        if self._loss_scale is not None:
            factor = factor / self._state.loss_scale.value
        if self._hooks.overrides("on_accumulate"):
            gradients = self._unscaled(gradients)
            gradients = self._hooks.on_accumulate(gradients, info)
            factor = weight
        norm = None
        if self.measures_gradients:
            used = [ops.cast(g, "float32") for g in gradients if g is not None]
            norm = global_norm(used) * (factor / weight)
        for position, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self._used.add(position)
            add(position, ops.cast(gradient, "float32") * factor)
        return norm

    def _unscaled(self, gradients):
        """Fill in zeros and undo the loss scale, for hooks."""
        variables = self._model.trainable_variables
        scale = 1.0 / self._state.loss_scale.value
        return [
            ops.zeros(v.shape, "float32")
            if g is None
            else ops.cast(g, "float32") * scale
            for g, v in zip(gradients, variables, strict=True)
        ]

    def _tally(self, summary, logs):
        weights = summary["denominators"]
        counted = ops.where(self._is_sum, ops.ones_like(weights), weights)
        self._window.add(
            summary["means"] * counted,
            ops.where(self._is_sum, ops.zeros_like(weights), weights),
            [
                summary["regularization"],
                summary["gradient_weight"],
                summary["samples"],
            ],
        )
        self._window.add_logs(logs)

    def _apply(self, micro_batches, weighing, sums):
        state, hooks = self._state, self._hooks
        count = ops.cast(micro_batches, "float32")
        means, denominators, regularization, weight, samples = (
            self._window_sums(count)
        )
        loss = total_loss(means, self._losses, regularization)
        info = Info(
            update=ops.copy(state.updates.value),
            epoch=state.epoch.value,
            micro_batches=micro_batches,
            loss=loss,
            total_weight=weight,
            loss_scale=state.loss_scale.value,
        )
        divisor = gradient_divisor(
            weighing, total_weight=weight, micro_batches=count
        )
        # The norm of what is yet to be divided, since dividing where the
        # optimizer reads it spares memory a pass.
        norm = ops.divide_no_nan(global_norm(sums), divisor)
        is_finite = ops.isfinite(norm)
        hooks._log_book.open()
        gradients = None
        if self._clips:
            gradients = _divide(sums, divisor)
        if hooks.overrides("on_apply"):
            gradients = hooks.on_apply(gradients, info)
            is_finite = ops.logical_and(
                is_finite, ops.isfinite(global_norm(gradients))
            )
        self._window.add_logs(hooks._log_book.take())
        # Copies, because both may be variables that are about to move.
        lr = ops.copy(ops.cast(self._optimizer.learning_rate, "float32"))
        scale = ops.copy(state.loss_scale.value)
        self._backend.cond(
            is_finite,
            lambda: self._commit(
                _divide(sums, divisor) if gradients is None else gradients,
                info,
                means,
                denominators,
            ),
            self._forget,
        )
        if self._loss_scale is not None:
            new_scale, good = next_scale(
                scale, state.good_windows.value, is_finite, self._loss_scale
            )
            state.loss_scale.assign(new_scale)
            state.good_windows.assign(good)
        state.micro_batches.assign(state.micro_batches.value + micro_batches)
        window = self._window_logs(loss, means) | {
            "learning_rate": lr,
            "gradient_norm": norm,
            "loss_scale": scale,
            "weight": weight,
        }
        if self._clips:
            window["clipped_gradient_norm"] = clipped_norm(
                gradients, self._optimizer
            )
        self._window.clear()
        return {
            "window": window,
            "running": self.running_logs(),
            "counters": {
                "applied": ops.cast(is_finite, "int32"),
                "updates": state.updates.value,
                "skipped_updates": state.skipped_updates.value,
                "consecutive_skips": state.consecutive_skips.value,
            },
        }

    def _clear_accumulators(self):
        for accumulator in self._accumulators:
            accumulator.assign(ops.zeros_like(accumulator.value))

    def _window_sums(self, micro_batches):
        numerators, denominators = self._window.losses()
        regularization, weight, samples = self._window.extras()
        means = ops.where(
            self._is_sum, numerators, window_means(numerators, denominators)
        )
        regularization = regularization / micro_batches
        return means, denominators, regularization, weight, samples

    def _commit(self, gradients, info, means, denominators):
        """Make the update; every clock that counts updates moves."""
        state = self._state
        self._optimizer.apply(
            self._for_optimizer(gradients), self._model.trainable_variables
        )
        state.updates.assign(state.updates.value + 1)
        state.consecutive_skips.assign(
            ops.zeros_like(state.consecutive_skips.value)
        )
        for layer in self._window_layers:
            layer.after_apply()
        self._hooks._log_book.open()
        self._hooks.after_apply(replace(info, update=state.updates.value))
        self._window.add_logs(self._hooks._log_book.take())
        count = ops.cast(info.micro_batches, "float32")
        self._add_to_epoch(means, denominators, count)

    def _add_to_epoch(self, means, denominators, count):
        """Add the window to the epoch's running means."""
        regularization, _, samples = self._window.extras()
        weights = ops.where(self._is_sum, samples, denominators)
        self._epoch.add(
            means * weights,
            weights,
            [samples * regularization / count, samples, samples],
        )
        self._epoch.add_logs(self._window.logs())

    def _forget(self):
        """Put back what the window changed; random streams stay advanced."""
        state = self._state
        self._put_back(self._undoable)
        state.skipped_updates.assign(state.skipped_updates.value + 1)
        state.consecutive_skips.assign(state.consecutive_skips.value + 1)

    def _for_optimizer(self, gradients):
        """Leave unused variables out, as Keras does, unless a hook looked."""
        if any(map(self._hooks.overrides, ("on_accumulate", "on_apply"))):
            return gradients
        return [
            gradient if position in self._used else None
            for position, gradient in enumerate(gradients)
        ]

    def _window_logs(self, loss, means):
        losses = {"loss": loss} | named_losses(self.loss_names, means)
        return losses | self._window.values()

    def running_logs(self):
        """Read the epoch so far: losses, metrics, logged values."""
        means = window_means(*self._epoch.losses())
        regularization, weight, _ = self._epoch.extras()
        regularization = ops.divide_no_nan(regularization, weight)
        named = named_losses(self.loss_names, means)
        logs = {
            "loss": total_loss(means, self._losses, regularization),
            **named,
            **metric_results(self._model),
            **self._epoch.values(),
        }
        # A model that Keras has trained has metrics for the named losses too,
        # which a window leaves alone.
        return logs | named

    def running_logs_with(self, micro_batches):
        """Read the epoch so far, as if the open window had been applied.

        Args:
            micro_batches: scalar tensor, int32, those of the open window.

        Returns:
            Dict of tensors.
        """
        count = ops.cast(micro_batches, "float32")
        means, denominators, *_ = self._window_sums(count)
        read = [
            *self._window.variables,
            *self._epoch.variables,
            *metric_variables(self._model),
        ]
        with Scratch(read):
            self._add_to_epoch(means, denominators, count)
            return self.running_logs()


def _divide(sums, divisor):
    """Divide the sums of gradients by what their weights add up to."""
    return [ops.divide_no_nan(total, divisor) for total in sums]


def _length(stacked):
    """Count the micro-batches of a `Batch` of tensors `[k, m, ...]`."""
    return ops.shape(tree.flatten(stacked)[0])[0]


def _weighed_rows(rows):
    """Turn the numbers of micro-batches into what adds up over replicas."""
    loss, weight, *rest = ops.unstack(rows, rows.shape[1], axis=1)
    if rest:
        norm, factor = rest
        rest = [norm * norm, factor]
    return ops.stack([loss * weight, weight, *rest], axis=1)


def _mean_rows(rows, replicas):
    """Undo that: losses are means by weight, norms root mean squares."""
    loss, weight, *rest = ops.unstack(rows, rows.shape[1], axis=1)
    if rest:
        norm, factor = rest
        rest = [ops.sqrt(norm / replicas), factor / replicas]
    return ops.stack([ops.divide_no_nan(loss, weight), weight, *rest], axis=1)
