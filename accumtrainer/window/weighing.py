"""How the micro-batches of a window combine into one gradient.

With `Lᵢ` the mean loss of micro-batch i over its denominator `wᵢ`, the window
as one big batch has the loss `Σᵢ wᵢ Lᵢ / Σᵢ wᵢ`, and so the gradient

    G = Σᵢ wᵢ ∇Lᵢ / Σᵢ wᵢ

Two arrangements of that sum are used. *One denominator*: differentiate `Lᵢ`,
weigh the gradient by `wᵢ` in float32, divide once at the end by `Σᵢ wᵢ`.
*Several denominators* (outputs averaged over different things): differentiate
`Σₒ k wₒᵢ/Σᵢ wₒᵢ Lₒᵢ`, add the gradients up, divide once at the end by k. The
factors in front of the losses are of order one, so that float16 does not
underflow; they need `Σᵢ wₒᵢ` before the first gradient.

Layers that compute in float8 note how large gradients are on their way back.
With them losses are divided instead of gradients, in both arrangements: then
all that is differentiated is as large as in the big batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Tensor
from accumtrainer.window.losses import WeightedLoss, sort_of

# Stands for a denominator of zero, as a window may have no other: too small to
# count beside one, large enough that a gradient survives being multiplied and
# divided by it.
ALMOST_NOTHING = 1e-25


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighing:
    """Which arrangement of the sum a window uses.

    Args:
        rule: `"denominator"` weighs gradients by the one denominator;
            `"balance"` weighs losses by their share; `"mean"` and `"sum"` are
            the plain ones, which ignore denominators.
        needs_totals: whether the window's denominators must be known before
            its first gradient.
        is_uniform: whether the one denominator is that of all micro-batches.
        divides_losses: whether losses are divided in place of that gradient,
            see `divide_first`.
    """

    rule: Literal["denominator", "balance", "mean", "sum"]
    needs_totals: bool = False
    is_uniform: bool = False
    divides_losses: bool = False

    def divide_first(self, micro_batches: "int | Tensor") -> "Weighing":
        """Divide losses in place of the window's gradient, if that can be.

        It is the same, but takes one pass less over gradients, which may be
        large. The loss of a micro-batch that is alone is left as it is.

        Args:
            micro_batches: k, an int or a scalar tensor.
        """
        is_alone = isinstance(micro_batches, int) and micro_batches == 1
        is_known = self.rule != "denominator" or self.is_uniform
        divides = self.divides_losses or is_known or is_alone
        return replace(self, divides_losses=divides)


NOT_WEIGHED = Weighing(rule="sum")
"""Of micro-batches whose gradients nobody adds up."""


class Shares(NamedTuple):
    """The micro-batches of a window, as replicas run them.

    Args:
        split: tuple of `Batch`es of arrays `[k, replicas * m, ...]`; of each
            micro-batch every replica runs m rows.
        copied: tuple of `Batch`es of arrays `[k, m, ...]`, which every
            replica runs whole, and which count once.
    """

    split: tuple[Batch, ...]
    copied: tuple[Batch, ...]


class Share(NamedTuple):
    """What a replica knows of the window it runs a part of.

    Args:
        micro_batches: scalar, int32, how many it runs.
        total: scalar, int32, how many all replicas run, copies counted once.
        replica: scalar, int32, its index.
        split: scalar, int32, how many it runs that are not copies; `None`
            where nobody else runs any.
        weighing: of the window.
        totals: `(losses,)`, float32, the denominators of the window, where
            the weighing needs them.
    """

    micro_batches: Any
    total: Any
    replica: Any = 0
    split: Any = None
    weighing: Weighing = NOT_WEIGHED
    totals: Any = None

    @classmethod
    def whole(
        cls,
        micro_batches: Any,
        weighing: Weighing = NOT_WEIGHED,
        totals: Any = None,
    ) -> "Share":
        """Make the share of one who runs all micro-batches."""
        return cls(
            micro_batches, micro_batches, weighing=weighing, totals=totals
        )

    def number_of(self, index: Any) -> Any:
        """Give a micro-batch its number among those of all replicas.

        Args:
            index: scalar, int32, its place in this share.

        Returns:
            Scalar, int32, below `total`; the same for each copy.
        """
        if self.split is None:
            return index
        beyond = self.total - self.micro_batches
        before = self.replica * self.split
        return index + ops.where(index < self.split, before, beyond)


def choose_weighing(
    losses: list[WeightedLoss],
    *,
    combine: Literal["exact", "mean", "sum"],
    is_even: bool,
    divides_losses: bool = False,
    per_example: bool = False,
) -> Weighing:
    """Choose how a window is weighed.

    Args:
        losses: one micro-batch's.
        combine: `"exact"`, `"mean"` or `"sum"`.
        is_even: whether all micro-batches of the window have equal shapes.
        divides_losses: whether what is differentiated must be as large as in
            the big batch.
        per_example: whether each example is run as a micro-batch of one.

    Examples:
        >>> from accumtrainer.window.losses import WeightedLoss
        >>> choose_weighing(
        ...     [WeightedLoss(0.5, 8.0)], combine="exact", is_even=False
        ... ).rule
        'denominator'
    """
    if combine != "exact":
        return Weighing(rule=combine, divides_losses=divides_losses)
    means = [loss for loss in losses if not loss.is_sum]
    is_uniform = is_even and all(loss.is_uniform for loss in means)
    if len(means) == 1 and len(losses) == 1:
        return Weighing(
            rule="denominator",
            needs_totals=divides_losses and not is_uniform,
            is_uniform=is_uniform,
            divides_losses=divides_losses,
        )
    return Weighing(
        rule="balance",
        # How many examples there are is one of the totals.
        needs_totals=(bool(means) and not is_uniform)
        or (per_example and not is_even),
        divides_losses=divides_losses,
    )


def loss_factors(
    losses: list[WeightedLoss],
    weighing: Weighing,
    *,
    micro_batches: Tensor,
    totals: Tensor,
) -> list[Tensor]:
    """Factors in front of each loss before it is differentiated.

    Args:
        losses: one micro-batch's.
        micro_batches: scalar, float32, k.
        totals: `(len(losses),)`, float32, the window's denominators; read only
            if `weighing.needs_totals`.

    Returns:
        List of scalars (tensors or Python floats), one per loss.
    """
    if weighing.rule != "balance":
        return [1.0] * len(losses)
    return [
        _balance(loss, weighing, micro_batches, totals, i)
        for i, loss in enumerate(losses)
    ]


def _balance(
    loss: WeightedLoss,
    weighing: Weighing,
    micro_batches: Tensor,
    totals: Tensor,
    position: int,
) -> Tensor:
    if loss.is_sum:
        return micro_batches
    if not weighing.needs_totals:
        return 1.0
    # Weights may have a gradient; what they count for has none.
    denominator = ops.stop_gradient(ops.cast(loss.denominator, "float32"))
    share = ops.divide_no_nan(denominator, totals[position])
    return micro_batches * share


def gradient_weight(losses: list[WeightedLoss], weighing: Weighing) -> Tensor:
    """Weigh one micro-batch's gradient in the window's sum.

    A micro-batch of padding alone has no loss, but its regularizers have a
    gradient, which a window of nothing else must not lose.

    Returns:
        Scalar, float32.
    """
    if weighing.rule == "denominator":
        weight = ops.cast(losses[0].denominator, "float32")
        return ops.where(ops.equal(weight, 0), ALMOST_NOTHING, weight)
    return ops.ones((), dtype="float32")


def loss_weight(
    weighing: Weighing,
    *,
    weight: Tensor,
    micro_batches: Tensor,
    totals: Tensor = None,
) -> Tensor:
    """Weigh one micro-batch's losses, where not its gradient is weighed.

    Args:
        weight: scalar, float32, see `gradient_weight`.
        micro_batches: scalar, float32, k.
        totals: `(losses,)`, float32, the window's denominators; read only if
            `weighing.needs_totals`.

    Returns:
        Scalar, float32, or a float.
    """
    if not weighing.divides_losses:
        return weight
    if weighing.rule == "sum":
        return 1.0
    if weighing.rule == "denominator" and weighing.needs_totals:
        share = ops.divide_no_nan(weight, totals[0])
        # Of padding alone, see `gradient_weight`, all count alike.
        return ops.where(ops.equal(totals[0], 0), 1.0 / micro_batches, share)
    return 1.0 / micro_batches


def gradient_divisor(
    weighing: Weighing, *, total_weight: Tensor, micro_batches: Tensor
) -> Tensor | None:
    """Choose what the window's weighted sum of gradients is divided by.

    Args:
        total_weight: scalar, float32, the sum of gradient weights.
        micro_batches: scalar, float32, k.

    Returns:
        Scalar, float32, or `None` if that has been done.
    """
    if weighing.divides_losses:
        return None
    if weighing.rule == "denominator":
        return total_weight
    if weighing.rule == "sum":
        return ops.ones((), dtype="float32")
    return micro_batches


def window_means(numerators: Tensor, denominators: Tensor) -> Tensor:
    """Divide a window's weighted sums of losses by their weights.

    Args:
        numerators: `(n,)`, float32.
        denominators: `(n,)`, float32.

    Returns:
        `(n,)`, float32, zero where the weight is zero.
    """
    return ops.divide_no_nan(numerators, denominators)


def where_sum(
    losses: Sequence[WeightedLoss], sums: Tensor, means: Tensor
) -> Tensor:
    """Take one thing for losses logged as sums, and another for means.

    Args:
        losses: n of them, of which only the kind counts.
        sums: `(n,)` or scalar, float32, for those.
        means: `(n,)`, float32, for the others.

    Returns:
        `(n,)`, float32.
    """
    is_sum = np.array([sort_of(loss) == "sum" for loss in losses])
    return ops.where(is_sum, sums, means) if is_sum.any() else means
