"""Numbers of losses and micro-batches, each by its name, packed and unpacked.

A tensor for each of them would cost more than it holds: several are packed
into one, here and nowhere else.
"""

from typing import Any, NamedTuple

import numpy as np

from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Tensor


class Sums(NamedTuple):
    """What a window or an epoch adds up of its losses.

    Args:
        numerators: `(losses,)`, float32.
        denominators: `(losses,)`, float32.
        regularization: scalar, float32.
        weight: scalar, float32, how much it counts.
        samples: scalar, float32.
    """

    numerators: Tensor
    denominators: Tensor
    regularization: Tensor
    weight: Tensor
    samples: Tensor

    @staticmethod
    def size(losses: int) -> int:
        """Count the numbers of that many losses."""
        return 2 * losses + 3

    def pack(self) -> Tensor:
        """Pack all of them, `(size,)`."""
        others = ops.stack([self.regularization, self.weight, self.samples])
        return ops.concatenate([self.numerators, self.denominators, others])

    @classmethod
    def unpack(cls, packed: Tensor, losses: int) -> "Sums":
        """Undo `pack`."""
        # One operation on TensorFlow, where a slice is four.
        sums = ops.unstack(packed, cls.size(losses))
        numerators = ops.stack(sums[:losses])
        denominators = ops.stack(sums[losses : 2 * losses])
        return cls(numerators, denominators, *sums[2 * losses :])


class OfMicroBatch(NamedTuple):
    """What is told of a micro-batch, scalars or `(k,)` of several, float32.

    Args:
        loss: with its regularization.
        weight: how much it counts.
        gradient_norm: of its gradient as it is added, `None` where nobody
            wants to know it; so is the next.
        gradient_weight: by what that gradient is multiplied before.
    """

    loss: Any
    weight: Any
    gradient_norm: Any = None
    gradient_weight: Any = None

    def pack(self) -> Tensor:
        """Pack those that are there, `(n,)`."""
        return ops.stack([number for number in self if number is not None])

    @classmethod
    def unpack(cls, rows: np.ndarray) -> "OfMicroBatch":
        """Read rows `(k, n)` of what `pack` returned."""
        return cls(*rows.T)

    def as_dict(self) -> dict[str, Any]:
        """Return those that are there by name."""
        return {k: v for k, v in self._asdict().items() if v is not None}


class OfPart(NamedTuple):
    """What replicas know of a part of a micro-batch, chosen to add up, float32.

    Args:
        numerators: `(losses,)`, or `(k, losses)` of several, as all here.
        denominators: `(losses,)`.
        regularization: scalar.
        weight: scalar.
        replicas: scalar, how many have added to it.
        squared_norm: scalar, of its gradient, `None` as in `OfMicroBatch`.
        gradient_weight: scalar, as there.
    """

    numerators: Any
    denominators: Any
    regularization: Any
    weight: Any
    replicas: Any
    squared_norm: Any = None
    gradient_weight: Any = None

    def pack(self) -> Tensor:
        """Pack those that are there, `(n,)`."""
        numbers = [ops.cast(v, "float32") for v in self[2:] if v is not None]
        return ops.concatenate(
            [self.numerators, self.denominators, ops.stack(numbers)]
        )

    @classmethod
    def unpack(cls, rows: np.ndarray, losses: int) -> "OfPart":
        """Read rows `(k, n)` of what `pack` returned."""
        numerators, denominators, others = np.split(
            rows, [losses, 2 * losses], axis=1
        )
        return cls(numerators, denominators, *others.T)
