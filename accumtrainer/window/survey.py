"""What one micro-batch tells about windows of its kind, before one runs."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from typing import Any

from accumtrainer import errors
from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Metric, Tensor, Variable
from accumtrainer.observers.logs import is_of_windows
from accumtrainer.window.draws import host_drawing_again
from accumtrainer.window.hooks import (
    check_batch,
    check_gradients,
    collect_logs,
    context_of,
)
from accumtrainer.window.losses import WeightedLoss, sort_of
from accumtrainer.window.objective import (
    is_random_state,
    metric_variables,
)
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.passes import Passes
from accumtrainer.window.results import idle_metrics, results
from accumtrainer.window.state import Scratch
from accumtrainer.window.weighing import Share


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What was seen while every hook ran once, without effect.

    Args:
        operations: the names of those in the model's computation.
        losses: of which only kind, coefficient and name count.
        idle_metrics: the model's metrics that a pass leaves alone.
        untold: names of results that the model leaves out of its logs.
        reductions: from what hooks log to how it is reduced.
        written: the variables that a window may write before it is applied or
            skipped, those that are tracked aside. Of the metrics' all but
            those of losses that it leaves alone: Keras gives them to a
            compiled model.
        moved: those of the model and the tracked ones that it gives new
            values.
        moved_by_perturb: those of them to which `perturb` itself assigns.
        embedding_dtypes: nest of those of what is embedded ahead, or `None`.
        others_read: variables that are no part of the model or its training.
        others_written: as those.
    """

    operations: set[str]
    losses: list[WeightedLoss]
    idle_metrics: list[Any]
    untold: Collection[str]
    reductions: dict[str, str]
    written: list[Variable]
    moved: list[Variable]
    moved_by_perturb: list[Variable]
    embedding_dtypes: Any
    others_read: list[Variable]
    others_written: list[Variable]

    @property
    def signature(self) -> Hashable:
        """What windows add up: losses by kind, and logged values."""
        losses = ((loss.name, sort_of(loss)) for loss in self.losses)
        return tuple(losses), tuple(self.reductions.items())

    @property
    def may_need_totals(self) -> bool:
        """Whether windows may have to be looked through for denominators."""
        return not all(loss.is_uniform or loss.is_sum for loss in self.losses)

    def find_captured(self, known: list[Variable]) -> list[Variable]:
        """List what hooks and layers read that is no part of the training.

        Args:
            known: what is.

        Raises:
            ValueError: they write to what is not, which nothing would save or
                put back.
        """
        ids = {id(v) for v in [*known, *self.find_streams(known)]}
        for variable in self.others_written:
            if id(variable) not in ids:
                raise ValueError(
                    errors.NOT_TRACKED.format(variable=variable.path)
                )
        return [v for v in self.others_read if id(v) not in ids]

    def find_streams(self, known: list[Variable]) -> list[Variable]:
        """List the random states that are drawn from and belong to nobody.

        A layer for augmentation may stand outside of the model.

        Args:
            known: what is part of the training.
        """
        ids = set(map(id, known))
        others = [v for v in self.others_written if id(v) not in ids]
        return list(filter(is_random_state, others))


def take_survey(parts: WindowParts, passes: Passes, batch: Batch) -> Survey:
    """Run every hook once without effect, and note what is seen.

    A hook that returns something of the wrong structure is so refused before
    training starts.

    Args:
        parts: whose windows will run.
        passes: what will run their micro-batches.
        batch: arrays, one micro-batch.
    """
    hooks, model = parts.hooks, parts.model
    movable = [*parts.non_trainable_variables, *parts.tracked]
    seen: dict[str, Any] = {}

    def run(batch: Batch) -> Tensor:
        with collect_logs(hooks):  # a backend may run this again
            before = [variable.value for variable in movable]
            info = passes.info(
                ops.zeros((), "int32"), Share.whole(ops.ones((), "int32"))
            )
            changed = hooks.on_micro_batch(batch, info)
            check_batch(batch, changed)
            with passes.layers_in_window(info.index):
                measured = passes.objective.measure(changed, info)
            zeros = passes.gradients.zeros()
            loss = ops.zeros((), "float32")
            info = replace(info, loss=loss, weight=measured.weight)
            gradients = hooks.on_accumulate(zeros, info)
            check_gradients("on_accumulate", zeros, gradients)
            pairs = zip(movable, before, strict=True)
            seen["moved"] = [v for v, value in pairs if v.value is not value]
            info = replace(
                info, index=None, is_last=None, weight=None, total_weight=loss
            )
            before = [variable.value for variable in movable]
            moves = hooks.perturb(zeros, info)
            check_gradients("perturb", zeros, moves)
            pairs = zip(movable, before, strict=True)
            seen["moved_by_perturb"] = [
                v
                for v, value in pairs
                if v.value is not value and not is_random_state(v)
            ]
            gradients = hooks.on_apply(zeros, info)
            check_gradients("on_apply", zeros, gradients)
            hooks.after_apply(info)
        seen["losses"] = measured.losses
        seen["untold"] = measured.untold
        seen["embedding_dtypes"] = passes.dtypes_of_embeddings(changed)
        return measured.total()

    book, known = context_of(hooks).log_book, parts.variables
    with book.surveying() as reductions, Scratch(known) as scope:
        with host_drawing_again():
            traced = parts.backend.trace(run, batch)
        if not traced.fixes_sizes:
            losses = seen["losses"]
            seen["losses"] = [replace(one, is_uniform=False) for one in losses]
        idle = idle_metrics(model, scope)
        survey = Survey(
            operations=traced.operations,
            idle_metrics=idle,
            reductions=reductions,
            written=_written(parts, scope, seen["losses"], idle),
            others_read=list(scope.others_read.values()),
            others_written=list(scope.others_written.values()),
            **seen,
        )
    check_log_names(parts, survey.losses, idle, reductions, batch)
    return survey


def check_log_names(
    parts: WindowParts,
    losses: list[WeightedLoss],
    idle: list[Metric],
    names: Collection[str],
    batch: Batch,
) -> None:
    """Refuse what hooks log under the name of what is logged already.

    Args:
        losses: of which only the names count.
        idle: the model's metrics that nobody updates.
        names: what hooks log.
        batch: arrays, one micro-batch.

    Raises:
        ValueError: a name is taken.
    """
    taken: set[str] = set()

    def read(batch: Batch) -> Tensor:
        del batch
        nothing = ops.zeros((), "float32")
        means = ops.zeros([len(losses)], "float32")
        taken.update(results(parts.model, losses, nothing, means, idle))
        return nothing

    if names:
        with Scratch(parts.variables):
            parts.backend.trace(read, batch)
    for name in names:
        if name in taken or is_of_windows(name):
            raise ValueError(errors.LOG_NAME_TAKEN.format(name=name))


def _written(
    parts: WindowParts,
    scope: Scratch,
    losses: list[WeightedLoss],
    idle: list[Metric],
) -> list[Variable]:
    """List what was written in a scope; see `Survey.written`."""
    hooks, model = parts.hooks, parts.model
    names = ["loss", *(loss.name for loss in losses)]
    of_losses = {
        id(variable)
        for metric in idle
        if metric.name in names
        for variable in metric.variables
    }
    others = [
        # Spectral normalization, for one, writes a kernel.
        *model.trainable_variables,
        *parts.non_trainable_variables,
        *hooks.optimizer.variables,
        *hooks.variables_of_loss,
    ]
    return [
        *filter(scope.has_written, others),
        *(v for v in metric_variables(model) if id(v) not in of_losses),
    ]
