"""The end of a window: one update of the weights, or none, and its report."""

from dataclasses import replace

from accumtrainer.keras_api import ops
from accumtrainer.window.clipping import (
    clipped_norm,
    clips,
    factor_to_clip,
    finite_norm,
)
from accumtrainer.window.hooks import Info, collect_logs
from accumtrainer.window.loss_scale import next_scale
from accumtrainer.window.objective import (
    metric_variables,
    named_losses,
    results,
    total_loss,
)
from accumtrainer.window.state import Scratch
from accumtrainer.window.weighing import (
    gradient_divisor,
    where_sum,
    window_means,
)


class Update:
    """Applies the sums of a window's gradients.

    Whoever calls it clears the sums afterwards, those of losses too.

    Args:
        hooks: `Hooks`, usually the Trainer.
        state: `TrainingState`.
        backend: the functions a backend must provide.
        passes: `Passes` that have made the sums.
        variables: `WindowVariables`.
        loss_scale: `LossScale`, or `None` to leave it as it is.
    """

    def __init__(self, hooks, state, backend, passes, variables, *, loss_scale):
        self._hooks = hooks
        self._model = hooks.model
        self._optimizer = hooks.optimizer
        self._state = state
        self._backend = backend
        self._passes = passes
        self._variables = variables
        self._loss_scale = loss_scale
        self._clips = hooks.overrides("on_apply") or clips(self._optimizer)

    def apply(self, micro_batches, weighing, sums, used):
        """Make the update, or put back what the window has changed.

        Args:
            micro_batches: scalar tensor, int32, k.
            weighing: `Weighing` of the window.
            sums: list of tensors, float32, its weighted gradients.
            used: what has been added to them, see `passes.uses`.

        Returns:
            Dict of scalar tensors under `"window"` (this window alone),
            `"running"` (the epoch so far) and `"counters"`.
        """
        state, hooks = self._state, self._hooks
        count = ops.cast(micro_batches, "float32")
        means, denominators, extras = self._window_means()
        regularization, weight, _ = extras
        loss = total_loss(
            means, self._variables.survey.losses, regularization / count
        )
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
        passes = self._passes
        norm, is_finite = finite_norm(passes.ordinary(sums), self._backend)
        if divisor is not None:
            norm = ops.divide_no_nan(norm, divisor)
            is_finite = ops.logical_and(is_finite, ops.isfinite(divisor))
        gradients, norm_to_clip = None, norm
        if self._clips:
            gradients = _divide(sums, divisor)
        if hooks.overrides("on_apply"):
            with collect_logs(hooks) as logs:
                gradients = passes.changed_by(hooks.on_apply, gradients, info)
            self._variables.window.add_logs(logs)
            norm_to_clip, is_changed_finite = finite_norm(
                passes.ordinary(gradients), self._backend
            )
            is_finite = ops.logical_and(is_finite, is_changed_finite)
        if not self._model.trainable_variables:
            is_finite = ops.isfinite(loss)  # there is nothing else to look at
        is_finite = self._backend.accepts(is_finite)
        factor = factor_to_clip(norm_to_clip, self._optimizer)
        if factor is not None:
            gradients = passes.times(factor, gradients)
        # Copies, because both may be variables that are about to move.
        lr = ops.copy(ops.cast(self._optimizer.learning_rate, "float32"))
        scale = ops.copy(state.loss_scale.value)
        self._backend.cond(
            is_finite,
            lambda: self._commit(
                self._for_optimizer(
                    _divide(sums, divisor) if gradients is None else gradients,
                    used,
                ),
                info,
                means,
                denominators,
                extras,
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
                self._passes.ordinary(gradients), self._optimizer
            )
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

    def take_gradients(self, micro_batches, weighing, sums):
        """Average the gradients of a window, and apply nothing.

        Args:
            micro_batches: scalar tensor, int32, k.
            weighing: `Weighing` of the window.
            sums: list of tensors, float32, its weighted gradients.

        Returns:
            Pair: the window's loss without regularization, a scalar tensor,
            float32; and its gradients, list of tensors, float32.
        """
        count = ops.cast(micro_batches, "float32")
        means, _, (_, weight, _) = self._window_means()
        divisor = gradient_divisor(
            weighing, total_weight=weight, micro_batches=count
        )
        # Copies, because sums may be variables that are about to be cleared.
        gradients = list(map(ops.copy, _divide(sums, divisor)))
        return total_loss(means, self._variables.survey.losses, 0.0), gradients

    def _window_means(self):
        numerators, denominators, extras = self._variables.window.read()
        means = window_means(numerators, denominators)
        means = where_sum(self._variables.survey.is_sum, numerators, means)
        return means, denominators, extras

    def _commit(self, gradients, info, means, denominators, extras):
        """Make the update; every clock that counts updates moves."""
        state = self._state
        self._backend.apply(
            self._optimizer, gradients, self._model.trainable_variables
        )
        state.updates.assign(state.updates.value + 1)
        state.consecutive_skips.assign(
            ops.zeros_like(state.consecutive_skips.value)
        )
        for layer in self._passes.window_layers:
            layer.after_apply()
        with collect_logs(self._hooks) as logs:
            self._hooks.after_apply(replace(info, update=state.updates.value))
        self._variables.window.add_logs(logs)
        count = ops.cast(info.micro_batches, "float32")
        self._add_to_epoch(means, denominators, extras, count)

    def _for_optimizer(self, gradients, used):
        """Leave unused variables out, as Keras does, unless a hook looked."""
        looked = any(map(self._hooks.overrides, ("on_accumulate", "on_apply")))
        passes = self._passes
        return [
            gradient
            if mark is not None
            or (looked and position not in passes.overwritten)
            else None
            for position, (gradient, mark) in enumerate(
                zip(gradients, used, strict=True)
            )
        ]

    def _forget(self):
        """Put back what the window changed; random streams stay advanced."""
        state = self._state
        self._variables.undo()
        state.skipped_updates.assign(state.skipped_updates.value + 1)
        state.consecutive_skips.assign(state.consecutive_skips.value + 1)

    def _add_to_epoch(self, means, denominators, extras, count):
        """Add the window to the epoch's running means."""
        regularization, _, samples = extras
        weights = where_sum(
            self._variables.survey.is_sum, samples, denominators
        )
        self._variables.epoch.add(
            means * weights,
            weights,
            [samples * regularization / count, samples, samples],
        )
        self._variables.epoch.add_logs(self._variables.window.logs())

    def _window_logs(self, loss, means):
        losses = {"loss": loss} | named_losses(
            self._variables.survey.losses, means
        )
        return losses | self._variables.window.values()

    def running_logs(self):
        """Read the epoch so far: losses, metrics, logged values.

        Losses are NaN where no window has been applied yet.
        """
        numerators, denominators, extras = self._variables.epoch.read()
        means = window_means(numerators, denominators)
        means = ops.where(ops.equal(extras[2], 0), float("nan"), means)
        regularization = ops.divide_no_nan(*extras[:2])
        loss = total_loss(means, self._variables.survey.losses, regularization)
        with self._backend.holding(metric_variables(self._model)):
            found = results(
                self._model,
                self._variables.survey.losses,
                loss,
                means,
                self._variables.survey.idle_metrics,
            )
        return found | self._variables.epoch.values()

    def running_logs_with(self, micro_batches):
        """Read the epoch so far, as if the open window had been applied.

        Args:
            micro_batches: scalar tensor, int32, those of the open window.

        Returns:
            Dict of tensors.
        """
        count = ops.cast(micro_batches, "float32")
        means, denominators, extras = self._window_means()
        read = [
            *self._variables.window.variables,
            *self._variables.epoch.variables,
            *metric_variables(self._model),
        ]
        with Scratch(read):
            self._add_to_epoch(means, denominators, extras, count)
            return self.running_logs()


def _divide(sums, divisor):
    """Divide the sums of gradients by what their weights add up to.

    A product costs so little that it is computed wherever it is read, while
    the quotients of large gradients would be written to memory first.

    Args:
        sums: list of tensors, float32.
        divisor: scalar tensor, float32, or `None` if that has been done.

    Returns:
        List of tensors, float32.
    """
    if divisor is None:
        return sums
    factor = ops.divide_no_nan(1.0, divisor)
    return [total * factor for total in sums]
