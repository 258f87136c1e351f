"""Runs windows by a plan and hands back numbers that are read late."""

import functools
from collections.abc import Callable, Hashable, Sequence
from itertools import starmap
from typing import Any

import numpy as np

from accumtrainer.data.batches import Batch, Window, kind_of
from accumtrainer.keras_api.types import Nest, Tensor
from accumtrainer.steps.backend import Backend, Compiled
from accumtrainer.steps.plan import Plan
from accumtrainer.steps.report import Packed, Report, pack
from accumtrainer.window.evaluation import EvaluationProgram
from accumtrainer.window.gradients import Uses, join_uses
from accumtrainer.window.program import Outcome, WindowProgram
from accumtrainer.window.replicas import join_parts, share_out
from accumtrainer.window.weighing import NOT_WEIGHED, Weighing


class Step:
    """Consumes windows, one update each; or micro-batches, as they come.

    Compiled functions are called from `run` itself where that can be: an
    update has few frames between `fit` and its program, and so has an error.

    Args:
        program: what a window computes; it has learnt from a first batch.
        backend: runs it.
        plan: by which.
    """

    def __init__(
        self,
        program: WindowProgram,
        backend: Backend,
        plan: Plan,
    ):
        self._program = program
        self._backend = backend
        self._plan = plan
        self._constant = functools.cache(
            lambda number, dtype="int32": backend.constant(
                np.asarray(number, dtype)
            )
        )
        self._functions: dict[Hashable, Compiled] = {}
        self._revision = program.variables.revision
        # Whether whole windows were seen to run better in parts.
        self._is_split = False
        # Of the open window: how it is weighed, and what each micro-batch uses.
        self._open: Weighing = NOT_WEIGHED
        self._used: list[Uses] = []

    def run(self, window: Window) -> Report:
        """Run one window.

        Raises:
            DataError: see `Backend.check`.
        """
        self._program.variables.note_kind()
        backend = self._backend
        result: Any = None
        join: dict[str, Any] = {}
        if backend.replicas.count > 1:
            function, argument, join = self._whole(window)
            result = function(argument)
        elif self._is_fused(window):
            function, argument, join = self._whole(window)
            result = backend.fused(function)(argument)
            self._is_split = result is None
        if result is None:
            self._perturb(window)
            function, calls, used = self._stream(window, window.split())
            rows, marks = zip(*starmap(function, calls), strict=True)
            marks = join_uses([*used, *marks])
            apply = self._apply(self._weighing(window), marks)
            result = apply(self._constant(window.micro_batches)), list(rows)
        report = Report(*result, **join)
        backend.check(report.was_applied)
        return report

    # A window whose micro-batches come one by one.

    def add(self, batch: Batch, index: int, micro_batches: int) -> Report:
        """Run one micro-batch of a window that stays open.

        Accumulators must have been made.

        Args:
            batch: arrays `[m, ...]`.
            index: its place in the window.
            micro_batches: k.

        Returns:
            Of the epoch so far, and of nothing else.
        """
        program = self._program
        program.variables.note_kind()
        # There may be less than k in the end.
        weighing = self._open = program.weighing(is_even=True)

        def run(
            batch: Batch, index: Tensor, count: Tensor
        ) -> tuple[Packed, Uses]:
            _, used = program.run_micro_batch(
                batch, index, count, None, weighing=weighing
            )
            running = program.running_logs_with(index + 1)
            return pack({"running": running}), used

        add = self.function(("add", weighing), run)
        count = self._constant(micro_batches)
        packed, used = add(batch, self._constant(index), count)
        self._used = [*self._used, used] if index else [used]
        return Report(packed)

    def apply_open(self, micro_batches: int) -> Report:
        """Apply the micro-batches that `add` has run, so many."""
        apply = self._apply(self._open, join_uses(self._used))
        report = Report(apply(self._constant(micro_batches)))
        self._backend.check(report.was_applied)
        return report

    # What is asked without an update.

    def gradients(
        self, window: Window
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Compute the gradients of a window, and apply nothing.

        Returns:
            Triple: the loss without regularization; the gradients, float32;
            and the packed numbers of each micro-batch.

        Raises:
            DataError: see `Backend.check`.
        """
        self._perturb(window)
        function, calls, _ = self._stream(window, window.split())
        rows = [function(*call)[0] for call in calls]
        weighing = self._weighing(window)
        take = functools.partial(
            self._program.take_gradients, weighing=weighing
        )
        compiled = self.function(("take", weighing), take)
        loss, gradients = compiled(self._constant(window.micro_batches))
        self._backend.check(lambda: False)
        return loss, gradients, rows

    def peak_bytes(self, window: Window) -> int:
        """Predict the most memory of a device that a window takes.

        Model and optimizer, batch, gradients and activations; the window is
        not applied.
        """
        backend, program = self._backend, self._program
        if not backend.predicts_memory:
            # Those after the second take no more than it does.
            tried = window.head(2)
            return backend.measure_peak(
                lambda: self.gradients(tried), program.variables.all_variables
            )
        if backend.replicas.count > 1 or self._is_fused(window):
            function, argument, _ = self._whole(window)
            return function.peak_bytes(argument)
        function, (call,), _ = self._stream(window, window.split()[:1])
        apply = self._apply(self._weighing(window), program.all_used)
        return max(
            function.peak_bytes(*call),
            apply.peak_bytes(self._constant(window.micro_batches)),
        )

    # The compiled functions of a plan.

    def _is_fused(self, window: Window) -> bool:
        # Nothing loops over a single micro-batch.
        is_whole = self._plan.name == "fused" or window.micro_batches == 1
        return window.is_even and is_whole and not self._is_split

    def _whole(self, window: Window) -> tuple[Compiled, Nest, dict[str, Any]]:
        """Prepare to run a window in one call.

        Returns:
            Triple: the function, its argument, and the options of the report.
        """
        program, replicas = self._program, self._backend.replicas
        run_whole: Callable[[Any], Outcome] = program.run_window
        argument: Nest = window.stacked
        join: dict[str, Any] = {}
        if replicas.count > 1:
            shares, indices = share_out(window, replicas.count)
            is_own = window.processes > 1
            argument = replicas.place(shares, is_own=is_own)
            run_whole = program.run_shares
            losses = program.survey.losses
            join["join"] = functools.partial(
                join_parts, indices=indices, losses=losses
            )

        def run(argument: Nest) -> tuple[Packed, Tensor]:
            outcome = run_whole(argument)
            rows = outcome.pop("per_micro_batch")
            return pack(outcome), rows

        return self.function("window", run), argument, join

    def _perturb(self, window: Window) -> None:
        """Run a window's micro-batches ahead, if weights move by them."""
        program, weighing = self._program, self._weighing(window)
        if not program.passes.perturbs:
            return
        function, calls, _ = self._stream(window, window.split())
        for call in calls:
            function(*call)
        move = functools.partial(program.perturb, weighing=weighing)
        compiled = self.function(("perturb", weighing), move)
        compiled(self._constant(window.micro_batches))

    def _stream(
        self, window: Window, batches: Sequence[Batch]
    ) -> tuple[Compiled, list[tuple], list[Uses]]:
        """Prepare to run micro-batches of a window, one by one.

        Where one must know of all others, what it must know is computed: the
        denominators of their losses, or the gradients of their embeddings.

        Returns:
            Triple: the function, the arguments of each call, and list of
            which variables have been used by now.
        """
        program, weighing = self._program, self._weighing(window)
        program.variables.make_accumulators()
        if program.passes.perturbs:
            program.variables.make_weights_before()
        count = self._constant(window.micro_batches)
        places = [
            (batch, self._constant(index), count)
            for index, batch in enumerate(batches)
        ]
        totals = self._constant(0.0, "float32")
        if weighing.needs_totals:
            measure = self.function(
                "denominators", program.measure_denominators
            )
            self._expect(measure, places, window)
            totals = sum(starmap(measure, places))
        cached, used = [None] * len(places), []
        if program.caches_gradients(len(places)):
            embed = self.function("embed", program.embed)
            cache = self.function("cache", program.cache_gradients)
            cached, marks = cache(list(starmap(embed, places)), count)
            used.append(marks)
        run = functools.partial(program.run_micro_batch, weighing=weighing)
        function = self.function(("micro_batch", weighing), run)
        calls = [
            (*place, totals, known)
            for place, known in zip(places, cached, strict=True)
        ]
        self._expect(function, calls, window)
        return function, calls, used

    def _weighing(self, window: Window) -> Weighing:
        return self._program.weighing(
            is_even=window.is_even, micro_batches=window.micro_batches
        )

    def _expect(
        self, function: Compiled, calls: Sequence[tuple], window: Window
    ) -> None:
        if not window.is_even:
            self._backend.expect(function, calls)

    def _apply(self, weighing: Weighing, used: Uses) -> Compiled:
        """Prepare to apply what micro-batches have added up."""

        def run(count: Tensor) -> Packed:
            return pack(
                self._program.apply(count, weighing=weighing, used=used)
            )

        return self.function(("apply", weighing, used), run)

    def function(
        self, key: Hashable, function: Callable[..., Nest]
    ) -> Compiled:
        """Compile a function of the program, once for all that it keeps.

        Args:
            key: what to find it by again.
            function: takes and returns nests of tensors.
        """
        variables = self._program.variables
        if self._revision != variables.revision:
            self._functions, self._revision = {}, variables.revision
        key = (
            self._program.survey.signature,
            frozenset(variables.kinds_of_epoch),
            self._program.passes.measures_gradients,
            key,
        )
        if key not in self._functions:
            self._functions[key] = self._backend.compile(
                function, variables, jit_compile=self._plan.jit_compile
            )
        return self._functions[key]


class EvaluationStep:
    """Evaluates and predicts, batch by batch.

    Args:
        program: what a batch computes.
        backend: runs it.
        jit_compile: whether XLA compiles it.
    """

    def __init__(
        self,
        program: EvaluationProgram,
        backend: Backend,
        *,
        jit_compile: bool,
    ):
        self._program = program
        self._backend = backend
        self._jit_compile = jit_compile
        self.forget()

    def forget(self) -> None:
        """Have everything compiled anew; the evaluation itself goes on."""
        self._reading: dict[Hashable, Compiled] = {}
        self._predicted: set[Hashable] = set()
        self._predict_batch = self._compiled(self._program.predict_batch)
        self._run_batch = self._compiled(self._program.run_batch)

    def _compiled(self, function: Callable[..., Any]) -> Compiled:
        return self._backend.compile(
            function, self._program, jit_compile=self._jit_compile
        )

    def predict(self, batch: Batch) -> Nest:
        """Compute the predictions of a batch."""
        kind = kind_of(batch)
        if kind not in self._predicted:
            self._backend.write_back()
            with self._backend.replicas.scope():
                self._program.build_model(batch)
                if self._backend.gives_values:
                    self._program.look_at_prediction(batch)
            self._predicted.add(kind)
        return self._predict_batch(self._backend.replicas.spread(batch))

    def run(self, batch: Batch, loader_samples: int, *, is_first: bool) -> None:
        """Add a batch to the evaluation, or begin one with it.

        Args:
            batch: arrays, a loader batch or a slice of one.
            loader_samples: of all slices.
            is_first: whether the evaluation begins.
        """
        if is_first:
            self._backend.write_back()
        if is_first or kind_of(batch) != self._program.kind:
            with self._backend.replicas.scope():
                self._program.build(batch)
        if is_first:
            self._program.start()
        # An array of the host is everywhere, wherever the batch is.
        samples = np.asarray(loader_samples, "float32")
        self._run_batch(self._backend.replicas.spread(batch), samples)

    def report(self) -> Report:
        """Report the evaluation so far, as section `"results"`."""
        program = self._program
        key = program.kind, program.kinds
        if key not in self._reading:
            self._reading[key] = self._compiled(
                lambda: pack({"results": program.results()})
            )
        return Report(self._reading[key]())
