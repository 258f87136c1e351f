"""The Trainer: says what an update is and owns the loop."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from accumtrainer.checks import require_choice
from accumtrainer.config import Accumulation, Every, LossScale
from accumtrainer.data.batches import Batch
from accumtrainer.data.sources import OnePiece
from accumtrainer.keras_api import keras
from accumtrainer.keras_api.types import Model
from accumtrainer.observers.logger import Logger
from accumtrainer.saving.checkpoint import find_checkpoint, write_checkpoint
from accumtrainer.saving.resume import check_same, find_saved, take_snapshot
from accumtrainer.saving.snapshot import Snapshot
from accumtrainer.steps import should_run_eagerly
from accumtrainer.training.announcing import announcer, updates_in_epoch
from accumtrainer.training.answers import Answers
from accumtrainer.training.construction import (
    check_devices,
    check_model,
    check_options,
    checked_callbacks,
    settle_compilation,
)
from accumtrainer.training.engine import Engine
from accumtrainer.training.evaluator import as_keras_returns
from accumtrainer.training.fit_data import FitData
from accumtrainer.training.fit_options import FitOptions
from accumtrainer.training.loop import FitLoop
from accumtrainer.training.other_trainers import (
    check_subclass,
    refuse_others,
    refuse_to_construct,
)
from accumtrainer.training.settled import Settled
from accumtrainer.training.signals import Interruption
from accumtrainer.window.hooks import HookContext
from accumtrainer.window.state import TrainingState


class Trainer(Answers):
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
        jit_compile: `"auto"`, `True` or `False`: whether XLA compiles, or on
            PyTorch, where `"auto"` is off, `torch.compile`.
        run_eagerly: run everything as plain Python, for debugging; done too
            where the model was compiled so, or the backend is told so.
        callbacks: list of callbacks, Keras's or ours, for every `fit`.
        seed: int for shuffling and `self.rng`; `None` draws one, as Keras does.
        **others: refused; the error says what replaces them.

    Raises:
        ValueError: an argument cannot lead to a right result.
        TypeError: an argument is of the wrong kind.

    Examples:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> trainer = Trainer(model, optimizer="sgd", loss="mse",
        ...                   accumulation=Accumulation(micro_batch_size=4))
        >>> x, y = np.ones([16, 2]), np.ones([16, 1])
        >>> history = trainer.fit(x, y, batch_size=8, epochs=2, verbose=0)
        >>> trainer.progress.updates
        4
    """

    model = Settled[Model]()
    accumulation = Settled[Accumulation]()
    loss_scale = Settled[LossScale | None]()

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        *,
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
        refuse_to_construct(self, Trainer, model, others)
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
        compilation = settle_compilation(model, optimizer, loss_scale, given)
        self.optimizer = compilation.optimizer
        self.loss_scale = compilation.loss_scale
        is_eager = run_eagerly or should_run_eagerly(model)
        self.seed = check_devices(
            self, self.accumulation, seed, run_eagerly=is_eager
        )
        self._callbacks = checked_callbacks(callbacks)
        self._context = HookContext.of(
            model, compilation.arguments, denominator
        )
        compilation.apply(model, run_eagerly=run_eagerly)
        self._loop: FitLoop | None = None
        self._tracked: list[Any] = []
        self._state = TrainingState(
            seed=self.seed, loss_scale=compilation.initial_scale
        )
        self._engine = Engine(
            self,
            self._state,
            accumulation=self.accumulation,
            tracked=self._tracked,
            jit_compile=jit_compile,
            run_eagerly=is_eager,
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
        shuffle: bool | Literal["batch"] = True,
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
                given the same arrays; of anything else each yields its shard.
            y: targets, where x is arrays.
            batch_size: samples per loader batch of arrays, default 32. What
                yields batches does not heed it, but warns if they have others.
            epochs: index of the epoch to stop before, as in Keras; default
                one epoch, or no end with `max_updates` or `max_seconds`.
            verbose: 0, 1, 2 or `"auto"`.
            callbacks: further callbacks, for this call.
            validation_split: fraction of the arrays kept for validation.
            validation_data: `(x, y)` or what `x` may be, the same in every
                process; a dict of these, not of the keys of `x`, validates on
                named sets, logged as `val_<name>_loss` and so on.
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
                the path of a checkpoint or of a directory of them; or
                `"wandb:entity/project/name:alias"`, an artifact that a
                `WandbLogger` has sent. `epochs`, `max_updates` and
                `max_seconds` then count from where that run began.
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
        refuse_others(Trainer, "fit", others)
        options = FitOptions(
            epochs=epochs,
            initial_epoch=initial_epoch,
            max_updates=max_updates,
            max_seconds=max_seconds,
            validation_every=validation_every,
            validation_freq=validation_freq,
            fast_dev_run=fast_dev_run,
            fast_forward=fast_forward,
            check_inputs=check_inputs,
        )
        data = FitData(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
            steps_per_epoch=steps_per_epoch,
            overfit_batches=overfit_batches,
            validation_data=validation_data,
            validation_split=validation_split,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
        )
        opened = self._opened(options, data, callbacks, verbose, resume_from)
        with self._engine.following_layers(), opened as loop:
            return loop.run()

    @contextlib.contextmanager
    def _opened(
        self,
        options: FitOptions,
        data: FitData,
        callbacks: Any,
        verbose: Any,
        resume_from: str | os.PathLike | None,
    ) -> Iterator[FitLoop]:
        """Make the loop of a fit, which snapshots ask for their place."""
        engine = self._engine
        engine.follow_model()
        callbacks = [self._callbacks, callbacks]
        saved = find_saved(resume_from, callbacks)
        epochs_before = 0  # a run that goes on knows its own
        if saved is None:
            begun = self.progress_at_most.epochs
            epochs_before = max(begun, options.initial_epoch)
        else:
            check_same(saved, self)
            self.seed = saved.about["seed"]
        source, validation = data.open(
            options,
            engine.replicas,
            seed=self.seed,
            epochs_before=epochs_before,
            preprocessing=self._preprocessing,
        )
        dispatcher = self._dispatcher(
            callbacks,
            verbose,
            add_history=True,
            epochs=options.last_epoch,
            steps=updates_in_epoch(
                source, self.accumulation, options.initial_epoch
            ),
            batch_size=source.batch_size,
            samples=source.samples_per_epoch,
            fast_dev_run=bool(options.fast_dev_run),
            resumes=saved is not None,
        )
        outer = self._loop, self._loggers
        self._loop = FitLoop(
            self,
            engine,
            options,
            source=source,
            validation=validation,
            dispatcher=dispatcher,
            saved=saved,
            announce=announcer(is_heard=bool(verbose) and self.is_chief),
        )
        self._loggers = tuple(
            c for c in dispatcher.callbacks if isinstance(c, Logger)
        )
        try:
            yield self._loop
        finally:
            self._loop, self._loggers = outer

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

        Examples:
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
        self._engine.follow_model()
        if not weights_only:
            check_same(saved, self)
        self._engine.lasting.check_fits(
            saved, is_amid_epoch=False, weights_only=weights_only
        )
        self._engine.restore(
            saved, is_amid_epoch=False, weights_only=weights_only
        )
        if not weights_only:
            self.seed = saved.about["seed"]

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
        **others: Any,
    ) -> Any:
        """Make one update from one batch.

        With `Accumulation(micro_batch_size=m)` the batch is sliced into
        micro-batches of m, with `Accumulation(steps=k)` into k at most.

        Args:
            x: arrays or nests of them.
            y: targets.
            sample_weight: weights of the samples.
            class_weight: dict from class to weight.
            return_dict: whether to return a dict instead of a list.
            **others: refused; the error says what replaces them.

        Returns:
            The batch's loss, or the list of loss and metrics, or a dict.
        """
        refuse_others(Trainer, "train_on_batch", others)
        with self._engine.following_layers(is_update=True):
            return self._train_on_piece(
                OnePiece(
                    x,
                    y,
                    sample_weight,
                    class_weight,
                    self._preprocessing,
                    seed=self.seed,
                    pieces_before=self.progress_at_most.updates,
                ),
                return_dict,
            )

    def _train_on_piece(self, piece: OnePiece, return_dict: bool) -> Any:
        engine = self._engine
        engine.follow_model()
        window = self._cut(piece)
        engine.prepare(window)
        engine.start_epoch(self.progress_at_most.epochs)
        with Interruption().deferred() as interruption:
            try:
                report = engine.run_window(window)
                window = engine.last_window
                engine.counting.add(window.micro_batches, window.samples)
            finally:
                engine.write_back()
            interruption.check()
        engine.counting.check_skips()
        logs = report.running()
        return as_keras_returns(logs, engine.trained_names, return_dict)
