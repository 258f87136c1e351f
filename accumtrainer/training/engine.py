"""Runs windows and evaluations for a Trainer, and counts what has run."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from accumtrainer.config import Accumulation
from accumtrainer.data.batches import Batch, Window, map_leaves
from accumtrainer.diagnosis.equivalence import Equivalence
from accumtrainer.diagnosis.inspection import Inspection
from accumtrainer.diagnosis.moving_state import notes_of_state
from accumtrainer.keras_api import BACKEND, keras
from accumtrainer.keras_api.rebuild import rebuild
from accumtrainer.keras_api.types import Variable
from accumtrainer.progress import Progress
from accumtrainer.saving.snapshot import Snapshot
from accumtrainer.steps import Plan, Report, Step, choose_plan, make_backend
from accumtrainer.steps.looks import Followed, Looks
from accumtrainer.steps.memory import MemoryPlan, make_memory_plan
from accumtrainer.training.construction import AsCompiled
from accumtrainer.training.counting import Counting
from accumtrainer.training.evaluator import Evaluator
from accumtrainer.training.examining import Examiner
from accumtrainer.training.in_flight import InFlight
from accumtrainer.training.input_checks import compile_option, has_own_loss
from accumtrainer.training.lasting import LastingState
from accumtrainer.training.sizing import AutoSize, make_sizing
from accumtrainer.window.hooks import Hooks
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.program import WindowProgram
from accumtrainer.window.results import result_names
from accumtrainer.window.state import TrainingState
from accumtrainer.window.trainable import Trained, warn_of_nothing_to_train


class Engine:
    """The compiled side of a Trainer: what the loop drives.

    Args:
        hooks: the Trainer.
        state: its counters, loss scale and random state.
        accumulation: how windows are made.
        tracked: variables, filled until training begins.
        jit_compile: whether XLA compiles.
        run_eagerly: whether everything runs as plain Python.
        max_consecutive_skips: `None` for any number.

    Attributes:
        compiled: what the model has to stay compiled with.
        counting: counts what has run.
        evaluator: evaluates and predicts.
        lasting: what a snapshot has of it.
        replicas: those that share windows out.
        last_window: the one that was run last, `None` before the first.
        last_report: `Report` of a window that has run since training began or
            was restored, of the last one; `None` before.
        data_seconds: seconds spent so far on waiting for windows.
    """

    def __init__(
        self,
        hooks: Hooks,
        state: TrainingState,
        *,
        accumulation: Accumulation,
        tracked: list[Variable],
        jit_compile: bool | Literal["auto"],
        run_eagerly: bool,
        max_consecutive_skips: int | None,
    ):
        self._hooks = hooks
        self._model = hooks.model
        self._state = state
        self._accumulation = accumulation
        self._tracked = tracked
        self._jit_compile = jit_compile
        self._run_eagerly = run_eagerly
        self._before: Any = None
        self.lasting: Any = None
        self._followed = Followed(self._look)
        self._set_up()
        self.last_report: Any = None
        self._in_flight = InFlight()
        self.counting = Counting(
            lambda: self.last_report.section("counters"),
            max_consecutive_skips,
        )
        self.last_window: Any = None
        self._like: Any = None
        self.data_seconds = 0.0
        is_built = self._model.built
        self._trainable: Any = Trained(self._model) if is_built else None
        self._is_following = False
        self._was_shown = True
        self._begins_epoch = False
        self._measures_gradients = False
        self.compiled = AsCompiled(hooks)

    def _set_up(self) -> None:
        """Make what compiles, which knows of no window yet."""
        self._backend = make_backend(
            run_eagerly=self._run_eagerly,
            model=self._model,
            jit_compile=self._jit_compile,
        )
        self._followed = self._backend.followed = self._followed.anew()
        self.replicas = self._backend.replicas
        self._window_parts = WindowParts(
            hooks=self._hooks,
            state=self._state,
            backend=self._backend,
            tracked=self._tracked,
            loss_scale=self._hooks.loss_scale,
            combine=self._accumulation.combine,
            per_example=self._accumulation.per_example,
        )
        self.lasting = LastingState(
            self._window_parts, self.replicas.scope, self.lasting
        )
        self._sizing = make_sizing(self._accumulation, self._backend)
        self.evaluator = Evaluator(
            self._window_parts,
            self._backend,
            self._sizing,
            look=self._look,
            jit_compile=self._jit_compile,
        )
        self._examiner = Examiner(
            self._window_parts,
            self.write_back,
            jit_compile=self._jit_compile,
            run_eagerly=self._run_eagerly,
        )
        self._program: Any = None
        self._step: Any = None
        self._plan: Any = None

    def aside(self) -> "Engine":
        """Make an engine for a training that is to leave no trace.

        It counts on from here, and goes on however many windows are skipped.
        What is to be put back is the caller's to keep.
        """
        engine = Engine(
            self._hooks,
            self._state,
            accumulation=self._accumulation,
            tracked=self._tracked,
            jit_compile=self._jit_compile,
            run_eagerly=self._run_eagerly,
            max_consecutive_skips=None,
        )
        engine.counting.restore(self.counting.progress, 0)
        return engine

    @property
    def rows_per_pass(self) -> int | None:
        """Samples that all replicas together run at a time, or `None`.

        Loader batches are micro-batches then, whatever their size.
        """
        return self._sizing.rows_per_pass

    @property
    def plan(self) -> Plan | None:
        """How windows run, `None` before the first."""
        return None if self._plan is None else self._sizing.complete(self._plan)

    @property
    def compiled_shapes(self) -> Any:
        """For which shapes there are programs, a nest of str."""
        return self._backend.compiled_shapes()

    @property
    def trained_names(self) -> list[str]:
        """Names of losses and metrics of windows, as Keras orders them."""
        return result_names(self._model, self._program.survey.losses)

    @property
    def has_begun(self) -> bool:
        """Whether a window has been prepared for."""
        return self._program is not None

    @contextlib.contextmanager
    def following_layers(self, *, is_update: bool = False) -> Iterator[None]:
        """Make a scope that begins with what the model is made of by now.

        What changes in here, the next one begins with.

        Args:
            is_update: whether it is for a single update, for which several
                processes are to exchange nothing but gradients.
        """
        if self._is_following and self.has_begun:
            self.follow_model_amid_fit()
        if self._is_following or (is_update and self.replicas.processes > 1):
            yield
            return
        is_changed = self._followed.has_changed()
        if self.replicas.any(is_changed or self._has_other_weights()):
            self._turn_to_model()
        self._is_following = True
        try:
            yield
        finally:
            self._is_following = False
            if self._model.built:
                self._followed.settle()

    def _look(self) -> Looks:
        """Note what windows are made of: a model, and what hooks are told."""
        told = {k: v for k, v in vars(self._hooks).items() if k[:1] != "_"}
        return self._backend.looks_of(self._model, [type(self._hooks), told])

    def follow_model(self) -> None:
        """Turn to what of the model is trainable by now, if that has changed.

        Raises:
            ValueError: the model was compiled anew, with other metrics.
        """
        self.compiled.check_metrics()
        if self._has_other_weights():
            self._turn_to_model()

    def _has_other_weights(self) -> bool:
        """Whether weights, or which are trained, are others than compiled."""
        before = self._trainable
        return before is not None and before.differs_from(self._model)

    def _turn_to_model(self) -> None:
        """Compile windows anew, once `prepare` has seen one.

        The optimizer keeps what it has, also of what is frozen.
        """
        self.write_back()
        if self._hooks.optimizer.built and self._has_other_weights():
            with self.replicas.scope():
                rebuild(self._hooks.optimizer, self._model)
        self._trainable = Trained(self._model)
        if self._program is not None:
            self._before = self._program.variables
            self._in_flight.clear()
        self._set_up()

    def follow_model_amid_fit(self) -> None:
        """Turn to what callbacks have made of the model since."""
        # Who was shown no weights has brought none; to list them takes time.
        may_differ = self._was_shown or self._trainable.is_outdated
        self._was_shown = False
        if may_differ and self._has_other_weights():
            self.follow_model()
        elif self._has_been_changed():
            self._turn_to_model()
        if self._program is None:
            self.prepare(self._like)

    def _has_been_changed(self) -> bool:
        """Whether callbacks have changed what windows are made of."""
        if self._backend.fit_compiles:  # then that does not count at once
            return False
        if self.replicas.processes == 1:
            return self._followed.has_been_changed()
        # Only as an epoch begins do all processes ask at once.
        begins_epoch, self._begins_epoch = self._begins_epoch, False
        return begins_epoch and self.replicas.any(
            self._followed.has_been_changed()
        )

    def prepare(
        self,
        window: Window,
        like: Snapshot | None = None,
        *,
        measures_gradients: bool | None = None,
        warns: bool = True,
    ) -> None:
        """Build what is missing before the first window runs.

        Args:
            window: one like those to come.
            like: of a run whose plan is kept.
            measures_gradients: whether somebody wants to know the norms of
                the micro-batches' gradients; default: as before.
            warns: whether to warn of denominators that are wrong.
        """
        micro_batch = window.split()[0]
        self._like = window
        if measures_gradients is not None:
            self._measures_gradients = measures_gradients
        is_first = self._program is None
        with self.replicas.scope():
            jit_compile = compile_option(
                micro_batch,
                self._jit_compile if is_first else self._plan.jit_compile,
                has_own_loss=has_own_loss(self._hooks),
            )
            if is_first:
                self.evaluator.build_model(Batch(micro_batch.x))
            if self._sizing.is_undecided:
                # One sample tells as much as many do.
                micro_batch = map_leaves(lambda leaf: leaf[:1], micro_batch)
            program = self._program or WindowProgram(
                self._window_parts, self._before
            )
            program.learn(micro_batch)
            if is_first:
                # By now every layer that is used has its weights.
                warn_of_nothing_to_train(self._model)
                self._begin(program, like, jit_compile)
                self._followed.settle()  # with what has been built by now
        self.lasting.note(micro_batch)
        program.passes.measures_gradients = self._measures_gradients
        if isinstance(self._sizing, AutoSize) and self._sizing.is_undecided:
            self._sizing.choose(window, self._step)
        if self._accumulates(window):
            self._check_losses(window, warns=warns)

    def _begin(
        self, program: WindowProgram, like: Snapshot | None, jit_compile: Any
    ) -> None:
        """Choose how windows run, now that it is known what they are like."""
        self._plan = self._plan_of(like) or choose_plan(
            self._model,
            program.survey.operations,
            self._backend,
            jit_compile=jit_compile,
            run_eagerly=self._run_eagerly,
        )
        self._program, self._before = program, None
        self.lasting.begin(program)
        self._step = Step(program, self._backend, self._plan)
        self._trainable = Trained(self._model)

    def _check_losses(self, window: Window, *, warns: bool = True) -> None:
        """Refuse losses that cannot be weighed in a window."""
        self._examiner.check_bare_losses(
            self._program.survey.losses,
            lambda: self._sizing.cut(window),
            warns=warns,
        )

    def notes_of_state(self, micro_batches: int) -> list[str]:
        """Write notes on layers whose state moves once per micro-batch."""
        moved = self._program.survey.moved
        return notes_of_state(self._model, moved, micro_batches)

    def cut(self, window: Window) -> Window:
        """Cut a window as it will run, once that is known."""
        if self._sizing.is_undecided:
            self.prepare(window)
        return self._sizing.cut(window)

    def memory_plan(
        self, window: Window, sizes: Sequence[int] | None = None
    ) -> MemoryPlan:
        """Predict what micro-batches of several sizes take."""
        plan = make_memory_plan(
            window,
            sizes,
            replicas=self.replicas.count,
            predict=self._step.peak_bytes,
        )
        self.write_back()  # or what is loaded next would be lost
        return plan

    def check_equivalence(
        self, window: Window, whole: Window, tolerance: float
    ) -> Equivalence:
        """Compare a window with the big batch; see the Trainer's method."""
        self.prepare(window, warns=False)
        return self._examiner.compare(
            window, whole, tolerance, jit_compile=self._plan.jit_compile
        )

    def _plan_of(self, snapshot: Snapshot | None) -> Plan | None:
        """Return the plan of a saved run, unless another was asked for."""
        if snapshot is None or snapshot.about["backend"] != BACKEND:
            return None
        self._backend.expect_shapes(snapshot.about.get("compiled_shapes", {}))
        if self._jit_compile != "auto" or self._run_eagerly:
            return None
        plan = snapshot.about["plan"]
        if plan is None or plan["run_eagerly"]:
            return None
        # What fits is found out anew: this may be another device.
        return Plan(name=plan["name"], jit_compile=plan["jit_compile"])

    def capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Copy what lasts from one window to the next, and the counters."""
        self.write_back()
        return self.lasting.capture(), self.counting.reached.as_dict()

    def restore(
        self,
        saved: Snapshot,
        *,
        is_amid_epoch: bool,
        weights_only: bool = False,
    ) -> None:
        """Put back what a snapshot has; see `LastingState.restore`."""
        self.write_back()
        self.lasting.restore(
            saved, is_amid_epoch=is_amid_epoch, weights_only=weights_only
        )
        if not weights_only:
            skips = keras.ops.convert_to_numpy(self._state.consecutive_skips)
            progress = Progress.from_dict(saved.progress)
            self.counting.restore(progress, int(skips))
            self.last_report = None

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch's running means."""
        self.write_back()
        self._in_flight.clear()
        self._begins_epoch = True
        if self.last_report is None:  # weights may have been loaded since
            self.lasting.begin_averages()
        self._program.variables.start_epoch(epoch)

    def run_window(self, window: Window) -> Report:
        """Make one update."""
        self.compiled.check_optimizer()
        if window.kind != self._like.kind:
            self.prepare(window)
        adds_up = self._accumulation.per_example or self.replicas.count > 1
        if adds_up or window.micro_batches > 1:
            self._check_losses(window)
        report = None
        # Where a window does not fit, `trying` puts the variables back and
        # learns of it, and there is no report: it is cut smaller then.
        while report is None:
            window = self._sizing.cut(window)
            with self._sizing.trying(window, self._program.variables) as note:
                try:
                    report = note(self._step.run(window))
                except Exception as error:
                    if self._backend.is_out_of_memory(error):
                        raise
                    raise self._program.raised_at_once(
                        error, window.split()
                    ) from None
        self.last_report, self.last_window = report, window
        self._like = window
        self._followed.pace.note_window()
        if self._backend.runs_ahead:
            self._in_flight.add(report, window.size_bytes)
        self.counting.add_window()
        self.counting.check_skips_if_many()
        return report

    def write_back(self, *, for_others: bool = False) -> None:
        """Make the model's variables current, for code that can look.

        Args:
            for_others: whether that may change what windows are made of.
        """
        self._was_shown = True
        if for_others:
            self._followed.expect_changes()
            self.evaluator.expect_changes()
        self._backend.write_back()

    def waiting_for(self, windows: Iterable[Window]) -> Iterator[Window]:
        """Yield windows, noting for how long each is waited for."""
        windows = iter(windows)
        while True:
            begun = time.monotonic()
            window = next(windows, None)
            self.data_seconds += time.monotonic() - begun
            if window is None:
                return
            yield window

    def finish_epoch(self) -> None:
        """Count an epoch that has run."""
        self.counting.add_epoch()
        if self.last_report is not None:
            self.counting.check_skips()

    def inspect(self, window: Window) -> Inspection:
        """Run a window again without effect; see `Trainer.inspect`."""
        self.write_back()
        loss_scale = 1.0
        before = int(keras.ops.convert_to_numpy(self._state.micro_batches))
        if self.last_report and window is self.last_window:
            loss_scale = self.last_report.window_logs()["loss_scale"]
            before -= window.micro_batches
        return self._examiner.inspect(
            window, loss_scale=loss_scale, micro_batches_before=before
        )

    def _accumulates(self, window: Window) -> bool:
        """Whether windows of more than one micro-batch are to be expected."""
        steps = self._accumulation.steps
        adds_up = self._accumulation.per_example or self.replicas.count > 1
        # Whatever fits now may have to be cut later.
        if adds_up or self._sizing.may_cut:
            return True
        return window.micro_batches > 1 if steps is None else steps != 1
