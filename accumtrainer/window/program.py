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

Where nobody looks at the gradients of a micro-batch, its losses are multiplied
by the weight in their place, which is the same and takes less time.

Where there is a hook `perturb`, it is given `sums / total_weight` first and
moves the weights; all else is put back, the loop runs again there, and the
weights return before `on_apply`.

A loss that couples the examples of a window needs gradient caching: see
`accumtrainer.window.gradient_cache`.

`accumtrainer.window.passes` is the body of that loop,
`accumtrainer.window.update` what follows it, `accumtrainer.window.variables`
what both keep; here they become the functions that are compiled: a whole window
in one call, or one micro-batch after the other.

All of it works on Keras variables. A backend runs it in place (TensorFlow) or
as a function of the variables' values (JAX); what must differ is asked of the
backend: to differentiate, to loop, to branch, to compile.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from accumtrainer import errors
from accumtrainer.data.batches import (
    Batch,
    count_samples,
    kind_of,
    leaves,
    map_leaves,
)
from accumtrainer.keras_api import ops
from accumtrainer.keras_api.rebuild import build
from accumtrainer.keras_api.types import Nest, Tensor
from accumtrainer.window.draws import drawing_again
from accumtrainer.window.gradient_cache import (
    join,
    join_rows,
    split,
    split_rows,
)
from accumtrainer.window.gradients import Uses, join_uses, uses
from accumtrainer.window.hooks import context_of
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.passes import Cached, Passes, length
from accumtrainer.window.replicas import SharedWindow, share_of
from accumtrainer.window.survey import Survey, take_survey
from accumtrainer.window.update import Update
from accumtrainer.window.variables import WindowVariables
from accumtrainer.window.weighing import (
    Share,
    Shares,
    Weighing,
    choose_weighing,
)

Outcome = dict[str, Any]
"""What `Update.apply` returns; of a whole window, packed numbers under
`"per_micro_batch"` too, `[k, n]`, see `Passes.run`."""


class WindowProgram:
    """Consumes the micro-batches of a window and applies one update.

    Before it does so it must `learn` what they are like.

    Args:
        parts: whose windows run, and on what.
        before: see `WindowVariables`.

    Attributes:
        passes: what runs a micro-batch.
        variables: what a window moves, once there is a survey.
    """

    variables: WindowVariables

    def __init__(
        self, parts: WindowParts, before: WindowVariables | None = None
    ):
        self._parts = parts
        self._before = before
        self._backend = parts.backend
        self.passes = Passes(parts)
        self._surveys: dict[Hashable, Survey] = {}

    # Before a window.

    def learn(self, batch: Batch) -> None:
        """Learn what the micro-batches to come are like.

        Sample weights, or another part that was not there before, change how
        a window is weighed, and what it writes.

        Args:
            batch: arrays, one micro-batch.
        """
        kind = kind_of(batch)
        if self._parts.per_example:
            batch = map_leaves(lambda leaf: leaf[:1], batch)
        if not self._surveys:
            context_of(self._parts.hooks).log_book.reductions.clear()
        if kind not in self._surveys:
            objective = self.passes.objective
            look = functools.partial(take_survey, self._parts, self.passes)
            objective.forget()
            survey = look(batch)
            if objective.is_unsure:
                objective.look_at_twice(look, batch)
                survey = look(batch)
            self._begin(survey)
            self._surveys[kind] = survey
        self._turn_to(self._surveys[kind])

    def learn_epoch(self, batches: Iterable[Batch]) -> None:
        """Learn what the epoch had so far, and turn back to what is to come.

        Args:
            batches: arrays, a micro-batch of each kind, in their order.
        """
        survey = self.survey
        self.variables.kinds_of_epoch = ()
        for batch in batches:
            self.learn(batch)
            self.variables.note_kind()
        self._turn_to(survey)

    def _turn_to(self, survey: Survey) -> None:
        self.variables.follow(survey)
        self.passes.objective.expected = survey.losses
        self.passes.streams = self.variables.streams

    def _begin(self, survey: Survey) -> None:
        """Get ready for micro-batches like one that was surveyed."""
        if self._surveys:
            self.variables.expect(survey)
            return
        parts, hooks = self._parts, self._parts.hooks
        if not hooks.optimizer.built:
            build(hooks.optimizer, parts.model)
        self.variables = WindowVariables(
            parts,
            self.passes.gradients,
            survey,
            runs_twice=self.passes.caches_gradients or self.passes.perturbs,
            before=self._before,
        )
        self._before = None
        self._update = Update(parts, self.passes, self.variables)
        self._shared = SharedWindow(parts, self.passes, self.variables)

    def raised_at_once(
        self, error: Exception, batches: Iterable[Batch]
    ) -> Exception:
        """Provoke an error anew on the shortest way to it, if there is one.

        What only some shape provokes comes up while a whole window is traced,
        many calls deep.

        Args:
            error: that came up.
            batches: arrays, the micro-batches that were run.

        Returns:
            The same with a short trace, or what was given. What a micro-batch
            provokes that is smaller than others says so in a note.
        """
        by_shapes = {str([x.shape for x in leaves(b)]): b for b in batches}
        # The largest first: of what a smaller one alone provokes, that is told.
        tried = sorted(by_shapes.values(), key=count_samples, reverse=True)
        for batch in tried:
            try:
                take_survey(self._parts, self.passes, batch)
            except type(error) as found:
                few, many = count_samples(batch), count_samples(tried[0])
                if few < many:
                    note = errors.SMALLER_MICRO_BATCH
                    found.add_note(note.format(few=few, many=many))
                within = found.__traceback__ and found.__traceback__.tb_next
                return found.with_traceback(within)
            except Exception:
                break
        return error

    def knows(self, kind: Hashable) -> bool:
        """Whether micro-batches of a kind, see `kind_of`, were learnt of."""
        return kind in self._surveys

    @property
    def survey(self) -> Survey:
        """What is known of micro-batches like those to come."""
        return self.variables.survey

    @property
    def all_used(self) -> Uses:
        """What a window that uses all variables returns."""
        return uses(self._parts.model.trainable_variables)

    def caches_gradients(self, micro_batches: Tensor | int) -> bool:
        """Whether a window of k must be embedded before its first gradient."""
        is_one = isinstance(micro_batches, int) and micro_batches == 1
        return self.passes.caches_gradients and not is_one

    @property
    def can_stream(self) -> bool:
        """Whether micro-batches can run before their window is known.

        Losses with denominators of their own cannot: what each counts depends
        on the whole window. Nor can those that are divided at once.
        """
        weighing = self.weighing(is_even=False)
        return weighing.rule != "balance" and not weighing.divides_losses

    def weighing(
        self, *, is_even: bool, micro_batches: Tensor | int | None = None
    ) -> Weighing:
        """Choose how a window is weighed whose micro-batches are surveyed.

        Args:
            is_even: whether they have equal shapes.
            micro_batches: k, an int or a scalar tensor, where it is known
                before the first of them.
        """
        weighing = choose_weighing(
            self.survey.losses,
            combine=self._parts.combine,
            is_even=is_even,
            divides_losses=self.passes.divides_losses,
            per_example=self._parts.per_example,
        )
        if micro_batches is None or not self.passes.weighs_losses:
            return weighing
        if self.caches_gradients(micro_batches):
            return weighing
        return weighing.divide_first(micro_batches)

    # A whole window in one call.

    def run_window(self, stacked: Batch) -> Outcome:
        """Consume a whole window of equally shaped micro-batches.

        Stands for: the loop at the top of this module.

        Args:
            stacked: tensors `[k, m, ...]`.
        """
        micro_batches = length(stacked)
        weighing = self.weighing(is_even=True, micro_batches=micro_batches)
        share = Share.whole(micro_batches, weighing)
        self.variables.keep_start()
        with self.variables.begun_empty():
            return self._run_and_apply(self._run_all, stacked, share)

    def _run_and_apply(
        self,
        run: Callable[[Any, Share], tuple[Tensor, list[Tensor], Uses]],
        window: Batch | Shares,
        share: Share,
    ) -> Outcome:
        """Run all of a window, a second time if weights move, and apply it.

        Args:
            run: runs the window by what `share` says; see `_run_all`.
        """
        count, weighing = ops.cast(share.total, "int32"), share.weighing
        if self.passes.perturbs:
            _, sums, _ = run(window, share)
            before = self._update.perturb(count, weighing, sums)
        per_micro_batch, sums, used = run(window, share)
        if self.passes.perturbs:
            self.variables.move_weights_back(before)
        report = self._update.apply(count, weighing, sums, used)
        return report | {"per_micro_batch": per_micro_batch}

    def _run_all(
        self, stacked: Batch, share: Share
    ) -> tuple[Tensor, list[Tensor], Uses]:
        """Run the micro-batches of a window, and what must be known ahead.

        Args:
            stacked: tensors `[k, m, ...]`.
            share: of them all, without totals.

        Returns:
            Triple: `[k, n]`, see `Passes.run`; their sums of gradients; and
            what has been added to them.
        """
        if share.weighing.needs_totals:
            with drawing_again(self.passes.variables):
                totals = self.passes.scan_denominators(stacked, share)
            share = share._replace(totals=totals)
        sums = self.passes.gradients.no_sums()
        micro_batches, cached, ahead = share.micro_batches, None, []
        if self.caches_gradients(micro_batches):
            parts = self.passes.scan_embeddings(
                stacked, share, self.survey.embedding_dtypes
            )
            cotangents, loss, gradients = self._cache_gradients(
                join_rows(parts), micro_batches
            )
            cached = split_rows(cotangents, parts[0]), loss
            sums = self.passes.gradients.add(sums, gradients)
            ahead.append(uses(gradients))
        rows, sums, used = self.passes.scan(
            stacked, share, self.variables.window, sums, cached=cached
        )
        return rows, list(sums), join_uses([used, *ahead])

    def run_shares(self, shares: Shares) -> Outcome:
        """Consume a window that is shared out among replicas.

        Args:
            shares: of tensors.

        Returns:
            As of `run_window`, with a row for every part of a micro-batch
            that `share_out` has made, added up over all replicas that count
            it, see `join_parts`.
        """
        share, is_even = share_of(shares, self._backend.replicas.count)
        weighing = self.weighing(is_even=is_even, micro_batches=share.total)
        share = share._replace(weighing=weighing)
        self.variables.keep_start()
        outcome = self._run_and_apply(self._shared.run, shares, share)
        self.variables.window.clear()
        return outcome

    # One micro-batch after the other.

    def run_micro_batch(
        self,
        batch: Batch,
        index: Tensor,
        micro_batches: Tensor,
        totals: Tensor,
        cached: Cached = None,
        *,
        weighing: Weighing,
    ) -> tuple[Tensor, Uses]:
        """Consume one micro-batch of a window.

        Args:
            batch: tensors `[m, ...]`.
            index: scalar, int32.
            micro_batches: scalar, int32, k.
            totals: `(losses,)`, float32, see `measure_denominators`.
            cached: what `cache_gradients` returns for it, if it was called.
            weighing: of the window.

        Returns:
            Pair: packed numbers, see `Passes.run`, and which variables it
            uses.
        """
        is_first = ops.equal(index, 0)
        if weighing.needs_totals and totals is not None:
            self.variables.draw_again(is_first)
        if cached is None:  # else `embed` has, before the window's loss
            self.variables.keep_start(is_first=is_first)
        share = Share.whole(micro_batches, weighing, totals)
        numbers, gradients = self.passes.run(
            batch, index, share, self.variables.window, cached
        )
        self.variables.accumulate(gradients)
        return numbers, uses(gradients)

    def measure_denominators(
        self, batch: Batch, index: Tensor, micro_batches: Tensor
    ) -> Tensor:
        """Measure a micro-batch's denominators; see `Passes`."""
        self.variables.keep_random_states(is_first=ops.equal(index, 0))
        share = Share.whole(micro_batches)
        return self.passes.measure_denominators(batch, index, share)

    def embed(self, batch: Batch, index: Tensor, micro_batches: Tensor) -> Nest:
        """Embed one micro-batch ahead; see `Passes.embed`."""
        self.variables.keep_start(is_first=ops.equal(index, 0))
        return self.passes.embed(batch, index, Share.whole(micro_batches))

    def cache_gradients(
        self, parts: list[Nest], micro_batches: Tensor
    ) -> tuple[Sequence[Cached], Uses]:
        """Differentiate the loss of a window by its embeddings.

        Forgets what `embed` has changed, so that embedding again repeats it.

        Args:
            parts: k results of `embed`.
            micro_batches: scalar, int32, k.

        Returns:
            Pair: for each micro-batch what `run_micro_batch` takes, and which
            variables the loss itself uses.
        """
        cotangents, loss, gradients = self._cache_gradients(
            join(parts), micro_batches
        )
        self.variables.accumulate(gradients)
        embeddings = [embedding for embedding, _ in parts]
        cached = [(c, loss) for c in split(cotangents, embeddings)]
        return cached, uses(gradients)

    def _cache_gradients(
        self, joined: tuple[Nest, Batch], micro_batches: Tensor
    ) -> tuple[Nest, Tensor, list[Tensor | None]]:
        self.variables.put_back()
        return self.passes.cache_gradients(
            joined, micro_batches, self.variables.window
        )

    def perturb(self, micro_batches: Tensor, *, weighing: Weighing) -> None:
        """Move the weights to where the window is to run again.

        What must keep them meanwhile has been made.

        Args:
            micro_batches: scalar, int32, k.
            weighing: of the window.
        """
        variables = self.variables
        before = self._update.perturb(
            micro_batches, weighing, variables.accumulated
        )
        for kept, value in zip(variables.weights_before, before, strict=True):
            kept.assign(value)
        variables.clear_gradients()

    def _move_weights_back(self) -> None:
        if self.passes.perturbs:
            kept = self.variables.weights_before
            self.variables.move_weights_back([v.value for v in kept])

    def apply(
        self, micro_batches: Tensor, *, weighing: Weighing, used: Uses
    ) -> Outcome:
        """Apply what `run_micro_batch` has accumulated.

        Args:
            micro_batches: scalar, int32, how many it has run.
            weighing: of the window.
            used: by all of them.
        """
        self._move_weights_back()
        report = self._update.apply(
            micro_batches,
            weighing,
            self.variables.accumulated,
            used,
        )
        self.variables.clear_sums()
        return report

    def take_gradients(
        self, micro_batches: Tensor, *, weighing: Weighing
    ) -> tuple[Tensor, list[Tensor]]:
        """Average what `run_micro_batch` has accumulated, and apply nothing.

        See `Update.take_gradients`.
        """
        self._move_weights_back()
        taken = self._update.take_gradients(
            micro_batches, weighing, self.variables.accumulated
        )
        self.variables.clear_sums()
        return taken

    # What has been trained on so far.

    def running_logs_with(self, micro_batches: Tensor) -> dict[str, Tensor]:
        """See `Update.running_logs_with`."""
        return self._update.running_logs_with(micro_batches)
