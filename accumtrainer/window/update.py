"""The end of a window: one update of the weights, or none, and its report."""

from dataclasses import replace
from typing import Any

from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Tensor
from accumtrainer.window.clipping import finite_norm
from accumtrainer.window.gradients import Uses, times
from accumtrainer.window.hooks import Info, collect_logs
from accumtrainer.window.loss_scale import next_scale
from accumtrainer.window.numbers import Sums
from accumtrainer.window.objective import (
    EpochSums,
    joined,
    metric_variables,
    named_losses,
    total_loss,
)
from accumtrainer.window.optimizers import Optimizers
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.passes import Passes
from accumtrainer.window.results import results
from accumtrainer.window.state import (
    PERTURB_DISTANCE,
    Scratch,
    shifted_seed,
)
from accumtrainer.window.variables import WindowVariables
from accumtrainer.window.weighing import (
    Weighing,
    gradient_divisor,
    where_sum,
    window_means,
)


class Update:
    """Applies the sums of a window's gradients.

    Whoever calls it clears the sums afterwards, those of losses too.

    Args:
        parts: whose windows they are.
        passes: what has made the sums.
        variables: what a window moves.
    """

    def __init__(
        self, parts: WindowParts, passes: Passes, variables: WindowVariables
    ):
        self._parts = parts
        self._hooks = parts.hooks
        self._optimizer = parts.hooks.optimizer
        self._state = parts.state
        self._backend = parts.backend
        self._passes = passes
        self._gradients = passes.gradients
        self._variables = variables
        self._optimizers = Optimizers(parts, passes.gradients)
        self._changes_gradients = self._optimizers.clips or (
            self._hooks.overrides("on_apply")
        )

    def apply(
        self,
        micro_batches: Tensor,
        weighing: Weighing,
        sums: list[Tensor],
        used: Uses,
    ) -> dict[str, dict[str, Tensor]]:
        """Make the update, or put back what the window has changed.

        Args:
            micro_batches: scalar, int32, k.
            weighing: of the window.
            sums: its weighted gradients, float32.
            used: what has been added to them.

        Returns:
            Scalars under `"window"` (losses and logged values of this window
            alone), `"step"` (how it was applied), `"running"` (the epoch so
            far) and `"counters"`.
        """
        state = self._state
        count = ops.cast(micro_batches, "float32")
        means, added = self._window_means()
        info = self._info(micro_batches, means, added, weighing)
        loss = info.loss
        divisor = self._divisor(weighing, added, count)
        gradients, norm, is_finite = self._finish(sums, divisor, info)
        # A copy, because it may be a variable that is about to move.
        scale = ops.copy(state.loss_scale.value)
        with self._optimizers.reading_rates() as rates:
            self._backend.cond(
                is_finite,
                lambda: self._commit(
                    self._for_optimizer(
                        _divide(sums, divisor)
                        if gradients is None
                        else gradients,
                        used,
                    ),
                    info,
                    means,
                    added,
                ),
                self._forget,
            )
        self._move_scale(scale, is_finite)
        state.micro_batches.assign(state.micro_batches.value + micro_batches)
        step = {
            **rates,
            "gradient_norm": norm,
            "loss_scale": scale,
            "weight": added.weight,
        }
        if gradients is not None:
            step["clipped_gradient_norm"] = self._optimizers.clipped_norm(
                gradients
            )
        return {
            "window": self._window_logs(loss, means),
            "step": step,
            "running": self.running_logs(),
            "counters": self._counters(is_finite),
        }

    def _info(
        self,
        micro_batches: Tensor,
        means: Tensor,
        added: Sums,
        weighing: Weighing,
    ) -> Info:
        """Tell hooks of a window what there is to be told of it."""
        state = self._state
        count = ops.cast(micro_batches, "float32")
        loss = total_loss(
            means, self._variables.survey.losses, added.regularization / count
        )
        return Info(
            update=ops.copy(state.updates.value),
            epoch=state.epoch.value,
            micro_batches=micro_batches,
            loss=loss,
            total_weight=_total_weight(weighing, added),
            loss_scale=state.loss_scale.value,
        )

    def perturb(
        self, micro_batches: Tensor, weighing: Weighing, sums: list[Tensor]
    ) -> list[Tensor]:
        """Move the weights to where the window is to run again.

        Everything else is put back, so that it runs as it did, but for what
        the hook itself assigns.

        Args:
            micro_batches: scalar, int32, k.
            weighing: of the window.
            sums: its weighted gradients, float32.

        Returns:
            List of tensors, see `WindowVariables.move_weights`.
        """
        info = self._info(micro_batches, *self._window_means(), weighing)
        _, gradients = self.take_gradients(micro_batches, weighing, sums)
        # Where the first run has ended the second one will end, and `on_apply`
        # draws there.
        rng = self._state.rng.state
        rng.assign(shifted_seed(rng, 1, PERTURB_DISTANCE))
        with collect_logs(self._hooks) as logs:
            moves = self._gradients.changed_by(
                self._hooks.perturb, gradients, info
            )
        self._variables.window.clear()
        self._variables.window.add_logs(logs)
        self._variables.put_back(after_perturb=True)
        return self._variables.move_weights(moves)

    def _finish(
        self, sums: list[Tensor], divisor: Tensor | None, info: Info
    ) -> tuple[list[Tensor | None] | None, Tensor, Tensor]:
        """Divide, change and clip gradients where that is to be seen here.

        Returns:
            Triple: the gradients, `None` if nothing changed them, so that the
            caller divides the sums where the optimizer reads them; their norm
            before `on_apply` and clipping; and whether all is finite.
        """
        hooks, backend = self._hooks, self._backend
        # The norm of what is yet to be divided, since dividing where the
        # optimizer reads it spares memory a pass.
        norm, is_finite = finite_norm(self._gradients.ordinary(sums), backend)
        if divisor is not None:
            norm = ops.divide_no_nan(norm, divisor)
            is_finite = ops.logical_and(is_finite, ops.isfinite(divisor))
        gradients: Any = None
        norm_to_clip = norm
        if self._changes_gradients:
            gradients = _divide(sums, divisor)
        if hooks.overrides("on_apply"):
            with collect_logs(hooks) as logs:
                gradients = self._gradients.changed_by(
                    hooks.on_apply, gradients, info
                )
            self._variables.window.add_logs(logs)
            norm_to_clip, is_changed_finite = finite_norm(
                self._gradients.ordinary(gradients), backend
            )
            is_finite = ops.logical_and(is_finite, is_changed_finite)
        if not self._parts.model.trainable_variables:
            # There is nothing else to look at.
            is_finite = ops.isfinite(info.loss)
        is_finite = backend.accepts(is_finite)
        if gradients is not None:
            gradients = self._optimizers.make_small_enough(
                gradients, norm_to_clip
            )
        return gradients, norm, is_finite

    def _move_scale(self, scale: Tensor, is_finite: Tensor) -> None:
        """Lower the loss scale, or count towards a higher one."""
        if self._parts.loss_scale is None:
            return
        state = self._state
        new_scale, good = next_scale(
            scale, state.good_windows.value, is_finite, self._parts.loss_scale
        )
        state.loss_scale.assign(new_scale)
        state.good_windows.assign(good)

    def _counters(self, is_finite: Tensor) -> dict[str, Tensor]:
        state = self._state
        return {
            "applied": ops.cast(is_finite, "int32"),
            "updates": state.updates.value,
            "skipped_updates": state.skipped_updates.value,
            "consecutive_skips": state.consecutive_skips.value,
        }

    def take_gradients(
        self, micro_batches: Tensor, weighing: Weighing, sums: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Average the gradients of a window, and apply nothing.

        Args:
            micro_batches: scalar, int32, k.
            weighing: of the window.
            sums: its weighted gradients, float32.

        Returns:
            Pair: the window's loss without regularization, a scalar, and its
            gradients, float32.
        """
        count = ops.cast(micro_batches, "float32")
        means, added = self._window_means()
        divisor = self._divisor(weighing, added, count)
        # Copies, because sums may be variables that are about to be cleared.
        gradients = list(map(ops.copy, _divide(sums, divisor)))
        return total_loss(means, self._variables.survey.losses, 0.0), gradients

    def _divisor(
        self, weighing: Weighing, added: Sums, count: Tensor
    ) -> Tensor | None:
        if self._parts.per_example and weighing.rule != "denominator":
            # Each example counts as a micro-batch, and weighs 1.
            count = added.weight
        weight = _total_weight(weighing, added)
        # Beside denominators as small as it, `ALMOST_NOTHING` is much.
        weight = ops.where(ops.equal(weight, 0), added.weight, weight)
        return gradient_divisor(
            weighing, total_weight=weight, micro_batches=count
        )

    def _window_means(self) -> tuple[Tensor, Sums]:
        added = self._variables.window.read()
        means = window_means(added.numerators, added.denominators)
        losses = self._variables.survey.losses
        return where_sum(losses, added.numerators, means), added

    def _commit(
        self,
        gradients: list[Tensor | None],
        info: Info,
        means: Tensor,
        added: Sums,
    ) -> None:
        """Make the update; every clock that counts updates moves."""
        state = self._state
        self._backend.apply(
            self._optimizer, gradients, self._parts.model.trainable_variables
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
        self._add_to_epoch(means, added, count)

    def _for_optimizer(
        self, gradients: list[Tensor | None], used: Uses
    ) -> list[Tensor | None]:
        """Leave unused variables out, as Keras does, unless a hook looked."""
        looked = any(map(self._hooks.overrides, ("on_accumulate", "on_apply")))
        overwritten = self._gradients.overwritten
        return [
            gradient
            if mark is not None or (looked and position not in overwritten)
            else None
            for position, (gradient, mark) in enumerate(
                zip(gradients, used, strict=True)
            )
        ]

    def _forget(self) -> None:
        """Put back what the window changed; random streams stay advanced."""
        state = self._state
        self._variables.undo()
        state.skipped_updates.assign(state.skipped_updates.value + 1)
        state.consecutive_skips.assign(state.consecutive_skips.value + 1)

    def _add_to_epoch(self, means: Tensor, added: Sums, count: Tensor) -> None:
        """Add the window to the epoch's running means."""
        samples = added.samples
        weights = where_sum(
            self._variables.survey.losses, samples, added.denominators
        )
        regularization = samples * added.regularization / count
        self._variables.epoch.add(
            Sums(means * weights, weights, regularization, samples, samples)
        )
        self._variables.epoch.add_logs(self._variables.window.logs())

    def _window_logs(self, loss: Tensor, means: Tensor) -> dict[str, Tensor]:
        losses = {"loss": loss} | named_losses(
            self._variables.survey.losses, means
        )
        return losses | self._variables.window.values()

    def running_logs(self) -> dict[str, Tensor]:
        """Read the epoch so far: losses, metrics, logged values.

        Losses are NaN where no window has been applied yet.
        """
        survey, epoch = self._variables.survey, self._variables.epoch
        others = self._variables.other_epochs
        parts = [(survey, epoch), *others]
        losses, means, loss = joined(
            [EpochSums.read(one.losses, running) for one, running in parts]
        )
        model = self._parts.model
        with self._backend.replicas.holding(metric_variables(model)):
            found = results(
                model,
                losses,
                loss,
                means,
                survey.idle_metrics,
                untold=survey.untold,
            )
        return found | epoch.values(other for _, other in others)

    def running_logs_with(self, micro_batches: Tensor) -> dict[str, Tensor]:
        """Read the epoch so far, as if the open window had been applied.

        Args:
            micro_batches: scalar, int32, those of the open window.
        """
        count = ops.cast(micro_batches, "float32")
        means, added = self._window_means()
        read = [
            *self._variables.window.variables,
            *self._variables.epoch.variables,
            *(v for _, e in self._variables.other_epochs for v in e.variables),
            *metric_variables(self._parts.model),
        ]
        with Scratch(read):
            self._add_to_epoch(means, added, count)
            return self.running_logs()


def _total_weight(weighing: Weighing, added: Sums) -> Tensor:
    """Say how much a window counts: of padding alone, not even a little."""
    if weighing.rule == "denominator":
        return added.denominators[0]
    return added.weight


def _divide(sums: list[Tensor], divisor: Tensor | None) -> list[Tensor]:
    """Divide the sums of gradients by what their weights add up to.

    A product costs so little that it is computed wherever it is read, while
    the quotients of large gradients would be written to memory first. `None`
    stands for a division that has been done.
    """
    if divisor is None:
        return sums
    factor = ops.divide_no_nan(1.0, divisor)
    return [times(total, factor) for total in sums]
