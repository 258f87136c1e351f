"""The story of a fit: windows, updates, validations, epochs, the end."""

import contextlib
import itertools
import math
import time

from accumtrainer.batches import windows
from accumtrainer.callback import Logs
from accumtrainer.config import updates_per_epoch
from accumtrainer.fit_options import check_steps
from accumtrainer.signals import Interruption
from accumtrainer.sources import make_source


class Validation:
    """The data sets a fit is validated on.

    Args:
        data: `None`; what `make_source` takes, or a tuple `(x, y)` or
            `(x, y, sample_weight)`; or a dict of these by name.
        batch_size: samples per loader batch, `None` for the default.
        steps: loader batches in a validation, `None` for all.
    """

    def __init__(self, data, *, batch_size, steps):
        check_steps("validation_steps", steps)
        check_steps("validation_batch_size", batch_size)
        named = data if isinstance(data, dict) else {"": data}
        self._sources = {
            f"{name}_" if name else "": _validation_source(
                part, batch_size, steps
            )
            for name, part in named.items()
            if part is not None
        }

    def __bool__(self):
        return bool(self._sources)

    def run(self, evaluate):
        """Evaluate every set.

        Args:
            evaluate: function from a `Source` to a dict of numbers.

        Returns:
            Dict of numbers, `val_loss` or `val_<set>_loss` and so on.
        """
        logs = {}
        for prefix, source in self._sources.items():
            results = evaluate(source)
            logs |= {f"val_{prefix}{k}": v for k, v in results.items()}
        return logs


def _validation_source(data, batch_size, steps):
    if isinstance(data, list) and not any(isinstance(v, tuple) for v in data):
        data = tuple(data)  # [x, y], as in Keras; else a list of batches
    arrays = data if isinstance(data, tuple) else (data,)
    batch_size = batch_size if isinstance(data, tuple) else None
    if not 1 <= len(arrays) <= 3:
        raise ValueError(
            "validation_data must be (x, y), (x, y, sample_weight), what "
            "yields such batches, or a dict of these by name. Received: "
            f"a tuple of {len(arrays)}. Put several inputs into one tuple."
        )
    return make_source(
        *arrays, batch_size=batch_size, shuffle=False, steps=steps
    )


def updates_in_epoch(source, accumulation, epoch):
    """Count the updates of an epoch.

    Args:
        source: `Source`.
        accumulation: `Accumulation`.
        epoch: index of the epoch.

    Returns:
        int, or `None` where it cannot be known.
    """
    batches = source.batches_per_epoch
    if batches is None or accumulation.micro_batch_size is not None:
        return batches
    if callable(accumulation.steps):
        return None
    steps = accumulation.steps_at(epoch, 0)
    return updates_per_epoch(batches, steps, accumulation.tail)


class FitLoop:
    """Runs the epochs of one `fit`.

    Args:
        trainer: `Trainer`.
        engine: `Engine` of the Trainer.
        options: `FitOptions`.
        source: `Source` of the training data.
        validation: `Validation`.
        dispatcher: `Dispatcher`.
    """

    def __init__(
        self, trainer, engine, options, source, validation, dispatcher
    ):
        self._trainer = trainer
        self._engine = engine
        self._options = options
        self._source = source
        self._validation = validation
        self._dispatcher = dispatcher
        self._interruption = Interruption()
        self._carried = []
        self._before = engine.progress
        self._validated = self._before
        self._validation_logs = {}

    def run(self, announce):
        """Train until an end is reached.

        Args:
            announce: function that is given the line saying what will
                happen, before it happens.

        Returns:
            `keras.callbacks.History`.
        """
        trainer, options = self._trainer, self._options
        trainer.model.stop_training = False
        epochs = itertools.count(options.initial_epoch)
        upcoming = self._windows(options.initial_epoch)
        begun = list(itertools.islice(upcoming, 1))
        first = begun[0] if begun else self._window_to_come()
        self._engine.prepare(first)
        announce(self.describe(first))
        upcoming = itertools.chain(begun, upcoming)
        self._begun = time.monotonic()
        with self._interruption.deferred(), self._dispatcher.training():
            with self._published_at_the_end():
                for epoch in itertools.takewhile(self._should_begin, epochs):
                    self._run_epoch(epoch, upcoming)
                    upcoming = self._windows(epoch + 1)
            trainer.optimizer.finalize_variable_values(
                trainer.model.trainable_variables
            )
        return self._dispatcher.history

    @contextlib.contextmanager
    def _published_at_the_end(self):
        """Leave the model current, however training ends."""
        try:
            yield
        finally:
            self._engine.publish()

    def _tell(self, hook, *arguments):
        """Call a hook, with the model current for whoever looks at it."""
        if self._dispatcher.looks(hook):
            self._engine.publish()
        self._dispatcher.call(hook, *arguments)

    def describe(self, first):
        """Say in one line what will happen.

        Args:
            first: `Window`, the first one.

        Returns:
            str.
        """
        sizes = sorted(set(first.sizes), reverse=True)
        shape = f"{first.micro_batches} micro-batches x {sizes[0]}"
        if first.micro_batches == 1:
            shape = "1 micro-batch"
        elif len(sizes) > 1:
            shape = f"{first.micro_batches} micro-batches of {sizes[-1]} to "
            shape += str(sizes[0])
        trainer = self._trainer
        count = updates_in_epoch(
            self._source, trainer.accumulation, self._options.initial_epoch
        )
        epoch = f"; {count:,} updates per epoch" if count else ""
        samples = f"{first.samples} samples per update"
        return f"{samples} = {shape}{epoch}; {trainer.plan}"

    def _windows(self, epoch):
        accumulation = self._trainer.accumulation
        is_last = epoch + 1 >= self._options.last_epoch
        tail = accumulation.tail
        if tail == "carry" and is_last:
            tail = "flush"  # nothing comes after it that could take the rest
        return windows(
            self._source,
            epoch=epoch,
            steps_at=lambda: accumulation.steps_at(epoch, self._updates()),
            micro_batch_size=accumulation.micro_batch_size,
            tail=tail,
            carried=self._carried,
        )

    def _window_to_come(self):
        """Make up a window where the first epoch is too short to fill one."""
        steps = self._trainer.accumulation.steps_at(
            self._options.initial_epoch, self._updates()
        )
        items = itertools.islice(itertools.cycle(self._carried), steps)
        return self._source.window(list(items), None)

    def _updates(self):
        """Count the updates made, only where the window's size needs it."""
        if callable(self._trainer.accumulation.steps):
            return self._engine.progress.updates
        return 0

    def _should_begin(self, epoch):
        if epoch >= self._options.last_epoch:
            return False
        return epoch == self._options.initial_epoch or not self._should_stop()

    def _seconds(self):
        """Seconds since training began, in this call."""
        return time.monotonic() - self._begun

    def _should_stop(self):
        trainer, options = self._trainer, self._options
        if trainer.model.stop_training:
            return True
        if options.max_seconds is not None:
            if self._seconds() >= options.max_seconds:
                return True
        if math.isinf(options.update_limit):
            return False
        end = self._before.updates + options.update_limit
        if self._engine.updates_at_most < end:
            return False
        return self._engine.progress.updates >= end

    def _run_epoch(self, epoch, upcoming):
        engine, dispatcher = self._engine, self._dispatcher
        engine.start_epoch(epoch)
        self._validation_logs = {}
        self._tell("on_epoch_begin", epoch, {})
        has_run = False  # A carried tail can be all there is of an epoch.
        for index, window in enumerate(upcoming):
            has_run = True
            self._run_update(index, window)
            self._validate_if_due()
            self._interruption.check()
            if self._should_stop():
                break
        engine.finish_epoch()
        logs = engine.running_logs() if has_run else {}
        self._validate_if_due()
        if self._validation and self._options.validates_after(epoch):
            self._validate()
        logs |= self._validation_logs
        self._tell("on_epoch_end", epoch, logs)
        dispatcher.last_logs = logs

    def _run_update(self, index, window):
        engine, dispatcher = self._engine, self._dispatcher
        self._tell("on_train_batch_begin", index, {})
        if any(map(dispatcher.listens, ("on_micro_batch", "on_accumulate"))):
            before = engine.progress
            report = engine.run_window(window)
            self._tell_micro_batches(report, window, before)
        else:
            report = engine.run_window(window)
        engine.count_window(window)
        engine.count_seconds(self._before.seconds + self._seconds())
        if dispatcher.listens("on_apply"):
            logs = Logs(report.window_logs)
            self._tell("on_apply", engine.progress.updates, logs)
        logs = Logs(report.running_logs)
        self._tell("on_train_batch_end", index, logs)

    def _tell_micro_batches(self, report, window, progress):
        """Tell of micro-batches, with `progress` as if one by one."""
        rows = zip(report.micro_batches(), window.sizes, strict=True)
        with self._engine.showing(progress):
            for index, ((loss, weight), size) in enumerate(rows):
                progress.micro_batches += 1
                progress.samples += size
                logs = {"loss": loss, "weight": weight}
                self._tell("on_micro_batch", index, logs)
                self._tell("on_accumulate", index, logs)

    def _validate_if_due(self):
        every = self._options.validation_every
        if every is None or not self._validation:
            return
        # Asking for the progress waits for the device: ask only when enough
        # windows have run that it could be due.
        if not every.is_due(self._validated, self._engine.progress_at_most):
            return
        now = self._engine.progress
        if every.is_due(self._validated, now):
            self._validated = now
            with self._engine.metrics_kept():
                self._validate()

    def _validate(self):
        def evaluate(source):
            return self._engine.evaluate(source, self._dispatcher)

        self._validation_logs = self._validation.run(evaluate)
        self._tell(
            "on_validation_end",
            self._engine.progress.updates,
            self._validation_logs,
        )
