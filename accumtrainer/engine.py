"""Runs windows and evaluations for a Trainer, and counts what has run."""

import contextlib

import numpy as np

from accumtrainer import errors
from accumtrainer.batches import Batch
from accumtrainer.callback import Logs
from accumtrainer.evaluation import EvaluationProgram
from accumtrainer.keras_api import keras, tree
from accumtrainer.objective import metric_variables
from accumtrainer.progress import Progress
from accumtrainer.steps import (
    EvaluationStep,
    Step,
    choose_plan,
    make_backend,
    should_compile_evaluation,
)
from accumtrainer.window import WindowProgram


class Engine:
    """The compiled side of a Trainer: what the loop drives.

    Args:
        hooks: `Hooks`, the Trainer.
        state: `TrainingState`.
        tracked: list of variables, filled until training begins.
        jit_compile: `"auto"`, `True` or `False`.
        run_eagerly: bool.
        max_consecutive_skips: int, or `None` for any number.

    Attributes:
        plan: `Plan` of the windows, `None` before the first.
    """

    def __init__(
        self,
        hooks,
        state,
        *,
        tracked,
        jit_compile,
        run_eagerly,
        max_consecutive_skips,
    ):
        self._hooks = hooks
        self._model = hooks.model
        self._state = state
        self._tracked = tracked
        self._jit_compile = jit_compile
        self._run_eagerly = run_eagerly
        self._max_consecutive_skips = max_consecutive_skips
        self._backend = make_backend(run_eagerly=run_eagerly)
        self._evaluation = EvaluationProgram(
            hooks, state, self._backend, tracked=tracked
        )
        self._evaluation_step = EvaluationStep(
            self._evaluation,
            self._backend,
            jit_compile=should_compile_evaluation(self._backend, jit_compile),
        )
        self._program = self._step = None
        self.plan = None
        self._progress = Progress()
        self._shown = None
        self._last_report = None
        self._unread_windows = 0
        self._known_skips = 0
        is_built = self._model.built
        self._trained_ids = _variable_ids(self._model) if is_built else None

    @property
    def has_begun(self):
        """Whether a window has been prepared for."""
        return self._program is not None

    @property
    def progress(self):
        """A copy of the counters; reading it waits for the device."""
        if self._shown is not None:
            return self._shown.copy()
        self._read_counters()
        return self._progress.copy()

    @property
    def samples_seen(self):
        """Samples consumed so far, an int the host knows without waiting."""
        return self._progress.samples

    @property
    def epochs_finished(self):
        """Epochs run so far, an int the host knows without waiting."""
        return self._progress.epochs

    def check_trainable(self):
        """Refuse a model whose trainable variables are other ones now."""
        if self._trained_ids is None:
            return
        now = _variable_ids(self._model)
        if now != self._trained_ids:
            raise ValueError(
                errors.TRAINABLE_CHANGED.format(
                    now=len(now), before=len(self._trained_ids)
                )
            )

    def prepare(self, window):
        """Build what is missing before the first window runs.

        Args:
            window: `Window` like those to come.
        """
        if self._program is not None:
            return
        self._hooks._must_weigh &= self._accumulates(window)
        first = window.split()[0]
        self._evaluation.build_model(Batch(first.x))
        if not self._model.trainable_variables:
            raise ValueError(
                errors.NOTHING_TO_TRAIN.format(model=self._model.name)
            )
        program = WindowProgram(
            self._hooks,
            self._state,
            self._backend,
            combine=self._hooks.accumulation.combine,
            loss_scale=self._hooks.loss_scale,
            tracked=self._tracked,
        )
        program.build(first)
        self.plan = choose_plan(
            self._model,
            program.operations,
            self._backend,
            jit_compile=self._jit_compile,
            run_eagerly=self._run_eagerly,
        )
        self._program = program
        self._step = Step(program, self._backend, self.plan)
        self._trained_ids = _variable_ids(self._model)

    def start_epoch(self, epoch):
        """Begin an epoch's running means."""
        self.publish()
        self._program.start_epoch(epoch)

    def run_window(self, window):
        """Make one update.

        Args:
            window: `Window`.

        Returns:
            `Report`.
        """
        if window.micro_batches > 1 and self._hooks._guessed_denominator:
            raise ValueError(errors.BARE_LOSS)
        self._last_report = self._step.run(window)
        self._unread_windows += 1
        if self._max_consecutive_skips is not None:
            most_skips = self._known_skips + self._unread_windows
            if most_skips > self._max_consecutive_skips:
                self.check_skips()
        return self._last_report

    def publish(self):
        """Make the model's variables current, for code that can look."""
        self._backend.publish()

    @contextlib.contextmanager
    def showing(self, progress):
        """Show other counters as `progress`, to tell of a window's middle."""
        self._shown = progress
        try:
            yield
        finally:
            self._shown = None

    def count_window(self, window):
        """Count a window that has run."""
        self._progress.micro_batches += window.micro_batches
        self._progress.samples += window.samples

    def count_seconds(self, seconds):
        """Note for how long training has gone on, over all calls."""
        self._progress.seconds = seconds

    def finish_epoch(self):
        """Count an epoch that has run."""
        self._progress.epochs += 1
        self.check_skips()

    @property
    def updates_at_most(self):
        """Updates made if no window since the last look was skipped."""
        return self._progress.updates + self._unread_windows

    @property
    def progress_at_most(self):
        """The counters if no window since the last look was skipped."""
        progress = self._progress.copy()
        progress.updates = self.updates_at_most
        return progress

    def running_logs(self):
        """Read the epoch so far, dict of numbers."""
        return self._last_report.running_logs()

    def evaluate(self, source, dispatcher):
        """Evaluate one source.

        Args:
            source: `Source`.
            dispatcher: `Dispatcher` to tell about it.

        Returns:
            Dict of numbers.
        """
        step = self._evaluation_step
        is_first = True
        with dispatcher.testing():
            for index, item in enumerate(source.iterate(0)):
                dispatcher.call("on_test_batch_begin", index, {})
                for batch in self._slice(source, item):
                    step.run(batch, is_first=is_first)
                    is_first = False
                if dispatcher.looks("on_test_batch_end"):
                    self.publish()
                dispatcher.call("on_test_batch_end", index, Logs(step.results))
            dispatcher.last_logs = logs = step.results()
            self.publish()
        return logs

    def predict(self, source, dispatcher):
        """Predict for one source.

        Args:
            source: `Source`.
            dispatcher: `Dispatcher` to tell about it.

        Returns:
            Nest of NumPy arrays, one row per sample.
        """
        outputs = []
        with dispatcher.predicting():
            for index, item in enumerate(source.iterate(0)):
                dispatcher.call("on_predict_batch_begin", index, {})
                for batch in self._slice(source, item):
                    predicted = self._evaluation_step.predict(Batch(batch.x))
                    outputs.append(tree.map_structure(np.asarray, predicted))
                self.publish()
                dispatcher.call("on_predict_batch_end", index, {})
        return tree.map_structure(
            lambda *parts: np.concatenate(parts), *outputs
        )

    @contextlib.contextmanager
    def metrics_kept(self):
        """Put the model's metrics back after a validation amid an epoch."""
        self.publish()
        variables = metric_variables(self._model)
        values = [keras.ops.convert_to_numpy(v) for v in variables]
        yield
        self.publish()
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def _accumulates(self, window):
        """Whether windows of more than one micro-batch are to be expected."""
        steps = self._hooks.accumulation.steps
        return window.micro_batches > 1 if steps is None else steps != 1

    def _slice(self, source, item):
        """Cut a loader batch into what fits, for evaluation."""
        return source.window(
            [item], self._hooks.accumulation.micro_batch_size
        ).split()

    def _read_counters(self):
        """Learn from the device how many windows were applied."""
        if self._unread_windows:
            counters = self._last_report.section("counters")
            self._progress.updates = counters["updates"]
            self._progress.skipped_updates = counters["skipped_updates"]
            self._known_skips = counters["consecutive_skips"]
            self._unread_windows = 0

    def check_skips(self):
        """Stop where too many windows in a row were not finite."""
        limit = self._max_consecutive_skips
        if self._last_report is None:
            return
        self._read_counters()
        counters = self._last_report.section("counters")
        if limit is not None and counters["consecutive_skips"] > limit:
            raise errors.NonFiniteError(
                errors.NON_FINITE.format(
                    count=counters["consecutive_skips"],
                    update=counters["updates"],
                    limit=limit,
                )
            )


def _variable_ids(model):
    return [id(variable) for variable in model.trainable_variables]
