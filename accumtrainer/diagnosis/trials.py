"""Finds out by trial what makes the examples of a batch depend on each other.

Four groups of rows of a batch, A, B, C and D, are run two by two. What a layer
makes of the rows of A is the same beside B and beside D, or else it couples
rows. And a loss that adds up over rows, once it is multiplied by what it was
divided by, has

    f(A, B) + f(C, D) = f(A, D) + f(C, B)

All of it is run from one state with one shape, so that layers which draw
random numbers draw the same ones, and whatever depends on shapes alone is left
out. Nothing that runs here has an effect.
"""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from accumtrainer.data.batches import Batch, Window, map_leaves
from accumtrainer.diagnosis.groups import (
    are_alike,
    groups_of,
    join,
    large_groups_of,
    numbers_of,
    size_of,
    to_host,
)
from accumtrainer.diagnosis.inspection import flatten_operations, recording
from accumtrainer.diagnosis.verdicts import (
    QUADRUPLES,
    LossTrial,
    LossValues,
    judge_loss,
)
from accumtrainer.keras_api import flatten_layers, ops, tree
from accumtrainer.keras_api.types import Layer, Model, Nest, Tensor, Variable
from accumtrainer.steps import Backend, should_compile_evaluation
from accumtrainer.window.hooks import Info, collect_logs
from accumtrainer.window.losses import sort_of
from accumtrainer.window.objective import is_random_state, unique
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.passes import Passes
from accumtrainer.window.state import Scratch
from accumtrainer.window.weighing import Share

VAGUE = ("mixes", "unknown")
"""Verdicts that leave something open."""

# A row beside others is the same up to this, relative to the largest.
SAME_ROW = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What layers and losses made of some rows.

    Args:
        means: array `(losses,)`, float64.
        denominators: array `(losses,)`, float64, 1 for sums.
        rows: list of arrays `[m, 3]`, what layers made of each row, without
            one where a layer's first axis is not that of the batch.
    """

    means: np.ndarray
    denominators: np.ndarray
    rows: list[np.ndarray]

    @property
    def totals(self) -> np.ndarray:
        """Values of the losses as they should add up over rows."""
        return self.means * self.denominators


@dataclass(kw_only=True, slots=True)
class _Traced:
    """What tracing a run shows, the same for all of a kind."""

    origins: list[str]
    is_sum: list[bool]
    layers: list[Any]
    has_rows: list[bool]
    draws: bool


class Trials:
    """Runs rows of a window without effect.

    Args:
        parts: whose windows they are; `training` is chosen for each run.
    """

    def __init__(
        self,
        parts: WindowParts,
        *,
        jit_compile: bool | Literal["auto"] = "auto",
    ):
        self.parts = parts
        self._hooks = parts.hooks
        self._model = parts.model
        assert isinstance(parts.backend, Backend)
        self.backend = parts.backend
        self.jit_compile = should_compile_evaluation(self.backend, jit_compile)
        self.captured: list[Variable] = []

    @property
    def all_variables(self) -> list[Variable]:
        """Every variable that a run reads or writes, each once.

        Those that belong to nobody are known once a run has been traced.
        """
        variables = [*self._model.variables, *self.parts.variables]
        return unique([*variables, *self.captured])

    def coupling_layers(self, window: Window) -> list[Layer]:
        """Find the layer that in training first makes rows depend on others.

        Returns:
            The layer in a list; an empty one where there is none, or where
            nobody can tell.
        """
        groups = groups_of(window)
        if groups is None:
            return []
        for runner in self._runners(groups, training=True):
            with contextlib.suppress(Exception):
                return runner.coupling_layers(runner.change(groups))
        return []

    def hook_couples(self, window: Window) -> bool:
        """Whether `on_micro_batch` makes rows depend on each other."""
        groups = groups_of(window)
        if groups is None or not self._hooks.overrides("on_micro_batch"):
            return False
        with contextlib.suppress(Exception):
            runner = _Runner(self, [], rows=size_of(groups[0]), training=True)
            return runner.hook_couples(groups)
        return False

    def judge_losses(self, window: Window) -> list[LossTrial]:
        """Find out whether losses are what they say they are.

        Layers that couple rows in training alone are run as in evaluation, and
        what shows nothing is run on more rows.

        Returns:
            One per loss in their order; an empty one where nobody can tell.
        """
        if self._hooks.has_window_loss:
            return []
        found: list[LossTrial] = []
        tries = itertools.product((groups_of, large_groups_of), (True, False))
        for make_groups, training in tries:
            groups = make_groups(window)
            if groups is None:
                return []
            trials = self._judge_losses(groups, training)
            if not found:
                found = trials
            elif [t.origin for t in trials] == [t.origin for t in found]:
                # What layers draw in training no longer hides what it is.
                found = [
                    settled
                    if trial.verdict in VAGUE and settled.verdict != "unknown"
                    else trial
                    for trial, settled in zip(found, trials, strict=True)
                ]
            if found and all(trial.verdict not in VAGUE for trial in found):
                break
        return found

    def _judge_losses(
        self, groups: Sequence[Batch], training: bool
    ) -> list[LossTrial]:
        for runner in self._runners(groups, training):
            # What a trial cannot run is no error of the user's.
            with contextlib.suppress(Exception):
                changed = runner.change(groups)
                if runner.coupling_layers(changed):
                    return []
                return runner.judge_losses(changed)
        return []

    def _runners(
        self, groups: Sequence[Batch], training: bool
    ) -> "Iterator[_Runner]":
        """Make runners that look at ever fewer layers.

        What a layer computes inside a transformation of the backend (a loop,
        a recomputation) may not be carried out of it.
        """
        model = self._model
        above = [*getattr(model, "layers", ()), model]
        for operations in (flatten_operations(model), above, [model]):
            rows = size_of(groups[0])
            yield _Runner(self, operations, rows=rows, training=training)


class _Runner:
    """Runs rows, and looks at what some layers make of them."""

    def __init__(
        self,
        trials: Trials,
        operations: list[Any],
        *,
        rows: int,
        training: bool,
    ):
        self._operations = operations
        self._rows = rows
        parts = replace(trials.parts, training=training)
        self._hooks = parts.hooks
        self._state = parts.state
        self._variables = trials.all_variables
        self._backend = trials.backend
        self._passes = Passes(parts)
        self._trials = trials
        self._compiled: dict[tuple[str, int], Callable[..., Nest]] = {}
        self._traced: dict[int, _Traced] = {}

    def change(self, groups: Sequence[Batch]) -> Sequence[Batch]:
        """Let `on_micro_batch` change four groups of rows, all at once."""
        if not self._hooks.overrides("on_micro_batch"):
            return groups
        changed = self._call(self._change, groups)
        size = self._rows
        return [
            map_leaves(lambda leaf, i=i: leaf[i : i + size], changed)
            for i in range(0, 4 * size, size)
        ]

    def hook_couples(self, groups: Sequence[Batch]) -> bool:
        """Whether rows of A become others beside D than beside B."""
        a, b, c, d = groups
        one, again, other = (
            self._call(self._change, rows) for rows in ((a, b), (a, b), (a, d))
        )
        size = self._rows
        leaves = [numbers_of(batch, size) for batch in (one, again, other)]
        pairs = list(zip(*leaves, strict=True))
        is_settled = all(_is_same(x, y) for x, y, _ in pairs)
        return is_settled and not all(_is_same(x, y) for x, _, y in pairs)

    def coupling_layers(self, groups: Sequence[Batch]) -> list[Layer]:
        """List the first layer whose rows of A are others beside D."""
        a, b, c, d = groups
        one, again, other = (
            self._measure(rows) for rows in ((a, b), (a, b), (a, d))
        )
        self._measure([a])
        size = self._rows
        alone, beside = self._traced[1], self._traced[2]
        layers = beside.layers
        if alone.layers != layers:
            return []
        # The experts of a layer may be as many as the rows of a batch, but
        # hardly of a batch of another size too.
        is_batch = map(operator.and_, alone.has_rows, beside.has_rows)
        for layer, has_rows, x, y, z in zip(
            layers, is_batch, one.rows, again.rows, other.rows, strict=True
        ):
            if not has_rows:
                continue
            if not _is_same(x, y):  # it draws what nobody can draw again
                return []
            if not _is_same(x[:size], z[:size]):
                return [layer]
        return []

    def judge_losses(self, groups: Sequence[Batch]) -> list[LossTrial]:
        """Judge every loss, list of `LossTrial`.

        By the model as it is, and once more by one of other weights: of a
        router, for example, that sends all examples one way by chance.
        """
        self._look_up_variables()
        here, elsewhere = self._values(groups, 0.0), self._values(groups, 1.0)
        again = self._measure([groups[0], groups[1]])
        traced = self._traced[2]
        origins = traced.origins
        if not np.allclose(again.means, here[0, 1].means, rtol=1e-6, atol=0):
            return [LossTrial(verdict="unknown", origin=o) for o in origins]
        kind = "float32"
        if traced.draws:
            kind = "random"
        elif _is_half(self._hooks.model):
            kind = "half"
        trials = [
            judge_loss(_at(here, i), _at(elsewhere, i), is_sum, kind)
            for i, is_sum in enumerate(traced.is_sum)
        ]
        if are_alike(groups):  # what depends on data does not show it
            trials = [
                replace(trial, verdict="unknown")
                if trial.verdict == "constant"
                else trial
                for trial in trials
            ]
        return [
            replace(trial, origin=origin, rows=self._rows)
            for trial, origin in zip(trials, origins, strict=True)
        ]

    def _look_up_variables(self) -> None:
        """Let what has been traced read all variables as such."""
        variables = self._trials.all_variables
        if len(variables) > len(self._variables):
            self._variables = variables
            self._compiled.clear()

    def _values(
        self, groups: Sequence[Batch], otherness: float
    ) -> dict[tuple[int, ...], _Run]:
        """Run single groups and pairs, dict from their places to `_Run`."""
        places = [(0,), (1,), (2,), *itertools.chain(*QUADRUPLES)]
        return {
            place: self._measure([groups[i] for i in place], otherness)
            for place in dict.fromkeys(places)
        }

    def _measure(self, groups: Sequence[Batch], otherness: float = 0.0) -> _Run:
        result = self._call(self._run, groups, np.asarray(otherness, "float32"))
        return _Run(
            means=np.asarray(result["means"], "float64"),
            denominators=np.asarray(result["denominators"], "float64"),
            rows=[np.asarray(rows, "float64") for rows in result["rows"]],
        )

    def _call(
        self,
        function: Callable[..., Any],
        groups: Sequence[Batch],
        *arguments: Any,
    ) -> Any:
        """Compile a function, call it; return its result on the host."""
        key = function.__name__, len(groups)  # each knows of one shape alone
        if key not in self._compiled:
            self._compiled[key] = self._backend.compile(
                function, self._trials, jit_compile=self._trials.jit_compile
            )
        try:
            return tree.map_structure(
                lambda leaf: None if leaf is None else to_host(leaf),
                self._compiled[key](join(groups), *arguments),
            )
        finally:
            self._backend.write_back()

    # What is traced.

    def _prepare(self) -> Info:
        if any(map(self._hooks.overrides, ("on_micro_batch", "compute_loss"))):
            self._state.fold_in(ops.zeros((), "int32"))
        share = Share.whole(ops.ones((), "int32"))
        return self._passes.info(ops.zeros((), "int32"), share)

    def _change(self, batch: Batch) -> Batch:
        with Scratch(self._variables):
            info = self._prepare()
            with collect_logs(self._hooks):
                batch = self._hooks.on_micro_batch(batch, info)
        return batch

    def _move(self, otherness: Tensor) -> None:
        """Make another model of it where `otherness`, a scalar, is 1.

        What is zero gets another number, also where it is not trained: a
        penalty by which nothing is multiplied yet, for example.
        """
        trained = set(map(id, self._hooks.model.trainable_variables))
        for variable in self._variables:
            value = variable.value
            if id(variable) in trained:
                variable.assign(_moved(value, otherness))
            elif "float" in str(value.dtype) and not is_random_state(variable):
                variable.assign(_filled(value, otherness))

    def _run(self, batch: Batch, otherness: Tensor) -> dict[str, Any]:
        """Measure rows; by other weights where `otherness`, a scalar, is 1."""
        hooks = self._hooks
        layers: list[Any] = []
        has_rows: list[bool] = []
        rows: list[Tensor] = []
        size = size_of(batch)

        def observe(operation: Any, tensor: Tensor) -> None:
            layers.append(operation)
            has_rows.append(_has_rows(tensor, size))
            rows.append(_digest(tensor) if has_rows[-1] else ops.zeros([0, 3]))

        with Scratch(self._variables) as scope:
            self._move(otherness)
            info = self._prepare()
            random = [v for v in self._variables if is_random_state(v)]
            before = [v.value for v in random]
            with (
                collect_logs(hooks),
                recording(self._operations, observe),
                self._passes.layers_in_window(info.index),
            ):
                measured = self._passes.objective.measure(batch, info)
            draws = any(
                v.value is not value
                for v, value in zip(random, before, strict=True)
            ) or any(map(is_random_state, scope.others_written.values()))
        self._trials.captured = list(scope.others_read.values())
        losses = measured.losses
        self._traced[size // self._rows] = _Traced(
            origins=[loss.origin for loss in losses],
            is_sum=[sort_of(loss) == "sum" for loss in losses],
            layers=layers,
            has_rows=has_rows,
            draws=draws,
        )
        return {
            "means": measured.means(),
            "denominators": measured.denominators(),
            "rows": rows,
        }


def _at(runs: dict[tuple[int, ...], _Run], index: int) -> LossValues:
    """Take the values of one loss out of runs."""
    return LossValues(
        means={k: float(run.means[index]) for k, run in runs.items()},
        totals={k: float(run.totals[index]) for k, run in runs.items()},
        counts={k: float(run.denominators[index]) for k, run in runs.items()},
    )


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether rows are the same, whatever is no number left out."""
    largest = np.abs(np.nan_to_num(one)).max(initial=0.0)
    gap = np.abs(np.nan_to_num(one - other)).max(initial=0.0)
    return gap <= SAME_ROW * largest


def _is_half(model: Model) -> bool:
    return any(
        layer.compute_dtype in ("float16", "bfloat16")
        for layer in flatten_layers(model)
    )


def _has_rows(tensor: Tensor, size: int) -> bool:
    """Whether a tensor is of floats, one row for each sample."""
    if "float" not in str(tensor.dtype) or len(tensor.shape) == 0:
        return False
    return tensor.shape[0] == size and all(tensor.shape)


def _moved(value: Tensor, otherness: Tensor) -> Tensor:
    """Move weights far away, or leave them as they are where that is 0."""
    factor = 1.0 + otherness * (_signs(value) - 1.0)
    moved = value * ops.cast(factor, value.dtype)
    return _filled(moved, otherness * _signs(value))


def _filled(value: Tensor, numbers: Tensor) -> Tensor:
    """Put small numbers where there are zeros, tenths of those given."""
    small = ops.broadcast_to(ops.cast(0.1 * numbers, value.dtype), value.shape)
    return ops.where(value == 0, small, value)


def _signs(value: Tensor) -> Tensor:
    """Give numbers from -1 to 1, one for each of a tensor's, float32."""
    size = int(np.prod(value.shape))
    signs = ops.cos(ops.arange(size, dtype="float32") * 1.7)
    return ops.reshape(signs, value.shape)


def _digest(tensor: Tensor) -> Tensor:
    """Tell three numbers of every row, tensor `[m, 3]`, float32."""
    rows = ops.reshape(ops.cast(tensor, "float32"), [tensor.shape[0], -1])
    return ops.stack(
        [
            ops.mean(rows, axis=1),
            ops.mean(ops.abs(rows), axis=1),
            ops.max(rows, axis=1),
        ],
        axis=1,
    )
