"""Runs windows by a plan and hands back numbers that are read late."""

import functools

import numpy as np

from accumtrainer.keras_api import ops
from accumtrainer.window.passes import join_uses
from accumtrainer.window.replicas import join_parts, share_out

CLOCKS = (
    "learning_rate",
    "gradient_norm",
    "loss_scale",
    "updates",
    "skipped_updates",
)
"""What every log carries beside losses and metrics."""

MICRO_BATCH_NUMBERS = ("loss", "weight", "gradient_norm", "gradient_weight")
"""What is known of a micro-batch; the gradient's only if it is measured."""


class Report:
    """The numbers of one window, on the device until somebody looks.

    Args:
        layout: `_Layout` of the packed values.
        packed: what a compiled function returned.
        micro_batches: list of k tensors `[n]` or one tensor `[k, n]`: the
            first n `MICRO_BATCH_NUMBERS` of each micro-batch.
        join: function that makes such rows of those that replicas return, or
            `None`.
    """

    def __init__(self, layout, packed, micro_batches, join=None):
        self._layout = layout
        self._packed = packed
        self._micro_batches = micro_batches
        self._join = join
        self._numbers = None

    def wait(self):
        """Wait until the window has run."""
        np.asarray(self._packed["int"])

    def section(self, name):
        """Read `"window"`, `"running"` or `"counters"` as Python numbers."""
        if self._numbers is None:
            self._numbers = self._layout.read(self._packed)
        return self._layout.unpack(name, self._numbers)

    def has(self, name):
        """Whether a section is there; without waiting for the device."""
        return self._layout.has(name)

    def tensors(self, name):
        """Return a section's names without waiting for the device.

        Returns:
            Dict from name to `None` for a number, or else to the tensor.
        """
        return self._layout.tensors(name, self._packed)

    def window_logs(self):
        """Read what this window alone was like, dict of numbers."""
        counters = self.section("counters")
        return self.section("window") | {
            "applied": bool(counters["applied"]),
            "updates": counters["updates"],
            "skipped_updates": counters["skipped_updates"],
        }

    def running(self):
        """Read the epoch so far as one of its windows shows it.

        A window's loss that is not finite is shown, although the running
        mean has forgotten that window: `TerminateOnNaN` looks for it here.
        Where there are no means yet, the window's losses are shown.

        Returns:
            Dict of numbers.
        """
        logs = self.section("running")
        if self.has("window"):
            window = self.section("window")
            if not np.isfinite(window["loss"]):
                logs["loss"] = window["loss"]
            logs |= {
                name: window[name]
                for name, value in logs.items()
                if name in window and np.all(np.isnan(value))
            }
        return logs

    def running_logs(self):
        """Read `running` and the clocks, dict of numbers."""
        return self.running() | self._clocks()

    def epoch_logs(self):
        """Read the epoch so far and the clocks, dict of numbers.

        Windows that were skipped are forgotten; the loss is NaN if all were.
        """
        return self.section("running") | self._clocks()

    def _clocks(self):
        window = self.window_logs()
        return {name: window[name] for name in CLOCKS}

    def micro_batches(self):
        """Read `MICRO_BATCH_NUMBERS`, dict from name to array `[k]`."""
        rows = self._micro_batches
        if isinstance(rows, list):
            rows = [np.asarray(row) for row in rows]
        rows = np.asarray(rows)
        if self._join is not None:
            rows = self._join(rows)
        columns = rows.T
        return dict(zip(MICRO_BATCH_NUMBERS, columns, strict=False))


class _Layout:
    """Packs many scalars into one tensor of each kind, and back."""

    def __init__(self):
        self._places = {}

    def pack(self, sections):
        """Pack `{section: {name: tensor}}`; runs while tracing."""
        kinds = {"float": [], "int": [], "other": []}
        for section, values in sections.items():
            places = self._places.setdefault(section, {})
            for name, value in values.items():
                value = ops.convert_to_tensor(value)
                kind = _kind(value)
                places[name] = (kind, len(kinds[kind]))
                kinds[kind].append(value)
        packed = {"other": kinds["other"]}
        if kinds["float"]:
            packed["float"] = ops.stack(
                [ops.cast(v, "float32") for v in kinds["float"]]
            )
        if kinds["int"]:
            packed["int"] = ops.stack(kinds["int"])
        return packed

    def has(self, section):
        """Whether a section was packed."""
        return section in self._places

    def tensors(self, section, packed):
        """Return a section's tensors by name, `None` for each number."""
        return {
            name: packed["other"][place] if kind == "other" else None
            for name, (kind, place) in self._places[section].items()
        }

    def read(self, packed):
        """Wait for what `pack` made, and bring it to the host."""
        return {
            kind: [np.asarray(value) for value in values]
            if kind == "other"
            else np.asarray(values).tolist()
            for kind, values in packed.items()
        }

    def unpack(self, section, numbers):
        """Return a section of what was read, `{name: number}`."""
        return {
            name: numbers[kind][place]
            for name, (kind, place) in self._places[section].items()
        }


def _kind(value):
    if len(value.shape) != 0:
        return "other"
    dtype = str(value.dtype)
    return "int" if "int32" in dtype and "uint" not in dtype else "float"


class Step:
    """Consumes windows, one update each.

    Args:
        program: `WindowProgram`, built.
        backend: the backend's functions.
        plan: `Plan`.
    """

    def __init__(self, program, backend, plan):
        self._program = program
        self._backend = backend
        self._plan = plan
        self._layouts = {}
        self._constant = functools.cache(
            lambda number, dtype: backend.constant(np.asarray(number, dtype))
        )
        self._compile = lambda function: backend.compile(
            function, program, jit_compile=plan.jit_compile
        )
        self._functions = {}
        self._revision = program.revision

    def run(self, window):
        """Run one window.

        Args:
            window: `Window`.

        Returns:
            `Report`.

        Raises:
            DataError: see `Backend.check`.
        """
        report = self._run(window)
        self._backend.check()
        return report

    def _run(self, window):
        if self._backend.replicas > 1:
            shares, indices = self._share_out(window)
            join = functools.partial(
                join_parts, indices=indices, losses=self._program.losses
            )
            return self._run_fused(self._program.run_shares, shares, join)
        if window.is_even and self._is_fused(window):
            return self._run_fused(self._program.run_window, window.stacked)
        return self._run_streamed(window)

    def _share_out(self, window):
        shares, indices = share_out(window, self._backend.replicas)
        is_own = window.processes > 1
        return self._backend.place(shares, is_own=is_own), indices

    def _is_fused(self, window):
        # Nothing loops over a single micro-batch.
        return self._plan.name == "fused" or window.micro_batches == 1

    def _run_fused(self, run_whole, argument, join=None):
        packed, rows = self._fused_function(run_whole)(argument)
        return Report(self.layout("window"), packed, rows, join)

    def _fused_function(self, run_whole):
        layout = self.layout("window")

        def run(argument):
            report = run_whole(argument)
            rows = report.pop("per_micro_batch")
            return layout.pack(report), rows

        measures = self._program.measures_gradients
        return self.function(("window", measures), run)

    def peak_bytes(self, window):
        """Predict the most memory of a device that a window takes.

        Args:
            window: `Window`; it is not applied.

        Returns:
            int: model and optimizer, batch, gradients and activations.
        """
        backend, program = self._backend, self._program
        if not backend.predicts_memory:
            return backend.measure_peak(
                lambda: self.gradients(window), program.variables
            )
        if backend.replicas > 1:
            shares, _ = self._share_out(window)
            return self._fused_function(program.run_shares).peak_bytes(shares)
        if window.is_even and self._is_fused(window):
            fused = self._fused_function(program.run_window)
            return fused.peak_bytes(window.stacked)
        program.make_accumulators()
        is_even, count = window.is_even, self._count(window)
        batches = window.split()[:1]
        indices = [self._constant(0, "int32")]
        totals = self._totals(batches, indices, count, is_even)
        (ahead,), _ = self._look_ahead(batches, indices, count)
        return max(
            self._micro_batch_function(is_even).peak_bytes(
                batches[0], indices[0], count, totals, ahead
            ),
            self._apply_function(is_even, program.all_used).peak_bytes(count),
        )

    def _run_streamed(self, window):
        is_even, count = window.is_even, self._count(window)
        rows, used = self._accumulate(window)
        packed = self._apply_function(is_even, used)(count)
        return Report(self.layout("window"), packed, rows)

    def _apply_function(self, is_even, used):
        layout = self.layout("window")

        def apply(count):
            return layout.pack(self._program.apply(count, is_even, used))

        return self.function(("apply", is_even, used), apply)

    def gradients(self, window):
        """Compute the gradients of a window, and apply nothing.

        Args:
            window: `Window`.

        Returns:
            Triple: the loss without regularization, a scalar tensor; the
            gradients, list of tensors, float32; and the loss and the weight
            of each micro-batch, list of tensors `[2]`.
        """
        is_even = window.is_even
        rows, _ = self._accumulate(window)

        def take(count):
            return self._program.take_gradients(count, is_even)

        take = self.function(("take", is_even), take)
        return (*take(self._count(window)), rows)

    def _count(self, window):
        return self._constant(window.micro_batches, "int32")

    def _accumulate(self, window):
        """Run the micro-batches of a window, one by one.

        Returns:
            Pair: list of their numbers, see `Passes.run`; and which variables
            the window uses, see `passes.uses`.
        """
        self._program.make_accumulators()
        is_even, count = window.is_even, self._count(window)
        batches = window.split()
        indices = [self._constant(i, "int32") for i in range(len(batches))]
        totals = self._totals(batches, indices, count, is_even)

        ahead, used = self._look_ahead(batches, indices, count)
        calls = [
            (batch, index, count, totals, known)
            for batch, index, known in zip(batches, indices, ahead, strict=True)
        ]
        each = self._each(self._micro_batch_function(is_even), calls, is_even)
        rows, marks = zip(*each, strict=True)
        return list(rows), join_uses([*used, *marks])

    def _micro_batch_function(self, is_even):
        def run(batch, index, count, totals, ahead):
            return self._program.run_micro_batch(
                batch, index, count, totals, is_even, ahead
            )

        measures = self._program.measures_gradients
        return self.function(("micro_batch", is_even, measures), run)

    def _totals(self, batches, indices, count, is_even):
        """Measure the window's denominators where they are needed first."""
        if not self._program.needs_totals(is_even):
            return self._constant(0.0, "float32")
        measure = self.function("weights", self._program.measure_weights)
        calls = [(b, i, count) for b, i in zip(batches, indices, strict=True)]
        return sum(self._each(measure, calls, is_even))

    def _look_ahead(self, batches, indices, count):
        """Embed the window first, where its loss couples its examples.

        Returns:
            Pair: list of what each micro-batch is to know, or of `None`; and
            list of which variables have been used for it.
        """
        if not self._program.looks_ahead(len(batches)):
            return [None] * len(batches), []
        embed = self.function("embed", self._program.embed)
        parts = [
            embed(b, i, count) for b, i in zip(batches, indices, strict=True)
        ]
        differentiate = self.function(
            "differentiate", self._program.differentiate
        )
        ahead, used = differentiate(parts, count)
        return ahead, [used]

    def _each(self, function, calls, is_even):
        """Call a compiled function for one micro-batch after the other."""
        if not is_even:
            self._backend.expect(function, calls)
        return [function(*call) for call in calls]

    def layout(self, name):
        """Find where the numbers of some reports are.

        What is logged depends on the losses, and so on the micro-batches.

        Args:
            name: str, which reports.
        """
        key = (self._program.signature, name)
        return self._layouts.setdefault(key, _Layout())

    def function(self, key, function):
        """Compile a function of the program, once for all that it keeps.

        Args:
            key: hashable, what to find it by again.
            function: takes nests of tensors, returns a nest of tensors.

        Returns:
            The compiled function.
        """
        revision = self._program.revision
        if self._revision != revision:
            self._functions, self._revision = {}, revision
        key = (self._program.signature, key)
        if key not in self._functions:
            self._functions[key] = self._compile(function)
        return self._functions[key]


class EvaluationStep:
    """Evaluates and predicts, batch by batch.

    Args:
        program: `EvaluationProgram`.
        backend: the backend's functions.
        jit_compile: bool.
    """

    def __init__(self, program, backend, *, jit_compile):
        self._program = program
        self._backend = backend
        self._reading = {}

        def compiled(function):
            return backend.compile(function, program, jit_compile=jit_compile)

        self._predict_batch = compiled(program.predict_batch)
        self._run_batch = compiled(program.run_batch)
        self._compiled = compiled

    def predict(self, batch):
        """Compute the predictions of a batch, a nest of tensors."""
        self._program.build_model(batch)
        return self._predict_batch(self._backend.spread(batch))

    def run(self, batch, loader_samples, *, is_first):
        """Add a batch to the evaluation, or begin one with it.

        Args:
            batch: `Batch` of arrays, a loader batch or a slice of one.
            loader_samples: int, samples of all slices.
            is_first: bool, whether the evaluation begins.
        """
        if is_first:
            self._backend.publish()
            self._program.build(batch)
            self._program.start()
        # An array of the host is everywhere, wherever the batch is.
        samples = np.asarray(loader_samples, "float32")
        self._run_batch(self._backend.spread(batch), samples)

    def results(self):
        """Read the evaluation so far, `{name: float}`."""
        kind = self._program.kind
        if kind not in self._reading:
            layout = _Layout()
            read = self._compiled(
                lambda: layout.pack({"results": self._program.results()})
            )
            self._reading[kind] = layout, read
        layout, read = self._reading[kind]
        return layout.unpack("results", layout.read(read()))
