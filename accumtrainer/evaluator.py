"""Evaluates and predicts over whole sources, and tells callbacks of it."""

import numpy as np

from accumtrainer.batches import Batch
from accumtrainer.evaluation import EvaluationProgram
from accumtrainer.keras_api import tree
from accumtrainer.logs import Logs
from accumtrainer.process_sources import items_of_all
from accumtrainer.steps import EvaluationStep, should_compile_evaluation


class Evaluator:
    """Runs evaluations and predictions.

    Args:
        hooks: `Hooks`, the Trainer.
        state: `TrainingState`.
        backend: the backend's functions.
        tracked: list of variables that hooks may read.
        jit_compile: `"auto"`, `True` or `False`.
    """

    def __init__(self, hooks, state, backend, *, tracked, jit_compile):
        self._has_window_loss = hooks.has_window_loss
        self._backend = backend
        self._program = EvaluationProgram(
            hooks, state, backend, tracked=tracked
        )
        self._step = EvaluationStep(
            self._program,
            backend,
            jit_compile=should_compile_evaluation(backend, jit_compile),
        )

    def build_model(self, batch):
        """Create the variables of a model that has none yet."""
        self._program.build_model(batch)

    def evaluate(self, source, dispatcher, *, rows_per_pass):
        """Evaluate one source.

        Args:
            source: `Source`.
            dispatcher: `Dispatcher` to tell about it.
            rows_per_pass: int, samples to run at a time; `None` for any
                number.

        Returns:
            Dict of numbers.
        """
        is_first = True
        items = items_of_all(source, self._backend)
        with dispatcher.testing():
            for index, item in enumerate(items):
                dispatcher.call("on_test_batch_begin", index, {})
                for batch in self._slice(source, item, rows_per_pass):
                    self._step.run(batch, is_first=is_first)
                    is_first = False
                if dispatcher.looks("on_test_batch_end"):
                    self._backend.publish()
                logs = Logs(self._step.results)
                dispatcher.call("on_test_batch_end", index, logs)
            dispatcher.last_logs = logs = self._step.results()
            self._backend.publish()
        return logs

    def predict(self, source, dispatcher, *, rows_per_pass):
        """Predict for one source.

        Args:
            source: `Source`.
            dispatcher: `Dispatcher` to tell about it.
            rows_per_pass: int, samples to run at a time; `None` for any
                number.

        Returns:
            Nest of NumPy arrays, one row per sample.
        """
        outputs = []
        items = items_of_all(source, self._backend)
        with dispatcher.predicting():
            for index, item in enumerate(items):
                dispatcher.call("on_predict_batch_begin", index, {})
                for batch in self._slice(source, item, rows_per_pass):
                    predicted = self._step.predict(Batch(batch.x))
                    outputs.append(tree.map_structure(np.asarray, predicted))
                self._backend.publish()
                dispatcher.call("on_predict_batch_end", index, {})
        return tree.map_structure(
            lambda *parts: np.concatenate(parts), *outputs
        )

    def _slice(self, source, item, rows_per_pass):
        """Cut a loader batch into what fits.

        A loss that compares examples must see those of a batch together.
        """
        size = None if self._has_window_loss else rows_per_pass
        return source.window([item], size).split()
