"""What one micro-batch tells about windows of its kind, before one runs."""

from dataclasses import replace

import numpy as np
import optree

from accumtrainer import errors
from accumtrainer.keras_api import ops
from accumtrainer.window.hooks import (
    check_batch,
    check_gradients,
    collect_logs,
    context_of,
)
from accumtrainer.window.objective import (
    idle_metrics,
    is_random_state,
    metric_variables,
    total_loss,
)
from accumtrainer.window.replicas import Share
from accumtrainer.window.state import Scratch


class Survey:
    """Runs every hook once without effect, and notes what it has seen.

    A hook that returns something of the wrong structure is so refused before
    training starts.

    Args:
        hooks: `Hooks`, usually the Trainer.
        passes: `Passes`.
        backend: the functions a backend must provide.
        batch: `Batch` of arrays, one micro-batch.

    Attributes:
        operations: the names of the operations in the model's computation.
        losses: list of `WeightedLoss`, of which only kind, coefficient and
            name count.
        idle_metrics: list of the model's metrics that a pass leaves alone.
        is_sum: array `(losses,)`, bool, which of them are no means.
        reductions: dict from what hooks log to how it is reduced.
        written: list of the variables that a window may write before it is
            applied or skipped, those that are tracked aside. Of the metrics'
            all but those of losses that it leaves alone: Keras gives them to
            a compiled model.
        moved: list of the model's and the tracked variables that it gives a
            new value.
    """

    def __init__(self, hooks, passes, backend, batch):
        self._hooks = hooks
        self._passes = passes
        model = hooks.model
        book = context_of(hooks).log_book
        with (
            book.surveying() as self.reductions,
            Scratch(passes.variables) as scope,
        ):
            with collect_logs(hooks):
                self.operations = backend.trace(self._run, batch)
            self.idle_metrics = idle_metrics(model, scope)
            names = ["loss", *(loss.name for loss in self.losses)]
            of_losses = {
                id(variable)
                for metric in self.idle_metrics
                if metric.name in names
                for variable in metric.variables
            }
            others = [
                # Spectral normalization, for one, writes a kernel.
                *model.trainable_variables,
                *model.non_trainable_variables,
                *hooks.optimizer.variables,
                *hooks.variables_of_loss,
            ]
            self.written = [
                *filter(scope.has_written, others),
                *(v for v in metric_variables(model) if id(v) not in of_losses),
            ]
        self._scope = scope

    @property
    def signature(self):
        """What windows add up, hashable: losses by kind, and logged values."""
        losses = ((loss.name, loss.is_sum) for loss in self.losses)
        return tuple(losses), tuple(self.reductions.items())

    def _run(self, batch):
        hooks, passes = self._hooks, self._passes
        model = hooks.model
        movable = [*model.non_trainable_variables, *passes.tracked]
        before = [variable.value for variable in movable]
        info, changed, measured = _measure(hooks, passes, batch)
        self.losses = measured.losses
        self.is_sum = np.array([loss.is_sum for loss in self.losses])
        zeros = passes.zeros()
        loss = ops.zeros((), "float32")
        info = replace(info, loss=loss, weight=measured.weight)
        gradients = hooks.on_accumulate(zeros, info)
        check_gradients("on_accumulate", zeros, gradients)
        self.moved = [
            variable
            for variable, value in zip(movable, before, strict=True)
            if variable.value is not value
        ]
        info = replace(
            info, index=None, is_last=None, weight=None, total_weight=loss
        )
        gradients = hooks.on_apply(zeros, info)
        check_gradients("on_apply", zeros, gradients)
        hooks.after_apply(info)
        passes.learn_embeddings(changed)
        return total_loss(
            measured.means(), self.losses, measured.regularization
        )

    def find_borrowed(self, known):
        """List what hooks and layers read that is no part of the training.

        Args:
            known: list of variables that are.

        Raises:
            ValueError: they write to what is not, which nothing would save or
                put back.
        """
        ids = {id(v) for v in [*known, *self.find_streams(known)]}
        for key, variable in self._scope.strangers_written.items():
            if key not in ids:
                raise ValueError(
                    errors.NOT_TRACKED.format(variable=variable.path)
                )
        read = self._scope.strangers_read.items()
        return [variable for key, variable in read if key not in ids]

    def find_streams(self, known):
        """List the random states that are drawn from and belong to nobody.

        A layer for augmentation may stand outside of the model.

        Args:
            known: list of variables that are part of the training.
        """
        ids = {id(variable) for variable in known}
        written = self._scope.strangers_written.items()
        return [v for k, v in written if k not in ids and is_random_state(v)]


def kind_of(batch):
    """Tell apart what a survey has to look at: parts, axes and types.

    Args:
        batch: `Batch` of arrays, one micro-batch.

    Returns:
        Hashable, the same for micro-batches that differ in their sizes alone.
    """
    leaves, structure = optree.tree_flatten(batch)
    return structure, *((len(leaf.shape), str(leaf.dtype)) for leaf in leaves)


def _measure(hooks, passes, batch):
    """Prepare a micro-batch that is alone, and compute its losses."""
    share = Share.whole(ops.ones((), "int32"))
    info = passes.info(ops.zeros((), "int32"), share)
    changed = hooks.on_micro_batch(batch, info)
    check_batch(batch, changed)
    with passes.layers_in_window(info.index):
        measured = passes.objective.measure(changed, info)
    return info, changed, measured
