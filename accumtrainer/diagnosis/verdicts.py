"""Tells by its values on groups of rows what a loss is.

A loss that adds up over rows, once it is multiplied by what it was divided by,
has for groups A, B, C and D

    f(A, B) + f(C, D) = f(A, D) + f(C, B)

where all batches have one shape, so that whatever depends on shapes alone is
left out, as are random numbers that are the same in all of them. What it is
divided by shows in batches of other sizes. Pure: see `Trials` for the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

Values = Mapping[tuple[int, ...], float]
"""Of a loss, by the groups it was computed on."""

QUADRUPLES = (
    ((0, 1), (0, 3), (2, 1), (2, 3)),
    ((0, 2), (0, 3), (1, 2), (1, 3)),
)
"""Pairs of groups, by the formula above: the outer two, and the inner two.

Coupling may fail to show in one quadruple, where groups happen to be alike.
"""

PAIRS = ((0, 1), (0, 2), (2, 1))
"""Pairs of groups that also run alone, each of three beside each other."""

Verdict = Literal[
    "right", "constant", "sum", "other", "size", "couples", "mixes", "unknown"
]
"""What a trial says of a loss.

`"right"`: it is what it says it is. `"constant"`: it depends on weights alone,
and so is a mean over whatever it is weighed by. `"sum"`: it adds up over
examples, and is no mean. `"other"`: a mean, but not over what it says.
`"size"`: it adds up over examples, and is then divided by something else that
grows with them. `"couples"`: it couples examples. `"mixes"`: that or
`"other"`. `"unknown"`: nobody can tell.
"""

TOLD = ("right", "sum", "size")
"""Verdicts that one model is enough to show, as one that has no zeros."""

# How far, relative to the largest, values of a loss may be from adding up and
# still do; and from how far on they do not. In between is rounding, perhaps.
ADDS_UP_WITHIN = 5e-6
FAILS_FROM = {"float32": 2e-5, "half": 2e-2}
# The same of values on batches of different sizes, which compilers may round
# otherwise, and random layers do otherwise altogether.
SIZES_AGREE_WITHIN = {"float32": 1e-4, "half": 5e-2, "random": 0.3}
# How far from adding up values in half precision are if they clearly do not.
FAILS_CLEARLY_FROM = 0.3
# How far ratios that three parts of a batch show, two by two, may disagree.
RATIOS_AGREE_WITHIN = 0.02
# The same of one ratio with two models.
WEIGHTS_AGREE_WITHIN = 1e-3
# Of values that differ less, relative to the largest, nothing can be said.
LEAST_SPREAD = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTrial:
    """What a trial has shown of one loss.

    Args:
        verdict: see `Verdict`.
        origin: where a bare scalar comes from; `""` for other losses.
        rows: how many rows each of two groups has.
        shown: how much the first group counts, the second counting 1, as the
            values of the loss show it; `None` where they do not.
        stated: the same as the loss states it.
    """

    verdict: Verdict
    origin: str = ""
    rows: int = 0
    shown: float | None = None
    stated: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossValues:
    """One loss on groups of rows: dicts from their places to floats."""

    means: dict[tuple[int, ...], float]
    totals: dict[tuple[int, ...], float]
    counts: dict[tuple[int, ...], float]


def _judge(values: LossValues, is_sum: bool, kind: str) -> LossTrial:
    """Judge one loss by its values on groups of rows, a `LossTrial`."""
    means = np.array(list(values.means.values()))
    if not np.isfinite(means).all():
        return LossTrial(verdict="unknown")
    if np.ptp(means) <= LEAST_SPREAD * np.abs(means).max():
        return LossTrial(verdict="constant" if means.any() else "unknown")
    coupling = max(_coupling(values.totals), _coupling(values.counts))
    within = SIZES_AGREE_WITHIN[kind]
    # What is drawn could make a mean look like a sum.
    exactly = SIZES_AGREE_WITHIN["half" if kind == "half" else "float32"]
    telling = _telling_pairs(values.means, exactly)
    sums_up = bool(telling) and _adds_up(values.means, exactly)
    counts_fit = is_sum or _adds_up(values.counts, within)
    if coupling <= ADDS_UP_WITHIN:
        is_shown = is_sum or bool(telling)
        if is_shown and counts_fit and _adds_up(values.totals, within):
            return LossTrial(verdict="right")
        if sums_up:
            return LossTrial(verdict="sum")
    ratios = _ratios(values.means)
    if kind == "float32":
        if sums_up:
            return LossTrial(verdict="sum")
        if ratios is not None:
            stated = {
                (i, j): _ratio(values.counts[i,], values.counts[j,])
                for i, j in ratios
            }
            if not all(
                abs(stated[pair] / ratios[pair] - 1) < RATIOS_AGREE_WITHIN
                for pair in ratios
            ):
                return LossTrial(
                    verdict="other",
                    shown=ratios[0, 1],
                    stated=stated[0, 1],
                )
        elif coupling <= ADDS_UP_WITHIN and counts_fit and telling:
            if not _adds_up(values.totals, RATIOS_AGREE_WITHIN):
                return LossTrial(verdict="size")
    elif kind == "half" and coupling <= FAILS_FROM["half"] and counts_fit:
        if not _adds_up(values.totals, FAILS_CLEARLY_FROM):
            return LossTrial(verdict="mixes")
    if coupling <= FAILS_FROM["half" if kind == "half" else "float32"]:
        return LossTrial(verdict="unknown")
    is_no_mean = ratios is None and len(telling) == len(PAIRS)
    is_clear = kind == "float32" and is_no_mean
    return LossTrial(verdict="couples" if is_clear else "mixes")


def judge_loss(
    here: LossValues, elsewhere: LossValues, is_sum: bool, kind: str
) -> LossTrial:
    """Judge one loss by the values it has with two models.

    Args:
        elsewhere: `LossValues` of the same loss with another model.
        is_sum: whether it says that it is a sum.
        kind: as in `SIZES_AGREE_WITHIN`.
    """
    trial = _judge(here, is_sum, kind)
    if trial.verdict == "constant" or not any(here.means.values()):
        # The data may show in nothing by chance: with these weights, or, like
        # masks that are empty, whatever the weights.
        other = _judge(elsewhere, is_sum, kind)
        one, two = here.means[0,], elsewhere.means[0,]
        is_moved = abs(one - two) > LEAST_SPREAD * max(abs(one), abs(two))
        is_penalty = other.verdict == "constant" and is_moved
        trial = LossTrial(verdict="constant" if is_penalty else "unknown")
    if trial.verdict in ("right", "size", "unknown"):
        other = _judge(elsewhere, is_sum, kind)
        if trial.verdict == "unknown" and other.verdict in TOLD:
            return other
        if trial.verdict == "unknown" and other.verdict == "other":
            return replace(other, verdict="mixes")
        return other if other.verdict in ("couples", "mixes") else trial
    if trial.verdict == "other":
        # A Dice loss is a mean by what is predicted; its gradient is none.
        ratios = _ratios(elsewhere.means)
        is_same = (
            ratios is not None
            and trial.shown is not None
            and (abs(ratios[0, 1] / trial.shown - 1) < WEIGHTS_AGREE_WITHIN)
        )
        if not is_same:
            exactly = SIZES_AGREE_WITHIN["float32"]
            telling = _telling_pairs(elsewhere.means, exactly)
            is_hidden = len(telling) < len(PAIRS)
            trial = replace(trial, verdict="mixes" if is_hidden else "couples")
        return trial
    return trial


def _coupling(values: Values) -> float:
    """Say how far values are from adding up over groups, relative."""
    largest = max(abs(value) for value in values.values())
    over = max(
        abs(values[one] - values[other] - values[third] + values[fourth])
        for one, other, third, fourth in QUADRUPLES
    )
    return over / (largest or 1.0)


def _adds_up(values: Values, within: float) -> bool:
    """Whether values on two groups are the sums of those on each."""
    largest = max(abs(value) for value in values.values())
    return all(
        abs(values[i, j] - values[i,] - values[j,]) <= within * largest
        for i, j in PAIRS
    )


def _ratios(
    means: Values,
) -> dict[tuple[int, int], float] | None:
    """Say how much groups count beside each other, where a loss is some mean.

    A mean over samples (or tokens, or weights) has on two parts together a
    value between its two, nearer to the one that counts more; and the ratios
    that three parts show two by two fit together.

    Returns:
        Dict from pairs of groups to how much the first counts, the second
        counting 1; or `None` where it is no mean.
    """
    ratios = {
        (i, j): _ratio(means[j,] - means[i, j], means[i, j] - means[i,])
        for i, j in PAIRS
    }
    fitting = _ratio(ratios[0, 2] * ratios[2, 1], ratios[0, 1])
    is_mean = min(ratios.values()) > 0
    fits = abs(fitting - 1) < RATIOS_AGREE_WITHIN
    return ratios if is_mean and fits else None


def _telling_pairs(means: Values, within: float) -> list[tuple[int, int]]:
    """List the pairs that show whether a loss is a sum or a mean, and of what.

    Not so where groups have one value, also together, as any mean of them has;
    nor where one has none and leaves that of the other as it is, as a sum does,
    and a mean whose mask leaves all of the group out.
    """
    largest = max(abs(value) for value in means.values())

    def tells(one: float, other: float, both: float) -> bool:
        is_empty = min(abs(one), abs(other)) <= within * largest
        adds_nothing = abs(both - one - other) <= within * largest
        is_one_value = np.ptp([one, other, both]) <= LEAST_SPREAD * largest
        return not is_one_value and not (is_empty and adds_nothing)

    return [
        (i, j) for i, j in PAIRS if tells(means[i,], means[j,], means[i, j])
    ]


def _ratio(one: float, other: float) -> float:
    return one / other if other else np.inf
