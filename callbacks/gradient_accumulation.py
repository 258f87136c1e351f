"""Gradient accumulation inside plain `Model.fit`."""

import threading
from collections.abc import Callable
from typing import Any, Literal

from accumtrainer import Accumulation, Callback, FitAccumulator, Progress


class GradientAccumulation(Callback):
    """Make one update of several of the batches that `fit` trains on.

    Every batch of `fit` is a micro-batch; `steps` of them make an update, the
    one that all their samples in one batch would make. What is left when an
    epoch ends makes a smaller update. Learning-rate schedules, moving averages
    and `optimizer.iterations` move once per update. With
    `compile(steps_per_execution=steps)` an update is one compiled call.

    Callbacks beside it see the batches of `fit` as always; between them the
    weights change once per update. Where an epoch ends amid a window because
    a callback listed after this one has stopped training, or on PyTorch because
    the data have ended whose length is not known, those listed before this one
    see the end of the epoch, and its logs, without that window's update. One of
    them that exchanges the weights then, as `SwapEMAWeights` does, has that
    update made to what it has put there: list it after this one.

    One that has Keras train or compile in `on_train_batch_begin` must be listed
    before this one. Another `fit` that a callback calls needs one of its own.

    A model whose `compute_loss` is overridden needs `denominator`, as a bare
    scalar does not say what it was averaged over. An overridden `train_step`
    is refused, and so is training on several devices.

    Args:
        steps: batches per update, as for `Accumulation`: a number, a dict
            `{first_epoch: steps}` or a function of the updates made, which
            is given `optimizer.iterations`.
        combine: `"exact"` gives the gradient of the window as one batch;
            `"mean"` the plain mean of micro-batch gradients; `"sum"` their
            sum.
        denominator: what a bare scalar loss was averaged over: `"samples"`,
            or a function from a `Batch` to a scalar. Default: unknown.
        loss_scale: `"auto"` (on iff a layer computes in float16),
            `LossScale`, or `None` for off.
        max_consecutive_skips: windows in a row that may have gradients that are
            not finite; `None` for any number.
        **others: refused; the error says what replaces them.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> accumulation = GradientAccumulation(steps=4)
        >>> x, y = np.ones([10, 2]), np.ones([10, 1])
        >>> history = model.fit(
        ...     x, y, batch_size=1, callbacks=[accumulation], verbose=0
        ... )
        >>> accumulation.progress.updates
        3
    """

    has_state = False  # A later fit goes on from the optimizer's state.
    async_safe = True  # Or else Keras would wait for the logs of every batch.

    def __init__(
        self,
        steps: int | dict[int, int] | Callable[[int], int] | None = None,
        *,
        combine: Literal["exact", "mean", "sum"] = "exact",
        denominator: Any = None,
        loss_scale: Any = "auto",
        max_consecutive_skips: int | None = 100,
        **others: Any,
    ):
        super().__init__()
        FitAccumulator.refuse_arguments(others, GradientAccumulation.__init__)
        if steps is None:
            raise ValueError(
                "steps must say how many batches make an update. Received: "
                "steps=None. Use for example GradientAccumulation(steps=8)."
            )
        self._accumulation = Accumulation(steps=steps, combine=combine)
        self._options = {
            "denominator": denominator,
            "loss_scale": loss_scale,
            "max_consecutive_skips": max_consecutive_skips,
        }
        self._accumulator: Any = None
        self._is_training = False
        self._thread = 0

    def __getstate__(self) -> dict[str, Any]:
        # What it has compiled is for this model, and the next `fit` makes it.
        return super().__getstate__() | {
            "_accumulator": None,
            "_is_training": False,
        }

    @property
    def progress(self) -> Any:
        """A copy of the counters of the model's training by this callback.

        A copy of the callback, or one that was pickled, begins at zero.
        """
        if self._accumulator is None:
            return Progress()
        return self._accumulator.progress

    def set_trainer(self, trainer: Any) -> None:
        """Refuse a Trainer, which accumulates by itself.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "GradientAccumulation must be given to keras.Model.fit. Received: "
            "it among the callbacks of a Trainer, which accumulates by itself. "
            "Use Trainer(accumulation=...) instead."
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over what `fit` calls for every batch."""
        model = self.model
        if self._accumulator is None or not self._accumulator.serves(model):
            self._accumulator = FitAccumulator(
                model, self._accumulation, **self._options
            )
        is_told = self.params.get("verbose", 0)
        self._accumulator.install(
            self.params["steps"], announce=print if is_told else _say_nothing
        )
        self._is_training = True
        self._thread = threading.get_ident()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch's running means.

        Raises:
            ValueError: see `on_train_batch_begin`.
        """
        self._check_that_it_runs()
        self._accumulator.stay()
        self._accumulator.start_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Go on where another callback has had Keras itself train.

        Raises:
            ValueError: another callback has called `fit` with this one, or it
                comes later and has had Keras train in `on_train_batch_begin`.
        """
        self._check_that_it_runs()
        self._accumulator.stay()
        self._accumulator.is_due = True

    def _check_that_it_runs(self) -> None:
        if not self._is_training:
            raise ValueError(
                "A GradientAccumulation must be in one fit at a time. "
                "Received: a fit that goes on after a callback has called "
                "another with the same one. Give that fit one of its own."
            )
        if self._accumulator.is_due:
            raise ValueError(
                "GradientAccumulation must come after callbacks that have "
                "Keras train or compile in on_train_batch_begin, since fit "
                "goes on with Keras's own training then. Received: a batch of "
                "which Keras has made an update. List GradientAccumulation "
                "last."
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Make the last update, if one is open, once training is stopped.

        Not in a thread of its own, where Keras calls this if no other callback
        listens to batches.
        """
        is_stopped = self._accumulator.model.stop_training
        if is_stopped and threading.get_ident() == self._thread:
            _ = self.model  # has `fit` on JAX make the variables current
            self._accumulator.finish_window()

    def on_test_begin(self, logs: Any = None) -> None:
        """Make the last update before a validation, if one is open."""
        if self._is_training:
            self._accumulator.finish_window()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Make the last update of the epoch, if one is open.

        Raises:
            ValueError: see `on_train_batch_begin`.
        """
        self._check_that_it_runs()
        self._accumulator.end_epoch({} if logs is None else logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the model as it was, but trained."""
        if self._is_training:
            self._accumulator.uninstall()
        self._is_training = False


def _say_nothing(line: str) -> None:
    del line
