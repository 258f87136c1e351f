"""What validation and prediction compute, told once for every backend."""

import numpy as np

from accumtrainer.keras_api import ops
from accumtrainer.window.hooks import Info, collect_logs, context_of
from accumtrainer.window.objective import (
    Objective,
    idle_metrics,
    metric_variables,
    results,
    total_loss,
)
from accumtrainer.window.state import Scratch, Tally
from accumtrainer.window.survey import kind_of
from accumtrainer.window.weighing import where_sum, window_means


class EvaluationProgram:
    """Runs batches through `compute_loss` and `predict_step`, no gradients.

    Args:
        hooks: `Hooks`, usually the Trainer.
        state: `TrainingState`.
        backend: the functions a backend must provide.
        tracked: list of variables that hooks may read.

    Attributes:
        losses: list of `WeightedLoss`, of which only kind, coefficient and
            name count; known once it is built.
        kind: what tells batches like this one apart, see `kind_of`.
    """

    def __init__(self, hooks, state, backend, *, tracked):
        self._hooks = hooks
        self._model = hooks.model
        self._state = state
        self._backend = backend
        self._tracked = list(tracked)
        self._objective = Objective(hooks)
        self._known = {}
        self._borrowed = []
        self.kind = None
        self.losses = []

    def build(self, batch):
        """Learn from one batch which losses and logged values there are."""
        self.build_model(batch)
        self.kind = kind_of(batch)
        if self.kind not in self._known:
            self._known[self.kind] = self._look_at(batch)
        self._tally, self.losses, self._idle_metrics = self._known[self.kind]
        self._objective.expected = self.losses

    def _look_at(self, batch):
        book = context_of(self._hooks).log_book
        known = self._known_variables()
        with book.surveying() as reductions, Scratch(known) as scope:
            self._backend.trace(self._survey, batch)
            idle = idle_metrics(self._model, scope)
        self._borrowed += scope.strangers_read.values()
        tally = Tally(
            losses=len(self.losses),
            reductions=reductions,
            name="evaluation",
        )
        return tally, self.losses, idle

    def build_model(self, batch):
        """Create the variables of a model that has none yet."""
        if self._model.built:
            return
        with Scratch([]):
            self._backend.trace(self._hooks.predict_step, batch)

    def _survey(self, batch):
        with collect_logs(self._hooks):
            measured = self._objective.measure(batch, self._info())
        self.losses = measured.losses
        return total_loss(
            measured.means(), measured.losses, measured.regularization
        )

    def _known_variables(self):
        return [
            *self._model.variables,
            *metric_variables(self._model),
            *self._tracked,
            *self._state.variables,
        ]

    @property
    def variables(self):
        """Every variable an evaluation reads or changes, each once."""
        tallies = [v for t, *_ in self._known.values() for v in t.variables]
        variables = [*self._known_variables(), *self._borrowed, *tallies]
        return list({id(v): v for v in variables}.values())

    def start(self):
        """Begin an evaluation."""
        self._tally.clear()
        for metric in self._model.metrics:
            metric.reset_state()

    def run_batch(self, batch, loader_samples):
        """Add a batch to the evaluation.

        Losses are averaged over loader batches, sums too: each slice adds its
        part of a sum, which counts for all of the samples.

        Args:
            batch: `Batch` of tensors, a loader batch or a slice of one.
            loader_samples: scalar tensor, float32, samples of all slices.

        Returns:
            Scalar tensor, float32, the batch's own loss.
        """
        with collect_logs(self._hooks) as logs:
            measured = self._objective.measure(batch, self._info())
        self._objective.check(measured.losses)
        means = measured.means()
        is_sum = np.array([loss.is_sum for loss in measured.losses])
        samples = measured.samples
        weights = measured.denominators()
        self._tally.add(
            means * where_sum(is_sum, loader_samples, weights),
            where_sum(is_sum, samples, weights),
            [samples * measured.regularization, samples, samples],
        )
        self._tally.add_logs(logs)
        return total_loss(means, measured.losses, measured.regularization)

    def predict_batch(self, batch):
        """Compute the predictions of a batch."""
        return self._hooks.predict_step(batch)

    def results(self):
        """Read the evaluation so far, `{name: tensor}`."""
        numerators, denominators, extras = self._tally.read()
        means = window_means(numerators, denominators)
        regularization = ops.divide_no_nan(*extras[:2])
        total = total_loss(means, self.losses, regularization)
        found = results(
            self._model, self.losses, total, means, self._idle_metrics
        )
        return found | self._tally.values()

    def _info(self):
        return Info(
            update=self._state.updates.value,
            epoch=self._state.epoch.value,
            loss_scale=self._state.loss_scale.value,
            training=False,
        )
