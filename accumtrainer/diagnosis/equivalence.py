"""Compares the gradient of micro-batches with that of the big batch."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accumtrainer import notebook
from accumtrainer.data.batches import Window
from accumtrainer.diagnosis.trials import Trials
from accumtrainer.keras_api import (
    by_path,
    flatten_layers,
    is_overwritten,
    keras,
    ops,
)
from accumtrainer.keras_api.types import Model, Variable
from accumtrainer.layers import computing_in, describe_layer, owners_of
from accumtrainer.steps import Backend, Plan, Step
from accumtrainer.window.objective import is_random_state
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.program import WindowProgram

MOST_ROWS = 8
"""Variables that are printed."""


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
        reasons: why they differ, empty where they do not.

    Examples:
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
    def largest_error(self) -> float:
        """The largest of the errors; NaN if one of them is."""
        return _largest(self.errors)

    @property
    def is_exact(self) -> bool:
        """Whether no variable differs by more than the tolerance."""
        # A NaN is not exact either.
        return bool(self.largest_error <= self.tolerance)

    def __str__(self) -> str:
        lines, rows = self._verdict(), self._largest_first()
        width = max((len(path) for path, _ in rows[:MOST_ROWS]), default=0)
        lines += [f"  {p:<{width}}  {e:.1e}" for p, e in rows[:MOST_ROWS]]
        if len(rows) > MOST_ROWS:
            lines.append(f"  and {len(rows) - MOST_ROWS} more variables")
        return "\n".join([*lines, *self._listed_reasons()])

    def _repr_html_(self) -> str:
        rows = [[path, f"{error:.1e}"] for path, error in self._largest_first()]
        return (
            notebook.paragraph("\n".join(self._verdict()))
            + notebook.table(["variable", "error"], rows)
            + notebook.paragraph("\n".join(self._listed_reasons()))
        )

    def _verdict(self) -> list[str]:
        verdict = "the same update" if self.is_exact else "different updates"
        return [
            f"{self.samples} samples in {self.micro_batches} micro-batches "
            f"and at once: {verdict}.",
            f"largest error {self.largest_error:.1e}, "
            f"tolerance {self.tolerance:.1e}",
        ]

    def _largest_first(self) -> list[tuple[str, float]]:
        return sorted(
            self.errors.items(),
            key=lambda row: -np.nan_to_num(row[1], nan=np.inf),
        )

    def _listed_reasons(self) -> list[str]:
        return [f"- {reason}" for reason in self.reasons]


class EquivalenceCheck:
    """Computes the gradients of a batch in several ways, without effect.

    Args:
        parts: whose windows they are, with a backend that trains nothing
            else.
        trials: what finds out by trial.
        jit_compile: whether XLA compiles.
        tolerance: largest error that counts as rounding.
    """

    def __init__(
        self,
        parts: WindowParts,
        trials: Trials,
        *,
        jit_compile: bool,
        tolerance: float,
    ):
        self._parts = parts
        self._trials = trials
        self._hooks = parts.hooks
        assert isinstance(parts.backend, Backend)
        self._backend = parts.backend
        self._plan = Plan(name="streamed", jit_compile=jit_compile)
        self._tolerance = tolerance

    def run(self, window: Window, whole: Window) -> Equivalence:
        """Compare a window with itself as one micro-batch.

        Args:
            window: `Window` of at least two micro-batches.
            whole: `Window` of the same samples as one micro-batch.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Micro-batches should have few")
            return self._run(window, whole)

    def _run(self, window: Window, whole: Window) -> Equivalence:
        self._micro_batch = window.split()[0]
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

    def _way(self, **options: Any) -> "_Way":
        program = WindowProgram(replace(self._parts, **options))
        program.learn(self._micro_batch)
        return _Way(self._parts, self._backend, program, self._plan)

    def _differs(self, way: "_Way", window: Window, whole: Window) -> bool:
        found = _errors(way, way.gradients(window), way.gradients(whole))
        return not _largest(found) <= self._tolerance

    def _reasons(
        self, way: "_Way", window: Window, whole: Window, big: list[np.ndarray]
    ) -> Iterator[str]:
        """Yield the reasons that trials single out."""
        if not all(np.isfinite(gradient).all() for gradient in big):
            yield NOT_FINITE
            return
        combine = self._parts.combine
        if combine != "exact" and not self._differs(
            self._way(combine="exact"), window, whole
        ):
            yield COMBINED.format(combine=combine)
            return
        found = [
            *self._reasons_of_state(way, whole, big),
            *self._reasons_of_layers(whole),
        ]
        settled: _Way | None = None
        if not self._hooks.has_window_loss:
            settled = self._way(training=False)
            if self._differs(settled, window, whole):
                found += self._reasons_of_losses(whole)
                settled = None
        if found:
            yield from found
            return
        error = self._error_in_float64(window, whole)
        if error is not None and error <= self._tolerance:
            yield ROUNDING.format(error=error)
        elif settled is not None:
            yield IN_TRAINING_ONLY
        elif self._hooks.overrides("on_accumulate"):
            yield ON_ACCUMULATE

    def _reasons_of_state(
        self, way: "_Way", whole: Window, big: list[np.ndarray]
    ) -> Iterator[str]:
        """Yield what differs when the big batch alone is run once more."""

        def differs(carried: list[Variable]) -> bool:
            gradients = way.gradients(whole, after=whole, carried=carried)
            return not _largest(_errors(way, gradients, big)) <= self._tolerance

        random, others = way.moved_by(whole)
        if random and differs(random):
            yield RANDOM.format(layers=_listed(_drawing_layers(way.model)))
        if others and differs(others):
            owners = owners_of(way.model, others)
            moving = [
                layer
                for layer in owners
                if len(owners) == 1 or differs(owners[layer])
            ]
            yield MOVING.format(layers=_listed(map(describe_layer, moving)))

    def _reasons_of_layers(self, whole: Window) -> Iterator[str]:
        if self._trials.hook_couples(whole):
            yield ON_MICRO_BATCH
            return
        for layer in self._trials.coupling_layers(whole):
            if isinstance(layer, keras.layers.BatchNormalization):
                layers = _listed(_normalizing_layers(self._hooks.model))
                yield NORMALIZING.format(layers=layers)
            else:
                yield LAYER_COUPLES.format(layer=describe_layer(layer))

    def _reasons_of_losses(self, whole: Window) -> Iterator[str]:
        for trial in self._trials.judge_losses(whole):
            reason = LOSSES.get(trial.verdict)
            if reason is not None:
                yield reason.format(
                    rows=trial.rows, shown=trial.shown, stated=trial.stated
                )

    def _error_in_float64(self, window: Window, whole: Window) -> float | None:
        """Repeat the comparison in float64.

        Returns:
            The largest error; `None` where layers or the backend cannot compute
            in float64.
        """
        # A layer may do what has no float64, or mix it with float32.
        with contextlib.suppress(Exception):
            with (
                self._backend.with_float64(),
                computing_in(self._hooks.model, "float64"),
            ):
                way = self._way()
                gradients = way.gradients(window)
                return _largest(_errors(way, gradients, way.gradients(whole)))
        return None


class _Way:
    """One way to compute gradients, which leaves everything as it was."""

    def __init__(
        self,
        parts: WindowParts,
        backend: Backend,
        program: WindowProgram,
        plan: Plan,
    ):
        self.model = parts.model
        self._micro_batches = parts.state.micro_batches
        self._backend = backend
        self._variables = program.variables
        self._step = Step(program, backend, plan)

    def gradients(
        self,
        window: Window,
        after: Window | None = None,
        carried: Sequence[Variable] = (),
    ) -> list[np.ndarray]:
        """Compute gradients from the state there is, or as a second window.

        Args:
            after: `Window` that is run first, `None` for none.
            carried: list of the variables that are then left as it leaves
                them.

        Returns:
            List of arrays, one per trainable variable.
        """
        with self._put_back() as values:
            if after is not None:
                self._run(after)
                kept = set(map(id, carried))
                for variable, value in values:
                    if id(variable) not in kept:
                        variable.assign(value)
            return self._run(window)

    def moved_by(self, window: Window) -> tuple[list[Variable], list[Variable]]:
        """List the variables that a window moves: random ones, and others."""
        random: list[Variable] = []
        others: list[Variable] = []
        with self._put_back() as values:
            self._run(window)
            for variable, value in values:
                if np.array_equal(ops.convert_to_numpy(variable), value):
                    continue
                is_random = is_random_state(variable) or (
                    variable is self._micro_batches
                )
                (random if is_random else others).append(variable)
        return random, others

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[list[tuple[Variable, np.ndarray]]]:
        """Put back what is run inside; give pairs of variable and value."""
        self._backend.write_back()
        # Layers may move what is trained, too.
        moved = [
            *self.model.trainable_variables,
            *self._variables.moved_by_passes,
        ]
        values = [(v, np.array(ops.convert_to_numpy(v))) for v in moved]
        try:
            yield values
        finally:
            self._backend.write_back()
            for variable, value in values:
                variable.assign(value)

    def _run(self, window: Window) -> list[np.ndarray]:
        _, gradients, _ = self._step.gradients(window)
        gradients = [np.array(ops.convert_to_numpy(g)) for g in gradients]
        self._backend.write_back()
        counter = self._micro_batches
        counter.assign(counter.value + window.micro_batches)
        return gradients


def _errors(
    way: _Way, gradients: list[np.ndarray], expected: list[np.ndarray]
) -> dict[str, float]:
    variables = way.model.trainable_variables
    sizes = [float(np.abs(gradient).max(initial=0.0)) for gradient in expected]
    assigned = list(map(is_overwritten, variables))
    # A gradient that is NaN is an error of its own, not of the others.
    largest = np.fmax.reduce(
        [s for s, alone in zip(sizes, assigned, strict=True) if not alone],
        initial=0.0,
    )
    return {
        path: _difference(one, other)
        / float((size if alone else largest) or 1.0)
        for path, one, other, size, alone in zip(
            by_path(variables),
            gradients,
            expected,
            sizes,
            assigned,
            strict=True,
        )
    }


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    """Find the largest difference; infinite values that agree have none."""
    with np.errstate(invalid="ignore"):
        differences = np.abs(one - other)
    return float(np.where(one == other, 0.0, differences).max(initial=0.0))


def _largest(errors: dict[str, float]) -> float:
    """Return the largest error; NaN if there is one, which `max` may miss."""
    return float(np.max(list(errors.values()), initial=0.0))


def _drawing_layers(model: Model) -> list[str]:
    """Name the layers that hold the state of a random stream of their own."""
    return [
        layer.name
        for layer in flatten_layers(model)
        if not getattr(layer, "layers", None)
        and any(map(is_random_state, layer.non_trainable_variables))
    ]


def _normalizing_layers(model: Model) -> list[str]:
    """Name the layers that normalize by the batch they see."""
    return [
        layer.name
        for layer in flatten_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
    ]


def _listed(names: Iterable[str]) -> str:
    names = list(names)
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
MOVING = (
    "What layers keep ({layers}) moves in every forward pass in training, and "
    "gradients depend on it: a window moves it once per micro-batch, the big "
    "batch once. Only one micro-batch per update is exactly the same."
)
ON_MICRO_BATCH = (
    "on_micro_batch couples examples: what it makes of some depends on the "
    "others that it sees at once. Change every example by itself, or the data "
    "before they are cut."
)
LAYER_COUPLES = (
    "Layer {layer} couples examples: what it makes of some depends on the "
    "others that it sees at once. No accumulation can change that; use one "
    "that treats each example by itself."
)
LOSSES = {
    "sum": (
        "The loss adds up over samples, it is no mean. Return "
        "WeightedLoss(value, None) from compute_loss to say so."
    ),
    "other": (
        "The loss is a mean, but not over what it states: by its values some "
        "{rows} samples count {shown:.3g} times as much as {rows} others, as "
        "stated {stated:.3g} times. Return WeightedLoss(mean, "
        "denominator) with what the mean was divided by."
    ),
    "size": (
        "The loss adds up over samples, and is then divided by something else "
        "that grows with them, as twice by their number. Divide it by their "
        "number alone."
    ),
    "couples": (
        "The loss couples examples: on two parts of the batch together it is "
        "no mean of what it is on each. Use a WindowLossTrainer, whose loss "
        "sees the whole window."
    ),
    "mixes": (
        "The loss either couples examples or is a mean over something else "
        "than it states. In the first case use a WindowLossTrainer, in the "
        "second return WeightedLoss(mean, denominator)."
    ),
}
ROUNDING = (
    "It is rounding: computed in float64, the largest error is {error:.1e}. "
    "Nothing is wrong."
)
ON_ACCUMULATE = (
    "on_accumulate changes the gradients of each micro-batch, of which the "
    "big batch has but one."
)
UNKNOWN = (
    "No reason was found: neither the state of layers, nor what layers make of "
    "examples, nor the values of the loss show one, nor does it vanish in "
    "float64."
)
