"""What validation and prediction compute, told once for every backend."""

from collections.abc import Hashable
from typing import Any

from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Metric, Tensor
from accumtrainer.window.hooks import Info, collect_logs, context_of
from accumtrainer.window.losses import WeightedLoss
from accumtrainer.window.numbers import Sums
from accumtrainer.window.objective import (
    Objective,
    idle_metrics,
    results,
    total_loss,
    unique,
)
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.state import RunningSums, Scratch
from accumtrainer.window.survey import check_log_names, kind_of
from accumtrainer.window.weighing import where_sum, window_means


class EvaluationProgram:
    """Runs batches through `compute_loss` and `predict_step`, no gradients.

    Args:
        parts: whose losses and predictions they are.

    Attributes:
        losses: of which only kind, coefficient and name count; known once it
            is built.
        kind: what tells batches like this one apart, see `kind_of`.
    """

    def __init__(self, parts: WindowParts):
        self._parts = parts
        self._hooks = parts.hooks
        self._model = parts.model
        self._state = parts.state
        self._objective = Objective(parts.hooks)
        self._known: dict[Hashable, Any] = {}
        self._captured: list[Any] = []
        self.kind: Hashable = None
        self.losses: list[WeightedLoss] = []

    def build(self, batch: Batch) -> None:
        """Learn from one batch which losses and logged values there are."""
        self.build_model(batch)
        self.kind = kind_of(batch)
        if self.kind not in self._known:
            self._known[self.kind] = self._look_at(batch)
        self._running, self.losses, self._idle_metrics = self._known[self.kind]
        self._objective.expected = self.losses

    def _look_at(
        self, batch: Batch
    ) -> tuple[RunningSums, list[WeightedLoss], list[Metric]]:
        book, known = context_of(self._hooks).log_book, self._parts.variables
        with book.surveying() as reductions, Scratch(known) as scope:
            self._parts.backend.trace(self._survey, batch)
            idle = idle_metrics(self._model, scope)
        check_log_names(self._parts, self.losses, idle, reductions, batch)
        self._capture(scope)
        running = RunningSums(
            losses=len(self.losses),
            reductions=reductions,
            name="evaluation",
        )
        return running, self.losses, idle

    def build_model(self, batch: Batch) -> None:
        """Create the variables of a model that has none yet."""
        if self._model.built:
            return
        with Scratch([]):
            self._parts.backend.trace(self._hooks.predict_step, batch)

    def look_at_prediction(self, batch: Batch) -> None:
        """Learn from one batch what predictions read beside the model.

        A random state that belongs to nobody is among it.

        Args:
            batch: for a model that has its variables.
        """
        with Scratch(self._parts.variables) as scope:
            self._parts.backend.trace(self._hooks.predict_step, batch)
        self._capture(scope)

    def _capture(self, scope: Scratch) -> None:
        self._captured = unique([*self._captured, *scope.others_read.values()])

    def _survey(self, batch: Batch) -> Tensor:
        with collect_logs(self._hooks):
            measured = self._objective.measure(batch, self._info())
        self.losses = measured.losses
        return measured.total()

    @property
    def all_variables(self) -> list[Any]:
        """Every variable an evaluation reads or changes, each once."""
        of_sums = [v for t, *_ in self._known.values() for v in t.variables]
        return unique([*self._parts.variables, *self._captured, *of_sums])

    def start(self) -> None:
        """Begin an evaluation."""
        self._running.clear()
        self._model.reset_metrics()

    def run_batch(self, batch: Batch, loader_samples: Any) -> Any:
        """Add a batch to the evaluation.

        Losses are averaged over loader batches, sums too: each slice adds its
        part of a sum, which counts for all of the samples.

        Args:
            batch: tensors, a loader batch or a slice of one.
            loader_samples: scalar, float32, samples of all slices.

        Returns:
            Scalar, float32, the batch's own loss.
        """
        with collect_logs(self._hooks) as logs:
            measured = self._objective.measure(batch, self._info())
        losses, means = measured.losses, measured.means()
        self._objective.check(losses)
        samples = measured.samples
        weights = measured.denominators()
        self._running.add(
            Sums(
                means * where_sum(losses, loader_samples, weights),
                where_sum(losses, samples, weights),
                samples * measured.regularization,
                samples,
                samples,
            )
        )
        self._running.add_logs(logs)
        return total_loss(means, losses, measured.regularization)

    def predict_batch(self, batch: Batch) -> Any:
        """Compute the predictions of a batch."""
        return self._hooks.predict_step(batch)

    def results(self) -> dict[str, Any]:
        """Read the evaluation so far, tensors by name."""
        added = self._running.read()
        means = window_means(added.numerators, added.denominators)
        regularization = ops.divide_no_nan(added.regularization, added.weight)
        total = total_loss(means, self.losses, regularization)
        found = results(
            self._model, self.losses, total, means, self._idle_metrics
        )
        return found | self._running.values()

    def _info(self) -> Info:
        return Info(
            update=self._state.updates.value,
            epoch=self._state.epoch.value,
            loss_scale=self._state.loss_scale.value,
            training=False,
        )
