"""One pass over a micro-batch, and over several of one shape.

A pass runs the hooks of a micro-batch, differentiates its loss, and weighs
the gradient as it counts in the window. See `accumtrainer.window.program` for
the algorithm it is a part of, `accumtrainer.window.weighing` for the weights.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from accumtrainer.data.batches import Batch, leaves
from accumtrainer.keras_api import flatten_layers, ops
from accumtrainer.keras_api.types import Nest, Tensor, Variable
from accumtrainer.layers import WindowLayer
from accumtrainer.window.clipping import global_norm
from accumtrainer.window.draws import only_drawing
from accumtrainer.window.gradient_cache import GradientCache
from accumtrainer.window.gradients import Gradients, Uses, uses
from accumtrainer.window.hooks import HOOK_NAMES, Info, collect_logs
from accumtrainer.window.loss_scale import computes_in_float16
from accumtrainer.window.losses import WeightedLoss, count_samples, minimized
from accumtrainer.window.numbers import OfMicroBatch, OfPart
from accumtrainer.window.objective import Measured, Objective, total_loss
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.passed import Passed, summary_of
from accumtrainer.window.per_example import (
    count_each,
    joined,
    judged_of,
    map_examples,
    to_be_judged,
)
from accumtrainer.window.state import RunningSums
from accumtrainer.window.weighing import (
    Share,
    loss_factors,
    loss_weight,
)

Cached = tuple[Nest, Tensor] | None
"""What gradient caching keeps: cotangents of embeddings, the window's loss."""


class Passes:
    """Runs micro-batches, and returns their gradients as they count.

    Attributes:
        objective: measures losses.
        gradients: what is done with lists of gradients.
        caches_gradients: whether windows of several micro-batches are embedded
            first.
        perturbs: whether windows run a second time, at moved weights.
        measures_gradients: whether to report the norm of each micro-batch's
            gradient too. What has been compiled does not notice a change.
        streams: random states that are drawn from and belong to nobody.
    """

    def __init__(self, parts: WindowParts):
        hooks = parts.hooks
        self._parts = parts
        self._hooks = hooks
        self._state = parts.state
        self._backend = parts.backend
        self.caches_gradients = hooks.has_window_loss
        self.perturbs = hooks.overrides("perturb")
        self._cache = GradientCache(parts)
        self._may_draw = any(map(hooks.overrides, HOOK_NAMES))
        self._may_weigh_losses = not (
            parts.loss_scale is not None
            or parts.per_example
            or hooks.overrides("on_accumulate")
            or computes_in_float16(parts.model)
        )
        self.objective = Objective(hooks, parts.backend)
        self.gradients = Gradients(parts)
        self.measures_gradients = False
        self.streams: list[Variable] = []

    @property
    def variables(self) -> list[Variable]:
        """What a micro-batch may read or move, and what it draws from."""
        return [*self._parts.variables, *self.streams]

    @functools.cached_property
    def window_layers(self) -> list[WindowLayer]:
        """The model's layers that know about windows."""
        return [
            layer
            for layer in flatten_layers(self._parts.model)
            if isinstance(layer, WindowLayer)
        ]

    # What hooks and layers are told.

    def info(self, index: Tensor | int, share: Share) -> Info:
        """Tell which micro-batch of its window this is."""
        return Info(
            update=self._state.updates.value,
            epoch=self._state.epoch.value,
            index=index,
            micro_batches=share.micro_batches,
            is_last=ops.equal(index + 1, share.micro_batches),
            loss_scale=self._state.loss_scale.value,
            training=self._parts.training,
        )

    @contextlib.contextmanager
    def layers_in_window(self, index: Tensor | int) -> Iterator[None]:
        """Tell the layers that know about windows where in one they are."""
        with contextlib.ExitStack() as stack:
            for layer in self.window_layers:
                stack.enter_context(layer.micro_batch(ops.equal(index, 0)))
            yield

    def _fold_in(self, index: Tensor, share: Share) -> None:
        if self._may_draw:
            self._state.fold_in(share.number_of(index))

    # One micro-batch.

    def run(
        self,
        batch: Batch,
        index: Tensor,
        share: Share,
        running: RunningSums,
        cached: Cached = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Run one micro-batch.

        Args:
            batch: tensors `[m, ...]`.
            index: scalar, its place in the window.
            share: what it belongs to, which says how it counts.
            running: of the window; its numbers are added to it.
            cached: if the window was looked at ahead.

        Returns:
            Pair. What is told of it, packed: `OfMicroBatch`, or `OfPart` of
            what a replica runs. And its gradients, to be added to the
            window's, float32 as soon as they are added, or `None` where it
            has none.
        """
        index = ops.cast(index, "int32")
        micro_batches = ops.cast(share.micro_batches, "int32")
        share = share._replace(micro_batches=micro_batches)
        info = self.info(index, share)
        self._fold_in(index, share)
        # Layers may run again while their gradients are taken.
        with self.layers_in_window(index):
            if self._parts.per_example:
                passed = self._run_examples(batch, share, info)
            else:
                passed = self._run_rows(batch, share, info, cached)
        summary, gradients, norm = passed
        running.add(passed.sums)
        logs = summary["logs"]
        running.add_logs(
            running.merged(logs) if self._parts.per_example else logs
        )
        is_part = share.split is not None
        return self._numbers(summary, norm, is_part=is_part), gradients

    def _run_rows(
        self, batch: Batch, share: Share, info: Info, cached: Cached = None
    ) -> Passed:
        """Run all of a micro-batch, or one example of it, by itself."""
        with collect_logs(self._hooks) as logs_before:
            batch = self._hooks.on_micro_batch(batch, info)

        compute_loss = None
        if cached is not None:
            cotangents, loss = cached

            def compute_loss(batch: Batch, info: Info) -> WeightedLoss:
                return self._cache.replay(batch, info, cotangents, loss)

        def objective() -> tuple[Tensor, Nest]:
            with collect_logs(self._hooks) as logs:
                measured = self.objective.measure(
                    batch,
                    info,
                    compute_loss,
                    updates_metrics=not self._parts.per_example,
                )
            self.objective.check(measured.losses)
            total = self._balanced(measured, share)
            logs = logs_before | logs
            summary = summary_of(measured, share.weighing, logs)
            if self._parts.per_example:
                summary |= to_be_judged(batch, measured.outputs)
            # A denominator may depend on the weights, as a count of what is
            # predicted does, and is a constant nevertheless.
            weight = ops.stop_gradient(summary["gradient_weight"])
            weight = self._weight_of_losses(weight, share)
            return total if weight is None else total * weight, summary

        summary, gradients = self._backend.value_and_grad(
            objective,
            self._parts.model.trainable_variables,
            keeps_rows=self.weighs_losses,
        )
        info = replace(info, loss=summary["loss"], weight=summary["weight"])
        weight = summary["gradient_weight"]
        with collect_logs(self._hooks) as logs:
            gradients, norm = self._weigh(gradients, weight, share, info)
        summary["logs"] |= logs
        return Passed(summary, gradients, norm)

    def _run_examples(self, batch: Batch, share: Share, info: Info) -> Passed:
        """Run each example of a micro-batch by itself, all at once."""
        share = count_each(share, batch)
        examples = map_examples(
            self._parts,
            lambda row: self._run_rows(row, share, info),
            batch,
            self.streams,
        )
        assert self.objective.expected is not None
        losses = self.objective.expected
        passed = joined(examples, losses, self._backend)
        if examples.summary["outputs"] is not None:
            judged = judged_of(examples.summary)
            self.objective.update_metrics(*judged)
        if self.measures_gradients:
            norm = global_norm(self.gradients.ordinary(passed.gradients))
            weight = passed.summary["gradient_weight"]
            passed = passed._replace(norm=ops.divide_no_nan(norm, weight))
        return passed

    def _balanced(self, measured: Measured, share: Share) -> Tensor:
        """Add up the losses of a micro-batch as they are differentiated."""
        factors = loss_factors(
            measured.losses,
            share.weighing,
            micro_batches=ops.cast(share.total, "float32"),
            totals=share.totals,
        )
        scaled = [
            factor * minimized(loss)
            for factor, loss in zip(factors, measured.losses, strict=True)
        ]
        total = total_loss(scaled, measured.losses, measured.regularization)
        if self._parts.loss_scale is not None:
            total = total * self._state.loss_scale.value
        return total

    def _numbers(
        self, summary: dict[str, Any], norm: Tensor | None, *, is_part: bool
    ) -> Tensor:
        """Pack what is told of a micro-batch; see `run`."""
        measures = self.measures_gradients
        factor = summary["gradient_weight"] if measures else None
        if not is_part:
            return OfMicroBatch(
                summary["loss"], summary["weight"], norm, factor
            ).pack()
        return OfPart(
            summary["numerators"],
            summary["denominators"],
            summary["regularization"],
            summary["weight"],
            1.0,
            None if norm is None else norm * norm,
            factor,
        ).pack()

    @property
    def weighs_losses(self) -> bool:
        """Whether to multiply losses by their weights, not their gradients.

        That is the same, but a gradient that is added as it comes need not
        pass through memory once more, and the few rows of an embedding that
        have one can be added alone. Not where somebody looks at gradients,
        nor in float16, whose range the weights would leave.
        """
        return self._may_weigh_losses and not self.measures_gradients

    @property
    def divides_losses(self) -> bool:
        """Whether what is differentiated is as large as in the big batch.

        What is assigned to variables may depend on how large it is.
        """
        return bool(self.gradients.overwritten)

    def _weight_of_losses(self, weight: Tensor, share: Share) -> Tensor | None:
        """Say by what losses are multiplied, `None` if their gradients are."""
        if not (self.weighs_losses or share.weighing.divides_losses):
            return None
        return loss_weight(
            share.weighing,
            weight=weight,
            micro_batches=ops.cast(share.total, "float32"),
            totals=share.totals,
        )

    def _weigh(
        self,
        gradients: list[Tensor | None],
        weight: Tensor,
        share: Share,
        info: Info,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Weigh a micro-batch's gradients; measure their norm if asked to."""
        if self.weighs_losses:
            return gradients, None
        # What the gradients have been multiplied by, the loss scale and maybe
        # the weight, is `scale`; they are to have `weight` alone.
        scale = self._state.loss_scale.value
        weight_of_losses = self._weight_of_losses(weight, share)
        if weight_of_losses is not None:
            weight, scale = weight_of_losses, weight_of_losses * scale
        if self._hooks.overrides("on_accumulate"):
            gradients = self.gradients.changed_by(
                self._hooks.on_accumulate,
                self.gradients.times(1.0 / scale, gradients),
                info,
            )
            scale = 1.0
        norm = None
        if self.measures_gradients and not self._parts.per_example:
            used = self.gradients.times(1.0, gradients)
            norm = global_norm(self.gradients.ordinary(used)) / scale
        return self.gradients.times(weight / scale, gradients), norm

    def measure_denominators(
        self, batch: Batch, index: Tensor, share: Share
    ) -> Tensor:
        """Measure a micro-batch's denominators `(losses,)`.

        Nothing stays but how far random states have moved, so that the next one
        draws what it will draw. Where examples are run by themselves their
        number comes last.
        """
        with only_drawing(self.variables):
            info = self.info(index, share)
            self._fold_in(index, share)
            if not self._parts.per_example:
                return self._denominators(batch, info)
            examples = map_examples(
                self._parts,
                lambda row: self._denominators(row, info),
                batch,
                self.streams,
            )
            count = ops.reshape(count_samples(batch.x), [1])
            return ops.concatenate([ops.sum(examples, axis=0), count])

    def _denominators(self, batch: Batch, info: Info) -> Tensor:
        measure = functools.partial(
            self.objective.measure,
            updates_metrics=not self._parts.per_example,
        )
        with collect_logs(self._hooks):
            batch = self._hooks.on_micro_batch(batch, info)
        with collect_logs(self._hooks):
            measured = measure(batch, info)
        self.objective.check(measured.losses)
        return measured.denominators()

    # Gradient caching, for a loss that couples the examples of a window.

    def dtypes_of_embeddings(self, batch: Batch) -> Nest:
        """Find out as what a micro-batch is embedded, while it is traced."""
        if not self.caches_gradients:
            return None
        with self.layers_in_window(0):
            return self._cache.dtypes(batch, self.info(0, Share.whole(1)))

    def embed(self, batch: Batch, index: Tensor, share: Share) -> Nest:
        """Embed one micro-batch; no gradient is taken.

        Returns:
            Pair: nest of tensors `[m, ...]`, float32, and the `Batch`
            without its inputs, as `on_micro_batch` has left it.
        """
        info = self.info(index, share)
        self._fold_in(index, share)
        with collect_logs(self._hooks):
            batch = self._hooks.on_micro_batch(batch, info)
        with self.layers_in_window(index):
            return self._cache.embed(batch, info)

    def cache_gradients(
        self, joined: Nest, micro_batches: Tensor | int, running: RunningSums
    ) -> tuple[Nest, Tensor, list[Tensor | None]]:
        """Differentiate the loss of a window by its embeddings.

        Args:
            joined: what `embed` has returned, of the whole window.
            micro_batches: scalar, k.
            running: of the window, to which what is logged is added.

        Returns:
            Triple: the cotangents, like the embeddings; the loss; and what
            the loss itself adds to the window's gradients.
        """
        info = self.info(0, Share.whole(micro_batches))
        info = replace(info, index=None, is_last=None)
        embeddings, batch = joined
        loss, cotangents, gradients, logs = self._cache.differentiate_loss(
            embeddings, batch, info
        )
        running.add_logs(logs)
        if not self.divides_losses:
            # As large as a gradient that counts k times and is divided by k.
            count = ops.cast(micro_batches, "float32")
            gradients = [None if g is None else g * count for g in gradients]
        return cotangents, loss, gradients

    # Several micro-batches of one shape, `Batch` of tensors `[k, m, ...]`.

    def scan(
        self,
        stacked: Batch,
        share: Share,
        running: RunningSums,
        sums: list[Tensor],
        begun: Tensor | int = 0,
        cached: Cached = None,
    ) -> tuple[Tensor, list[Tensor], Uses]:
        """Run micro-batches, and add up their gradients.

        Args:
            stacked: tensors `[k, m, ...]`.
            share: what they belong to.
            running: of the window.
            sums: what to add to, float32.
            begun: how many have run before.
            cached: as in `run`, the cotangents stacked.

        Returns:
            Triple: `[k, n]`, see `run`; the new sums; and what has been added
            to them.
        """
        cotangents, loss = cached or (None, None)
        used: Uses = ()

        def body(
            index: Tensor, item: Nest, sums: list[Tensor]
        ) -> tuple[Nest, list[Tensor]]:
            nonlocal used
            batch, cotangents = item
            row, gradients = self.run(
                batch,
                index + begun,
                share,
                running,
                cached=(cotangents, loss) if cached else None,
            )
            used = uses(gradients)
            return row, self.gradients.add(sums, gradients)

        rows, sums = self._backend.scan(
            body, (stacked, cotangents), length(stacked), sums
        )
        return rows, sums, used

    def scan_denominators(
        self, stacked: Batch, share: Share, begun: Tensor | int = 0
    ) -> Tensor:
        """Add up what `measure_denominators` returns for micro-batches."""

        def body(
            index: Tensor, batch: Batch, carry: list[Tensor]
        ) -> tuple[Nest, list[Tensor]]:
            return self.measure_denominators(batch, index + begun, share), carry

        measured, _ = self._backend.scan(body, stacked, length(stacked))
        return ops.sum(measured, axis=0)

    def scan_embeddings(
        self, stacked: Batch, share: Share, dtypes: Nest
    ) -> Nest:
        """Embed micro-batches; see `embed`. Every tensor gets an axis k.

        Args:
            stacked: tensors `[k, m, ...]`.
            share: what they belong to.
            dtypes: what `dtypes_of_embeddings` has found.
        """

        def body(
            index: Tensor, batch: Batch, carry: list[Tensor]
        ) -> tuple[Nest, list[Tensor]]:
            return self.embed(batch, index, share), carry

        parts, _ = self._backend.scan(
            body, stacked, share.micro_batches, dtypes=dtypes
        )
        return parts


def length(stacked: Batch) -> Tensor | int:
    """Count the micro-batches of tensors `[k, m, ...]`."""
    return ops.shape(leaves(stacked)[0])[0]
