"""What validation and prediction compute, told once for every backend."""

from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

from accumtrainer.data.batches import Batch, kind_of
from accumtrainer.keras_api.types import Metric, Tensor
from accumtrainer.window.hooks import Info, collect_logs, context_of
from accumtrainer.window.losses import WeightedLoss
from accumtrainer.window.numbers import Sums
from accumtrainer.window.objective import (
    EpochSums,
    Objective,
    joined,
    total_loss,
    unique,
)
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.results import idle_metrics, results
from accumtrainer.window.state import RunningSums, Scratch
from accumtrainer.window.survey import check_log_names
from accumtrainer.window.weighing import where_sum


class _OfKind(NamedTuple):
    """What is known of batches of a kind, and what they have added up.

    Args:
        losses: of which only kind, coefficient and name count.
        running: of an evaluation.
        idle_metrics: the model's metrics that these batches leave alone.
        untold: names of results that the model leaves out of its logs.
    """

    losses: list[WeightedLoss]
    running: RunningSums
    idle_metrics: list[Metric]
    untold: Collection[str]


class EvaluationProgram:
    """Runs batches through `compute_loss` and `predict_step`, no gradients.

    Args:
        parts: whose losses and predictions they are.

    Attributes:
        kind: of the batches that it is built for, see `kind_of`.
        kinds: of the batches of the evaluation so far.
    """

    def __init__(self, parts: WindowParts):
        self._parts = parts
        self._hooks = parts.hooks
        self._model = parts.model
        self._state = parts.state
        self._objective = Objective(parts.hooks, parts.backend)
        self._known: dict[Hashable, _OfKind] = {}
        self._captured: list[Any] = []
        self.kind: Hashable = None
        self.kinds: tuple[Hashable, ...] = ()

    def build(self, batch: Batch) -> None:
        """Learn from one batch which losses and logged values there are."""
        self.build_model(batch)
        self.kind = kind_of(batch)
        if self.kind not in self._known:
            # Current first, while the programs know no others.
            self._parts.backend.write_back()
            self._objective.forget()
            self._known[self.kind] = self._look_at(batch)
            if self._objective.is_unsure:
                self._objective.look_at_twice(self._look_at, batch)
                self._known[self.kind] = self._look_at(batch)
        self._objective.expected = self._now.losses
        if self.kind not in self.kinds:
            self.kinds += (self.kind,)

    @property
    def losses(self) -> list[WeightedLoss]:
        """Those of the evaluation so far; only kind and name count."""
        if len(self.kinds) == 1:
            return self._now.losses
        losses = [v for k in self.kinds for v in self._known[k].losses]
        return list({v.name: v for v in losses if v.name is not None}.values())

    @property
    def _now(self) -> _OfKind:
        return self._known[self.kind]

    def _look_at(self, batch: Batch) -> _OfKind:
        book, known = context_of(self._hooks).log_book, self._parts.variables
        seen: dict[str, Any] = {}

        def survey(batch: Batch) -> Tensor:
            with collect_logs(self._hooks):
                measured = self._objective.measure(batch, self._info())
            seen.update(losses=measured.losses, untold=measured.untold)
            return measured.total()

        with book.surveying() as reductions, Scratch(known) as scope:
            self._parts.backend.trace(survey, batch)
            idle = idle_metrics(self._model, scope)
        losses = seen["losses"]
        check_log_names(self._parts, losses, idle, reductions, batch)
        self._capture(scope)
        running = RunningSums(
            losses=len(losses),
            reductions=reductions,
            name="evaluation",
        )
        return _OfKind(losses, running, idle, seen["untold"])

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

    @property
    def all_variables(self) -> list[Any]:
        """Every variable an evaluation reads or changes, each once."""
        of_sums = [v for k in self._known.values() for v in k.running.variables]
        return unique([*self._parts.variables, *self._captured, *of_sums])

    def start(self) -> None:
        """Begin an evaluation of batches like the one that it is built for."""
        self.kinds = (self.kind,)
        for known in self._known.values():
            known.running.clear()
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
        running = self._now.running
        running.add(
            Sums(
                means * where_sum(losses, loader_samples, weights),
                where_sum(losses, samples, weights),
                samples * measured.regularization,
                samples,
                samples,
            )
        )
        running.add_logs(logs)
        return total_loss(means, losses, measured.regularization)

    def predict_batch(self, batch: Batch) -> Any:
        """Compute the predictions of a batch."""
        return self._hooks.predict_step(batch)

    def results(self) -> dict[str, Any]:
        """Read the evaluation so far, tensors by name."""
        last = self._now
        others = [self._known[k] for k in self.kinds if k != self.kind]
        losses, means, total = joined(
            [EpochSums.read(k.losses, k.running) for k in (last, *others)]
        )
        idle = [
            metric
            for metric in last.idle_metrics
            if all(metric in known.idle_metrics for known in others)
        ]
        found = results(
            self._model, losses, total, means, idle, untold=last.untold
        )
        return found | last.running.values(known.running for known in others)

    def _info(self) -> Info:
        return Info(
            update=self._state.updates.value,
            epoch=self._state.epoch.value,
            loss_scale=self._state.loss_scale.value,
            training=False,
        )
