"""Compares the gradient of micro-batches with that of the big batch."""

import warnings
from dataclasses import dataclass, replace

import numpy as np

from accumtrainer.data.batches import Window, map_leaves
from accumtrainer.keras_api import flatten_layers, is_overwritten, keras, ops
from accumtrainer.steps import Plan, Step
from accumtrainer.window.objective import is_random_state

MOST_ROWS = 8
"""Variables that are printed."""

# How far the weights that three parts of a batch show, two by two, may be from
# agreeing and still be weights; rounding of float32 losses takes some.
SAME_WEIGHTS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Equivalence:
    """How far an accumulated gradient is from that of the big batch.

    Printing it shows a short table.

    Args:
        errors: dict from the path of each trainable variable to the largest
            difference between its two gradients, over the largest gradient of
            the whole model; over its own where it is to be assigned, as the
            scales of float8 layers are.
        samples: number of samples in the batch.
        micro_batches: number of micro-batches it was cut into.
        tolerance: largest error that counts as rounding.
        reasons: tuple of str, why they differ, empty where they do not.

    Example:
        >>> print(Equivalence(errors={"dense/kernel": 2e-8, "dense/bias": 0.0},
        ...                   samples=8, micro_batches=4, tolerance=1e-5))
        8 samples in 4 micro-batches and at once: the same update.
        largest error 2.0e-08, tolerance 1.0e-05
          dense/kernel  2.0e-08
          dense/bias    0.0e+00
    """

    errors: dict[str, float]
    samples: int
    micro_batches: int
    tolerance: float
    reasons: tuple[str, ...] = ()

    @property
    def largest_error(self):
        """The largest of the errors; NaN if one of them is."""
        return _largest(self.errors)

    @property
    def is_exact(self):
        """Whether no variable differs by more than the tolerance."""
        # A NaN is not exact either.
        return bool(self.largest_error <= self.tolerance)

    def __str__(self):
        verdict = "the same update" if self.is_exact else "different updates"
        lines = [
            f"{self.samples} samples in {self.micro_batches} micro-batches "
            f"and at once: {verdict}.",
            f"largest error {self.largest_error:.1e}, "
            f"tolerance {self.tolerance:.1e}",
        ]
        rows = sorted(
            self.errors.items(),
            key=lambda row: -np.nan_to_num(row[1], nan=np.inf),
        )
        width = max(len(path) for path, _ in rows[:MOST_ROWS])
        lines += [f"  {p:<{width}}  {e:.1e}" for p, e in rows[:MOST_ROWS]]
        if len(rows) > MOST_ROWS:
            lines.append(f"  and {len(rows) - MOST_ROWS} more variables")
        lines += [f"- {reason}" for reason in self.reasons]
        return "\n".join(lines)


class EquivalenceCheck:
    """Computes the gradients of a batch in several ways, without effect.

    Args:
        hooks: `Hooks`.
        make_program: function of the options in which a `WindowProgram` is to
            differ from that of the training; returns it, built.
        backend: the functions a backend must provide.
        jit_compile: bool, whether XLA compiles.
        tolerance: largest error that counts as rounding.
    """

    def __init__(self, hooks, make_program, backend, *, jit_compile, tolerance):
        self._hooks = hooks
        self._make_program = make_program
        self._backend = backend
        self._plan = Plan(name="streamed", jit_compile=jit_compile)
        self._tolerance = tolerance

    def run(self, window, whole):
        """Compare a window with itself as one micro-batch.

        Args:
            window: `Window` of at least two micro-batches.
            whole: `Window` of the same samples as one micro-batch.

        Returns:
            `Equivalence`.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Micro-batches should have few")
            return self._run(window, whole)

    def _run(self, window, whole):
        way = self._way()
        big = way.gradients(whole)
        errors = _errors(way, way.gradients(window), big)
        found = Equivalence(
            errors=errors,
            samples=window.samples,
            micro_batches=window.micro_batches,
            tolerance=self._tolerance,
        )
        if found.is_exact:
            return found
        reasons = tuple(self._reasons(way, window, whole, big))
        return replace(found, reasons=reasons or (UNKNOWN,))

    def _way(self, **options):
        program = self._make_program(**options)
        return _Way(self._hooks, program, self._backend, self._plan)

    def _differs(self, way, window, whole):
        found = _errors(way, way.gradients(window), way.gradients(whole))
        return not _largest(found) <= self._tolerance

    def _reasons(self, way, window, whole, big):
        """Yield the reasons that trials and the model's layers show."""
        if not all(np.isfinite(gradient).all() for gradient in big):
            yield NOT_FINITE
            return
        combine = self._hooks.accumulation.combine
        if combine != "exact" and not self._differs(
            self._way(combine="exact"), window, whole
        ):
            yield COMBINED.format(combine=combine)
            return
        again = _errors(way, way.gradients(whole, after=whole), big)
        is_random = not _largest(again) <= self._tolerance
        if is_random:
            yield RANDOM.format(layers=_listed(_drawing_layers(way.model)))
        normalizing = _normalizing_layers(way.model)
        if normalizing:
            yield NORMALIZING.format(layers=_listed(normalizing))
        if self._hooks.has_window_loss:
            return
        settled = self._way(training=False)
        if not self._differs(settled, window, whole):
            if not is_random and not normalizing:
                yield IN_TRAINING_ONLY
            return
        reason = _reason_of_loss(settled, whole)
        if reason is None and self._hooks.overrides("on_accumulate"):
            reason = ON_ACCUMULATE
        if reason is not None:
            yield reason


class _Way:
    """One way to compute gradients, which leaves everything as it was."""

    def __init__(self, hooks, program, backend, plan):
        self.model = hooks.model
        self._program = program
        self._backend = backend
        self._step = Step(program, backend, plan)

    def gradients(self, window, after=None):
        """Compute gradients from the state there is, or as a second window.

        Args:
            window: `Window`.
            after: `Window` that is run first, `None` for none.

        Returns:
            List of arrays, one per trainable variable.
        """
        return self._measure(window, after)[1]

    def measure(self, window):
        """Return the loss and the weight of a window, two floats."""
        loss, _, weight = self._measure(window, None)
        return loss, weight

    def _measure(self, window, after):
        self._backend.publish()
        variables = self._program.moved_by_micro_batches
        before = [np.array(ops.convert_to_numpy(v)) for v in variables]
        try:
            if after is not None:
                self._step.gradients(after)
                self._backend.publish()
                self._program.count_micro_batches(after.micro_batches)
            loss, gradients, rows = self._step.gradients(window)
            gradients = [np.array(ops.convert_to_numpy(g)) for g in gradients]
            weight = sum(float(row[1]) for row in rows)
            return float(loss), gradients, weight
        finally:
            self._backend.publish()
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)


def _errors(way, gradients, expected):
    variables = way.model.trainable_variables
    sizes = [float(np.abs(gradient).max()) for gradient in expected]
    assigned = list(map(is_overwritten, variables))
    # A gradient that is NaN is an error of its own, not of the others.
    largest = np.fmax.reduce(
        [s for s, alone in zip(sizes, assigned, strict=True) if not alone],
        initial=0.0,
    )
    return {
        variable.path: float(np.abs(one - other).max())
        / float((size if alone else largest) or 1.0)
        for variable, one, other, size, alone in zip(
            variables, gradients, expected, sizes, assigned, strict=True
        )
    }


def _largest(errors):
    """Return the largest error; NaN if there is one, which `max` may miss."""
    return float(np.max(list(errors.values())))


def _drawing_layers(model):
    """Name the layers that hold the state of a random stream of their own."""
    return [
        layer.name
        for layer in flatten_layers(model)
        if not getattr(layer, "layers", None)
        and any(map(is_random_state, layer.non_trainable_variables))
    ]


def _normalizing_layers(model):
    """Name the layers that normalize by the batch they see."""
    return [
        layer.name
        for layer in flatten_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
    ]


def _reason_of_loss(way, whole):
    """Find out from its values on parts of a batch what a loss is.

    A mean over samples (or tokens, or weights) has on two parts together a
    value between its two, nearer to the one that counts more; and the shares
    that three parts show two by two fit together. A sum adds up.

    Args:
        way: `_Way`.
        whole: `Window` of one micro-batch.

    Returns:
        str, or `None` where the loss is what it says it is, or there are too
        few samples to tell.
    """
    parts = [list(p) for p in np.array_split(np.arange(whole.samples), 3)]
    if not parts[-1]:
        return None
    single = [way.measure(_pick(whole, part)) for part in parts]
    losses = [loss for loss, _ in single]
    shares, is_sum = {}, True
    for i, j in ((0, 1), (1, 2), (0, 2)):
        joint, _ = way.measure(_pick(whole, parts[i] + parts[j]))
        is_sum &= bool(np.isclose(joint, losses[i] + losses[j], rtol=1e-4))
        with np.errstate(divide="ignore", invalid="ignore"):
            shares[i, j] = np.divide(losses[j] - joint, joint - losses[i])
    if is_sum:
        return ADDS_UP
    fitting = shares[0, 1] * shares[1, 2] / shares[0, 2]
    is_mean = min(shares.values()) > 0 and abs(fitting - 1) < SAME_WEIGHTS
    if not is_mean:
        return COUPLES
    stated = single[0][1] / single[1][1] if single[1][1] else np.inf
    if abs(stated / shares[0, 1] - 1) < SAME_WEIGHTS:
        return None
    return OTHER_WEIGHTS.format(
        first=len(parts[0]),
        second=len(parts[1]),
        shown=shares[0, 1],
        stated=stated,
    )


def _pick(whole, rows):
    """Take some samples of a window of one micro-batch, as another one."""
    stacked = map_leaves(
        lambda leaf: np.asarray(leaf)[:, np.array(rows)], whole.stacked
    )
    return Window(stacked=stacked, parts=None, sizes=(len(rows),))


def _listed(names):
    if not names:
        return "a hook, or a layer that shows no stream of its own"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


NOT_FINITE = (
    "The gradients of the big batch itself are not all finite, so nothing can "
    "be equal to them. Look at the numbers first."
)
RANDOM = (
    "Random numbers are drawn otherwise in micro-batches ({layers}): the big "
    "batch differs from itself, too, when it is run again. Both are right."
)
NORMALIZING = (
    "BatchNormalization ({layers}) normalizes each micro-batch by its own "
    "statistics. No accumulation can change that; "
    "use GroupNormalization or LayerNormalization, or freeze it."
)
IN_TRAINING_ONLY = (
    "Something that acts in training only depends on how many samples it sees "
    "at once: as in evaluation, there is no difference."
)
COMBINED = (
    "combine={combine!r} is asked for, which is not the update of the big "
    "batch. Leave it out for combine='exact'."
)
ADDS_UP = (
    "The loss adds up over samples, it is no mean. Return WeightedLoss(value, "
    "None) from compute_loss to say so."
)
OTHER_WEIGHTS = (
    "The loss is a mean, but not over what it states: by its values the first "
    "{first} samples count {shown:.3g} times as much as the next {second}, as "
    "stated {stated:.3g} times. Return WeightedLoss(mean, denominator) with "
    "what the mean was divided by."
)
COUPLES = (
    "The loss couples examples: on two parts of the batch together it is no "
    "mean of what it is on each. Use a WindowLossTrainer, whose loss sees the "
    "whole window."
)
ON_ACCUMULATE = (
    "on_accumulate changes the gradients of each micro-batch, of which the "
    "big batch has but one."
)
UNKNOWN = (
    "No reason was found: neither layers nor the values of the loss show one."
)
