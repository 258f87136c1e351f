"""One pass over a micro-batch, and over several of one shape.

A pass runs the hooks of a micro-batch, differentiates its loss, and weighs
the gradient as it counts in the window. See `accumtrainer.window.program` for
the algorithm it is a part of, `accumtrainer.window.weighing` for the weights.
"""

import contextlib
import functools
from dataclasses import replace

import numpy as np

from accumtrainer.keras_api import flatten_layers, is_overwritten, ops, tree
from accumtrainer.layers import WindowLayer
from accumtrainer.window.clipping import global_norm
from accumtrainer.window.gradient_cache import GradientCache
from accumtrainer.window.hooks import HOOK_NAMES, Info, collect_logs
from accumtrainer.window.loss_scale import computes_in_float16
from accumtrainer.window.objective import (
    Objective,
    metric_variables,
    total_loss,
)
from accumtrainer.window.replicas import Share
from accumtrainer.window.state import Scratch
from accumtrainer.window.weighing import (
    gradient_weight,
    loss_factors,
    loss_weight,
    where_sum,
)


class Passes:
    """Runs micro-batches, and returns their gradients as they count.

    Args:
        hooks: `Hooks`, usually the Trainer.
        state: `TrainingState`.
        backend: the functions a backend must provide.
        loss_scale: `LossScale`, or `None` to leave the loss as it is.
        tracked: list of variables that hooks may move.
        training: whether layers and hooks are told that this is training.

    Attributes:
        objective: `Objective`.
        tracked: as given.
        measures_gradients: whether to report the norm of each micro-batch's
            gradient too. What has been compiled does not notice a change.
    """

    def __init__(self, hooks, state, backend, *, loss_scale, tracked, training):
        self._hooks = hooks
        self._model = hooks.model
        self._state = state
        self._backend = backend
        self._loss_scale = loss_scale
        self._training = training
        self._cache = None
        if hooks.has_window_loss:
            self._cache = GradientCache(hooks, state, backend)
        self._may_draw = any(map(hooks.overrides, HOOK_NAMES))
        self._may_weigh_losses = not (
            loss_scale is not None
            or hooks.overrides("on_accumulate")
            or computes_in_float16(self._model)
        )
        self.objective = Objective(hooks)
        self.tracked = tracked
        self.measures_gradients = False

    @functools.cached_property
    def window_layers(self):
        """The model's layers that know about windows."""
        return [
            layer
            for layer in flatten_layers(self._model)
            if isinstance(layer, WindowLayer)
        ]

    @property
    def variables(self):
        """What a pass may read or move, those it has borrowed aside."""
        return [
            *self._model.trainable_variables,
            *self._model.non_trainable_variables,
            *metric_variables(self._model),
            *self.tracked,
            *self._state.variables,
        ]

    # Gradients, one per trainable variable.

    @functools.cached_property
    def overwritten(self):
        """Positions of the variables that are assigned what their gradient is.

        Such a gradient is neither scaled nor weighed, no hook sees it, and in
        place of the sum of several the largest counts, as in Keras.
        """
        variables = enumerate(self._model.trainable_variables)
        return {position for position, v in variables if is_overwritten(v)}

    def ordinary(self, gradients):
        """Pick the gradients that are there and are not to be assigned."""
        return [
            gradient
            for position, gradient in enumerate(gradients)
            if gradient is not None and position not in self.overwritten
        ]

    def zeros(self):
        """Make gradients of nothing, list of tensors, float32."""
        return [
            ops.zeros(v.shape, "float32")
            for v in self._model.trainable_variables
        ]

    def no_sums(self):
        """Make sums of no gradients yet, list of tensors, float32."""
        return [
            ops.full(v.shape, self.least(position), "float32")
            for position, v in enumerate(self._model.trainable_variables)
        ]

    def least(self, position):
        """Return what a sum of gradients begins with, a float."""
        return -np.inf if position in self.overwritten else 0.0

    def add(self, sums, gradients):
        """Add gradients to their sums, `None` standing for nothing."""
        return [
            total if gradient is None else self._plus(position, total, gradient)
            for position, (total, gradient) in enumerate(
                zip(sums, gradients, strict=True)
            )
        ]

    def _plus(self, position, total, gradient):
        if position in self.overwritten:
            return ops.maximum(total, ops.cast(gradient, "float32"))
        return self._backend.add(total, gradient)

    def changed_by(self, hook, gradients, info):
        """Have a hook change gradients, in which it finds zeros for `None`.

        Args:
            hook: function of a list of tensors and of an `Info`.
            gradients: list of tensors, float32, or `None`.
            info: `Info`.

        Returns:
            List of tensors, `None` only where nothing is to be assigned.
        """
        shown = [
            zeros if g is None or position in self.overwritten else g
            for position, (g, zeros) in enumerate(
                zip(gradients, self.zeros(), strict=True)
            )
        ]
        return [
            before if position in self.overwritten else after
            for position, (before, after) in enumerate(
                zip(gradients, hook(shown, info), strict=True)
            )
        ]

    # What hooks and layers are told.

    def info(self, index, share):
        """Tell which micro-batch this is.

        Args:
            index: scalar tensor or int, the index of the micro-batch.
            share: `Share` of the window it belongs to.

        Returns:
            `Info`.
        """
        return Info(
            update=self._state.updates.value,
            epoch=self._state.epoch.value,
            index=index,
            micro_batches=share.micro_batches,
            is_last=ops.equal(index + 1, share.micro_batches),
            loss_scale=self._state.loss_scale.value,
            training=self._training,
        )

    @contextlib.contextmanager
    def layers_in_window(self, index):
        """Tell the layers that know about windows where in one they are."""
        with contextlib.ExitStack() as stack:
            for layer in self.window_layers:
                stack.enter_context(layer.micro_batch(ops.equal(index, 0)))
            yield

    def _prepare(self, batch, index, share, info):
        if self._may_draw:
            self._state.seat_rng(share.seat(index))
        return self._hooks.on_micro_batch(batch, info)

    # One micro-batch.

    def run(self, batch, index, share, tally, ahead=None):
        """Run one micro-batch.

        Args:
            batch: `Batch` of tensors `[m, ...]`.
            index: scalar tensor, its index in the window.
            share: `Share` it belongs to, which says how it counts.
            tally: `Tally` of the window, to which its numbers are added.
            ahead: pair of the cotangents of its embeddings and the loss of
                the window, if the window was looked at ahead.

        Returns:
            Pair. A tensor, float32: its loss and its weight; with
            `measures_gradients` also the norm of its gradient, as it is
            added, and by what that is multiplied before. What a replica runs
            of it is instead told so that it adds up, see `join_parts`. And
            its gradients, to be added to the window's: list of tensors,
            float32 as soon as they are added, or `None` where it has none.
        """
        index = ops.cast(index, "int32")
        micro_batches = ops.cast(share.micro_batches, "int32")
        share = share._replace(micro_batches=micro_batches)
        info = self.info(index, share)
        with collect_logs(self._hooks) as logs_before:
            batch = self._prepare(batch, index, share, info)

        compute_loss = None
        if ahead is not None:
            cotangents, loss = ahead

            def compute_loss(batch, info):
                return self._cache.replay(batch, info, cotangents, loss)

        def objective():
            with collect_logs(self._hooks) as logs:
                measured = self.objective.measure(batch, info, compute_loss)
            self.objective.check(measured.losses)
            factors = loss_factors(
                measured.losses,
                share.weighing,
                micro_batches=ops.cast(share.total, "float32"),
                totals=share.totals,
            )
            scaled = [
                factor * ops.cast(loss.mean, "float32")
                for factor, loss in zip(factors, measured.losses, strict=True)
            ]
            total = total_loss(scaled, measured.losses, measured.regularization)
            if self._loss_scale is not None:
                total = total * self._state.loss_scale.value
            summary = _summary(measured, share.weighing, logs)
            # A denominator may depend on the weights, as a count of what is
            # predicted does, and is a constant nevertheless.
            weight = ops.stop_gradient(summary["gradient_weight"])
            weight = self._weight_of_losses(weight, share)
            return total if weight is None else total * weight, summary

        # Layers may run again while their gradients are taken.
        with self.layers_in_window(index):
            summary, gradients = self._backend.value_and_grad(
                objective,
                self._model.trainable_variables,
                keeps_rows=self.weighs_losses,
            )
        info = replace(info, loss=summary["loss"], weight=summary["weight"])
        weight = summary["gradient_weight"]
        with collect_logs(self._hooks) as logs:
            gradients, norm = self._weigh(gradients, weight, share, info)
        tally.add(
            summary["numerators"],
            summary["denominators"],
            [summary["regularization"], weight, summary["samples"]],
        )
        tally.add_logs(logs_before | summary["logs"] | logs)
        is_part = share.split is not None
        return self._numbers(summary, norm, is_part=is_part), gradients

    def _numbers(self, summary, norm, *, is_part):
        """Gather what is told of a micro-batch, tensor; see `run`."""
        if not is_part:
            numbers = [summary["loss"], summary["weight"]]
            if self.measures_gradients:
                numbers += [norm, summary["gradient_weight"]]
            return ops.stack(numbers)
        numbers = [summary["regularization"], summary["weight"], 1.0]
        if self.measures_gradients:
            numbers += [norm * norm, summary["gradient_weight"]]
        numbers = [ops.cast(number, "float32") for number in numbers]
        losses = [summary["numerators"], summary["denominators"]]
        return ops.concatenate([*losses, ops.stack(numbers)])

    @property
    def weighs_losses(self):
        """Whether to multiply losses by their weights, not their gradients.

        That is the same, but a gradient that is added as it comes need not
        pass through memory once more, and the few rows of an embedding that
        have one can be added alone. Not where somebody looks at gradients,
        nor in float16, whose range the weights would leave.
        """
        return self._may_weigh_losses and not self.measures_gradients

    @property
    def divides_losses(self):
        """Whether what is differentiated is as large as in the big batch.

        What is assigned to variables may depend on how large it is.
        """
        return bool(self.overwritten)

    def _weight_of_losses(self, weight, share):
        """Say by what losses are multiplied, `None` if their gradients are."""
        if not (self.weighs_losses or share.weighing.divides_losses):
            return None
        return loss_weight(
            share.weighing,
            weight=weight,
            micro_batches=ops.cast(share.total, "float32"),
            totals=share.totals,
        )

    def _weigh(self, gradients, weight, share, info):
        """Weigh a micro-batch's gradients; measure their norm if asked to."""
        if self.weighs_losses:
            return gradients, None
        scale = self._state.loss_scale.value
        has_weight = self._weight_of_losses(weight, share)
        if has_weight is not None:
            weight, scale = has_weight, has_weight * scale
        if self._hooks.overrides("on_accumulate"):
            gradients = self.times(1.0 / scale, gradients)
            gradients = self.changed_by(
                self._hooks.on_accumulate, gradients, info
            )
            scale = 1.0
        norm = None
        if self.measures_gradients:
            used = self.ordinary(self.times(1.0, gradients))
            norm = global_norm(used) / scale
        return self.times(weight / scale, gradients), norm

    def times(self, factor, gradients):
        """Multiply gradients in float32, but for those to be assigned."""
        return [
            g
            if g is None or position in self.overwritten
            else ops.cast(g, "float32") * factor
            for position, g in enumerate(gradients)
        ]

    def measure_weights(self, batch, index, share):
        """Measure a micro-batch's denominators, without effect.

        Args:
            batch: `Batch` of tensors `[m, ...]`.
            index: scalar tensor, int32.
            share: `Share` it belongs to.

        Returns:
            Tensor `(losses,)`, float32.
        """
        with Scratch(self.variables):
            info = self.info(index, share)
            with collect_logs(self._hooks):
                batch = self._prepare(batch, index, share, info)
            with collect_logs(self._hooks):
                judging = replace(info, training=False)
                measured = self.objective.measure(batch, judging)
            if not self.objective.expects_as_many(measured.losses):
                # Layers may add a loss in training only.
                with collect_logs(self._hooks):
                    measured = self.objective.measure(batch, info)
                self.objective.check(measured.losses)
        return measured.denominators()

    # Looking ahead, for a loss that couples the examples of a window.

    @property
    def looks_ahead(self):
        """Whether windows of several micro-batches are embedded first."""
        return self._cache is not None

    def learn_embeddings(self, batch):
        """Learn what a micro-batch is embedded as, while it is traced."""
        if self._cache is not None:
            with self.layers_in_window(0):
                self._cache.learn(batch, self.info(0, Share.whole(1)))

    def embed(self, batch, index, share):
        """Embed one micro-batch; no gradient is taken.

        Returns:
            Pair: nest of tensors `[m, ...]`, float32, and the `Batch`
            without its inputs, as `on_micro_batch` has left it.
        """
        info = self.info(index, share)
        with collect_logs(self._hooks):
            batch = self._prepare(batch, index, share, info)
        with self.layers_in_window(index):
            return self._cache.embed(batch, info)

    def differentiate(self, joined, micro_batches, tally):
        """Differentiate the loss of a window by its embeddings.

        Args:
            joined: what `embed` has returned, of the whole window.
            micro_batches: scalar tensor or int, k.
            tally: `Tally` of the window.

        Returns:
            Tuple: nest of tensors like the embeddings, the cotangents; the
            loss; and what the loss itself adds to the window's gradients.
        """
        info = self.info(0, Share.whole(micro_batches))
        info = replace(info, index=None, is_last=None)
        embeddings, batch = joined
        loss, cotangents, gradients, logs = self._cache.differentiate(
            embeddings, batch, info
        )
        tally.add_logs(logs)
        if not self.divides_losses:
            # As large as a gradient that counts k times and is divided by k.
            count = ops.cast(micro_batches, "float32")
            gradients = [None if g is None else g * count for g in gradients]
        return cotangents, loss, gradients

    # Several micro-batches of one shape, `Batch` of tensors `[k, m, ...]`.

    def scan(self, stacked, share, tally, sums, begun=0, ahead=None):
        """Run micro-batches, and add up their gradients.

        Args:
            stacked: `Batch` of tensors `[k, m, ...]`.
            share: `Share` they belong to.
            tally: `Tally` of the window.
            sums: list of tensors, float32.
            begun: int, or scalar tensor, how many have run before.
            ahead: pair as in `run`, the cotangents stacked, or `None`.

        Returns:
            Triple: tensor `[k, n]`, see `run`; the new sums; and what has
            been added to them, see `uses`.
        """
        cotangents, loss = ahead or (None, None)
        used = None

        def body(index, item, sums):
            nonlocal used
            batch, cotangents = item
            row, gradients = self.run(
                batch,
                index + begun,
                share,
                tally,
                ahead=(cotangents, loss) if ahead else None,
            )
            used = uses(gradients)
            return row, self.add(sums, gradients)

        rows, sums = self._backend.scan(
            body, (stacked, cotangents), length(stacked), sums
        )
        return rows, sums, used

    def scan_weights(self, stacked, share, begun=0):
        """Add up the denominators of micro-batches; see `measure_weights`."""

        def body(index, batch, carry):
            return self.measure_weights(batch, index + begun, share), carry

        measured, _ = self._backend.scan(body, stacked, length(stacked))
        return ops.sum(measured, axis=0)

    def scan_embeddings(self, stacked, share):
        """Embed micro-batches; see `embed`. Every tensor gets an axis k."""

        def body(index, batch, carry):
            return self.embed(batch, index, share), carry

        parts, _ = self._backend.scan(
            body, stacked, share.micro_batches, dtypes=self._cache.dtypes
        )
        return parts


def uses(gradients):
    """Mark which gradients there are.

    A compiled function that returns the marks returns no tensors: they are a
    part of the structure of its result, as tracing has found it.

    Args:
        gradients: list of tensors, or of `None` where a variable is not used.

    Returns:
        Tuple with `()` in the place of each tensor, and `None` elsewhere.

    Example:
        >>> uses([1.0, None])
        ((), None)
    """
    return tuple(None if g is None else () for g in gradients)


def join_uses(marks):
    """Mark what any of several, a list of what `uses` returned, has used.

    Example:
        >>> join_uses([((), None, None), (None, (), None)])
        ((), (), None)
    """
    return tuple(
        None if all(mark is None for mark in each) else ()
        for each in zip(*marks, strict=True)
    )


def length(stacked):
    """Count the micro-batches of a `Batch` of tensors `[k, m, ...]`."""
    return ops.shape(tree.flatten(stacked)[0])[0]


def _summary(measured, weighing, logs):
    """Gather what must leave the differentiated function, as tensors."""
    means, weights = measured.means(), measured.denominators()
    is_sum = np.array([loss.is_sum for loss in measured.losses])
    return {
        "loss": total_loss(means, measured.losses, measured.regularization),
        "numerators": means * where_sum(is_sum, 1.0, weights),
        "denominators": where_sum(is_sum, 0.0, weights),
        "regularization": measured.regularization,
        "weight": measured.weight,
        "gradient_weight": gradient_weight(measured.losses, weighing),
        "samples": measured.samples,
        "logs": logs,
    }
