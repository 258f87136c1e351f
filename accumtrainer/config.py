"""Frozen option values: what an update is, how losses scale, how often."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from accumtrainer.checks import require_choice, require_count, require_number
from accumtrainer.plain_options import PlainOptions

TAILS = ("flush", "carry", "drop")
COMBINES = ("exact", "mean", "sum")
UNITS = ("updates", "epochs", "micro_batches", "samples", "seconds")


def updates_per_epoch(batches_per_epoch: int, steps: int, tail: str) -> int:
    """Count the updates of one epoch that starts with nothing carried over.

    Stands for:
        rounding `batches_per_epoch / steps` up for `tail="flush"`, down else.

    Args:
        batches_per_epoch: loader batches in the epoch, at least 0.
        steps: loader batches per update, at least 1.
        tail: `"flush"`, `"carry"` or `"drop"`. With `"carry"` a later epoch
            that starts with batches carried over can have one update more.

    Returns:
        Number of updates.

    Examples:
        >>> updates_per_epoch(10, 4, "flush"), updates_per_epoch(10, 4, "drop")
        (3, 2)
    """
    made, left = divmod(batches_per_epoch, steps)
    return made + 1 if left and tail == "flush" else made


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation(PlainOptions):
    """What makes an update: how many samples or loader batches, combined how.

    Give exactly one of `steps` and `micro_batch_size`.

    Args:
        steps: loader batches per update; every loader batch is one
            micro-batch. A whole number of at least 1, or a dict
            `{first_epoch: steps}` that contains epoch 0, or a function that
            gets the number of updates made and returns the steps of the next
            window; it may be asked twice for the same one.
        micro_batch_size: samples per micro-batch; every loader batch is one
            update, sliced into micro-batches of that many samples. `"auto"`
            takes the most that fit into memory, of sizes which are about
            halves of each other and, where they can, divide the loader batch
            evenly; see `Trainer.memory_plan`.
        memory_limit_bytes: most memory of a device that `"auto"` may plan
            for, all in all; default nine tenths of what JAX or PyTorch may
            use of a GPU. A CPU and TensorFlow do not tell, so there it must
            be given.
        tail: what happens to the batches left over when an epoch ends inside
            a window, with `steps` alone: `"flush"` makes a smaller update,
            `"carry"` keeps them for the next epoch, or for a last update
            where training ends; `"drop"` forgets them.
        combine: `"exact"` gives the gradient of the whole window as one
            batch; `"mean"` the plain mean of micro-batch gradients; `"sum"`
            their sum.
        per_example: whether each example of a micro-batch is run as a
            micro-batch of one, all of them at once. The hooks `on_micro_batch`
            and `on_accumulate` then get one example and its gradients,
            `info.loss` and `info.weight` are its own, and `combine` combines
            examples. What a callback is told of a micro-batch is that of all
            its examples together. A micro-batch takes the memory of as many
            gradients as it has examples.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that is not allowed, or both or
            neither of `steps` and `micro_batch_size` were given.

    Examples:
        >>> Accumulation(steps=4, tail="drop").steps_at(epoch=0, updates=0)
        4
    """

    steps: int | Mapping[int, int] | Callable[[int], int] | None = None
    micro_batch_size: int | Literal["auto"] | None = None
    memory_limit_bytes: int | None = None
    tail: Literal["flush", "carry", "drop"] = "flush"
    combine: Literal["exact", "mean", "sum"] = "exact"
    per_example: bool = False

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.micro_batch_size is None):
            raise ValueError(
                "Accumulation must get exactly one of steps and "
                f"micro_batch_size. Received: steps={self.steps!r}, "
                f"micro_batch_size={self.micro_batch_size!r}. Give steps=k to "
                "make an update of k loader batches, or micro_batch_size=m to "
                "slice every loader batch into micro-batches of m samples."
            )
        require_choice(
            "tail", self.tail, TAILS, "'flush' makes a smaller last update."
        )
        require_choice(
            "combine",
            self.combine,
            COMBINES,
            "'exact' gives the gradient of the window as one batch.",
        )
        if not isinstance(self.per_example, bool):
            raise TypeError(
                "per_example must be True or False. Received: "
                f"per_example={self.per_example!r}. Use True to run each "
                "example as a micro-batch of one."
            )
        self._check_memory_limit()
        if self.micro_batch_size is not None:
            self._check_micro_batch_size()
        elif isinstance(self.steps, Mapping):
            object.__setattr__(self, "steps", _checked_schedule(self.steps))
        elif not callable(self.steps):
            require_count(
                "steps",
                self.steps,
                "Use 1 to make an update of every loader batch.",
            )

    @classmethod
    def of(cls, value: "Accumulation | int") -> "Accumulation":
        """Make an `Accumulation` of what a user may write for one.

        Args:
            value: a whole number k, read as `Accumulation(steps=k)`, or an
                `Accumulation`, returned as it is.

        Raises:
            TypeError: the value is neither of them.
            ValueError: the number is smaller than 1.

        Examples:
            >>> Accumulation.of(4).steps
            4
        """
        if isinstance(value, cls):
            return value
        steps = require_count(
            "accumulation",
            value,
            "Use 1 to make an update of every loader batch, or an "
            "Accumulation(...) to say more.",
        )
        return cls(steps=steps)

    def steps_at(self, epoch: int, updates: int) -> int:
        """Say how many loader batches make the next window.

        Args:
            epoch: index of the epoch, from zero.
            updates: updates made before this window.

        Returns:
            Loader batches, at least 1. With `micro_batch_size` always 1.

        Raises:
            TypeError: the function given as `steps` returned no whole number.
            ValueError: the function given as `steps` returned less than 1.

        Examples:
            >>> Accumulation(steps={0: 1, 5: 8}).steps_at(epoch=6, updates=0)
            8
        """
        if self.micro_batch_size is not None:
            return 1
        if callable(self.steps):
            return require_count(
                f"steps({updates})",
                self.steps(updates),
                "The function given as steps must return the loader batches "
                "of the next update.",
            )
        if isinstance(self.steps, Mapping):
            return self.steps[
                max(first for first in self.steps if first <= epoch)
            ]
        assert self.steps is not None
        return int(self.steps)

    def updates(self, *, samples: int, batch_size: int, epochs: int = 1) -> int:
        """Count the updates of a training run, to build a schedule for it.

        Args:
            samples: samples in the data.
            batch_size: samples in one loader batch, whichever of `steps` and
                `micro_batch_size` is used.
            epochs: times through the data.

        Returns:
            Number of updates. Batches carried over the last epoch count as
            one more update, because the end of a run applies them.

        Raises:
            TypeError: an argument is no whole number.
            ValueError: an argument is smaller than 1.

        Examples:
            >>> Accumulation(steps=4).updates(samples=100, batch_size=10)
            3
        """
        remedy = "Give the size of the run the schedule is for."
        samples = require_count("samples", samples, remedy)
        batch_size = require_count("batch_size", batch_size, remedy)
        epochs = require_count("epochs", epochs, remedy)
        batches = math.ceil(samples / batch_size)
        made, carried = 0, 0
        for epoch in range(epochs):
            made, left = self._consume(carried + batches, epoch, made)
            if left and self.tail == "flush":
                made += 1
            carried = left if self.tail == "carry" else 0
        return made + 1 if carried else made

    def _consume(self, batches: int, epoch: int, made: int) -> tuple[int, int]:
        """Return the updates made after full windows, and batches left."""
        if not callable(self.steps):
            windows, left = divmod(batches, self.steps_at(epoch, made))
            return made + windows, left
        while batches:
            steps = self.steps_at(epoch, made)
            if batches < steps:
                break
            batches -= steps
            made += 1
        return made, batches

    def _check_micro_batch_size(self) -> None:
        if self.micro_batch_size != "auto":
            require_count(
                "micro_batch_size",
                self.micro_batch_size,
                "Give the number of samples in one forward and backward pass, "
                "or 'auto' for as many as fit into memory.",
            )
        if self.tail != "flush":
            raise ValueError(
                "tail must be left out together with micro_batch_size, where "
                "every loader batch is an update and none is left over. "
                f"Received: tail={self.tail!r}, "
                f"micro_batch_size={self.micro_batch_size!r}. Leave tail out, "
                "or give steps instead of micro_batch_size."
            )

    def _check_memory_limit(self) -> None:
        if self.memory_limit_bytes is None:
            return
        require_count(
            "memory_limit_bytes",
            self.memory_limit_bytes,
            "Write for example 4 * 2**30; on a GPU with JAX or PyTorch it may "
            "be left out.",
        )
        if self.micro_batch_size != "auto":
            raise ValueError(
                "memory_limit_bytes must come with micro_batch_size='auto', "
                "which alone heeds it. Received: "
                f"micro_batch_size={self.micro_batch_size!r}. Leave it out."
            )


def _checked_schedule(schedule: Mapping[int, int]) -> dict[int, int]:
    """Return a sorted copy of a dict `{first_epoch: steps}`, all checked."""
    if 0 not in schedule:
        raise ValueError(
            "steps must say what holds from epoch 0 when it is a dict "
            f"{{first_epoch: steps}}. Received: steps={dict(schedule)!r}. "
            "Add the key 0."
        )
    for epoch, steps in schedule.items():
        require_count(
            "first epoch in steps",
            epoch,
            "The keys of the dict are epochs, counted from zero.",
            minimum=0,
        )
        require_count(
            f"steps[{epoch}]",
            steps,
            "The values of the dict are loader batches per update.",
        )
    return dict(sorted(schedule.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale(PlainOptions):
    """How losses are scaled so that float16 gradients do not underflow.

    Args:
        initial: scale of the first window, between `minimum` and `maximum`.
        growth_interval: applied updates in a row after which the scale grows.
        factor: what the scale is multiplied by when it grows, and divided by
            after a window that was not finite; above 1.
        minimum: the scale never falls below this, above 0.
        maximum: the scale never grows beyond this.

    Raises:
        TypeError: an argument is no number.
        ValueError: an argument is not finite or out of its range.

    Examples:
        >>> LossScale(initial=1024).factor
        2.0
        >>> LossScale.from_dict({"initial": 64}).to_dict()["initial"]
        64.0
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    factor: float = 2.0
    minimum: float = 1.0
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("initial", "minimum", "maximum"):
            value = require_number(
                name,
                getattr(self, name),
                "a finite number above 0",
                "A power of two loses no precision.",
                lambda number: number > 0,
            )
            object.__setattr__(self, name, value)
        require_count(
            "growth_interval",
            self.growth_interval,
            "Give the number of updates between two growths.",
        )
        factor = require_number(
            "factor",
            self.factor,
            "a finite number above 1",
            "2 doubles and halves the scale.",
            lambda number: number > 1,
        )
        object.__setattr__(self, "factor", factor)
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                "initial must lie between minimum and maximum. Received: "
                f"minimum={self.minimum!r}, initial={self.initial!r}, "
                f"maximum={self.maximum!r}. Move initial or widen the range."
            )


@dataclass(frozen=True, slots=True)
class Every(PlainOptions):
    """How often something happens, counted on one clock.

    Args:
        n: distance between two occasions, above 0; a whole number, except
            for seconds.
        unit: `"updates"`, `"epochs"`, `"micro_batches"`, `"samples"` or
            `"seconds"` of training.

    Raises:
        TypeError: `n` is no number of the kind the unit needs.
        ValueError: `n` is not above 0, or the unit is unknown.

    Examples:
        >>> from accumtrainer.progress import Progress
        >>> every = Every(100, "updates")
        >>> every.is_due(Progress(updates=99), Progress(updates=100))
        True
    """

    n: float
    unit: Literal["updates", "epochs", "micro_batches", "samples", "seconds"]

    def __post_init__(self) -> None:
        require_choice(
            "unit", self.unit, UNITS, "Write for example Every(100, 'updates')."
        )
        if self.unit != "seconds":
            require_count("n", self.n, "Write for example Every(1, 'epochs').")
            return
        require_number(
            "n",
            self.n,
            "a finite number above 0",
            "Write for example Every(30, 'seconds').",
            lambda number: number > 0,
        )

    def is_due(self, before: Any, after: Any) -> bool:
        """Say whether a multiple of `n` was reached between two moments.

        Args:
            before: `Progress` at the earlier moment.
            after: `Progress` at the later moment.

        Returns:
            Whether one or more multiples of `n` lie after the earlier moment
            and not after the later one.
        """
        earlier = getattr(before, self.unit)
        later = getattr(after, self.unit)
        return later // self.n > earlier // self.n

    def least_updates(self, since: Any) -> int:
        """Say how many updates it takes at least until the next occasion.

        Args:
            since: `Progress` at a moment.

        Returns:
            Above 0.

        Examples:
            >>> from accumtrainer.progress import Progress
            >>> Every(100, "updates").least_updates(Progress(updates=99))
            1
        """
        if self.unit != "updates":
            return 1
        return self.n - since.updates % self.n


def beta_for_batch(
    beta: float, *, batch_size: float, reference: float
) -> float:
    """Keep the half-life of a moving average, counted in samples.

    Adam's average of squared gradients forgets by `beta_2` at every update.
    With larger updates the same factor averages over more samples. The one
    that forgets half after as many samples as before is

        beta ** (batch_size / reference)

    (Marek et al. 2025, arXiv:2507.07101, for the second moment of Adam.)

    Args:
        beta: at least 0 and below 1, good for updates of `reference` samples.
        batch_size: samples, or tokens, per update: all micro-batches.
        reference: the same for `beta`.

    Returns:
        At least 0 and below 1.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> beta_for_batch(0.999, batch_size=256, reference=32)
        0.992
        >>> beta_for_batch(0.95, batch_size=1, reference=512)
        0.9999
    """
    if not 0 <= beta < 1:
        raise ValueError(
            f"beta must be at least 0 and below 1. Received: beta={beta!r}. "
            "Use for example 0.999, the beta_2 of Adam."
        )
    for name, size in {
        "batch_size": batch_size,
        "reference": reference,
    }.items():
        if not size > 0:
            raise ValueError(
                f"{name} must be above 0. Received: {name}={size!r}. Count "
                "the samples of one update."
            )
    return float(beta ** (batch_size / reference))
