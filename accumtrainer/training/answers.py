"""What a Trainer answers: none of it trains."""

import contextlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import NoneType
from typing import Any, Literal

from accumtrainer import errors
from accumtrainer.checks import require_count, require_number
from accumtrainer.config import Accumulation, Every
from accumtrainer.data.batches import Window
from accumtrainer.data.preprocessing import Preprocessing, preprocessing_of
from accumtrainer.data.source import check_ends
from accumtrainer.data.sources import OnePiece, make_source
from accumtrainer.diagnosis.equivalence import Equivalence
from accumtrainer.diagnosis.inspection import Inspection
from accumtrainer.diagnosis.range_test import RangeTest
from accumtrainer.keras_api import keras
from accumtrainer.observers.dispatcher import Dispatcher
from accumtrainer.observers.logger import Logger, send_media
from accumtrainer.observers.logs import Logs
from accumtrainer.observers.progress_bar import make_progress_bar
from accumtrainer.progress import Progress
from accumtrainer.steps.memory import MemoryPlan
from accumtrainer.steps.plan import Plan
from accumtrainer.training.engine import Engine
from accumtrainer.training.evaluator import as_keras_returns
from accumtrainer.training.fit_data import FitData
from accumtrainer.training.fit_options import checked_steps
from accumtrainer.training.other_trainers import refuse_others
from accumtrainer.training.rate_search import SearchOptions, search_rate
from accumtrainer.training.signals import Interruption
from accumtrainer.training.validation import metrics_kept
from accumtrainer.window.hooks import Hooks


class Answers(Hooks):
    """What hooks, callbacks and users may ask a Trainer for."""

    accumulation: Accumulation
    _engine: Engine
    _loop: Any
    _loggers: tuple[Logger, ...] | None = None  # None outside a fit

    @property
    def progress(self) -> Progress:
        """A copy of the counters; reading it waits for the device.

        Code that the device calls amid an update, as by `jax.debug.callback`,
        would wait for itself: it reads `progress_at_most`.
        """
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
        return Logs(self._engine.last_report.window_logs)

    def log_media(self, name: str, value: Any) -> None:
        """Have the loggers of the running `fit` log what is no number.

        For callbacks; in a hook, keep what is to be shown in a variable of
        `track`. It stands at the updates made so far, for which this waits.

        Args:
            name: what it is called; the same name makes a series.
            value: an `Image`, `Histogram`, `Text` or `Table`.

        Raises:
            RuntimeError: no `fit` is running.
            TypeError: the value is of another kind.
        """
        if self._loggers is None:
            raise RuntimeError(errors.MEDIA_OUTSIDE.format(name=name))
        send_media(self._loggers, name, value)

    @property
    def micro_batch_logs(self) -> Logs:
        """`Logs` of the last window's micro-batches, arrays `[k]` by name.

        They hold what `on_accumulate` is given, micro-batch by micro-batch,
        and are fetched from the device when somebody looks at them.
        """
        return Logs(self._engine.last_report.micro_batches)

    @property
    def last_window(self) -> Window | None:
        """The `Window` that was run last, on the host; `None` before one.

        Where processes have a shard of it each, its arrays are this one's.
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
            window: `Window`, default `last_window`.

        Returns:
            `Inspection`, with the `findings` and the `first` of them; printed,
            it is a short report.

        Raises:
            RuntimeError: there has been no window.
            TypeError: it is something else.
        """
        window = self.last_window if window is None else window
        if window is None:
            raise RuntimeError(
                "inspect must come after a window has run. Received: a "
                "Trainer that has not trained. Call fit first."
            )
        if not isinstance(window, Window):
            raise TypeError(errors.NOT_A_WINDOW.format(received=type(window)))
        return self._engine.inspect(window)

    def is_due(self, every: Every, since: Progress) -> bool:
        """Say whether an occasion has come, waiting only where it could have.

        Args:
            every: `Every`.
            since: `Progress` at an earlier moment, a copy.

        Returns:
            bool.
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
        **others: Any,
    ) -> Any:
        """Compute the loss and the metrics of some data.

        Args:
            x: what `fit` takes. Several processes evaluate together, and are
                all given the same.
            y: targets, where x is arrays.
            batch_size: as of `fit`, default 32.
            verbose: 0, 1, 2 or `"auto"`.
            sample_weight: weights of the samples, where x is arrays.
            steps: loader batches to take.
            callbacks: callbacks for this call.
            return_dict: whether to return a dict instead of a list.
            **others: refused; the error says what replaces them.

        Returns:
            The loss, or the list of loss and metrics, or a dict of them.
        """
        refuse_others(type(self), "evaluate", others)
        steps = checked_steps("steps", steps)
        self._engine.compiled.check_metrics()
        source = make_source(
            x,
            y,
            sample_weight,
            self._preprocessing,
            batch_size=batch_size,
            shuffle=False,
            steps=steps,
        )
        check_ends(source, "steps")
        dispatcher = self._dispatcher(
            callbacks, verbose, epochs=1, steps=source.batches_per_epoch
        )
        with (
            self._engine.following_layers(),
            self._metrics_of_fit_kept(),
            Interruption().deferred() as interruption,
        ):
            evaluator = self._engine.evaluator
            logs = evaluator.evaluate(source, dispatcher, interruption.check)
        return as_keras_returns(logs, evaluator.names, return_dict)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | Literal["auto"] = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        **others: Any,
    ) -> Any:
        """Compute the predictions for some data.

        Args:
            x: what `fit` takes, as for `evaluate`; targets in it are ignored.
            batch_size: as of `fit`, default 32.
            verbose: 0, 1, 2 or `"auto"`.
            steps: loader batches to take.
            callbacks: callbacks for this call.
            **others: refused; the error says what replaces them.

        Returns:
            Nest of NumPy arrays, one row per sample.
        """
        refuse_others(type(self), "predict", others)
        steps = checked_steps("steps", steps)
        source = make_source(
            x,
            preprocessing=self._preprocessing,
            batch_size=batch_size,
            shuffle=False,
            steps=steps,
        )
        check_ends(source, "steps")
        dispatcher = self._dispatcher(
            callbacks, verbose, epochs=1, steps=source.batches_per_epoch
        )
        with (
            self._engine.following_layers(),
            Interruption().deferred() as interruption,
        ):
            return self._engine.evaluator.predict(
                source, dispatcher, interruption.check
            )

    def memory_plan(
        self, batch: Any, sizes: Sequence[int] | None = None
    ) -> MemoryPlan:
        """Predict how much memory micro-batches of several sizes take.

        On JAX the compiler is asked for every size, elsewhere the gradients
        of micro-batches are computed; nothing else happens.

        Args:
            batch: `(x, y)`, `(x, y, sample_weight)` or `x`, arrays or nests
                of them, the batch of an update.
            sizes: list of int, samples per micro-batch on each device;
                default those that `"auto"` tries: the whole batch, about its
                half, and so on down to 1, divisors where there are any near.

        Returns:
            `MemoryPlan`, whose `rows` have `micro_batch_size`,
            `micro_batches` and `peak_bytes`; printed, it is a short table.

        Raises:
            TypeError: the sizes are no list of whole numbers.
            ValueError: a size is below 1.

        Examples:
            >>> import numpy as np
            >>> from accumtrainer import Trainer
            >>> model = keras.Sequential([keras.Input([2])])
            >>> model.add(keras.layers.Dense(1))
            >>> trainer = Trainer(model, optimizer="sgd", loss="mse")
            >>> plan = trainer.memory_plan((np.eye(8, 2), np.ones([8, 1])))
            >>> [row.micro_batch_size for row in plan.rows]
            [1, 2, 4, 8]
        """
        remedy = "Give x and y as one batch, memory_plan((x, y))."
        if not isinstance(sizes, (Sequence, NoneType)):
            raise TypeError(
                "sizes must be a list of whole numbers. Received: "
                f"{type(sizes).__name__}. {remedy}"
            )
        for size in sizes or ():
            require_count("sizes", size, remedy)
        self._engine.follow_model()
        data = self._in_one_piece(batch)
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
            `Equivalence`; printed, it is a short table.

        Raises:
            TypeError: the tolerance is no number.
            ValueError: the batch makes a single micro-batch, or the tolerance
                is negative.

        Examples:
            >>> import numpy as np
            >>> from accumtrainer import Trainer
            >>> model = keras.Sequential([keras.Input([2])])
            >>> model.add(keras.layers.Dense(1))
            >>> trainer = Trainer(model, optimizer="sgd", loss="mse",
            ...                   accumulation=4)
            >>> x, y = np.eye(8, 2), np.ones([8, 1])
            >>> trainer.check_equivalence((x, y)).is_exact
            True
        """
        require_number(
            "tolerance",
            tolerance,
            "a number of at least 0",
            "Give x and y as one batch, check_equivalence((x, y)).",
            lambda value: value >= 0,
        )
        self._engine.follow_model()
        data = self._in_one_piece(batch)
        window = self._cut(data)
        if window.micro_batches < 2:
            raise ValueError(
                "batch must make at least two micro-batches. Received: "
                f"{window.samples} samples, which make one under "
                f"{self.accumulation}. Give more samples, or accumulate more."
            )
        return self._engine.check_equivalence(window, data.window(), tolerance)

    def find_learning_rate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        *,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        shuffle: bool = True,
        lowest: float = 1e-7,
        highest: float = 10.0,
        updates: int = 100,
        smoothing: float = 0.8,
        divergence: float = 4.0,
        **others: Any,
    ) -> RangeTest:
        """Let the learning rate grow with every update, and look at the loss.

        This is the range test of Smith 2015 (arXiv:1506.01186). The rate
        grows exponentially; it takes the place of a number, of a schedule and
        of a function alike. Several optimizers keep the ratio that their
        rates have now, and the largest is as given here. Afterwards all that
        training changes is put back, bit for bit, also after an error or
        Ctrl-C. Callbacks are not told.

        Args:
            x: what `fit` takes. Where it ends it begins anew. What can be
                read only once, such as a generator, has been read then, and
                a loader that shuffles by itself goes on doing so.
            y: targets, where x is arrays.
            batch_size: as of `fit`, default 32; the rate found is one for
                this size of updates.
            sample_weight: weights of the samples, where x is arrays.
            class_weight: dict from class to weight.
            shuffle: as in `fit`.
            lowest: rate of the first update.
            highest: rate of the last one.
            updates: how many to make.
            smoothing: at least 0 and below 1: by how much a loss counts less
                than the next in their moving average.
            divergence: at how many times its lowest the average ends the
                test. Where a loss falls towards zero or below, what it has
                fallen by counts instead of the lowest.
            **others: refused; the error says what replaces them.

        Returns:
            `RangeTest`, with the `suggestion`, `learning_rates`, `losses` and
            `plot(path)`; printed, it is a short report.

        Raises:
            ValueError: an argument breaks its rule.
            TypeError: an argument is of the wrong kind.

        Examples:
            >>> import numpy as np
            >>> from accumtrainer import Trainer
            >>> model = keras.Sequential([keras.Input([2])])
            >>> model.add(keras.layers.Dense(1))
            >>> trainer = Trainer(model, optimizer="sgd", loss="mse")
            >>> x, y = np.eye(8, 2), np.ones([8, 1])
            >>> found = trainer.find_learning_rate(x, y, updates=20)
            >>> len(found.losses), trainer.progress.updates
            (20, 0)
        """
        refuse_others(type(self), "find_learning_rate", others)
        options = SearchOptions(
            lowest=lowest,
            highest=highest,
            updates=updates,
            smoothing=smoothing,
            divergence=divergence,
        )
        data = FitData(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        return search_rate(
            self, self._engine, data, options, self._preprocessing
        )

    def _metrics_of_fit_kept(self) -> AbstractContextManager:
        """Keep what the metrics hold where a callback evaluates amid `fit`."""
        if self._loop is None:
            return contextlib.nullcontext()
        return metrics_kept(self.model, self._engine.write_back)

    @property
    def _preprocessing(self) -> Preprocessing | None:
        return preprocessing_of(self.model)

    def _in_one_piece(self, batch: Any) -> OnePiece:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        return OnePiece(x, y, sample_weight, None, self._preprocessing)

    def _cut(self, data: OnePiece) -> Window:
        """Cut all there is into the micro-batches of one window."""
        size = self._engine.rows_per_pass
        if size is None:
            steps = self.accumulation.steps_at(0, self.progress.updates)
            size = math.ceil(data.samples / steps)
        return self._engine.cut(data.window(size))

    def _dispatcher(
        self,
        callbacks: Any,
        verbose: Any,
        *,
        add_history: bool = False,
        **params: Any,
    ) -> Dispatcher:
        """Make what tells callbacks; they are given the `params`."""
        return Dispatcher(
            callbacks,
            model=self.model,
            trainer=self,
            params={"verbose": verbose, **params},
            add_history=add_history,
            progress_bar=make_progress_bar(verbose if self.is_chief else 0),
            make_current=self._engine.write_back,
        )
