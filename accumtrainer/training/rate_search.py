"""A learning rate range test: a short training that leaves no trace."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from accumtrainer.checks import require_count, require_number
from accumtrainer.data.preprocessing import Preprocessing
from accumtrainer.diagnosis.range_test import End, RangeTest
from accumtrainer.observers.callback import Callback
from accumtrainer.observers.dispatcher import Dispatcher
from accumtrainer.saving.resume import take_snapshot
from accumtrainer.training.engine import Engine
from accumtrainer.training.fit_data import FitData
from accumtrainer.training.fit_options import FitOptions
from accumtrainer.training.loop import FitLoop
from accumtrainer.training.ramp import Ramp, ramped
from accumtrainer.training.signals import Interruption


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """The arguments of `Trainer.find_learning_rate` beside the data.

    They are explained there.

    Examples:
        >>> SearchOptions(lowest=0.01, highest=1.0, updates=3).rates.tolist()
        [0.01, 0.1, 1.0]
    """

    lowest: float = 1e-7
    highest: float = 10.0
    updates: int = 100
    smoothing: float = 0.8
    divergence: float = 4.0

    def __post_init__(self) -> None:
        require_count("updates", self.updates, "Use 100.", minimum=2)
        require_number(
            "lowest",
            self.lowest,
            "a number above 0",
            "Use 1e-7.",
            lambda value: value > 0,
        )
        require_number(
            "highest",
            self.highest,
            f"a number above lowest={self.lowest}",
            "Use 10.0.",
            lambda value: value > self.lowest,
        )
        require_number(
            "smoothing",
            self.smoothing,
            "at least 0 and below 1",
            "Use 0.8 to average over about ten updates.",
            lambda value: 0 <= value < 1,
        )
        require_number(
            "divergence",
            self.divergence,
            "a number above 1",
            "Use 4.0 to end at four times the lowest loss.",
            lambda value: value > 1,
        )

    @property
    def rates(self) -> np.ndarray:
        """The rate of each update, `[updates]`."""
        return np.geomspace(self.lowest, self.highest, self.updates)


def search_rate(
    trainer: Any,
    engine: Engine,
    data: FitData,
    options: SearchOptions,
    preprocessing: Preprocessing | None,
) -> RangeTest:
    """Train with a growing rate, and put everything back.

    Args:
        trainer: `Trainer`.
        engine: its `Engine`, which learns nothing of it.
        data: what to train on.
        options: how it grows, and when it ends.
        preprocessing: the model's own, if it has one.
    """
    engine.follow_model()
    engine.write_back()
    if trainer.model.built:
        # A function may make the optimizers of a `MultiOptimizer` only then.
        engine.lasting.build_optimizer()
    aside = engine.aside()
    how_long = FitOptions(max_updates=options.updates)
    source, validation = data.open(
        how_long,
        aside.replicas,
        seed=trainer.seed,
        epochs_before=trainer.progress_at_most.epochs,
        preprocessing=preprocessing,
    )
    stopped = getattr(trainer.model, "stop_training", False)
    with ramped(trainer.optimizer, options.rates) as ramp:
        search = _Search(trainer, aside, ramp, options)
        loop = FitLoop(
            trainer,
            aside,
            how_long,
            source=source,
            validation=validation,
            dispatcher=Dispatcher(
                search,
                model=trainer.model,
                trainer=trainer,
                params={"verbose": 0, "epochs": math.inf, "steps": None},
                make_current=aside.write_back,
            ),
            saved=None,
            announce=lambda line: None,
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Your input ran out of data")
                loop.run()
        finally:
            trainer.model.stop_training = stopped
            search.put_back()
    return search.result()


class _Search(Callback):
    """Sets the rate of each update, and ends when there is no more to see."""

    has_state = True

    def __init__(
        self, trainer: Any, engine: Engine, ramp: Ramp, options: SearchOptions
    ):
        super().__init__()
        self._owner = trainer
        self._engine = engine
        self._ramp = ramp
        self._options = options
        self._saved: Any = None
        self._losses: list[float] = []
        self._smoothed: list[float] = []
        self._average = 0.0
        self._ended_by: End | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        # All is built by now, and nothing has run.
        self._saved = take_snapshot(self._owner, self._engine, None)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._ramp.set(len(self._losses))

    def on_apply(self, update: int, logs: Any = None) -> None:
        loss = float(logs["loss"])
        if not (logs["applied"] and math.isfinite(loss)):
            if not (math.isfinite(loss) and self._may_be_overflow(logs)):
                self._end("not finite")
            return
        self._losses.append(loss)
        beta, count = self._options.smoothing, len(self._losses)
        self._average = beta * self._average + (1 - beta) * loss
        self._smoothed.append(self._average / (1 - beta**count))
        if self._has_diverged():
            self._end("divergence")

    def _may_be_overflow(self, logs: Any) -> bool:
        """Whether a lower loss scale may help at the same rate."""
        scale = self._owner.loss_scale
        return scale is not None and logs["loss_scale"] > scale.minimum

    def _has_diverged(self) -> bool:
        """Whether the average is several times its lowest.

        Losses may be negative, or come down to zero: what they have fallen
        by counts there.
        """
        first, lowest = self._smoothed[0], min(self._smoothed)
        unit = max(abs(lowest), first - lowest)
        risen = self._smoothed[-1] - lowest
        return risen > (self._options.divergence - 1) * unit

    def _end(self, reason: End) -> None:
        self._ended_by = reason
        self._owner.model.stop_training = True

    def put_back(self) -> None:
        """Leave everything as it was before."""
        if self._saved is None:
            return
        with Interruption().deferred() as interruption:
            self._engine.restore(self._saved, is_amid_epoch=False)
        interruption.check()

    def result(self) -> RangeTest:
        """Say what was seen."""
        made, planned = len(self._losses), self._options.updates
        at_end: End = "updates" if made == planned else "data"
        return RangeTest(
            learning_rates=tuple(self._options.rates[:made].tolist()),
            losses=tuple(self._losses),
            smoothing=self._options.smoothing,
            ended_by=self._ended_by or at_end,
            shares=self._ramp.shares,
        )
