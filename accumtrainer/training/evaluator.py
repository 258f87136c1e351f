"""Evaluates and predicts over whole sources, and tells callbacks of it."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from accumtrainer import errors
from accumtrainer.data.batches import Batch, Window
from accumtrainer.data.processes import items_of_all
from accumtrainer.data.source import Source
from accumtrainer.keras_api import check_feature, metric_names, tree
from accumtrainer.keras_api.arrays import to_array
from accumtrainer.keras_api.types import Nest
from accumtrainer.observers.dispatcher import Dispatcher
from accumtrainer.observers.logs import Logs
from accumtrainer.steps import (
    Backend,
    EvaluationStep,
    Report,
    should_compile_evaluation,
)
from accumtrainer.steps.looks import Followed, Looks
from accumtrainer.training.input_checks import compile_option, has_own_loss
from accumtrainer.training.own_evaluation import (
    evaluate_by_itself,
    evaluates_itself,
)
from accumtrainer.training.predictions import Predictions
from accumtrainer.training.sizing import AutoSize, GivenSize
from accumtrainer.window.evaluation import EvaluationProgram
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.results import result_names


class _Results:
    """What an evaluation has come to, which further batches add to.

    Args:
        step: the evaluation.
    """

    def __init__(self, step: EvaluationStep):
        self._step = step
        self._report: Report | None = None

    def settle(self) -> Report:
        """Keep what there is now; waits for nothing."""
        if self._report is None:
            self._report = self._step.report()
        return self._report

    def __call__(self) -> dict[str, Any]:
        """Read the numbers by name."""
        return self.settle().section("results")


def _settle(told: "weakref.ref[_Results] | None") -> None:
    """Have logs stay what they are that somebody has kept unread."""
    results = told and told()
    if results:
        results.settle()


class Evaluator:
    """Runs evaluations and predictions.

    Args:
        parts: whose losses and predictions they are.
        backend: what they run on.
        sizing: says how many samples run at a time.
        look: notes what is evaluated by now.
        jit_compile: whether XLA compiles.
    """

    def __init__(
        self,
        parts: WindowParts,
        backend: Backend,
        sizing: GivenSize | AutoSize,
        *,
        look: Callable[[], Looks],
        jit_compile: bool | Literal["auto"],
    ):
        self._has_window_loss = parts.hooks.has_window_loss
        self._hooks = parts.hooks
        self._model = parts.model
        self._evaluates_itself = evaluates_itself(parts.hooks)
        self._jit_compile = jit_compile
        self._backend = backend
        self._sizing = sizing
        self._followed = Followed(look)
        self._program = EvaluationProgram(parts)
        self._step = EvaluationStep(
            self._program,
            backend,
            jit_compile=should_compile_evaluation(backend, jit_compile),
        )

    def build_model(self, batch: Batch) -> None:
        """Create the variables of a model that has none yet."""
        self._program.build_model(batch)

    @property
    def names(self) -> list[str]:
        """Names of losses and metrics evaluated, as Keras orders them."""
        if self._evaluates_itself:
            return metric_names(self._model)
        return result_names(self._model, self._program.losses)

    def evaluate(
        self,
        source: Source,
        dispatcher: Dispatcher,
        rest: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Evaluate one source.

        Args:
            source: the data.
            dispatcher: tells about it.
            rest: is called after every loader batch.
        """
        if self._evaluates_itself:
            return self._evaluate_by_model(source, dispatcher, rest)
        is_first, told = True, None
        model = self._model
        model.stop_evaluating = False
        items = items_of_all(source, self._backend.replicas)
        with dispatcher.testing(), self._following():
            for index, item in enumerate(items):
                dispatcher.call("on_test_batch_begin", index, {})
                self._follow_model(is_first=index == 0)
                window = self._slice(source, item)
                if is_first:
                    self._check_text(window.split()[0])
                _settle(told)
                for batch in window.split():
                    self._step.run(batch, window.samples, is_first=is_first)
                    is_first = False
                results = _Results(self._step)
                told = weakref.ref(results)
                dispatcher.call("on_test_batch_end", index, Logs(results))
                del results
                if rest is not None:
                    rest()
                # Otherwise one process could stop while others wait for it.
                if self._backend.replicas.any(model.stop_evaluating):
                    break
            _settle(told)
            dispatcher.last_logs = logs = _Results(self._step)()
        return logs

    def _evaluate_by_model(
        self,
        source: Source,
        dispatcher: Dispatcher,
        rest: Callable[[], None] | None,
    ) -> dict[str, Any]:
        """Evaluate as Keras does, since the model has its own way for it."""
        if self._backend.replicas.processes > 1:
            raise ValueError(
                errors.MODEL_WITH_OWN_TEST_STEP.format(
                    model=type(self._model).__name__,
                    processes=self._backend.replicas.processes,
                )
            )
        check_feature("evaluation")
        self._backend.write_back()
        with dispatcher.testing():
            logs = evaluate_by_itself(self._model, source, dispatcher, rest)
            dispatcher.last_logs = logs
        return logs

    def predict(
        self,
        source: Source,
        dispatcher: Dispatcher,
        rest: Callable[[], None] | None = None,
    ) -> Nest:
        """Predict for one source; the arguments are those of `evaluate`.

        Returns:
            Nest of NumPy arrays, one row per sample; ragged tensors where the
            predictions of batches differ in length, on TensorFlow.
        """
        outputs = Predictions(self._check_shapes)
        model = self._model
        model.stop_predicting = False
        items = items_of_all(source, self._backend.replicas)
        with dispatcher.predicting(), self._following():
            for index, item in enumerate(items):
                dispatcher.call("on_predict_batch_begin", index, {})
                self._follow_model(is_first=index == 0)
                window, pieces = self._slice(source, item), []
                for batch in window.split():
                    if not outputs:
                        self._check_text(Batch(batch.x))
                    predicted = self._step.predict(Batch(batch.x))
                    outputs.add(predicted, window.size_bytes)
                    pieces.append(predicted)
                logs = Logs(functools.partial(self._outputs, pieces))
                dispatcher.call("on_predict_batch_end", index, logs)
                if rest is not None:
                    rest()
                if self._backend.replicas.any(model.stop_predicting):
                    break
            parts = outputs.read()
        return tree.map_structure(self._join, *parts)

    def expect_changes(self) -> None:
        """Note that others may change next what is evaluated."""
        self._followed.expect_changes()

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        """Make a scope in which what is recorded is told from windows.

        Callbacks may change a model for an evaluation, and change it back.
        """
        of_windows = self._backend.followed
        self._backend.followed = self._followed
        try:
            yield
        finally:
            self._followed.settle()
            self._backend.followed = of_windows
            # The model is left current, however a round of the data ends.
            self._backend.write_back()

    def _follow_model(self, *, is_first: bool) -> None:
        """Turn to what callbacks have made of the model since."""
        if self._backend.fit_compiles:  # then that does not count at once
            return
        followed, replicas = self._followed, self._backend.replicas
        if is_first:
            is_changed = replicas.any(followed.has_changed())
        else:
            # Several processes would have to ask at every batch.
            is_changed = replicas.processes == 1 and followed.has_been_changed()
        followed.pace.note_window()
        if is_changed:
            self._followed = self._backend.followed = followed.anew()
            self._step.forget()

    def _check_text(self, batch: Batch) -> None:
        compile_option(
            batch,
            self._jit_compile,
            has_own_loss=has_own_loss(self._hooks),
        )

    def _check_shapes(self, first: Nest, other: Nest) -> None:
        """Refuse predictions of other shapes where nothing is ragged."""
        if self._backend.has_ragged:
            return
        pairs = zip(tree.flatten(first), tree.flatten(other), strict=True)
        for one, other in pairs:
            if one.shape[1:] != other.shape[1:]:
                raise ValueError(
                    errors.RAGGED_PREDICTIONS.format(
                        before=one.shape, now=other.shape
                    )
                )

    def _outputs(self, pieces: list[Nest]) -> dict[str, Nest]:
        """Read the predictions of a loader batch, for callbacks."""
        read = tree.map_structure(to_array, pieces)
        return {"outputs": tree.map_structure(self._join, *read)}

    def _join(self, *parts: Any) -> Any:
        """Join the predictions of several batches, arrays or ragged."""
        if len(parts) == 1:
            return parts[0]
        if parts[0].ndim == 0:
            return np.stack(parts)
        if len({part.shape[1:] for part in parts}) > 1:
            return self._backend.join_ragged(parts)
        return np.concatenate(parts)

    def _slice(self, source: Source, item: Any) -> Window:
        """Cut a loader batch into what fits.

        A loss that compares examples must see those of a batch together.
        """
        size = None if self._has_window_loss else self._sizing.rows_per_pass
        return source.window([item], size)


def as_keras_returns(
    logs: dict[str, Any], names: Sequence[str], return_dict: bool
) -> Any:
    """Return results as Keras does: a number, a list or a dict.

    Args:
        logs: numbers by name.
        names: in which order; see `metric_names`.
        return_dict: whether a dict is wanted.
    """
    if return_dict:
        return logs
    others = [name for name in sorted(logs) if name not in names]
    values = [logs[name] for name in [*names, *others] if name in logs]
    return values[0] if len(values) == 1 else values
