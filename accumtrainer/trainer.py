"""The Trainer: says what an update is and owns the loop."""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from accumtrainer.config import Accumulation, Every, LossScale, require_choice
from accumtrainer.data.batches import Batch, Window
from accumtrainer.data.source import Source, SourceOptions, check_ends
from accumtrainer.data.sources import (
    OnePiece,
    make_source,
    make_training_source,
    recognize,
    recognize_sets,
)
from accumtrainer.diagnosis.equivalence import Equivalence
from accumtrainer.diagnosis.inspection import Inspection
from accumtrainer.keras_api import keras
from accumtrainer.keras_api.types import Variable
from accumtrainer.observers.callback import (
    Dispatcher,
    check_callback,
    flatten_callbacks,
)
from accumtrainer.observers.logs import Logs
from accumtrainer.observers.progress_bar import make_progress_bar
from accumtrainer.progress import Progress
from accumtrainer.saving.checkpoint import find_checkpoint, write_checkpoint
from accumtrainer.saving.resume import check_same, find_saved, take_snapshot
from accumtrainer.saving.snapshot import Snapshot
from accumtrainer.steps import make_backend
from accumtrainer.steps.memory import MemoryPlan
from accumtrainer.steps.plan import Plan
from accumtrainer.training.announcing import updates_in_epoch
from accumtrainer.training.construction import (
    check_loss,
    check_memory,
    check_model,
    check_options,
    check_replicas,
    compile_by_itself,
    compiles_itself,
    draw_seed,
    resolve_compile_arguments,
    resolve_loss_scale,
    resolve_optimizer,
)
from accumtrainer.training.engine import Engine
from accumtrainer.training.fit_options import FitOptions, checked_steps, limited
from accumtrainer.training.loop import FitLoop
from accumtrainer.training.other_trainers import (
    check_subclass,
    refuse_arguments,
)
from accumtrainer.training.signals import Interruption
from accumtrainer.training.validation import Validation
from accumtrainer.window.hooks import (
    HookContext,
    Hooks,
)
from accumtrainer.window.state import TrainingState


class Trainer(Hooks):
    """Train a Keras model with exact gradient accumulation.

    Args:
        model: `keras.Model`, compiled or not. It is left compiled with the
            live optimizer.
        optimizer: Keras optimizer or its name; default the compiled one.
        loss: as in `Model.compile`; default the compiled one.
        loss_weights: as in `Model.compile`.
        metrics: as in `Model.compile`.
        weighted_metrics: as in `Model.compile`.
        denominator: what a bare scalar loss was averaged over: `"samples"`,
            or a function from a `Batch` to a scalar. Default: unknown.
        accumulation: `Accumulation`, or an int k for k loader batches.
        loss_scale: `"auto"` (on iff a layer computes in float16),
            `LossScale`, or `None` for off.
        max_consecutive_skips: windows in a row that may have gradients that are
            not finite; `None` for any number.
        jit_compile: `"auto"`, `True` or `False`: whether XLA compiles.
        run_eagerly: run everything as plain Python, for debugging.
        callbacks: list of callbacks, Keras's or ours, for every `fit`.
        seed: int for shuffling and `self.rng`; `None` draws one.
        **others: refused; the error says what replaces them.

    Raises:
        ValueError: an argument cannot lead to a right result.
        TypeError: an argument is of the wrong kind.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> trainer = Trainer(model, optimizer="sgd", loss="mse",
        ...                   accumulation=Accumulation(micro_batch_size=4))
        >>> x, y = np.ones([16, 2]), np.ones([16, 1])
        >>> history = trainer.fit(x, y, batch_size=8, epochs=2, verbose=0)
        >>> trainer.progress.updates
        4
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        *,
        weighted_metrics: Any = None,
        denominator: Literal["samples"] | Callable[[Batch], Any] | None = None,
        accumulation: Accumulation | int = 1,
        loss_scale: LossScale | Literal["auto"] | None = "auto",
        max_consecutive_skips: int | None = 100,
        jit_compile: bool | Literal["auto"] = "auto",
        run_eagerly: bool = False,
        callbacks: Any = None,
        seed: int | None = None,
        **others: Any,
    ):
        refuse_arguments(
            type(self).__name__,
            others,
            Trainer.__init__,
            (Trainer.fit, "fit({name}=)"),
        )
        check_subclass(type(self), Trainer)
        check_model(model)
        check_options(
            denominator=denominator,
            max_consecutive_skips=max_consecutive_skips,
            jit_compile=jit_compile,
            run_eagerly=run_eagerly,
            seed=seed,
        )
        self.model = model
        self.accumulation = Accumulation.of(accumulation)
        given = {
            "loss": loss,
            "loss_weights": loss_weights,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
        }
        backend = make_backend(model=model)
        with backend.replicas.scope():
            # An optimizer that is made here is where the model's weights are.
            if compiles_itself(model):
                optimizer, given = compile_by_itself(model, optimizer, given)
            self.optimizer, carried = resolve_optimizer(model, optimizer)
        self.loss_scale = resolve_loss_scale(model, loss_scale, carried)
        arguments = resolve_compile_arguments(model, given)
        check_loss(arguments)
        check_replicas(self, model, backend.replicas.count, run_eagerly)
        check_memory(self.accumulation, backend, run_eagerly)
        for callback in flatten_callbacks(callbacks):
            check_callback(callback)
        self._context = HookContext.of(model, arguments, denominator)
        self._compile_model(arguments, is_new=_is_given(given, optimizer))
        self._callbacks = callbacks
        self.seed = draw_seed(backend) if seed is None else seed
        self._loop: FitLoop | None = None
        self._tracked: list[Variable] = []
        initial_scale = self.loss_scale.initial if self.loss_scale else 1.0
        self._state = TrainingState(seed=self.seed, loss_scale=initial_scale)
        self._engine = Engine(
            self,
            self._state,
            tracked=self._tracked,
            jit_compile=jit_compile,
            run_eagerly=run_eagerly,
            max_consecutive_skips=max_consecutive_skips,
        )

    # What researchers use inside hooks, beside the hooks themselves.

    @property
    def rng(self) -> Any:
        """The `keras.random.SeedGenerator` of the training state."""
        return self._state.rng

    def track(self, thing: Any) -> Any:
        """Make a variable, layer, model or metric part of the training state.

        It is then compiled into the step, saved and restored, and put back
        when a window is skipped. It is never trained.

        Args:
            thing: `keras.Variable`, or an object with `variables`.

        Returns:
            The same object.

        Raises:
            RuntimeError: training has begun.
        """
        if self._engine.has_begun:
            raise RuntimeError(
                "track must be called before training begins. Received: "
                f"{thing!r} after the first window. Call it in __init__."
            )
        is_variable = isinstance(thing, keras.Variable)
        self._tracked.extend([thing] if is_variable else thing.variables)
        if isinstance(thing, keras.metrics.Metric):
            self._context.tracked_metrics.extend(thing.variables)
        return thing

    @property
    def progress(self) -> Progress:
        """A copy of the counters; reading it waits for the device."""
        return self._engine.counting.progress

    @property
    def progress_at_most(self) -> Progress:
        """A copy of `progress` that does not wait for the device.

        Its updates are as many as there can be: windows that may yet turn out
        to be skipped count among them.
        """
        return self._engine.counting.progress_at_most

    @property
    def samples_seen(self) -> int:
        """Samples consumed so far, an int the host knows without waiting."""
        return self.progress_at_most.samples

    @property
    def window_logs(self) -> Logs:
        """`Logs` of the last window alone, as `on_apply` is given them.

        They are fetched from the device when somebody looks at them, also
        later, when further windows have run.
        """
        return self._engine.window_logs

    @property
    def micro_batch_logs(self) -> Logs:
        """`Logs` of the last window's micro-batches, arrays `[k]` by name.

        They hold what `on_accumulate` is given, micro-batch by micro-batch,
        and are fetched from the device when somebody looks at them.
        """
        return self._engine.micro_batch_logs

    @property
    def last_window(self) -> Window | None:
        """The `Window` that was run last, on the host; `None` before one.

        Where processes have a share of it each, its arrays are this one's.
        """
        return self._engine.last_window

    @property
    def data_seconds(self) -> float:
        """Seconds that `fit` has spent so far on waiting for data."""
        return self._engine.data_seconds

    def inspect(self, window: Window | None = None) -> Inspection:
        """Run a window again without effect, and say what is not finite.

        Its micro-batches run one by one and operation by operation, slowly,
        from their inputs to their gradients, with the model as it is now.
        That is the model the window saw if it is the last one and was
        skipped. Draws from `self.rng` are those the window made, except under
        XLA on TensorFlow, which draws in its own way; layers that draw, such
        as dropout, draw anew.

        Args:
            window: default `last_window`.

        Returns:
            With the `findings` and the `first` of them; printed, it is a short
            report.

        Raises:
            RuntimeError: there has been no window.
        """
        window = self.last_window if window is None else window
        if window is None:
            raise RuntimeError(
                "inspect must come after a window has run. Received: a "
                "Trainer that has not trained. Call fit first."
            )
        return self._engine.inspect(window)

    def is_due(self, every: Every, since: Progress) -> bool:
        """Say whether an occasion has come, waiting only where it could have.

        Args:
            since: `Progress` at an earlier moment, a copy.
        """
        return self._engine.counting.is_due(every, since)

    @property
    def replicas(self) -> int:
        """How many replicas of the model share an update out."""
        return self._engine.replicas.count

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that writes; a single one is."""
        return self._engine.replicas.is_chief

    @property
    def plan(self) -> Plan | None:
        """How windows run, a `steps.Plan`; `None` before the first."""
        return self._engine.plan

    # Training, evaluating, predicting.

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | Literal["auto"] = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        *,
        max_updates: int | None = None,
        max_seconds: float | None = None,
        validation_every: Every | None = None,
        resume_from: str | os.PathLike | None = None,
        fast_forward: bool = False,
        fast_dev_run: bool | int = False,
        overfit_batches: int | None = None,
        check_inputs: bool = False,
        **others: Any,
    ) -> Any:
        """Train the model; Keras's arguments mean what they mean there.

        `batch_size` and `steps_per_epoch` count what the loader yields.

        Args:
            x: arrays or nests of them, `keras.utils.PyDataset`, a tf.data
                dataset, or any iterable of batches. Several processes are
                given the same arrays; of anything else each yields its share.
            y: targets, where x is arrays.
            batch_size: samples per loader batch, default 32.
            epochs: passes over the data, default 1, or unlimited with
                `max_updates` or `max_seconds`.
            verbose: 0, 1, 2 or `"auto"`.
            callbacks: further callbacks, for this call.
            validation_split: fraction of the arrays kept for validation.
            validation_data: `(x, y)` or what `x` may be, the same in every
                process; a dict of these validates on several named sets.
            shuffle: whether arrays and PyDatasets are shuffled each epoch, or
                `"batch"` to shuffle arrays within each batch alone. The order
                depends on `seed` and on how many epochs came before, in
                earlier calls or by `initial_epoch`, whichever are more.
            class_weight: dict from class to weight.
            sample_weight: weights of the samples, where x is arrays.
            initial_epoch: index of the first epoch.
            steps_per_epoch: loader batches in an epoch.
            validation_steps: loader batches in a validation.
            validation_batch_size: default `batch_size`.
            validation_freq: epochs between validations, or a list of epochs.
            max_updates: updates after which to stop.
            max_seconds: seconds after which to stop.
            validation_every: `Every`, instead of the ends of epochs.
            resume_from: `"auto"`, to go on from the newest good checkpoint
                of the `Checkpoint` callback, or begin where there is none; or
                the path of a checkpoint or of a directory of them. What
                counts from the beginning then counts from the run's:
                `epochs`, `max_updates`, `max_seconds`.
            fast_forward: whether data that cannot go to a place by
                themselves, such as generators, may be run through on going
                on.
            fast_dev_run: `True`, or a number of updates: a short trial.
            overfit_batches: train on the first few batches only.
            check_inputs: whether to look at every number before it is used:
                a value that is not finite, a label that is none of the
                classes of a sparse crossentropy, or an id that an `Embedding`
                takes straight from an input and has no row for, is then an
                error which says where it is. The data are looked at as they
                come, before `on_micro_batch`.
            **others: refused; the error says what replaces them.

        Returns:
            `keras.callbacks.History`.

        Raises:
            ValueError: an argument breaks its rule.
            TypeError: an argument is of the wrong kind, or unknown.
            NonFiniteError: too many windows in a row were not finite.
            CheckpointError: the checkpoint to go on from is damaged, or of
                another training.
            DataError: the data end early, are not what they were or, with
                `check_inputs`, should be, or cannot go on from where they
                were.
            Preempted: a signal that a callback wants heeded has arrived.
        """
        refuse_arguments(
            "fit",
            others,
            Trainer.fit,
            (Trainer.__init__, "Trainer({name}=)"),
        )
        if not (epochs is max_updates is max_seconds is None):
            epochs = limited("epochs", epochs, "max_epochs")
        options = FitOptions(
            epochs=epochs,
            initial_epoch=initial_epoch,
            max_updates=max_updates,
            max_seconds=max_seconds,
            validation_every=validation_every,
            validation_freq=validation_freq,
            fast_dev_run=fast_dev_run,
            overfit_batches=overfit_batches,
            fast_forward=fast_forward,
            check_inputs=check_inputs,
        )
        self._engine.check_model()
        saved = find_saved(resume_from, [self._callbacks, callbacks])
        if saved is not None:
            check_same(saved, self)
            self.seed = saved.about["seed"]
        data = recognize(x, y, sample_weight)
        if validation_split and validation_data is None:
            data, held_back = data.split(validation_split)
            validation_sets: dict[str, Any] = {"": held_back}
        else:
            validation_sets = recognize_sets(validation_data)
        epochs_before = 0  # a run that goes on knows its own
        if saved is None:
            epochs_before = max(0, self.progress_at_most.epochs - initial_epoch)
        if overfit_batches:
            shuffle, steps_per_epoch = False, None
        else:
            steps_per_epoch = limited(
                "steps_per_epoch", steps_per_epoch, "max_steps_per_epoch"
            )
        source = make_training_source(
            data,
            SourceOptions(
                batch_size=batch_size,
                shuffle=shuffle,
                seed=self.seed,
                class_weight=class_weight,
                steps=steps_per_epoch,
                epochs_before=epochs_before,
            ),
            self._engine.replicas,
            first=overfit_batches,
            must_end=not options.may_end_amid_epoch,
        )
        if validation_batch_size is None:
            validation_batch_size = batch_size
        validation = Validation(
            validation_sets,
            batch_size=validation_batch_size,
            steps=validation_steps,
            first=int(fast_dev_run) or None,
        )
        dispatcher = Dispatcher(
            [self._callbacks, callbacks],
            model=self.model,
            trainer=self,
            params={
                "verbose": verbose,
                "epochs": epochs or (1 if options.is_bounded else None),
                "steps": updates_in_epoch(
                    source, self.accumulation, initial_epoch
                ),
                "fast_dev_run": bool(fast_dev_run),
            },
            add_history=True,
            progress_bar=make_progress_bar(verbose if self.is_chief else 0),
            make_current=self._engine.publish,
        )
        self._loop = FitLoop(
            self, self._engine, options, source, validation, dispatcher, saved
        )
        try:
            is_told = verbose and self.is_chief
            return self._loop.run(announce=print if is_told else _say_nothing)
        finally:
            self._loop = None

    # Saving and restoring.

    def snapshot(self) -> Snapshot:
        """Copy everything that training changes to the host.

        Called by a callback in `on_safe_point` it holds the place in the
        data too, so that a `fit` can go on from it.
        """
        return take_snapshot(self, self._engine, self._loop)

    def save(self, path: str | os.PathLike) -> None:
        """Save everything that training changes as one checkpoint.

        Args:
            path: directory to be made, or a checkpoint to be replaced.

        Raises:
            OSError: the disk does not take it; what was there is still there.
            CheckpointError: there is something else at `path`.
            ValueError: the model is not built.

        Example:
            >>> import tempfile
            >>> model = keras.Sequential([keras.Input([2])])
            >>> model.add(keras.layers.Dense(1))
            >>> trainer = Trainer(model, optimizer="sgd", loss="mse")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     trainer.save(f"{folder}/begun")
            ...     trainer.restore(f"{folder}/begun")
        """
        write_checkpoint(path, self.snapshot())

    def restore(
        self,
        path: str | os.PathLike,
        which: Literal["latest", "best"] = "latest",
        weights_only: bool = False,
    ) -> None:
        """Put back what was saved, but for the place in the data.

        A `fit` afterwards begins an epoch. To go on amid one, use
        `fit(resume_from=path)`.

        Args:
            path: a checkpoint, or the directory of a `Checkpoint` callback.
            which: `"latest"` or `"best"`, where there are many.
            weights_only: whether to restore the model's variables alone, for
                another optimizer or a new run.

        Raises:
            CheckpointError: there is none that is good, or it belongs to
                another model or optimizer; nothing has changed then.
            ValueError: the model is not built, or `which` is unknown.
        """
        require_choice(
            "which", which, ("latest", "best"), "Use 'latest' for the newest."
        )
        saved = find_checkpoint(path, which)
        parts = ("model",) if weights_only else None
        if not weights_only:
            check_same(saved, self)
        self._engine.check_fits(
            saved.variables, is_amid_epoch=False, parts=parts
        )
        self._engine.restore(
            saved.variables,
            None if weights_only else saved.progress,
            is_amid_epoch=False,
            was_scaled=saved.scales_loss,
            parts=parts,
        )
        if not weights_only:
            self.seed = saved.about["seed"]

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | Literal["auto"] = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Compute the loss and the metrics of some data.

        Args:
            x: what `fit` takes. Several processes evaluate together, and are
                all given the same.
            y: targets, where x is arrays.
            batch_size: samples per loader batch, default 32.
            verbose: 0, 1, 2 or `"auto"`.
            sample_weight: weights of the samples, where x is arrays.
            steps: loader batches to take.
            callbacks: callbacks for this call.
            return_dict: whether to return a dict instead of a list.

        Returns:
            The loss, or the list of loss and metrics, or a dict of them.
        """
        steps = checked_steps("steps", steps)
        self._engine.check_compiled()
        source = make_source(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            shuffle=False,
            steps=steps,
        )
        check_ends(source, "steps")
        dispatcher = self._dispatcher(callbacks, source, verbose)
        with Interruption().deferred() as interruption:
            logs = self._engine.evaluate(
                source, dispatcher, rest=interruption.check
            )
        names = self._engine.evaluated_names
        return _as_keras_returns(logs, names, return_dict)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | Literal["auto"] = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Compute the predictions for some data.

        Args:
            x: what `fit` takes, as for `evaluate`; targets in it are ignored.
            batch_size: samples per loader batch, default 32.
            verbose: 0, 1, 2 or `"auto"`.
            steps: loader batches to take.
            callbacks: callbacks for this call.

        Returns:
            Nest of NumPy arrays, one row per sample.
        """
        steps = checked_steps("steps", steps)
        source = make_source(
            x, batch_size=batch_size, shuffle=False, steps=steps
        )
        check_ends(source, "steps")
        dispatcher = self._dispatcher(callbacks, source, verbose)
        with Interruption().deferred() as interruption:
            return self._engine.predict(
                source, dispatcher, rest=interruption.check
            )

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Make one update from one batch.

        With `Accumulation(micro_batch_size=m)` the batch is sliced into
        micro-batches of m, with `Accumulation(steps=k)` into k.

        Args:
            x: arrays or nests of them.
            y: targets.
            sample_weight: weights of the samples.
            class_weight: dict from class to weight.
            return_dict: whether to return a dict instead of a list.

        Returns:
            The batch's loss, or the list of loss and metrics, or a dict.
        """
        engine = self._engine
        engine.check_model()
        window = self._cut(OnePiece(x, y, sample_weight, class_weight))
        engine.prepare(window)
        engine.start_epoch(self.progress_at_most.epochs)
        with Interruption().deferred() as interruption:
            try:
                report = engine.run_window(window)
                window = engine.last_window
                engine.counting.add(window.micro_batches, window.samples)
            finally:
                engine.publish()
            interruption.check()
        engine.counting.check_skips()
        return _as_keras_returns(
            report.running(), engine.trained_names, return_dict
        )

    def memory_plan(
        self, batch: Any, sizes: Sequence[int] | None = None
    ) -> MemoryPlan:
        """Predict how much memory micro-batches of several sizes take.

        On JAX the compiler is asked, for every size; on TensorFlow the
        gradients of the batch are computed, and nothing else happens. There
        it is the memory of the process that is measured where there is no
        accelerator, which other threads move too.

        Args:
            batch: `(x, y)`, `(x, y, sample_weight)` or `x`, arrays or nests
                of them, the batch of an update.
            sizes: samples per micro-batch on each device; default those that
                `"auto"` tries: the whole batch, about its half, and so on down
                to 1, divisors where there are any near.

        Returns:
            `MemoryPlan`, whose `rows` have `micro_batch_size`,
            `micro_batches` and `peak_bytes`; printed, it is a short table.

        Example:
            >>> import numpy as np
            >>> model = keras.Sequential([keras.Input([2])])
            >>> model.add(keras.layers.Dense(1))
            >>> trainer = Trainer(model, optimizer="sgd", loss="mse")
            >>> plan = trainer.memory_plan((np.eye(8, 2), np.ones([8, 1])))
            >>> [row.micro_batch_size for row in plan.rows]
            [1, 2, 4, 8]
        """
        self._engine.check_model()
        data = OnePiece(*keras.utils.unpack_x_y_sample_weight(batch))
        window = data.window()
        self._engine.prepare(window)
        return self._engine.memory_plan(window, sizes)

    def check_equivalence(
        self, batch: Any, tolerance: float = 1e-5
    ) -> Equivalence:
        """Compare the accumulated update of a batch with that of the whole.

        The gradients before the optimizer, and before `on_apply`, are
        computed from the model as it is, cut into micro-batches and in one
        piece, both drawing from the same random state. Where they differ,
        some trials find out why. Nothing is changed.

        Args:
            batch: `(x, y)`, `(x, y, sample_weight)` or `x`, arrays or nests
                of them. It is cut as by `train_on_batch`.
            tolerance: largest difference that counts as rounding, relative to
                the largest gradient of the model.

        Returns:
            Printed, it is a short table.

        Raises:
            ValueError: the batch makes a single micro-batch.

        Example:
            >>> import numpy as np
            >>> model = keras.Sequential([keras.Input([2])])
            >>> model.add(keras.layers.Dense(1))
            >>> trainer = Trainer(model, optimizer="sgd", loss="mse",
            ...                   accumulation=4)
            >>> x, y = np.eye(8, 2), np.ones([8, 1])
            >>> trainer.check_equivalence((x, y)).is_exact
            True
        """
        self._engine.check_model()
        data = OnePiece(*keras.utils.unpack_x_y_sample_weight(batch))
        window = self._cut(data)
        if window.micro_batches < 2:
            raise ValueError(
                "batch must make at least two micro-batches. Received: "
                f"{window.samples} samples, which make one under "
                f"{self.accumulation}. Give more samples, or accumulate more."
            )
        return self._engine.check_equivalence(window, data.window(), tolerance)

    def _cut(self, data: OnePiece) -> Window:
        """Cut all there is into the micro-batches of one window."""
        size = self._engine.rows_per_pass
        if size is None:
            steps = self.accumulation.steps_at(0, self.progress.updates)
            size = math.ceil(data.samples / steps)
        return self._engine.cut(data.window(size))

    def _dispatcher(
        self, callbacks: Any, source: Source, verbose: Any
    ) -> Dispatcher:
        """Make the dispatcher of one pass over a source."""
        return Dispatcher(
            callbacks,
            model=self.model,
            trainer=self,
            params={
                "verbose": verbose,
                "epochs": 1,
                "steps": source.batches_per_epoch,
            },
            progress_bar=make_progress_bar(verbose if self.is_chief else 0),
            make_current=self._engine.publish,
        )

    def _compile_model(
        self, arguments: dict[str, Any], *, is_new: bool
    ) -> None:
        if is_new:
            # That of the model's own class may take other arguments.
            keras.Model.compile(
                self.model,
                optimizer=self.optimizer,
                auto_scale_loss=False,
                **arguments,
            )
        else:
            self.model.optimizer = self.optimizer


def _is_given(arguments: dict[str, Any], optimizer: Any) -> bool:
    given = any(value is not None for value in arguments.values())
    return given or optimizer is not None


def _say_nothing(line: str) -> None:
    del line


def _as_keras_returns(
    logs: dict[str, Any], names: list[str], return_dict: bool
) -> Any:
    """Return results as Keras does: a number, a list or a dict.

    Args:
        logs: dict from name to number.
        names: what `metric_names` returns.
    """
    if return_dict:
        return logs
    others = [name for name in sorted(logs) if name not in names]
    values = [logs[name] for name in [*names, *others] if name in logs]
    return values[0] if len(values) == 1 else values
