"""How long `fit` trains and how it is validated, checked before it starts."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from accumtrainer.checks import require_count, require_number
from accumtrainer.config import Every
from accumtrainer.keras_api import global_limit


def checked_steps(name: str, value: Any) -> int | None:
    """Refuse a number of loader batches that is no number, and limit others.

    Returns:
        No more than `keras.config.max_steps_per_epoch`.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is smaller than 1.
    """
    if value is not None:
        require_count(name, value, "Leave it out to use all of the data.")
    return limited(name, value, "max_steps_per_epoch")


def limited(
    name: str,
    value: Any,
    limit_name: Literal["max_epochs", "max_steps_per_epoch"],
) -> Any:
    """Limit epochs or steps by what `keras.config` allows, with a warning.

    Args:
        name: the argument, for the warning.
        value: how many, `None` for as many as there are. What is no number is
            left for others to refuse.
        limit_name: the setting.
    """
    limit = global_limit(limit_name)
    if limit is None:
        return value
    is_within = value is not None and not (
        isinstance(value, Integral) and int(value) > limit
    )
    if is_within:
        return value
    warnings.warn(
        f"{name} is limited to {limit}, by keras.config.set_{limit_name} or "
        f"the environment variable KERAS_{limit_name.upper()}.",
        stacklevel=3,
    )
    return limit


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    """The arguments of `Trainer.fit` that say how long and how validated.

    They are explained there.

    Examples:
        >>> FitOptions(max_updates=10).last_epoch
        inf
        >>> FitOptions().last_epoch
        1
    """

    epochs: int | None = None
    initial_epoch: int = 0
    max_updates: int | None = None
    max_seconds: float | None = None
    validation_every: Every | None = None
    validation_freq: Any = 1
    fast_dev_run: bool | int = False
    fast_forward: bool = False
    check_inputs: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (("epochs", 0), ("max_updates", 1)):
            value = getattr(self, name)
            if value is not None:
                remedy = "Leave it out for the default."
                require_count(name, value, remedy, minimum=minimum)
        require_count(
            "initial_epoch", self.initial_epoch, "Use 0 to begin.", minimum=0
        )
        if self.max_seconds is not None:
            require_number(
                "max_seconds",
                self.max_seconds,
                "a number above 0",
                "Leave it out for no limit.",
                lambda value: value > 0,
            )
        if not isinstance(self.fast_dev_run, bool):
            require_count(
                "fast_dev_run", self.fast_dev_run, "Use True for one update."
            )
        if not isinstance(self.validation_every, Every | None):
            raise TypeError(
                "validation_every must be an Every. Received: "
                f"validation_every={self.validation_every!r}. Use for example "
                "Every(100, 'updates')."
            )
        if not isinstance(self.fast_forward, bool):
            raise TypeError(
                "fast_forward must be True or False. Received: "
                f"fast_forward={self.fast_forward!r}. Use True to run through "
                "past data when a run goes on."
            )
        if not isinstance(self.check_inputs, bool):
            raise TypeError(
                "check_inputs must be True or False. Received: "
                f"check_inputs={self.check_inputs!r}. Use True to look for "
                "NaN and for labels of no class."
            )
        self._check_validation_freq()
        if not (self.epochs is self.max_updates is self.max_seconds is None):
            epochs = limited("epochs", self.epochs, "max_epochs")
            object.__setattr__(self, "epochs", epochs)

    def _check_validation_freq(self) -> None:
        freq = self.validation_freq
        if isinstance(freq, Sequence) and not isinstance(freq, str):
            for epoch in freq:
                require_count("validation_freq", epoch, "Count from 1.")
        else:
            require_count("validation_freq", freq, "Use 1 for every epoch.")

    @property
    def last_epoch(self) -> float:
        """Where the epochs end: one past the last index, or infinity."""
        if self.epochs is not None:
            return self.epochs
        is_limited = self.max_updates is not None or (
            self.max_seconds is not None
        )
        return math.inf if is_limited else self.initial_epoch + 1

    @property
    def is_bounded(self) -> bool:
        """Whether the number of epochs is known."""
        return not math.isinf(self.last_epoch)

    @property
    def may_end_amid_epoch(self) -> bool:
        """Whether something else than the data ends an epoch."""
        return self.max_seconds is not None or not math.isinf(self.update_limit)

    @property
    def update_limit(self) -> float:
        """Updates after which to stop, or infinity."""
        limit = math.inf if self.max_updates is None else self.max_updates
        if self.fast_dev_run:
            limit = min(limit, int(self.fast_dev_run))
        return limit

    def validates_after(self, epoch: int) -> bool:
        """Whether the end of an epoch is a time to validate."""
        if self.validation_every is not None:
            return False
        if isinstance(self.validation_freq, Sequence):
            return epoch + 1 in self.validation_freq
        return (epoch + 1) % self.validation_freq == 0
