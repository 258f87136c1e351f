"""Lists of gradients, one per trainable variable, `None` where there is none.

Some variables, as the scales of float8 layers, are assigned what their gradient
is. Such a gradient is neither scaled nor weighed, no hook sees it, and in place
of the sum of several the largest counts, as in Keras.
"""

import functools
from collections.abc import Callable, Collection, Sequence

import numpy as np

from accumtrainer.keras_api import is_overwritten, ops
from accumtrainer.keras_api.types import Tensor
from accumtrainer.window.backend import dtype_of_sum
from accumtrainer.window.hooks import Info
from accumtrainer.window.parts import WindowParts

Uses = tuple[tuple[()] | None, ...]
"""`()` in the place of each gradient that is there, and `None` elsewhere.

A compiled function that returns it returns no tensors: it is a part of the
structure of its result, as tracing has found it.
"""


class Gradients:
    """What is done with all gradients alike, those to be assigned aside.

    A list that is returned is a new one, of float32 where it was computed.
    """

    def __init__(self, parts: WindowParts):
        self._model = parts.model
        self._backend = parts.backend

    @functools.cached_property
    def overwritten(self) -> set[int]:
        """Positions of the variables that are assigned their gradients."""
        variables = enumerate(self._model.trainable_variables)
        return {position for position, v in variables if is_overwritten(v)}

    def ordinary(
        self,
        gradients: Sequence[Tensor | None],
        positions: Collection[int] | None = None,
    ) -> list[Tensor]:
        """Pick the gradients that are there and are not to be assigned.

        Args:
            positions: of those to pick from; `None` for all.
        """
        return [
            gradient
            for position, gradient in enumerate(gradients)
            if gradient is not None
            and position not in self.overwritten
            and (positions is None or position in positions)
        ]

    def zeros(self) -> list[Tensor]:
        """Make gradients of nothing, float32."""
        return [
            ops.zeros(v.shape, dtype_of_sum(v))
            for v in self._model.trainable_variables
        ]

    def no_sums(self) -> list[Tensor]:
        """Make sums of no gradients yet, float32."""
        return [
            self._backend.full_like(v, self.least(position))
            for position, v in enumerate(self._model.trainable_variables)
        ]

    def least(self, position: int) -> float:
        """Return what a sum of gradients begins with."""
        return -np.inf if position in self.overwritten else 0.0

    def add(
        self, sums: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Add gradients to their sums."""
        return [
            total if gradient is None else self._plus(position, total, gradient)
            for position, (total, gradient) in enumerate(
                zip(sums, gradients, strict=True)
            )
        ]

    def _plus(self, position: int, total: Tensor, gradient: Tensor) -> Tensor:
        if position in self.overwritten:
            return ops.maximum(total, ops.cast(gradient, "float32"))
        return self._backend.add(total, gradient)

    def times(
        self,
        factor: Tensor,
        gradients: Sequence[Tensor | None],
        positions: Collection[int] | None = None,
    ) -> list[Tensor | None]:
        """Multiply gradients in float32.

        Args:
            positions: of those to multiply; `None` for all.
        """
        return [
            g
            if g is None
            or position in self.overwritten
            or (positions is not None and position not in positions)
            else times(ops.cast(g, dtype_of_sum(g)), factor)
            for position, g in enumerate(gradients)
        ]

    def changed_by(
        self,
        hook: Callable[[list[Tensor], Info], list[Tensor]],
        gradients: Sequence[Tensor | None],
        info: Info,
    ) -> list[Tensor | None]:
        """Have a hook change gradients, in which it finds zeros for `None`."""
        shown = [
            zeros if g is None or position in self.overwritten else g
            for position, (g, zeros) in enumerate(
                zip(gradients, self.zeros(), strict=True)
            )
        ]
        return [
            before if position in self.overwritten else after
            for position, (before, after) in enumerate(
                zip(gradients, hook(shown, info), strict=True)
            )
        ]


def times(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply a gradient by a scalar, float32."""
    if dtype_of_sum(gradient) != "float32":
        factor = ops.cast(factor, gradient.dtype)
    return gradient * factor


def uses(gradients: Sequence[Tensor | None]) -> Uses:
    """Mark which gradients there are.

    Examples:
        >>> uses([1.0, None])
        ((), None)
    """
    return tuple(None if g is None else () for g in gradients)


def join_uses(marks: Sequence[Uses]) -> Uses:
    """Mark what any of several has used.

    Examples:
        >>> join_uses([((), None, None), (None, (), None)])
        ((), (), None)
    """
    return tuple(
        None if all(mark is None for mark in each) else ()
        for each in zip(*marks, strict=True)
    )
