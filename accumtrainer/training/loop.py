"""The story of a fit: windows, updates, validations, epochs, the end."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accumtrainer import errors
from accumtrainer.config import Accumulation
from accumtrainer.data.batches import Window, window_of_batches
from accumtrainer.data.position import Position
from accumtrainer.data.source import Source, groups
from accumtrainer.keras_api import take_initial_epoch
from accumtrainer.observers.dispatcher import Dispatcher
from accumtrainer.observers.logs import Logs, in_order_of_keras
from accumtrainer.progress import Progress
from accumtrainer.saving.callback_state import CallbackStates
from accumtrainer.saving.snapshot import Snapshot, blank
from accumtrainer.steps import Plan, Report
from accumtrainer.training.announcing import (
    FIRST_OF_A_SIZE,
    NOTHING_LEFT,
    describe,
    updates_in_epoch,
)
from accumtrainer.training.clock import Clock
from accumtrainer.training.ending import Ending
from accumtrainer.training.engine import Engine
from accumtrainer.training.fit_options import FitOptions
from accumtrainer.training.input_checks import InputChecks
from accumtrainer.training.safe_points import SafePoints
from accumtrainer.training.signals import Interruption, agree
from accumtrainer.training.start import Start, start_from
from accumtrainer.training.validation import Validation, metrics_kept


class FitLoop:
    """Runs the epochs of one `fit`.

    Args:
        trainer: whose fit it is.
        engine: runs its windows.
        options: how long it trains, and how it is validated.
        source: the training data.
        validation: the data to validate on.
        dispatcher: tells callbacks.
        saved: what to go on from, `None` to begin.
        announce: is given a line saying what will happen, before it happens,
            and one where the plan has changed.
    """

    def __init__(
        self,
        trainer: Any,
        engine: Engine,
        options: FitOptions,
        *,
        source: Source,
        validation: Validation,
        dispatcher: Dispatcher,
        saved: Snapshot | None,
        announce: Callable[[str], None],
    ):
        self._trainer = trainer
        self._engine = engine
        self._options = options
        self._accumulation: Accumulation = trainer.accumulation
        self._source = source
        self._validation = validation
        self._dispatcher = dispatcher
        self._interruption = Interruption(
            {
                name
                for callback in dispatcher.callbacks
                for name in getattr(callback, "signals", ())
            },
            is_agreed=engine.replicas.processes > 1,
        )
        self._clock = Clock(is_agreed=engine.replicas.processes > 1)
        self._saved = saved
        self._announce = announce
        self._validation_logs: dict[str, Any] = {}
        self._checks: Any = None
        self._callback_states = CallbackStates([])  # none while it begins
        self._told_plan: Plan | None = None
        self._ending = Ending()
        self._safe_points = SafePoints(dispatcher, self._interruption)
        self._first_epoch = options.initial_epoch
        self._has_run_out = False
        self._first_items: Any = None
        self._coming: Any = None  # a generator, before the first update

    def run(self) -> Any:
        """Train until an end is reached; return `keras.callbacks.History`."""
        trainer = self._trainer
        trainer.model.stop_training = False
        take_initial_epoch(trainer.model)
        self._start = self._find_start()
        self._position = self._start.position
        self._clock.start(self._start.seconds)
        upcoming = self._prepare()
        self._engine.lasting.begin_averages()
        self._start.iterations = self._engine.lasting.iterations
        self._clock.start(self._start.seconds)  # compiling does not count
        with self._interruption.deferred(), self._dispatcher.training():
            self._callback_states = CallbackStates(
                self._dispatcher.callbacks,
                saved=self._engine.lasting.list_variables,
                will_set=self._saved is not None,
            )
            with (
                contextlib.ExitStack() as at_the_end,
                self._safe_points.saved_on_errors(),
            ):
                # The model is left current, however training ends.
                at_the_end.callback(self._engine.write_back)
                upcoming = self._move_to_callbacks_epoch() or upcoming
                if not self._start.is_amid_epoch:
                    self._restore()
                is_complete = True
                while is_complete and self._should_begin():
                    is_complete = self._run_epoch(upcoming)
                    upcoming = self._windows(self._position)
                if is_complete:
                    self._safe_points.tell("end")
                    self._apply_carried()
                self._interruption.check()
            trainer.optimizer.finalize_variable_values(
                trainer.model.trainable_variables
            )
        return self._dispatcher.history

    def _find_start(self) -> Start:
        if self._saved is None:
            begun = self._engine.counting.progress
            position = Position(epoch=self._options.initial_epoch)
            return Start(position=position, before=begun, validated=begun)
        return start_from(
            self._saved,
            self._source,
            self._trainer.model,
            self._dispatcher.callbacks,
            fast_forward=self._options.fast_forward,
        )

    def _prepare(self) -> Iterator[Window]:
        """Build what the first window needs; return the windows to come."""
        start, is_saved = self._start, self._saved is not None
        position = self._position
        if self._source.begins_again:  # that of the window is forgotten
            position = position.copy()
        has_ended = is_saved and not self._should_begin()
        coming = iter(()) if has_ended else self._groups(position)
        self._first_items = next(coming, None)
        begun = list(
            self._cut([self._first_items] if self._first_items else [])
        )
        first = begun[0] if begun else self._window_to_see()
        start.micro_batch = first.split()[0]
        if begun and self._options.check_inputs and self._trainer.model.built:
            # Where a model runs eagerly, preparing computes with these numbers.
            self._check(first, self._make_checks(), index=0)
        self._engine.follow_model()
        self._engine.prepare(
            first,
            like=start.snapshot,
            measures_gradients=any(
                getattr(callback, "needs_gradient_norms", False)
                for callback in self._dispatcher.callbacks
            ),
        )
        first = self._engine.cut(first)
        self._checks = self._make_checks()
        start.check(self._engine)
        is_last = self._position.epoch + 1 >= self._options.last_epoch
        is_over = is_saved and is_last and not begun
        self._told_plan = self._engine.plan
        self._announce(NOTHING_LEFT if is_over else self._describe(first))
        if not is_over:
            for note in self._engine.notes_of_state(first.micro_batches):
                self._announce(note)
        self._coming = None if has_ended else coming
        return itertools.chain(begun, self._cut(coming))

    def _move_to_callbacks_epoch(self) -> Iterator[Window] | None:
        """Begin where a callback has restored the model, at its epoch.

        `BackupAndRestore` does so when training begins, and some of the first
        epoch's data have been taken by then. Data that come in the same order
        whatever the epoch go on from there.

        Returns:
            The windows to come, or `None` to go on as begun.
        """
        epoch = take_initial_epoch(self._trainer.model)
        items, self._first_items = self._first_items, None
        if self._saved is not None or epoch is None:
            return None
        is_trial = bool(self._options.fast_dev_run)
        self._start.follow_optimizer(self._engine, is_trial=is_trial)
        self._first_epoch = epoch or self._first_epoch
        self._position = Position(epoch=self._first_epoch)
        if not self._source.orders_epochs:
            for item in items:
                self._position.take(item)
            self._position.carried = list(items)
        return self._windows(self._position)

    def _make_checks(self) -> InputChecks:
        return InputChecks(self._trainer, numbers=self._options.check_inputs)

    def _check(self, window: Window, checks: Any, index: int) -> None:
        """Refuse a window that is wrong, or whose other shards are."""
        # Shards have the same sizes; numbers can be wrong in one alone.
        is_alone = not self._options.check_inputs
        with contextlib.nullcontext() if is_alone else self._source.together():
            checks.check(window, epoch=self._position.epoch, index=index)

    @property
    def to_be_restored(self) -> Snapshot | None:
        """What the run goes on from, as long as nothing of it is put back."""
        return self._start.snapshot

    def snapshot_parts(self) -> dict[str, Any]:
        """Return what the loop adds to a snapshot, by its fields."""
        return {
            "position": self._position.get_state(),
            "source": self._source.get_state(),
            "run": {
                "before": self._start.before.as_dict(),
                "seconds": self._clock.seconds,
                "validated": self._start.validated.as_dict(),
                "validation_logs": dict(self._validation_logs),
                "last_logs": self._epoch_logs(),
                "has_stopped": bool(self._trainer.model.stop_training),
                "micro_batch": blank(self._start.micro_batch),
                "examples_of_epoch": self._engine.lasting.examples_of_epoch,
                "ending": self._ending.get_state(self._callback_states),
            },
            "callbacks": self._callback_states.get(),
        }

    def _restore(self) -> None:
        self._start.restore(self._engine, self._callback_states)
        self._validation_logs = self._start.validation_logs
        self._ending = self._start.ending

    def _describe(self, first: Window) -> str:
        return describe(
            first,
            self._engine.plan,
            replicas=self._engine.replicas.count,
            updates=updates_in_epoch(
                self._source, self._accumulation, self._options.initial_epoch
            ),
        )

    def _windows(self, position: Position) -> Iterator[Window]:
        return self._cut(self._groups(position))

    def _cut(self, groups: Iterable[Any]) -> Iterator[Window]:
        """Make windows of groups of loader items, as is right by now."""
        size = self._engine.rows_per_pass
        return (self._source.window(items, size) for items in groups)

    def _groups(self, position: Position) -> Iterator[tuple[Any, ...]]:
        """Yield the loader items of each window of the rest of an epoch.

        The first epoch must have some; a later one that has no data at all
        ends the training, and one whose tail is all it has has no windows.
        """
        accumulation, epoch = self._accumulation, position.epoch
        is_last = epoch + 1 >= self._options.last_epoch
        tail = accumulation.tail
        if tail == "carry" and is_last:
            tail = "flush"  # nothing comes after it that could take the rest
        try:
            yield from groups(
                self._source,
                position,
                steps_at=lambda: accumulation.steps_at(epoch, self._updates()),
                tail=tail,
            )
        except errors.NothingLeftError:
            if epoch == self._first_epoch:
                raise

    def _window_to_see(self) -> Window:
        """Make a window for building where none comes, or not yet."""
        steps = self._accumulation.steps_at(
            self._position.epoch, self._updates()
        )
        known = self._start.micro_batch
        if known is not None:
            return window_of_batches([known] * (steps or 1), None)
        position = self._position
        if not position.carried:
            # A finished run that was saved by hand has yet to see the data.
            position = Position(epoch=position.epoch)
            for window in self._windows(position):
                return window
        items = itertools.islice(itertools.cycle(position.carried), steps)
        if not position.carried:
            no_batches = errors.NO_BATCHES.format(epoch=position.epoch)
            raise errors.NothingLeftError(no_batches)
        return self._source.window(list(items), None)

    def _updates(self) -> int:
        """Count the updates made, only where the window's size needs it."""
        if not callable(self._accumulation.steps):
            return 0
        return self._start.updates(self._engine)

    def _should_begin(self) -> bool:
        position = self._position
        if self._has_run_out or position.epoch >= self._options.last_epoch:
            return False
        if self._start.is_amid_epoch:
            return True
        if position.epoch == self._first_epoch:
            return not self._has_made_all_updates()
        return not self._should_stop()

    def _should_stop(self) -> bool:
        limit = self._options.max_seconds
        is_late = limit is not None and self._clock.seconds >= limit
        has_stopped = bool(self._trainer.model.stop_training) or is_late
        return has_stopped or self._has_made_all_updates()

    def _has_made_all_updates(self) -> bool:
        end = self._start.before.updates + self._options.update_limit
        return self._start.has_made(end, self._engine)

    def _run_epoch(self, upcoming: Iterator[Window]) -> bool:
        """Run an epoch, or the rest of one; return whether it is complete.

        It may be broken off by an end that came first.
        """
        engine, epoch = self._engine, self._position.epoch
        self._safe_points.is_at_rest = False
        engine.start_epoch(epoch)
        self._validation_logs = {}
        self._dispatcher.call("on_epoch_begin", epoch, {})
        engine.compiled.check_metrics()
        is_complete = self._run_windows(self._begun_anew() or upcoming)
        position = self._position
        if not position.batches:
            self._has_run_out = True
            warnings.warn(
                errors.NO_MORE_EPOCHS.format(epoch=epoch), stacklevel=4
            )
            return True
        # A carried tail can be all there is of an epoch.
        logs = self._epoch_logs() if position.windows else {}
        ending = self._ending
        ending.is_complete = ending.is_complete or is_complete
        if not ending.is_counted:  # else it was, before somebody saved
            engine.finish_epoch()
            ending.is_counted = True
        if not ending.told:
            self._validate_if_due()
            if self._validation and self._options.validates_after(epoch):
                self._validate()
        logs = in_order_of_keras(logs, self._validation_logs)
        logs |= ending.logs if ending.told else {}
        ending.logs = logs
        self._dispatcher.call("on_epoch_end", epoch, logs, told=ending.told)
        self._ending = Ending()
        self._dispatcher.last_logs = logs
        position.begin_next_epoch()
        if ending.is_complete:
            self._safe_points.tell("epoch")
            self._safe_points.leave_if_interrupted()
        return ending.is_complete

    def _begun_anew(self) -> Iterator[Window] | None:
        """Begin with the data once more, which callbacks may have changed.

        The first window is taken before they know of the training, as programs
        are compiled for its shapes. Keras does the same.

        Returns:
            The windows to come, or `None` to go on as begun.
        """
        coming, self._coming = self._coming, None
        if coming is None or not self._source.begins_again:
            return None
        coming.close()
        return self._windows(self._position)

    def _epoch_logs(self) -> dict[str, Any]:
        report = self._engine.last_report
        return self._start.last_logs if report is None else report.epoch_logs()

    def _run_windows(self, upcoming: Iterator[Window]) -> bool:
        """Run the windows of an epoch until there are no more, or an end is.

        Returns:
            Whether there are no more.
        """
        if self._start.is_amid_epoch:
            self._restore()
            if self._should_stop():
                return False
        self._safe_points.is_at_rest = True
        engine = self._engine
        for window in engine.waiting_for(upcoming):
            self._safe_points.is_at_rest = False
            self._run_window(window)
            if engine.replicas.processes > 1:
                model, gather = self._trainer.model, engine.replicas.gather
                agree(self._clock, self._interruption, model, gather)
            self._validate_if_due()
            should_stop = self._should_stop()
            self._safe_points.tell("stop" if should_stop else "update")
            self._safe_points.leave_if_interrupted()
            if should_stop:
                return False
        self._safe_points.is_at_rest = False
        return True

    def _apply_carried(self) -> None:
        """Make an update of what an epoch has carried on to none.

        Training was to end with some epoch, and has ended earlier. A
        checkpoint made before holds what is carried, for a run that goes on.
        """
        items = self._position.carried
        has_begun = self._coming is None
        if items and has_begun and not self._has_made_all_updates():
            self._safe_points.is_at_rest = False
            self._run_window(self._source.window(list(items), None))

    def _run_window(self, window: Window) -> None:
        self._ending.told = []  # in a run that was to end here
        index = self._position.windows
        self._check(window, self._checks, index)
        engine, dispatcher = self._engine, self._dispatcher
        dispatcher.call("on_train_batch_begin", index, {})
        engine.follow_model_amid_fit()
        counting, before = engine.counting, None
        if any(map(dispatcher.listens, ("on_micro_batch", "on_accumulate"))):
            before = counting.progress
        report = engine.run_window(window)
        self._position.take_group()
        window = engine.last_window
        counting.add(window.micro_batches, window.samples)
        counting.set_seconds(self._start.before.seconds + self._clock.seconds)
        if before is not None:
            self._tell_micro_batches(report, window, before)
        if dispatcher.listens("on_apply"):
            logs = Logs(report.window_logs)
            dispatcher.call("on_apply", counting.progress.updates, logs)
        logs = Logs(report.running_logs)
        dispatcher.call("on_train_batch_end", index, logs)
        self._tell_of_plan()

    def _tell_of_plan(self) -> None:
        """Announce what a first window has shown of a size that was chosen."""
        plan = self._engine.plan
        if plan != self._told_plan:
            self._told_plan = plan
            self._announce(FIRST_OF_A_SIZE.format(plan=plan))

    def _tell_micro_batches(
        self, report: Report, window: Window, progress: Progress
    ) -> None:
        """Tell of micro-batches, with `progress` as if one by one."""
        columns = report.micro_batches()
        with self._engine.counting.showing(progress):
            for index, size in enumerate(window.sizes):
                progress.micro_batches += 1
                progress.samples += size
                logs = {name: float(v[index]) for name, v in columns.items()}
                self._dispatcher.call("on_micro_batch", index, logs)
                self._dispatcher.call("on_accumulate", index, logs)

    def _validate_if_due(self) -> None:
        every = self._options.validation_every
        if every is None or not self._validation:
            return
        counting = self._engine.counting
        if counting.is_due(every, self._start.validated):
            self._start.validated = counting.progress
            with metrics_kept(self._trainer.model, self._engine.write_back):
                self._validate()

    def _validate(self) -> None:
        def evaluate(source: Source) -> dict[str, Any]:
            return self._engine.evaluator.evaluate(source, self._dispatcher)

        # What callbacks have chosen since is what is validated.
        self._engine.follow_model_amid_fit()
        self._validation_logs = self._validation.run(evaluate)
        self._dispatcher.call(
            "on_validation_end",
            self._engine.counting.progress.updates,
            self._validation_logs,
        )
