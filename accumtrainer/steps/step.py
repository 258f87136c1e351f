"""Runs windows by a plan and hands back numbers that are read late."""

import numpy as np

from accumtrainer.keras_api import ops

CLOCKS = (
    "learning_rate",
    "gradient_norm",
    "loss_scale",
    "updates",
    "skipped_updates",
)
"""What every log carries beside losses and metrics."""


class Report:
    """The numbers of one window, on the device until somebody looks.

    Args:
        layout: `_Layout` of the packed values.
        packed: what a compiled function returned.
        micro_batches: list of tensors `[2]` or one tensor `[k, 2]`: loss and
            weight of each micro-batch.
    """

    def __init__(self, layout, packed, micro_batches):
        self._layout = layout
        self._packed = packed
        self._micro_batches = micro_batches
        self._sections = None

    def section(self, name):
        """Read `"window"`, `"running"` or `"counters"` as Python numbers."""
        if self._sections is None:
            self._sections = self._layout.unpack(self._packed)
        return self._sections[name]

    def window_logs(self):
        """Read what this window alone was like, dict of numbers."""
        counters = self.section("counters")
        return self.section("window") | {
            "applied": bool(counters["applied"]),
            "updates": counters["updates"],
            "skipped_updates": counters["skipped_updates"],
        }

    def running_logs(self):
        """Read the epoch so far, dict of numbers.

        A window's loss that is not finite is shown, although the running
        mean has forgotten that window: `TerminateOnNaN` looks for it here.
        """
        window = self.window_logs()
        logs = dict(self.section("running"))
        if not np.isfinite(window["loss"]):
            logs["loss"] = window["loss"]
        return logs | {name: window[name] for name in CLOCKS}

    def micro_batches(self):
        """Read loss and weight of each micro-batch, list of pairs."""
        rows = self._micro_batches
        if isinstance(rows, list):
            rows = [np.asarray(row) for row in rows]
        return [(float(a), float(b)) for a, b in np.asarray(rows)]


class _Layout:
    """Packs many scalars into one tensor of each kind, and back."""

    def __init__(self):
        self._places = {}

    def pack(self, sections):
        """Pack `{section: {name: tensor}}`; runs while tracing."""
        kinds = {"float": [], "int": [], "other": []}
        for section, values in sections.items():
            for name, value in values.items():
                value = ops.convert_to_tensor(value)
                kind = _kind(value)
                self._places[section, name] = (kind, len(kinds[kind]))
                kinds[kind].append(value)
        packed = {"other": kinds["other"]}
        if kinds["float"]:
            packed["float"] = ops.stack(
                [ops.cast(v, "float32") for v in kinds["float"]]
            )
        if kinds["int"]:
            packed["int"] = ops.stack(kinds["int"])
        return packed

    def unpack(self, packed):
        """Read what `pack` made, `{section: {name: number}}`."""
        arrays = {
            kind: np.asarray(value).tolist()
            for kind, value in packed.items()
            if kind != "other"
        }
        arrays["other"] = [np.asarray(value) for value in packed["other"]]
        sections = {}
        for (section, name), (kind, place) in self._places.items():
            sections.setdefault(section, {})[name] = arrays[kind][place]
        return sections


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
        self._plan = plan
        self._layout = _Layout()
        self._compile = lambda function: backend.compile(
            function, program, jit_compile=plan.jit_compile, donate=True
        )
        self._functions = {}

    def run(self, window):
        """Run one window.

        Args:
            window: `Window`.

        Returns:
            `Report`.
        """
        if window.is_even and self._plan.name == "fused":
            return self._run_fused(window)
        return self._run_streamed(window)

    def _run_fused(self, window):
        def run(stacked):
            report = self._program.run_window(stacked)
            rows = report.pop("per_micro_batch")
            return self._layout.pack(report), rows

        packed, rows = self._function("window", run)(window.stacked)
        return Report(self._layout, packed, rows)

    def _run_streamed(self, window):
        is_even = window.is_even
        count = np.asarray(window.micro_batches, "int32")
        batches = window.split()
        indices = [np.asarray(i, "int32") for i in range(len(batches))]
        totals = self._totals(batches, indices, count, is_even)

        def run(batch, index, count, totals):
            return self._program.run_micro_batch(
                batch, index, count, totals, is_even
            )

        run_micro_batch = self._function(("micro_batch", is_even), run)
        rows = [
            run_micro_batch(batch, index, count, totals)
            for batch, index in zip(batches, indices, strict=True)
        ]

        def apply(count):
            return self._layout.pack(self._program.apply(count, is_even))

        packed = self._function(("apply", is_even), apply)(count)
        return Report(self._layout, packed, rows)

    def _totals(self, batches, indices, count, is_even):
        """Measure the window's denominators where they are needed first."""
        if not self._program.needs_totals(is_even):
            return np.zeros((), "float32")
        measure = self._function("weights", self._program.measure_weights)
        return sum(
            measure(b, i, count) for b, i in zip(batches, indices, strict=True)
        )

    def _function(self, key, function):
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
        self._layout = _Layout()

        def compiled(function):
            return backend.compile(
                function, program, jit_compile=jit_compile, donate=False
            )

        self._predict_batch = compiled(program.predict_batch)
        self._run_batch = compiled(program.run_batch)
        self._read = compiled(
            lambda: self._layout.pack({"results": program.results()})
        )

    def predict(self, batch):
        """Compute the predictions of a batch, a nest of tensors."""
        self._program.build_model(batch)
        return self._predict_batch(batch)

    def run(self, batch, *, is_first):
        """Add a batch to the evaluation, or begin one with it."""
        if is_first:
            self._backend.publish()
            self._program.build(batch)
            self._program.start()
        self._run_batch(batch)

    def results(self):
        """Read the evaluation so far, `{name: float}`."""
        return self._layout.unpack(self._read())["results"]
