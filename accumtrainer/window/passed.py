"""What a pass over a micro-batch returns."""

from typing import Any, NamedTuple

from accumtrainer.keras_api.types import Tensor
from accumtrainer.window.numbers import Sums
from accumtrainer.window.objective import Measured, total_loss
from accumtrainer.window.weighing import Weighing, gradient_weight, where_sum


class Passed(NamedTuple):
    """What was made of a micro-batch, or of one example.

    Attributes:
        summary: what is told of it, see `summary_of`.
        gradients: as they are added.
        norm: of the gradient, `None` where nobody wants to know it.
    """

    summary: dict[str, Any]
    gradients: list[Tensor | None]
    norm: Tensor | None

    @property
    def sums(self) -> Sums:
        """What a window adds up of it."""
        summary = self.summary
        return Sums(
            summary["numerators"],
            summary["denominators"],
            summary["regularization"],
            summary["gradient_weight"],
            summary["samples"],
        )


def summary_of(
    measured: Measured, weighing: Weighing, logs: dict[str, tuple]
) -> dict[str, Any]:
    """Gather what must leave the differentiated function, as tensors."""
    means, weights = measured.means(), measured.denominators()
    losses = measured.losses
    return {
        "loss": total_loss(means, losses, measured.regularization),
        "numerators": means * where_sum(losses, 1.0, weights),
        "denominators": where_sum(losses, 0.0, weights),
        "regularization": measured.regularization,
        "weight": measured.weight,
        "gradient_weight": gradient_weight(losses, weighing),
        "samples": measured.samples,
        "logs": logs,
    }
