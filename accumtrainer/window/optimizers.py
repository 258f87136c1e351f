"""What optimizes: one optimizer, or several that share the variables out."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accumtrainer.keras_api import (
    give_rate,
    given_rate,
    is_known_to,
    ops,
    optimizers_of,
    schedule_of,
)
from accumtrainer.keras_api.types import Optimizer, Tensor
from accumtrainer.window.clipping import finite_norm, global_norm
from accumtrainer.window.gradients import Gradients
from accumtrainer.window.parts import WindowParts

CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")
"""Attributes of a Keras optimizer, of which at most one is set."""

MOST_TO_SQUARE = 1e18
"""The square of a norm above is near the end of float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """An optimizer, and the positions of the variables that it updates."""

    optimizer: Optimizer
    positions: frozenset[int]

    @property
    def clips(self) -> bool:
        return any(getattr(self.optimizer, limit, None) for limit in CLIPPING)

    @property
    def clips_globally(self) -> bool:
        return bool(getattr(self.optimizer, "global_clipnorm", None))


@dataclass(frozen=True)
class _Read:
    """A function that returns a rate that another one has returned."""

    rate: Any

    def __call__(self, *_: Any) -> Any:
        return self.rate


class Optimizers:
    """The optimizer of a Trainer, or those that a `MultiOptimizer` has.

    Each has a learning rate of its own, and clips what it updates, by itself.

    Args:
        parts: whose windows are applied; the optimizer is built.
        gradients: what is done with all of them alike.
    """

    def __init__(self, parts: WindowParts, gradients: Gradients):
        self._backend = parts.backend
        self._gradients = gradients
        variables = parts.model.trainable_variables
        self._is_one, members = optimizers_of(parts.hooks.optimizer)
        self._members = [
            _Member(
                optimizer=optimizer,
                positions=frozenset(
                    position
                    for position, variable in enumerate(variables)
                    if is_known_to(optimizer, variable)
                ),
            )
            for optimizer in members
            if optimizer.built
        ]

    @property
    def clips(self) -> bool:
        """Whether any of them clips."""
        return any(member.clips for member in self._members)

    @contextlib.contextmanager
    def reading_rates(self) -> Iterator[dict[str, Tensor]]:
        """Make a scope in which an update is made at the rates read here.

        A function may return another rate each time, and Keras calls it for the
        update and once more for each variable whose weights decay.

        Returns:
            Scalars, float32, by the names they are logged under:
            `learning_rate`, or `learning_rate_<name>` of each, numbered where
            names come again.
        """
        functions = [
            (member.optimizer, given_rate(member.optimizer))
            for member in self._members
            if schedule_of(member.optimizer) is None
            and callable(given_rate(member.optimizer))
            # Replicas take turns in TensorFlow: one may have read it already.
            and not isinstance(given_rate(member.optimizer), _Read)
        ]
        try:
            for optimizer, _ in functions:
                give_rate(optimizer, _Read(self._backend.rate_of(optimizer)))
            yield self._learning_rates()
        finally:
            for optimizer, function in functions:
                give_rate(optimizer, function)

    def _learning_rates(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for member in self._members:
            name = "learning_rate"
            if not self._is_one:
                name = f"{name}_{member.optimizer.name}"
            if name in found:
                alike = sum(known.startswith(name) for known in found)
                name = f"{name}_{alike}"
            rate = ops.cast(member.optimizer.learning_rate, "float32")
            # A copy, because it may be a variable that is about to move.
            found[name] = ops.copy(rate)
        return found

    def make_small_enough(
        self, gradients: list[Tensor | None], norm: Tensor
    ) -> list[Tensor | None]:
        """Bound gradients that Keras is to clip globally.

        It squares them to do so, and would make them NaN where that is
        infinite.

        Args:
            gradients: all of them, float32.
            norm: scalar, float32, their global norm.
        """
        for member in self._members:
            if not member.clips_globally:
                continue
            if not self._is_one:
                norm, _ = finite_norm(
                    self._of(member, gradients), self._backend
                )
            # Not the limit at once, as the quotient might be too small for
            # float32.
            limit = member.optimizer.global_clipnorm
            enough = max(limit, 1e-2 * MOST_TO_SQUARE)
            factor = ops.where(norm > MOST_TO_SQUARE, enough / norm, 1.0)
            gradients = self._gradients.times(
                factor, gradients, member.positions
            )
        return gradients

    def clipped_norm(self, gradients: list[Tensor | None]) -> Tensor:
        """Compute the global norm that is left after clipping, float32."""
        norms = [
            clipped_norm(self._of(member, gradients), member.optimizer)
            for member in self._members
        ]
        return norms[0] if self._is_one else global_norm(norms)

    def _of(
        self, member: _Member, gradients: list[Tensor | None]
    ) -> list[Tensor]:
        """Pick what a member clips."""
        return self._gradients.ordinary(gradients, member.positions)


def clipped_norm(gradients: list[Tensor], optimizer: Optimizer) -> Tensor:
    """Compute the global norm that is left after an optimizer's clipping.

    Args:
        gradients: float32, those that it updates variables by.

    Returns:
        Scalar, float32.
    """
    clipnorm, global_clipnorm, clipvalue = (
        getattr(optimizer, limit, None) for limit in CLIPPING
    )
    if clipvalue:
        gradients = [ops.clip(g, -clipvalue, clipvalue) for g in gradients]
    norm = global_norm(gradients)
    if global_clipnorm:
        return ops.minimum(norm, global_clipnorm)
    if clipnorm:
        norms = [global_norm([gradient]) for gradient in gradients]
        return global_norm([ops.minimum(n, clipnorm) for n in norms])
    return norm
