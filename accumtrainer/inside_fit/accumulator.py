"""Accumulation inside `Model.fit`, which keeps its loop.

What is relied on, and watched by
`tests/inside_fit/test_gradient_accumulation.py`:

- `fit` calls `model.make_train_function()` once, before `on_train_begin`, and
  then for every group of `steps_per_execution` batches `model.train_function`
  with an iterator of batches, on JAX with the state besides. Both are meant to
  be overridden. `train_on_batch` calls them too.
- An epoch ends when the train function raises `StopIteration`, or after
  `params["steps"]` batches. On JAX what a call has done is lost if it raises.
- At the end of an epoch `fit` reads the model's metrics.

`fit` says nothing when it fails. So the next call of `make_train_function`,
which every `fit` begins with, is where what an error has left is put back; see
`takeover.py`.
"""

import math
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal

from accumtrainer import errors
from accumtrainer.config import Accumulation, LossScale
from accumtrainer.data.batches import Batch, Window, count_samples
from accumtrainer.diagnosis.moving_state import notes_of_state
from accumtrainer.inside_fit.carried_scale import CarriedScale, as_number
from accumtrainer.inside_fit.fit_logs import late_logs
from accumtrainer.inside_fit.fit_state import make_fit_state
from accumtrainer.inside_fit.groups import Group, Groups
from accumtrainer.inside_fit.takeover import Takeover, check_fit, compiled_as
from accumtrainer.keras_api import (
    compiled_arguments,
    flatten_layers,
    keras,
)
from accumtrainer.keras_api.rebuild import begin_averages
from accumtrainer.keras_api.types import Nest
from accumtrainer.progress import Progress
from accumtrainer.steps import (
    Step,
    choose_plan,
    make_backend,
    should_run_eagerly,
)
from accumtrainer.steps.looks import Followed, Looks
from accumtrainer.steps.report import Report
from accumtrainer.training.construction import (
    check_options,
    resolve_loss_scale,
    resolve_optimizer,
)
from accumtrainer.training.counting import Counting
from accumtrainer.training.examining import Examiner
from accumtrainer.training.other_trainers import WITHIN_FIT, refuse_arguments
from accumtrainer.window.hooks import HookContext, Hooks
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.program import WindowProgram
from accumtrainer.window.state import Scratch, TrainingState
from accumtrainer.window.trainable import Trainable, warn_of_nothing_to_train


class FitAccumulator(Hooks):
    """Make one update of several of the batches that `Model.fit` trains on.

    `accumtrainer.callbacks.GradientAccumulation` is how it is used: inside
    one `fit`, `install`, then for every epoch `start_epoch` and `end_epoch`,
    and `uninstall`. `is_due` may be set until `fit` next has this train.

    Args:
        model: compiled `keras.Model`, left as it is but for its training.
        accumulation: `Accumulation` by `steps`, tail `"flush"`.
        denominator: what a bare scalar loss was averaged over: `"samples"`,
            or a function from a `Batch` to a scalar. Default: unknown.
        loss_scale: `"auto"` (on iff a layer computes in float16),
            `LossScale`, or `None` for off.
        max_consecutive_skips: windows in a row that may have gradients that are
            not finite; `None` for any number.

    Raises:
        ValueError: something cannot be done exactly inside `fit`.
        TypeError: an argument is of the wrong kind.
    """

    _owner = "GradientAccumulation"

    def __init__(
        self,
        model: Any,
        accumulation: Accumulation,
        *,
        denominator: Literal["samples"] | Callable[[Batch], Any] | None = None,
        loss_scale: LossScale | Literal["auto"] | None = "auto",
        max_consecutive_skips: int | None = 100,
    ):
        self.model = model
        self.accumulation = accumulation
        self._options = {"denominator": denominator, "loss_scale": loss_scale}
        self._max_consecutive_skips = max_consecutive_skips
        self._state: Any = None
        self._set_up()
        self._takeover = Takeover(model, self._step_aside)
        self._trainable: Any = None
        self._open = 0  # micro-batches of the open window that have run
        self._held: list[Any] = []  # those that wait for the rest of it
        self._counting = Counting(self._read_counters, max_consecutive_skips)
        self._is_running = False
        self.is_due = False

    def _set_up(self) -> None:
        """Make what depends on how the model is compiled."""
        model, denominator = self.model, self._options["denominator"]
        run_eagerly = should_run_eagerly(model)
        # What Keras has made of "auto", it does not tell.
        jit_compile: Any = "auto" if model.jit_compile else False
        compiling = {"run_eagerly": run_eagerly, "jit_compile": jit_compile}
        self._backend = make_backend(**compiling)
        self._followed = self._backend.followed = Followed(self._look)
        check_fit(model, self._backend)
        check_options(
            denominator=denominator,
            max_consecutive_skips=self._max_consecutive_skips,
            jit_compile=model.jit_compile,
            run_eagerly=model.run_eagerly,
            seed=None,
        )
        self.optimizer, carried = resolve_optimizer(model, None)
        loss_scale = self._options["loss_scale"]
        self.loss_scale = resolve_loss_scale(model, loss_scale, carried)
        self._context = HookContext.of(
            model, compiled_arguments(model), denominator
        )
        if self._state is None:
            initial_scale = self.loss_scale.initial if self.loss_scale else 1.0
            self._state = TrainingState(seed=0, loss_scale=initial_scale)
        carries = loss_scale == "auto" and carried is not None
        self._scale = CarriedScale(
            model, self._state, self.loss_scale if carries else None
        )
        self._parts = WindowParts(
            hooks=self,
            state=self._state,
            backend=self._backend,
            loss_scale=self.loss_scale,
            combine=self.accumulation.combine,
        )
        self._fit_state = make_fit_state(self._backend, model)
        self._train_function = self._fit_state.make_train_function(self._run)
        self._program: Any = None
        self._before: Any = None
        self._step: Any = None
        self._examiner = Examiner(
            self._parts,
            self._backend.write_back,
            **compiling,
        )
        self._kind: Hashable = None
        self._trains = compiled_as(model)

    # What a callback calls, in this order.

    @classmethod
    def refuse_arguments(
        cls, others: dict[str, Any], function: Callable[..., Any]
    ) -> None:
        """Refuse arguments that a callback does not have.

        Args:
            others: dict of them.
            function: the callback's constructor.

        Raises:
            TypeError: there are some; the message says what replaces them.
        """
        refuse_arguments(
            cls._owner,
            others,
            function,
            (keras.Model.fit, "model.fit({name}=)"),
            (keras.Model.compile, "model.compile({name}=)"),
            replacements=WITHIN_FIT,
        )

    def serves(self, model: Any) -> bool:
        """Whether this can train a model again, compiled as it was."""
        return (
            self.model is model
            and not self._is_running
            and self._takeover.has_put_back
            and self._trains == compiled_as(model)
            and not (self._trainable and self._trainable.differs_from(model))
        )

    def install(
        self, batches_per_epoch: int | None, announce: Callable[[str], None]
    ) -> None:
        """Take over the model's train function, for one `fit`.

        Args:
            batches_per_epoch: int, or `None` where `fit` does not know it.
            announce: function that is given lines to tell the user.
        """
        self._announce, self.is_due = announce, False
        self._groups_per_epoch = None
        if batches_per_epoch is not None:
            self._groups_per_epoch = math.ceil(
                batches_per_epoch / self.model.steps_per_execution
            )
        begin_averages(self.model.optimizer)  # before `fit` has the state
        self._followed.expect_changes()
        self._begun = time.monotonic() - self._counting.progress_at_most.seconds
        self._take_over()

    def _take_over(self) -> None:
        self._takeover.begin(self._train_function)
        self._fit_state.leave()
        self._kind = None

    def stay(self) -> None:
        """Take over again, where somebody has had Keras train amid `fit`.

        Raises:
            ValueError: the model was compiled again amid a window.
        """
        may_change = self._follows_model or self._program is None
        if may_change and self._trains != compiled_as(self.model):
            self.model.make_train_function(force=True)
        if not self._takeover.is_aside:
            return
        if self._takeover.is_outdated:
            if self._waiting:
                raise ValueError(
                    errors.COMPILED_AMID_WINDOW.format(batches=self._waiting)
                )
            self._set_up()
        self._take_over()
        self._scale.take()

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch, of some index."""
        self._fit_state.leave()
        self._scale.take()  # not earlier: a callback may have restored it
        if self._program is not None:
            self._program.variables.start_epoch(epoch)
        self._state.epoch.assign(epoch)
        self._epoch = epoch
        self._open, self._held, self.is_due = 0, [], False
        self._groups: Any = Groups(
            self._backend,
            self.model.steps_per_execution,
            self._groups_per_epoch,
        )
        self._logs: dict[str, Any] = {}
        self._late: Report | None = None  # of a window after `fit`'s logs

    def finish_window(self) -> None:
        """Apply an open window, where an epoch has ended amid one.

        This is outside of what `fit` repeats: its variables are current.
        """
        if self._waiting:
            self._fit_state.leave()
            self._late = self._close_window()
            self._backend.write_back()

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Count an epoch that has run, and stop after too many bad windows.

        Its logs, which `fit` has read, are told of a window open until now.
        """
        self.finish_window()
        if self._late is not None:
            logs.update(self._late.section("running"))
        self._fit_state.leave()
        self._scale.give()
        self._counting.add_epoch()
        self._counting.check_skips()
        self._followed.expect_changes()

    def uninstall(self) -> None:
        """Put back what `install` has changed, unless others have since."""
        self._step_aside()
        self._takeover.end()
        self._groups = None

    def _step_aside(self) -> None:
        """Leave the model to others, with all that training has made of it."""
        if not self._is_running:  # or else its arrays may be lost
            self._fit_state.leave()
            self._scale.give()
        self._scale.forget()

    @property
    def progress(self) -> Progress:
        """A copy of the counters; reading it waits for the device."""
        return self._counting.progress

    # What `fit` calls.

    def _run(self, iterator: Iterator[Any]) -> dict[str, Any]:
        """Train on the next group of batches.

        Nothing may raise once something has run, or `fit` on JAX is left with
        arrays that have been given away.
        """
        self.is_due = False
        self._counting.check_skips_if_many()
        group = self._groups.take(iterator)
        self._follow_model()
        for kind in group.kinds:
            self._turn_to(kind, group)
        self._fit_state.settle(self._program.variables)
        self._counting.add(len(group), group.samples)
        while len(group):
            if not self._waiting:
                self._steps = self._steps_of_window()
            room = self._steps - self._waiting
            part, group = group.cut(room)
            self._check_window(part)
            self._is_running = True
            try:
                self._fill_window(part, len(part) == room)
            except Exception as error:
                found = self._program.raised_at_once(error, part.batches())
                raise found from None
            self._is_running = False
        if self._waiting and self._groups.is_last():
            self._is_running = True
            self._close_window()
            self._is_running = False
        self._counting.set_seconds(time.monotonic() - self._begun)
        return self._logs

    @property
    def _follows_model(self) -> bool:
        """Whether Keras's own step would see at once what is changed."""
        return should_run_eagerly(self.model) or not self._backend.fit_compiles

    def _follow_model(self) -> None:
        """Turn to what the model is by now, where Keras's own step would.

        One that `fit` has compiled keeps to what was trainable at first. What
        else than that has changed, the next epoch sees.

        Raises:
            ValueError: that has changed amid a window.
        """
        if not self._follows_model:
            return
        # Asked as an epoch begins: amid one, layers may change themselves.
        has_been_changed = self._followed.has_been_changed()
        if self._program is None:
            return
        if self._trainable.differs_from(self.model):
            if self._waiting:
                message = errors.FROZEN_AMID_WINDOW
                raise ValueError(message.format(batches=self._waiting))
        elif not has_been_changed:
            return
        self._before = self._program.variables  # what the epoch has had so far
        self._program = self._kind = None
        self._followed = self._backend.followed = self._followed.anew()

    def _look(self) -> Looks:
        """Note what windows are made of."""
        return self._backend.looks_of(self.model, [])

    def _turn_to(self, kind: Hashable, group: Group) -> None:
        """Get ready for batches of a kind, as a group has some.

        Another part of the data may be there for the first time amid `fit`.
        """
        if kind == self._kind:
            return
        if self._kind is not None and not self._program.knows(kind):
            self._fit_state.unsettle()
        self._prepare(group.first_of(kind))
        self._kind = kind

    def _check_window(self, part: Group) -> None:
        """Turn to the losses of a window's batches, which must be alike.

        Raises:
            ValueError: they are others than the window has begun with.
        """
        for kind in part.kinds:
            self._turn_to(kind, part)
            signature, _ = self._program.survey.signature
            if not self._waiting and kind == part.kinds[0]:
                self._signature = signature
            if signature != self._signature:
                raise ValueError(errors.MIXED_WINDOW.format(steps=self._steps))

    @property
    def _waiting(self) -> Any:
        """How many micro-batches the open window has so far."""
        return self._open + len(self._held)

    def _steps_of_window(self) -> int:
        updates = 0
        if callable(self.accumulation.steps):
            # This is what comes back with a model that `fit` goes on with.
            updates = as_number(self._fit_state.read(self.optimizer.iterations))
        return self.accumulation.steps_at(self._epoch, updates)

    def _fill_window(self, group: Group, closes: bool) -> None:
        """Put batches into the open window, and close it where they do."""
        fuses = closes and not self._waiting and self._is_fused
        if fuses and group.is_even:
            self._note(self._step.run(group.window()))
            return
        if self._can_stream:
            for batch in group.batches():
                report = self._step.add(batch, self._open, self._steps)
                self._open += 1
            self._logs = late_logs(report)
        else:
            self._held += group.batches()
        if closes:
            self._close_window()

    def _close_window(self) -> Report:
        if self._held:
            report = self._step.run(Group(self._held).window())
        else:
            report = self._step.apply_open(self._open)
        self._open, self._held = 0, []
        self._note(report)
        return report

    def _note(self, report: Report) -> None:
        self._counting.add_window()
        self._followed.pace.note_window()
        self._logs = late_logs(report)

    # Parts.

    def _prepare(self, batch: Batch) -> None:
        """Build what is missing before the first micro-batch of a `fit`."""
        if self._program is None:
            self._backend.write_back()
            self._build_model(batch)
            warn_of_nothing_to_train(self.model)
        program = self._program or WindowProgram(self._parts, self._before)
        program.learn(batch)
        self._can_stream = program.can_stream
        if self.accumulation.steps != 1:
            self._examiner.check_bare_losses(
                program.survey.losses,
                lambda: Window(None, (batch,), (count_samples(batch),)),
                owner=self._owner,
            )
        if self._program is None:
            self._begin(program)

    def _begin(self, program: WindowProgram) -> None:
        """Choose how windows run, now that it is known what they are like."""
        survey = program.survey
        plan = choose_plan(
            self.model,
            survey.operations,
            self._backend,
            jit_compile=self.model.jit_compile,
            run_eagerly=should_run_eagerly(self.model),
        )
        self._is_fused = plan.name == "fused"
        # While `fit` has the state, nothing can be made any more.
        program.variables.make_accumulators()
        self._step = Step(program, self._backend, plan)
        steps = self._steps_of_window()
        for note in notes_of_state(self.model, survey.moved, steps):
            self._announce(note)
        self._program = program
        self._trainable = Trainable(self.model)

    def _build_model(self, batch: Batch) -> None:
        """Create what Keras creates when it first trains on a batch."""

        def call(batch: Batch) -> Nest:
            mode = self._context.mode(training=False)
            return self.model(batch.x, **mode)

        if not all(layer.built for layer in flatten_layers(self.model)):
            with Scratch([]):
                self._backend.trace(call, batch)
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
            begin_averages(optimizer)

    def _read_counters(self) -> dict[str, int]:
        names = ("updates", "skipped_updates", "consecutive_skips")
        read, state = self._fit_state.read, self._state
        return {name: as_number(read(getattr(state, name))) for name in names}
