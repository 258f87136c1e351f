"""The variables that training moves beside those of model and optimizer."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from accumtrainer.config import LossScale
from accumtrainer.keras_api import keras, ops
from accumtrainer.keras_api.types import Tensor, Variable
from accumtrainer.window.loss_scale import restored_scale
from accumtrainer.window.numbers import Sums

EXTREMES = {
    "max": (ops.maximum, -np.inf, ops.max),
    "min": (ops.minimum, np.inf, ops.min),
}
"""How logged values merge, where they begin, and how many of them merge."""


MICRO_BATCH_DISTANCE = 0x61C88647
"""How far the seeds of neighbouring micro-batches are from each other.

On PyTorch Keras adds the seed and how often it was drawn from, so that of
seeds in a row each would repeat what the one before it drew second. For the
same reason this and the distances below are such that no few of some and few
of others come near each other, or near a multiple of 2**32.
"""

EXAMPLE_DISTANCE = 0x6C078965
"""How far the seeds of neighbouring examples are that run at once."""

REPLICA_DISTANCE = 0x780F8225
"""How far the seeds of neighbouring replicas are from each other."""

PERTURB_DISTANCE = 0x2545F491
"""How far what `perturb` draws from is from a micro-batch's stream."""


class Scratch(keras.StatelessScope):
    """A scope in which nothing that is written to a variable survives.

    Args:
        variables: list of Keras variables that may be read or written.

    Attributes:
        others_read: dict of further variables that were read, by their id.
        others_written: dict of further variables that were written.
    """

    def __init__(self, variables: Iterable[Variable]):
        self._before = {id(v): v.value for v in variables}
        self.others_read: dict[int, Variable] = {}
        self.others_written: dict[int, Variable] = {}
        super().__init__([(v, v.value) for v in variables], collect_losses=True)
        self._before = {
            id(v): super(Scratch, self).get_current_value(v) for v in variables
        }

    def get_current_value(self, variable: Variable) -> Tensor:
        """Return the value a variable has inside this scope, if it has one."""
        if id(variable) not in self._before:
            self.others_read[id(variable)] = variable
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        return value

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        """Note a new value of a variable, a pair of both."""
        if id(update[0]) not in self._before:
            self.others_written[id(update[0])] = update[0]
        super().add_update(update)

    def has_written(self, variable: Variable) -> bool:
        """Whether a variable was assigned inside this scope."""
        if id(variable) not in self._before:
            return id(variable) in self.others_written
        value = self.get_current_value(variable)
        return value is not self._before[id(variable)]


def shifted_seed(variable: Variable, number: Tensor, distance: int) -> Tensor:
    """Choose another stream for a random state, one for each number.

    Args:
        variable: of a `keras.random.SeedGenerator`.
        number: scalar, int32; 0 keeps the stream.
        distance: by how much the seeds of neighbouring numbers differ.
    """
    seed, *rest = ops.unstack(variable.value, 2)
    kind = variable.dtype
    distance = ops.convert_to_tensor(_as_seeds(distance, kind))
    seed = seed + ops.cast(number, kind) * distance
    return ops.stack([seed, *rest])


def _as_seeds(numbers: Any, dtype: str) -> np.ndarray:
    """Make 32 bits of each number, which Keras keeps signed on PyTorch."""
    return np.asarray(numbers, "uint32").astype(dtype)


class TrainingState:
    """Counters, loss scale and random state of a Trainer, as variables.

    Args:
        seed: int from which the random stream is derived.
        loss_scale: the loss scale to begin with.
    """

    def __init__(self, *, seed: int, loss_scale: float):
        self.updates = _counter("updates")
        self.skipped_updates = _counter("skipped_updates")
        self.consecutive_skips = _counter("consecutive_skips")
        self.good_windows = _counter("good_windows")
        self.micro_batches = _counter("micro_batches")
        self.epoch = _counter("epoch")
        self.loss_scale = _variable("loss_scale", loss_scale)
        stream = np.random.SeedSequence(seed).generate_state(1)[0]
        self.rng = keras.random.SeedGenerator(0)
        kind = self.rng.state.dtype
        # Keras's generators hold 32 bits; a longer seed is condensed.
        first = seed if seed < 2**32 else stream
        self.rng.state.assign(_as_seeds([first, 0], kind))
        self.stream = keras.Variable(
            # An array needs no program of its own to become a tensor.
            _as_seeds(stream, kind),
            dtype=kind,
            trainable=False,
            name="stream",
        )

    @property
    def counters(self) -> dict[str, Variable]:
        """Every counter by name."""
        return {
            "updates": self.updates,
            "skipped_updates": self.skipped_updates,
            "consecutive_skips": self.consecutive_skips,
            "good_windows": self.good_windows,
            "micro_batches": self.micro_batches,
            "epoch": self.epoch,
        }

    @property
    def variables(self) -> list[Variable]:
        """Every variable, in a fixed order."""
        return [
            *self.counters.values(),
            self.loss_scale,
            self.stream,
            self.rng.state,
        ]

    def settle_loss_scale(
        self, options: LossScale | None, *, was_scaled: bool
    ) -> None:
        """Move a loss scale that was put back to where options have it.

        Args:
            options: `LossScale`, or `None` where the loss is not scaled.
            was_scaled: whether it was scaled when the scale was saved.
        """
        scale = float(ops.convert_to_numpy(self.loss_scale))
        scale = restored_scale(scale, options, was_scaled=was_scaled)
        self.loss_scale.assign(scale)
        if options is None or not was_scaled:
            self.good_windows.assign(0)

    def fold_in(self, index: Tensor) -> None:
        """Point the random stream at one micro-batch of this window.

        Each micro-batch draws from a stream of its own, so that a pass over
        the window can be replayed from any place.

        Args:
            index: scalar, int32, index of the micro-batch.
        """
        kind = self.rng.state.dtype
        number = ops.cast(self.micro_batches.value + index, kind)
        distance = ops.convert_to_tensor(_as_seeds(MICRO_BATCH_DISTANCE, kind))
        seed = self.stream.value + number * distance
        self.rng.state.assign(ops.stack([seed, ops.zeros((), dtype=kind)]))


class RunningSums:
    """Running sums of losses and logged values, over a window or an epoch.

    Args:
        losses: how many losses a micro-batch has.
        reductions: dict from log name to `"mean"`, `"sum"`, `"max"` or
            `"min"`.
        name: prefix of the variables' names.
    """

    def __init__(self, *, losses: int, reductions: dict[str, str], name: str):
        self._losses = losses
        self._reductions = dict(reductions)
        self._no_sums = np.zeros(Sums.size(losses), "float32")
        self._sums = _variable(f"{name}_sums", self._no_sums)
        self._logs = {
            key: _variable(f"{name}_{key}", _empty_log(reduce))
            for key, reduce in self._reductions.items()
        }

    @property
    def variables(self) -> list[Variable]:
        """Every variable, in a fixed order."""
        return [self._sums, *self._logs.values()]

    @property
    def merging_rules(self) -> list[tuple[Variable, str]]:
        """How the sums of several replicas become one; see `Merger`."""
        extremes = {
            key: reduce if reduce in EXTREMES else "sum"
            for key, reduce in self._reductions.items()
        }
        return [
            (self._sums, "sum"),
            *((v, extremes[key]) for key, v in self._logs.items()),
        ]

    def add(self, sums: Sums) -> None:
        """Add to the sums."""
        self._sums.assign(self._sums.value + sums.pack())

    def add_logs(self, entries: dict[str, tuple]) -> None:
        """Merge logged values, `{name: (value, weight)}`."""
        for name, (value, weight) in entries.items():
            variable = self._logs[name]
            reduce = self._reductions[name]
            if reduce in EXTREMES:
                merged = EXTREMES[reduce][0](
                    variable.value, ops.stack([value, weight])
                )
            else:
                amount = value * weight if reduce == "mean" else value
                merged = variable.value + ops.stack([amount, weight])
            variable.assign(merged)

    def merged(self, entries: dict[str, tuple]) -> dict[str, tuple]:
        """Merge values `[m]` that were logged at once to one of each name."""
        merged = {}
        for name, (values, weights) in entries.items():
            reduce = self._reductions[name]
            if reduce in EXTREMES:
                merge = EXTREMES[reduce][2]
                merged[name] = (merge(values), merge(weights))
                continue
            weight, value = ops.sum(weights), ops.sum(values)
            if reduce == "mean":
                value = ops.divide_no_nan(ops.sum(values * weights), weight)
            merged[name] = value, weight
        return merged

    def logs(self) -> dict[str, tuple]:
        """Reduce the logged values, `{name: (value, weight)}`."""
        return {
            name: _reduced(variable.value, self._reductions[name])
            for name, variable in self._logs.items()
        }

    def values(self, others: Iterable["RunningSums"] = ()) -> dict[str, Tensor]:
        """Reduce the logged values, and those of others, `{name: value}`."""
        pairs: dict[str, Tensor] = {}
        reductions: dict[str, str] = {}
        for sums in (self, *others):
            for name, variable in sums._logs.items():
                pair = variable.value
                reduce = reductions.setdefault(name, sums._reductions[name])
                if name in pairs:
                    merge = (
                        EXTREMES[reduce][0] if reduce in EXTREMES else ops.add
                    )
                    pair = merge(pairs[name], pair)
                pairs[name] = pair
        return {
            name: _reduced(pair, reductions[name])[0]
            for name, pair in pairs.items()
        }

    def read(self) -> Sums:
        """Return the sums, as `add` takes them."""
        return Sums.unpack(self._sums.value, self._losses)

    def clear(self) -> None:
        """Put every sum back to its beginning."""
        # Arrays of the host: on JAX every operation outside of a program is
        # compiled before the first update.
        self._sums.assign(self._no_sums)
        for name, variable in self._logs.items():
            variable.assign(_empty_log(self._reductions[name]))


def _reduced(pair: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """Return the value of what was merged, and its weight."""
    value, weight = pair[0], pair[1]
    if reduce == "mean":
        value = ops.divide_no_nan(value, weight)
    return value, weight


def _empty_log(reduce: str) -> np.ndarray:
    start = EXTREMES[reduce][1] if reduce in EXTREMES else 0.0
    return np.array([start, start if reduce in EXTREMES else 0.0], "float32")


def _variable(name: str, value: Any) -> Variable:
    # Of a copy, because PyTorch shares the memory of an array.
    return keras.Variable(
        np.array(value), dtype="float32", trainable=False, name=name
    )


def _counter(name: str) -> Variable:
    return keras.Variable(0, dtype="int32", trainable=False, name=name)
