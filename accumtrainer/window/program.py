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
`accumtrainer.window.gradient_cache`.

`accumtrainer.window.passes` is the body of that loop,
`accumtrainer.window.update` what follows it, `accumtrainer.window.variables`
what both keep; here they become the functions that are compiled: a whole window
in one call, or one micro-batch after the other.

All of it works on Keras variables. A backend runs it in place (TensorFlow) or
as a function of the variables' values (JAX); what must differ is asked of the
backend: to differentiate, to loop, to branch, to compile.
"""

from accumtrainer.keras_api import ops
from accumtrainer.window.gradient_cache import (
    join,
    join_rows,
    split,
    split_rows,
)
from accumtrainer.window.hooks import context_of
from accumtrainer.window.passes import Passes, join_uses, length, uses
from accumtrainer.window.replicas import Share
from accumtrainer.window.shared_window import SharedWindow, share_of
from accumtrainer.window.survey import Survey, kind_of
from accumtrainer.window.update import Update
from accumtrainer.window.variables import WindowVariables
from accumtrainer.window.weighing import choose_weighing


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
        self._state = state
        self._backend = backend
        self._combine = combine
        self._loss_scale = loss_scale
        self._passes = Passes(
            hooks,
            state,
            backend,
            loss_scale=loss_scale,
            tracked=list(tracked),
            training=training,
        )

    # Before the first window.

    def build(self, batch):
        """Learn from one micro-batch what a window has to keep.

        Args:
            batch: `Batch` of arrays, one micro-batch.
        """
        hooks, state, backend = self._hooks, self._state, self._backend
        passes = self._passes
        context_of(hooks).log_book.reductions.clear()
        survey = Survey(hooks, passes, backend, batch)
        self.operations = survey.operations
        self.losses = passes.objective.expected = survey.losses
        self.idle_metrics = survey.idle_metrics
        self.moved = survey.moved
        self._surveys = {kind_of(batch): survey}
        if not hooks.optimizer.built:
            hooks.optimizer.build(hooks.model.trainable_variables)
        variables = WindowVariables(hooks, state, backend, survey, passes)
        self._variables = variables
        self._update = Update(
            hooks,
            state,
            backend,
            passes,
            variables,
            loss_scale=self._loss_scale,
        )
        self._shared = SharedWindow(hooks, state, backend, passes, variables)

    def learn(self, batch):
        """Learn what the micro-batches to come are like.

        Sample weights, or another part that was not there before, change how
        a window is weighed, and what it writes.

        Args:
            batch: `Batch` of arrays, one micro-batch.
        """
        kind = kind_of(batch)
        objective = self._passes.objective
        if kind not in self._surveys:
            survey = Survey(self._hooks, self._passes, self._backend, batch)
            self._variables.expect(survey)
            self._surveys[kind] = survey
        self._variables.follow(self._surveys[kind])
        self.losses = objective.expected = self._surveys[kind].losses
        self.idle_metrics = self._surveys[kind].idle_metrics
        self.moved = self._surveys[kind].moved

    @property
    def signature(self):
        """See `Survey.signature`, of the micro-batches to come."""
        return self._variables.survey.signature

    @property
    def revision(self):
        """See `WindowVariables.revision`."""
        return self._variables.revision

    @property
    def measures_gradients(self):
        """Whether the norm of each micro-batch's gradient is reported too.

        What has been compiled does not notice a change.
        """
        return self._passes.measures_gradients

    @measures_gradients.setter
    def measures_gradients(self, measures):
        self._passes.measures_gradients = measures

    @property
    def parts(self):
        """See `WindowVariables.parts`."""
        return self._variables.parts

    @property
    def all_used(self):
        """What a window that uses all variables returns, see `passes.uses`."""
        return uses(self._hooks.model.trainable_variables)

    @property
    def passing(self):
        """See `WindowVariables.passing`."""
        return self._variables.passing

    @property
    def variables(self):
        """See `WindowVariables.all`."""
        return self._variables.all

    @property
    def moved_by_micro_batches(self):
        """See `WindowVariables.moved_by_passes`."""
        return self._variables.moved_by_passes

    def make_accumulators(self):
        """See `WindowVariables.make_accumulators`."""
        self._variables.make_accumulators()

    def start_epoch(self, epoch):
        """See `WindowVariables.start_epoch`."""
        self._variables.start_epoch(epoch)

    @property
    def micro_batches(self):
        """The variable that counts micro-batches, by which hooks draw."""
        return self._state.micro_batches

    def count_micro_batches(self, micro_batches):
        """Count micro-batches whose window is not applied.

        Args:
            micro_batches: int.
        """
        counter = self._state.micro_batches
        counter.assign(counter.value + micro_batches)

    def looks_ahead(self, micro_batches):
        """Whether a window has to be embedded before its first gradient.

        Args:
            micro_batches: k, an int or a tensor.
        """
        is_one = isinstance(micro_batches, int) and micro_batches == 1
        return self._passes.looks_ahead and not is_one

    def needs_totals(self, is_even):
        """Whether `run_micro_batch` wants the window's denominators."""
        return self._weighing(is_even=is_even).needs_totals

    @property
    def can_stream(self):
        """Whether micro-batches can run before their window is known.

        Losses with denominators of their own cannot: what each counts depends
        on the whole window. Nor can those that are divided at once.
        """
        weighing = self._weighing(is_even=False)
        return weighing.rule != "balance" and not weighing.divides_losses

    def _weighing(self, is_even):
        return choose_weighing(
            self.losses,
            combine=self._combine,
            is_even=is_even,
            divides_losses=self._passes.divides_losses,
        )

    # A whole window in one call.

    def run_window(self, stacked):
        """Consume a whole window of equally shaped micro-batches.

        Stands for: the loop at the top of this module.

        Args:
            stacked: `Batch` of tensors `[k, m, ...]`.

        Returns:
            Report of the update, see `Update.apply`; and under
            `"per_micro_batch"` a tensor `[k, n]`, see `Passes.run`.
        """
        micro_batches = length(stacked)
        weighing = self._weighing(is_even=True)
        looks_ahead = self.looks_ahead(micro_batches)
        if self._passes.weighs_losses and not looks_ahead:
            weighing = weighing.divide_first(micro_batches)
        share = Share.whole(micro_batches, weighing)
        if weighing.needs_totals:
            totals = self._passes.scan_weights(stacked, share)
            share = share._replace(totals=totals)
        self._variables.keep_start()
        sums = self._passes.no_sums()
        ahead = None
        with self._variables.begun_empty():
            if looks_ahead:
                parts = self._passes.scan_embeddings(stacked, share)
                cotangents, loss, gradients = self._differentiate(
                    join_rows(parts), micro_batches
                )
                ahead = split_rows(cotangents, parts[0]), loss
                sums = self._passes.add(sums, gradients)
            per_micro_batch, sums, used = self._passes.scan(
                stacked, share, self._variables.window, sums, ahead=ahead
            )
            if looks_ahead:
                used = join_uses([used, uses(gradients)])
            report = self._update.apply(
                ops.cast(micro_batches, "int32"), weighing, list(sums), used
            )
        return report | {"per_micro_batch": per_micro_batch}

    def run_shares(self, shares):
        """Consume a window that is shared out among replicas.

        Args:
            shares: `Shares` of tensors.

        Returns:
            As `run_window`. There is a row for every part of a micro-batch
            that `share_out` has made, added up over all replicas that count
            it, see `join_parts`.
        """
        share, is_even = share_of(shares, self._backend.replicas)
        weighing = self._weighing(is_even=is_even)
        share = share._replace(weighing=weighing)
        if weighing.needs_totals:
            totals = self._shared.totals(shares, share)
            share = share._replace(totals=totals)
        self._variables.keep_start()
        sums, per_micro_batch, used = self._shared.run(shares, share)
        report = self._update.apply(
            ops.cast(share.total, "int32"), weighing, sums, used
        )
        self._variables.window.clear()
        return report | {"per_micro_batch": per_micro_batch}

    # One micro-batch after the other.

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
            Pair: tensor `[n]`, see `Passes.run`; and which variables it
            uses, see `passes.uses`.
        """
        self._variables.keep_start(is_first=ops.equal(index, 0))
        share = Share.whole(micro_batches, self._weighing(is_even), totals)
        numbers, gradients = self._passes.run(
            batch, index, share, self._variables.window, ahead
        )
        self._variables.accumulate(gradients)
        return numbers, uses(gradients)

    def measure_weights(self, batch, index, micro_batches):
        """Measure a micro-batch's denominators, without effect.

        Args:
            batch: `Batch` of tensors `[m, ...]`.
            index: scalar tensor, int32.
            micro_batches: scalar tensor, int32.

        Returns:
            Tensor `(losses,)`, float32.
        """
        share = Share.whole(micro_batches)
        return self._passes.measure_weights(batch, index, share)

    def embed(self, batch, index, micro_batches):
        """Embed one micro-batch, to look ahead; no gradient is taken.

        Args:
            batch: `Batch` of tensors `[m, ...]`.
            index: scalar tensor, int32.
            micro_batches: scalar tensor, int32, k.

        Returns:
            See `Passes.embed`.
        """
        self._variables.keep_start(is_first=ops.equal(index, 0))
        return self._passes.embed(batch, index, Share.whole(micro_batches))

    def differentiate(self, parts, micro_batches):
        """Differentiate the loss of a window by its embeddings.

        Forgets what `embed` has changed, so that embedding again repeats it.

        Args:
            parts: list of k results of `embed`.
            micro_batches: scalar tensor, int32, k.

        Returns:
            Pair: list of k pairs, what `run_micro_batch` takes as `ahead`;
            and which variables the loss itself uses, see `passes.uses`.
        """
        cotangents, loss, gradients = self._differentiate(
            join(parts), micro_batches
        )
        self._variables.accumulate(gradients)
        embeddings = [embedding for embedding, _ in parts]
        ahead = [(c, loss) for c in split(cotangents, embeddings)]
        return ahead, uses(gradients)

    def _differentiate(self, joined, micro_batches):
        self._variables.put_back()
        return self._passes.differentiate(
            joined, micro_batches, self._variables.window
        )

    def apply(self, micro_batches, is_even, used):
        """Apply what `run_micro_batch` has accumulated.

        Args:
            micro_batches: scalar tensor, int32, k.
            is_even: Python bool, as given to `run_micro_batch`.
            used: which variables the window uses, see `passes.uses`.

        Returns:
            See `Update.apply`.
        """
        report = self._update.apply(
            micro_batches,
            self._weighing(is_even),
            self._variables.accumulated,
            used,
        )
        self._variables.clear_sums()
        return report

    def take_gradients(self, micro_batches, is_even):
        """Average what `run_micro_batch` has accumulated, and apply nothing.

        Args:
            micro_batches: scalar tensor, int32, k.
            is_even: Python bool, as given to `run_micro_batch`.

        Returns:
            See `Update.take_gradients`.
        """
        taken = self._update.take_gradients(
            micro_batches,
            self._weighing(is_even),
            self._variables.accumulated,
        )
        self._variables.clear_sums()
        return taken

    # What has been trained on so far.

    def running_logs_with(self, micro_batches):
        """See `Update.running_logs_with`."""
        return self._update.running_logs_with(micro_batches)
