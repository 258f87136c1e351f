"""What a window keeps in variables: sums, and what it may have to put back."""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from accumtrainer.keras_api import keras, ops
from accumtrainer.keras_api.types import Tensor, Variable
from accumtrainer.window.backend import dtype_of_sum
from accumtrainer.window.gradients import Gradients
from accumtrainer.window.objective import (
    is_random_state,
    metric_variables,
    unique,
)
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.state import RunningSums
from accumtrainer.window.survey import Survey


class WindowVariables:
    """The variables that a window moves, in the model and beside it.

    Args:
        parts: whose windows they are.
        gradients: what is done with lists of gradients.
        survey: of a first micro-batch.
        runs_twice: whether windows may be run through twice.
        before: those of a program that this one takes the place of, amid an
            epoch whose sums go on.

    Attributes:
        survey: of micro-batches like those to come.
        window: sums of a window of them.
        epoch: sums of the epoch's windows, those that were skipped aside.
        captured: variables that hooks read and nobody moves.
        accumulators: variables to which gradients are added from one call to
            the next; see `make_accumulators`.
        weights_before: variables with what `move_weights` returns, from one
            call to the next; see `make_weights_before`.
        streams: random states that are drawn from and belong to nobody.
        start: variables with the values that a window began with.
        moved: variables that micro-batches give new values.
    """

    def __init__(
        self,
        parts: WindowParts,
        gradients: Gradients,
        survey: Survey,
        *,
        runs_twice: bool,
        before: "WindowVariables | None" = None,
    ):
        self._parts = parts
        self._model = parts.model
        self._optimizer = parts.hooks.optimizer
        self._state = parts.state
        self._backend = parts.backend
        self._of_loss = parts.hooks.variables_of_loss
        self._gradients = gradients
        self._runs_twice = runs_twice
        self.accumulators: list[Variable] = []
        self.weights_before: list[Variable] = []
        self._running_sums: dict[Any, list[RunningSums]] = {}
        self._surveys: dict[Any, Survey] = {}
        self.kinds_of_epoch: tuple[Hashable, ...] = ()
        if before is not None:
            self._running_sums = before._running_sums
            self._surveys = before._surveys
            self.kinds_of_epoch = before.kinds_of_epoch
        self.captured: list[Variable] = []
        self.streams: list[Variable] = []
        self.moved: list[Variable] = []
        self._moved_by_perturb: list[Variable] = []
        self._kept: list[Variable] = []
        self.start: list[Variable] = []
        beside = parts.backend.variables_beside(parts.model)
        self._keep(
            self._put_back([*parts.tracked, *beside], draws_again=runs_twice)
        )
        self.expect(survey)
        self.follow(survey)

    # What it learns.

    def expect(self, survey: Survey) -> None:
        """Get ready for micro-batches like one that was surveyed.

        Raises:
            ValueError: it writes to what is no part of the training.
        """
        known = [
            *self._parts.variables,
            *self._optimizer.variables,
            *self._of_loss,
        ]
        captured = unique([*self.captured, *survey.find_captured(known)])
        # Current first, while the programs know no others.
        self._backend.write_back()
        self.captured = captured
        streams = survey.find_streams(known)
        self.streams = unique([*self.streams, *streams])
        self.moved = unique([*self.moved, *survey.moved, *streams])
        self._moved_by_perturb = unique(
            [*self._moved_by_perturb, *survey.moved_by_perturb]
        )
        draws_again = (
            self._runs_twice
            or self._parts.per_example
            or survey.may_need_totals
        )
        written = [*survey.written, *streams]
        self._keep(self._put_back(written, draws_again=draws_again))

    def follow(self, survey: Survey) -> None:
        """Turn to micro-batches like those of a survey that was expected."""
        if survey.signature not in self._running_sums:
            self._backend.write_back()
            pair = [
                RunningSums(
                    name=name,
                    losses=len(survey.losses),
                    reductions=survey.reductions,
                )
                for name in ("window", "epoch")
            ]
            for sums in pair:
                sums.clear()
            self._running_sums[survey.signature] = pair
        self._surveys[survey.signature] = survey
        self.window, self.epoch = self._running_sums[survey.signature]
        self.survey = survey

    @property
    def other_epochs(self) -> list[tuple[Survey, RunningSums]]:
        """`Survey`s and `RunningSums` of windows with losses unlike these."""
        return [
            (self._surveys[signature], epoch)
            for signature, (_, epoch) in self._running_sums.items()
            if epoch is not self.epoch and signature in self.kinds_of_epoch
        ]

    def note_kind(self) -> None:
        """Note, before each window, that the epoch has losses like these."""
        if self.survey.signature not in self.kinds_of_epoch:
            self.kinds_of_epoch += (self.survey.signature,)

    @property
    def revision(self) -> int:
        """How much `expect` has found, a number that only grows.

        What was compiled for less keeps less, and must not run any more.
        """
        parts = (
            self.captured,
            self.moved,
            self._moved_by_perturb,
            self.start,
            self._running_sums,
        )
        return sum(map(len, parts))

    def _put_back(
        self, variables: Iterable[Variable], *, draws_again: bool
    ) -> Iterator[Variable]:
        """Leave random states out, unless the same numbers are drawn again."""
        return (v for v in variables if draws_again or not is_random_state(v))

    def _keep(self, variables: Iterable[Variable]) -> None:
        """Make room for the values that variables have before a window."""
        self._kept = unique([*self._kept, *variables])
        self.start += [
            _copy_of(v, f"start_{position}")
            for position, v in enumerate(self._kept)
            if position >= len(self.start)
        ]

    # What there is.

    @property
    def parts(self) -> dict[str, list[Variable]]:
        """What lasts from one window to the next, by part; see `PARTS`."""
        kinds = self.kinds_of_epoch or (self.survey.signature,)
        epochs = [self._running_sums[kind][1] for kind in kinds]
        return {
            "model": [
                *self._model.trainable_variables,
                *self._parts.non_trainable_variables,
            ],
            "optimizer": list(self._optimizer.variables),
            "state": self._state.variables,
            "tracked": list(self._parts.tracked),
            "streams": self.streams,
            "metrics": metric_variables(self._model),
            "means": [v for epoch in epochs for v in epoch.variables],
        }

    @property
    def seen_outside(self) -> list[Variable]:
        """What others than windows know, and may look at or assign to."""
        parts = self.parts | {"state": [], "means": []}
        known = (v for part in parts.values() for v in part)
        return unique([*known, *self.captured])

    @property
    def passing(self) -> list[Variable]:
        """What is empty between windows, or written when one begins.

        The accumulators come last, since they may be made last.
        """
        windows = [
            v for w, _ in self._running_sums.values() for v in w.variables
        ]
        last = [*self.accumulators, *self.weights_before]
        return [*windows, *self.start, *last]

    @property
    def all_variables(self) -> list[Variable]:
        """Every variable a window reads or changes, each once."""
        # In one order, of whichever kind the micro-batches are.
        parts = self.parts | {"means": []}
        lasting = (v for part in parts.values() for v in part)
        epochs = [
            v for _, e in self._running_sums.values() for v in e.variables
        ]
        return unique([*lasting, *epochs, *self.captured, *self.passing])

    @property
    def moved_by_passes(self) -> list[Variable]:
        """What micro-batches change before the window is applied."""
        return [
            *self._parts.non_trainable_variables,
            *metric_variables(self._model),
            *self._parts.tracked,
            *self.streams,
            *self._state.variables,
        ]

    @property
    def read_by_passes(self) -> list[Variable]:
        """What micro-batches may read; of the optimizer, its numbers."""
        numbers = [v for v in self._optimizer.variables if not v.shape]
        known = self._parts.variables
        return [*known, *self._of_loss, *self.captured, *numbers]

    # Sums of gradients that last from one call to the next.

    def make_accumulators(self) -> None:
        """Make what gradients are added to from one call to the next.

        Windows that run in one call need no such memory.
        """
        if len(self.accumulators) == len(self._model.trainable_variables):
            return
        self._backend.write_back()
        self.accumulators = [
            keras.Variable(
                _filled_with(self._gradients.least(position)),
                shape=v.shape,
                dtype=dtype_of_sum(v),
                trainable=False,
                name=f"accumulator_{position}",
            )
            for position, v in enumerate(self._model.trainable_variables)
        ]

    def make_weights_before(self) -> None:
        """Make what keeps the weights while a window runs beside them."""
        kept = [*self._model.trainable_variables, *self._moved_by_perturb]
        if len(self.weights_before) == len(kept):
            return
        self._backend.write_back()
        self.weights_before = [
            _copy_of(v, f"weight_before_{position}")
            for position, v in enumerate(kept)
        ]

    def move_weights(self, moves: list[Tensor | None]) -> list[Tensor]:
        """Add to the weights, and return what they were.

        A window that begins anew after that keeps another start, so the start
        of what `perturb` has assigned to is returned too.

        Args:
            moves: list of tensors, like the trainable variables.
        """
        variables, starts = self._model.trainable_variables, self._starts()
        before = [*map(ops.copy, self._backend.replicas.read(variables))]
        for position, (variable, value, move) in enumerate(
            zip(variables, before, moves, strict=True)
        ):
            if position in self._gradients.overwritten:
                continue
            moved = ops.add(value, ops.cast(move, variable.dtype))
            self._backend.replicas.write(variable, moved)
            if id(variable) in starts:
                starts[id(variable)].assign(moved)
        assigned = [starts[id(v)].value for v in self._moved_by_perturb]
        return [*before, *map(ops.copy, assigned)]

    def move_weights_back(self, before: list[Tensor]) -> None:
        """Undo `move_weights`.

        What layers themselves have done to weights meanwhile stays, unless
        the window is skipped.

        Args:
            before: what `move_weights` returned.
        """
        variables, starts = self._model.trainable_variables, self._starts()
        now = self._backend.replicas.read(variables)
        weights, others = before[: len(variables)], before[len(variables) :]
        for variable, old in zip(self._moved_by_perturb, others, strict=True):
            starts[id(variable)].assign(old)
        for variable, value, old in zip(variables, now, weights, strict=True):
            start = starts.get(id(variable))
            if start is None:
                self._backend.replicas.write(variable, old)
                continue
            returned = value - (start.value - old)
            self._backend.replicas.write(variable, returned)
            start.assign(old)

    def _starts(self) -> dict[int, Variable]:
        """Return what keeps a variable's start, by the variable's id."""
        pairs = zip(self._kept, self.start, strict=True)
        return {id(variable): start for variable, start in pairs}

    def accumulate(self, gradients: list[Tensor | None]) -> None:
        """Add gradients to the accumulators, `None` standing for nothing."""
        for position, (total, gradient) in enumerate(
            zip(self.accumulators, gradients, strict=True)
        ):
            if gradient is None:
                continue
            if position in self._gradients.overwritten:
                total.assign(ops.maximum(total.value, gradient))
            else:
                self._backend.add_to(total, gradient)

    @property
    def accumulated(self) -> list[Tensor]:
        """The sums of gradients, float32."""
        return [accumulator.value for accumulator in self.accumulators]

    @contextlib.contextmanager
    def begun_empty(self) -> Iterator[None]:
        """Make a scope in which the sums of losses begin at nothing.

        Between windows they are empty, but a compiler cannot know it. It does
        if they are emptied first, and put back to what they were last: nobody
        needs these variables then.
        """
        before = self._backend.replicas.read(self.window.variables)
        self.window.clear()
        yield
        for variable, value in zip(self.window.variables, before, strict=True):
            variable.assign(value)

    def clear_sums(self) -> None:
        """Begin with sums of no micro-batches, of losses and of gradients."""
        self.window.clear()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Begin with sums of no gradients."""
        for position, accumulator in enumerate(self.accumulators):
            least = self._gradients.least(position)
            value = accumulator.value
            fill = _filled_with(least)
            accumulator.assign(fill(value.shape, value.dtype))

    # The beginnings of epochs and windows.

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch's running means, and forget a broken-off window."""
        self._state.epoch.assign(epoch)
        self.kinds_of_epoch = ()
        for pair in self._running_sums.values():
            for sums in pair:
                sums.clear()
        self.clear_sums()
        self._model.reset_metrics()

    def keep_start(self, is_first: Tensor | None = None) -> None:
        """Remember what may have to be put back.

        Args:
            is_first: scalar, bool, whether the window begins here; without
                it, it does.
        """
        values = self._backend.replicas.read(self._kept)
        for value, start in zip(values, self.start, strict=True):
            if is_first is not None:
                value = ops.where(is_first, value, start.value)
            start.assign(value)

    def keep_random_states(self, is_first: Tensor) -> None:
        """Remember where random states are before a window, to draw again.

        Args:
            is_first: scalar, bool, whether the window begins here.
        """
        for variable, start in zip(self._kept, self.start, strict=True):
            if is_random_state(variable):
                value = ops.where(is_first, variable.value, start.value)
                start.assign(value)

    def draw_again(self, is_first: Tensor) -> None:
        """Begin with the random numbers of the window once more.

        Args:
            is_first: as above.
        """
        for variable, start in zip(self._kept, self.start, strict=True):
            if is_random_state(variable):
                value = ops.where(is_first, start.value, variable.value)
                variable.assign(value)

    def put_back(self, *, after_perturb: bool = False) -> None:
        """Put everything back as the window's start has found it.

        Args:
            after_perturb: whether to leave what that hook has assigned.
        """
        left = set(map(id, self._moved_by_perturb)) if after_perturb else ()
        for variable, start in zip(self._kept, self.start, strict=True):
            if id(variable) not in left:
                self._backend.replicas.write(variable, start.value)

    def undo(self) -> None:
        """Put back what a skipped window changed; what is random stays."""
        for variable, start in zip(self._kept, self.start, strict=True):
            if not is_random_state(variable):
                self._backend.replicas.write(variable, start.value)


def _copy_of(variable: Variable, name: str) -> Variable:
    """Make another variable with the value that one has."""
    return keras.Variable(
        ops.copy(variable), dtype=variable.dtype, trainable=False, name=name
    )


def _filled_with(value: float) -> Callable[..., Tensor]:
    if not value:
        return ops.zeros  # for which JAX compiles nothing
    return lambda shape, dtype: ops.full(shape, value, dtype)
