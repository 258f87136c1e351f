"""A learning rate that grows with every update, whatever it is otherwise."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from accumtrainer.keras_api import given_rate, keras, ops, optimizers_of
from accumtrainer.keras_api.types import Optimizer, Tensor, Variable


@dataclass(frozen=True, slots=True)
class Ramp:
    """Sets the rates of those optimizers that keep theirs in variables.

    Args:
        shares: dict from names of optimizers to their parts of the rate.
        assigned: pairs of a variable and its rates, `[updates]`.
    """

    shares: dict[str, float]
    assigned: list[tuple[Variable, np.ndarray]]

    def set(self, index: int) -> None:
        """Set the rates of an update, counted from 0."""
        for variable, rates in self.assigned:
            variable.assign(rates[min(index, len(rates) - 1)])


class RampSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A rate for each update, in place of a schedule.

    Args:
        rates: `[updates]`, float32.
        begun: the optimizer's iterations at the first of them.
    """

    def __init__(self, rates: np.ndarray, begun: int):
        super().__init__()
        self._rates = rates
        self._begun = begun

    def __call__(self, step: Tensor) -> Tensor:
        index = ops.cast(step, "int32") - self._begun
        index = ops.clip(index, 0, len(self._rates) - 1)
        return ops.take(ops.convert_to_tensor(self._rates), index)

    def get_config(self) -> dict[str, Any]:
        return {"rates": self._rates.tolist(), "begun": self._begun}


@contextlib.contextmanager
def ramped(optimizer: Optimizer, rates: np.ndarray) -> Iterator[Ramp]:
    """Have an optimizer learn at one rate after the other.

    Several optimizers keep the ratio of their rates; the largest is as given.
    Variables are left at the last rate, schedules are put back.

    Args:
        optimizer: built or not.
        rates: `[updates]`.

    Raises:
        ValueError: one of several begins at a rate of 0, or which there are
            shows only as they are built.
    """
    is_one, members = optimizers_of(optimizer)
    if not members:
        raise ValueError(
            "find_learning_rate must be called for a built model where a "
            "function chooses the optimizers. Received: a MultiOptimizer that "
            "has none yet. Call the model on a batch first."
        )
    shares = [1.0] if is_one else _shares(members)
    assigned, put_back = [], []
    try:
        for member, share in zip(members, shares, strict=True):
            own = (rates * share).astype("float32")
            given = given_rate(member)
            if callable(given):
                put_back.append((member, given))
                member.learning_rate = RampSchedule(own, _iterations(member))
            else:
                assigned.append((given, own))
        names = [member.name for member in members]
        yield Ramp(
            {} if is_one else dict(zip(names, shares, strict=True)), assigned
        )
    finally:
        for member, given in put_back:
            member.learning_rate = given


def _shares(members: list[Optimizer]) -> list[float]:
    """Compare the rates of several optimizers with the largest of them."""
    rates = [
        float(ops.convert_to_numpy(member.learning_rate)) for member in members
    ]
    if not all(rate > 0 for rate in rates):
        raise ValueError(
            "find_learning_rate keeps the ratio of the rates of several "
            "optimizers, so all of them must be above 0. Received: "
            f"{dict(zip([m.name for m in members], rates, strict=True))}. "
            "Build them with numbers in the ratio you want, or with schedules "
            "that begin above 0."
        )
    return [rate / max(rates) for rate in rates]


def _iterations(optimizer: Optimizer) -> int:
    return int(ops.convert_to_numpy(optimizer.iterations))
