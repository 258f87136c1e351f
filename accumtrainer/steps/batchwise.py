"""Runs windows whose micro-batches arrive one by one, inside `Model.fit`."""

import numpy as np

from accumtrainer.keras_api import keras, ops
from accumtrainer.steps.step import Report, Step
from accumtrainer.window.objective import names_of
from accumtrainer.window.passes import join_uses


class BatchwiseProgram:
    """A window program that keeps the losses `Model.fit` reads current.

    At the end of an epoch `fit` reads the model's metrics, of which the first
    is its loss, and those after it the losses of several outputs.

    Args:
        program: `WindowProgram`, built.
    """

    measures_gradients = False

    def __init__(self, program):
        self._program = program

    @property
    def _trackers(self):
        names = ["loss", *names_of(self._program.losses)]
        return [
            metric
            for metric in self._program.idle_metrics
            if metric.name in names and isinstance(metric, keras.metrics.Mean)
        ]

    @property
    def variables(self):
        """Every variable a window may change, each once."""
        return self._program.variables

    @property
    def signature(self):
        """See `WindowProgram.signature`."""
        return self._program.signature

    @property
    def revision(self):
        """See `WindowProgram.revision`."""
        return self._program.revision

    def make_accumulators(self):
        """See `WindowProgram.make_accumulators`."""
        self._program.make_accumulators()

    def needs_totals(self, is_even):
        """See `WindowProgram.needs_totals`."""
        return self._program.needs_totals(is_even)

    def looks_ahead(self, micro_batches):
        """See `WindowProgram.looks_ahead`."""
        return self._program.looks_ahead(micro_batches)

    def measure_weights(self, batch, index, micro_batches):
        """See `WindowProgram.measure_weights`."""
        return self._program.measure_weights(batch, index, micro_batches)

    def run_micro_batch(
        self, batch, index, micro_batches, totals, is_even, ahead=None
    ):
        """See `WindowProgram.run_micro_batch`."""
        return self._program.run_micro_batch(
            batch, index, micro_batches, totals, is_even, ahead
        )

    def add(self, batch, index, micro_batches):
        """Consume one micro-batch and say how the epoch stands.

        Args:
            batch: `Batch` of tensors `[m, ...]`.
            index: scalar tensor, int32.
            micro_batches: scalar tensor, int32, k.

        Returns:
            Pair: dict with the scalar tensors of the epoch so far, this
            window included, under `"running"`; and which variables the
            micro-batch uses, see `passes.uses`.
        """
        _, used = self.run_micro_batch(batch, index, micro_batches, None, True)
        running = self._program.running_logs_with(index + 1)
        return self._show({"running": running}), used

    def apply(self, micro_batches, is_even, used):
        """See `WindowProgram.apply`."""
        return self._show(self._program.apply(micro_batches, is_even, used))

    def run_window(self, stacked):
        """See `WindowProgram.run_window`."""
        return self._show(self._program.run_window(stacked))

    def _show(self, report):
        for tracker in self._trackers:
            value = report["running"][tracker.name]
            tracker.total.assign(ops.cast(value, tracker.total.dtype))
            tracker.count.assign(ops.ones_like(tracker.count.value))
        return report


class BatchwiseStep:
    """Consumes micro-batches as they come, and windows that are whole.

    Args:
        program: `BatchwiseProgram`.
        backend: the backend's functions.
        plan: `Plan`.
    """

    def __init__(self, program, backend, plan):
        program.make_accumulators()
        self._backend = backend
        self._step = Step(program, backend, plan)
        self._constants = {}
        self._program = program
        self._used = []  # by each micro-batch of the open window

    def run(self, window):
        """Run a whole window.

        Args:
            window: `Window`.

        Returns:
            `Report`.
        """
        return self._step.run(window)

    def add(self, batch, index, micro_batches):
        """Run one micro-batch of a window.

        Args:
            batch: `Batch` of arrays `[m, ...]`.
            index: int, its position in the window.
            micro_batches: int, k.

        Returns:
            `Report` of the epoch so far, and of nothing else.
        """
        count = self._constant(micro_batches)

        layout = self._step.layout("open")

        def run(*arguments):
            running, used = self._program.add(*arguments)
            return layout.pack(running), used

        add = self._step.function("add", run)
        packed, used = add(batch, self._constant(index), count)
        self._used = [used] if index == 0 else [*self._used, used]
        return Report(layout, packed, [])

    def apply(self, micro_batches):
        """Apply the micro-batches that `add` has run.

        Args:
            micro_batches: int, how many.

        Returns:
            `Report`.
        """
        used = join_uses(self._used)
        layout = self._step.layout("applied")

        def run(count):
            return layout.pack(self._program.apply(count, True, used))

        apply = self._step.function(("apply open", used), run)
        packed = apply(self._constant(micro_batches))
        self._backend.check()
        return Report(layout, packed, [])

    def _constant(self, number):
        if number not in self._constants:
            array = np.asarray(number, "int32")
            self._constants[number] = self._backend.constant(array)
        return self._constants[number]


def late_logs(report):
    """Return the epoch so far as `Model.fit` wants it, to be read later.

    Args:
        report: `Report` of a window, or of an open one.

    Returns:
        Dict by name of what `float` turns into a number, waiting for the
        device only then; of tensors where a metric is not a scalar.
    """
    tensors = report.tensors("running")
    return {
        name: _LateNumber(report, name) if tensor is None else tensor
        for name, tensor in tensors.items()
    }


class _LateNumber:
    """A number of `Report.running` that is read when Keras wants a float."""

    __slots__ = ("_name", "_report")

    def __init__(self, report, name):
        self._report = report
        self._name = name

    def __float__(self):
        return float(self._report.running()[self._name])

    def __repr__(self):
        return repr(float(self))
