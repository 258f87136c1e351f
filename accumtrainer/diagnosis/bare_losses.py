"""Refuses losses that do not say what they were averaged over.

A loss that reduces by itself, to a bare scalar, cannot be weighed, unless
nothing of the batch goes into it. What else can be said of it is found out by a
trial, so that no remedy is named that is wrong.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accumtrainer import errors
from accumtrainer.diagnosis.verdicts import LossTrial
from accumtrainer.window.added_losses import ASSUMED
from accumtrainer.window.hooks import context_of
from accumtrainer.window.losses import WeightedLoss
from accumtrainer.window.parts import WindowParts


def check_bare_losses(
    parts: WindowParts,
    losses: list[WeightedLoss],
    find_dependent: Callable[[], list[bool | None]],
    find_trials: Callable[[], list[LossTrial]],
    *,
    owner: str = "Trainer",
) -> None:
    """Refuse bare scalars where micro-batches must be weighed.

    Of what does not depend on data, as a penalty on weights, any denominator is
    right, unless it adds up over micro-batches. Where the user has stated what
    others were averaged over, a trial that shows otherwise is a warning, and so
    is one for samples that shows nothing, but on several devices, where there
    is none. So is it where nobody has stated it, if layers have added all of
    them, and but a trial shows that none depends on data. Activity regularizers
    are refused where a trial shows that they do not add up over samples.

    Args:
        parts: whose windows are weighed.
        losses: of which only the kind counts.
        find_dependent: function that returns of each loss whether it depends
            on data, `None` where nobody can tell; or an empty list.
        find_trials: function that returns a list of `LossTrial`, one per loss,
            or an empty one where nobody can tell.
        owner: what users give arguments to.

    Raises:
        ValueError: there are some, and nobody has stated anything; or an
            activity regularizer is no sum over samples; or several values of a
            loss are not known to add up over examples.
    """
    bare = [i for i, loss in enumerate(losses) if loss.origin]
    if not bare or parts.combine != "exact":
        return
    dependent = find_dependent() or [None] * len(losses)
    bare = [
        i
        for i in bare
        if dependent[i] is not False
        or losses[i].origin.endswith(errors.OF_VALUES)
    ]
    trials = find_trials() if bare else []
    stated = context_of(parts.hooks).denominator
    verdicts = _worst_verdicts(
        (losses[i].origin, _shown_by(trials[i], dependent[i]))
        if trials
        else (losses[i].origin, "unknown")
        for i in bare
    )
    if not callable(stated):
        verdicts = {o: _verdict(o, shown) for o, shown in verdicts.items()}
    for origin in [o for o in verdicts if o.startswith(ASSUMED)]:
        verdict = verdicts.pop(origin)
        if verdict not in FINE:
            raise ValueError(
                errors.NO_SUM_OVER_SAMPLES.format(
                    regularizer=origin,
                    shown=COUPLES if verdict == "couples" else NO_SUM,
                    combine=_combine(owner),
                )
            )
    for origin in [o for o in verdicts if o.endswith(errors.OF_VALUES)]:
        verdict = verdicts.pop(origin)
        if verdict != "right":
            raise ValueError(
                errors.VALUES_OF_NO_EXAMPLES.format(
                    origin=origin,
                    shown=_shown({origin: verdict}),
                    owner=owner,
                    combine=_combine(owner),
                )
            )
    if stated is not None:
        _warn_where_wrong(stated, verdicts, owner)
        if stated == "samples" and parts.backend.replicas.count == 1:
            _warn_where_unknown(verdicts, owner)
    elif not all(_is_settled(o, verdict) for o, verdict in verdicts.items()):
        raise ValueError(
            errors.BARE_LOSS.format(
                origins=" and ".join(verdicts),
                shown=_shown(verdicts),
                remedy=_remedies(verdicts, owner),
            )
        )
    else:
        _warn_of_penalties(
            {o: v for o, v in verdicts.items() if o.startswith(ADDED)}, owner
        )


def _shown_by(trial: LossTrial, is_dependent: bool | None) -> str:
    """Say what a trial has shown: not that other data make no difference."""
    is_chance = trial.verdict == "constant" and is_dependent
    return "unknown" if is_chance else trial.verdict


def _worst_verdicts(known: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Keep the worst of what is known by origin: a layer may add several."""
    worst: dict[str, str] = {}
    for origin, verdict in known:
        before = worst.get(origin, verdict)
        worst[origin] = max(before, verdict, key=_gravity)
    return worst


def _is_settled(origin: str, verdict: str) -> bool:
    """Whether a loss can be weighed by samples though nobody has said so.

    Any denominator is right for a penalty, which depends on no data, and of
    Keras's own losses only rows of no axis leave open what they average over.
    """
    is_penalty = origin.startswith(ADDED) and verdict == "constant"
    return is_penalty or (
        origin.endswith(errors.ROWLESS) and verdict == "right"
    )


def _warn_where_wrong(
    stated: Any, verdicts: Mapping[str, str], owner: str
) -> None:
    """Warn of losses that were averaged over something else than stated."""
    for origin, verdict in verdicts.items():
        if verdict not in FINE:
            warnings.warn(
                errors.WRONG_DENOMINATOR.format(
                    stated=_stated(stated),
                    origin=origin,
                    shown=SHOWN[verdict],
                    remedy=_remedies({origin: verdict}, owner),
                ),
                stacklevel=3,
            )


def _warn_where_unknown(verdicts: Mapping[str, str], owner: str) -> None:
    """Warn of losses of which nobody can tell whether samples are right."""
    unknown = [o for o, verdict in verdicts.items() if verdict == "unknown"]
    if unknown:
        warnings.warn(
            errors.UNCHECKED_DENOMINATOR.format(
                origins=" and ".join(unknown), owner=owner
            ),
            stacklevel=3,
        )


def _warn_of_penalties(verdicts: Mapping[str, str], owner: str) -> None:
    """Warn of what is taken for penalties, if there are any."""
    if verdicts:
        warnings.warn(
            errors.CONSTANT_LOSS.format(
                origins=" and ".join(verdicts),
                shown=_shown(verdicts),
                owner=owner,
            ),
            stacklevel=3,
        )


def _gravity(verdict: str) -> int:
    """Say how little goes with a verdict, 0 where any denominator does."""
    return FINE.index(verdict) if verdict in FINE else len(FINE)


def _verdict(origin: str, shown: str) -> str:
    """Say what is known of a loss, where a trial for samples missed it."""
    if origin.endswith(errors.PAIRED):
        return "couples"
    is_missed = origin.endswith(errors.DEPENDENT) and shown in FINE
    return "mixes" if is_missed else shown


def _combine(owner: str) -> str:
    """Say what takes `combine`."""
    return "Accumulation" if owner == "Trainer" else owner


def _stated(denominator: Any) -> str:
    if isinstance(denominator, str):
        return f"denominator={denominator!r}"
    return f"denominator={getattr(denominator, '__name__', denominator)}"


def _shown(verdicts: Mapping[str, str]) -> str:
    """Say in a sentence what a trial has shown, "" if that is nothing."""
    is_one = len(verdicts) == 1
    shown = [
        f"{'it' if is_one else origin} {SHOWN[verdict]}"
        for origin, verdict in verdicts.items()
        if verdict != "unknown"
    ]
    if not shown:
        return ""
    return f"A trial with some of the data shows that {', and '.join(shown)}. "


FINE = ("constant", "right", "unknown")
"""Verdicts that contradict nobody, the best first."""

ADDED = "add_loss"
"""How the origin of a loss begins that a layer has added."""

COUPLES = "it couples examples"
NO_SUM = "it is no sum over samples"

SHOWN = {
    "right": "is a mean over samples",
    "constant": "is the same whatever the data, as a penalty on weights is",
    "sum": "adds up over samples, so that it is no mean",
    "other": "is a mean over something else, such as tokens or weights",
    "size": "adds up over examples, but is no mean over them",
    "couples": "couples examples, so that no denominator makes it exact",
    "mixes": (
        "either couples examples or is a mean over something else than samples"
    ),
}
"""What a trial shows, by verdict; of a bare scalar samples are tried."""

_WINDOW = "{use_window}, whose loss sees all examples of an update"
_FUNCTION = (
    "say {owner}(denominator=fn) with a function of a batch that gives what "
    "it was averaged over"
)
_SAMPLES = "say {owner}(denominator='samples')"
_HOOK = "{hook} return a WeightedLoss for each"

REMEDIES = {
    "right": (_SAMPLES,),
    "constant": (_SAMPLES,),
    "other": (_FUNCTION,),
    "size": (_HOOK,),
    "couples": (_WINDOW,),
    "mixes": (f"in the first case {_WINDOW}", f"in the second {_FUNCTION}"),
    "unknown": (
        f"{_FUNCTION} if it is a mean over something else than samples",
        f"{_WINDOW}, if it couples examples, as a contrastive loss does",
        f"{_SAMPLES} if it is a mean over samples, or a penalty on weights",
    ),
}
"""What to do about it, by verdict."""

_ADDED = (
    "leave it out; if that is by a coefficient of 0 of its layer, say "
    "denominator='samples' too"
)
"""In place of `_WINDOW`, which does not see what layers add."""

SUMS = {
    ADDED: "give add_loss one value per example, which it adds up",
    "the loss": (
        "make it a keras.losses.Loss of one value per example, with "
        "reduction='sum'"
    ),
    "": "{hook} return WeightedLoss(value, None), which is a sum",
}
"""What to do about a sum, by how its origin begins."""


def _remedies(verdicts: Mapping[str, str], owner: str) -> str:
    """Write in a sentence what to do about bare scalars.

    Args:
        verdicts: dict from origins to verdicts.
        owner: what users give arguments to.
    """
    remedies = []
    # What does not depend on data goes with any denominator.
    depending = {o: v for o, v in verdicts.items() if v != "constant"}
    verdicts = depending or verdicts
    kinds = set(verdicts.values())
    if len(kinds) > 1:
        # There is but one denominator to state.
        remedies.append(_HOOK)
    for origin, verdict in verdicts.items():
        if verdict == "sum":
            begun = next(start for start in SUMS if origin.startswith(start))
            remedies.append(SUMS[begun])
        elif verdict != "right" or len(kinds) == 1:
            is_added = origin.startswith(ADDED)
            remedies += [
                remedy.replace(_WINDOW, _ADDED) if is_added else remedy
                for remedy in REMEDIES[verdict]
            ]
    if "sum" not in kinds:
        remedies.append(
            "choose {combine}(combine='mean') for the plain mean over "
            "micro-batches"
        )
    remedies = list(dict.fromkeys(remedies))
    text = "; ".join(remedies[:-1])
    text = f"{text}; or {remedies[-1]}" if text else remedies[-1]
    is_trainer = owner == "Trainer"
    text = text.format(
        owner=owner,
        combine=_combine(owner),
        use_window="use a WindowLossTrainer"
        if is_trainer
        else "train by a WindowLossTrainer instead of fit",
        hook="let Trainer.compute_loss"
        if is_trainer
        else "train by a Trainer instead of fit, and let its compute_loss",
    )
    return text[0].upper() + text[1:]
