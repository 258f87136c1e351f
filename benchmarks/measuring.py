"""How contenders are timed: in turn."""

import dataclasses
import math
import time
from collections.abc import Callable

import keras
import numpy as np
from contenders import BACKEND, CONTENDERS, PEERS, Runner, start_peer

STARTED_AGAIN = (
    "trainer",
    "keras_accumulating",
    "keras_accumulating_with_xla",
)
"""Whose first updates are compared, and so made more than once."""


@dataclasses.dataclass(kw_only=True)
class Timing:
    """What was measured of one contender on one cell.

    Args:
        runner: `Runner`.
        first_updates: list of seconds from a model to its first update,
            compilation included; empty for peers, who start elsewhere.
        first_loss: loss before the first update.
        start_again: function that makes a first update anew, and returns
            its seconds.
        compilations: programs compiled until the second round, `None` where
            nobody counts.
        updates: updates in a round.
        rounds: list of seconds per update, one per round.
    """

    runner: Runner
    first_updates: list[float]
    first_loss: float
    start_again: Callable[[], float]
    compilations: int | None = None
    updates: int = 1
    rounds: list[float] = dataclasses.field(default_factory=list)


class Compilations:
    """Counts what JAX compiles; TensorFlow has no public way to tell."""

    def __init__(self):
        self._count = 0
        if BACKEND == "jax":
            import jax

            jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, duration, **_):
        self._count += event.endswith("backend_compile_duration")

    @property
    def count(self):
        """Programs compiled so far, or `None`."""
        return self._count if BACKEND == "jax" else None


COMPILATIONS = Compilations()


def measure(
    cell,
    contenders,
    *,
    rounds,
    round_secs,
    starts=3,
    python=None,
    start_one=None,
):
    """Time some contenders on one cell, in turn.

    Args:
        cell: `Cell`.
        contenders: list of names.
        rounds: int.
        round_secs: seconds that a round should take at most.
        starts: first updates of each of `STARTED_AGAIN`.
        python: interpreter of the peers, or `None` to leave them out.
        start_one: function of a contender's name that starts it, and returns
            a `Timing`; by default all start in this process.

    Returns:
        Dict from name to `Timing`.
    """
    start_one = start_one or (lambda name: start(CONTENDERS[name], cell))
    timings = {name: start_one(name) for name in contenders}
    check_losses(timings)
    again = [name for name in contenders if name in STARTED_AGAIN]
    for turn in range(1, starts):
        # Each comes first once, as whoever does pays for more.
        for name in again[turn:] + again[:turn]:
            timings[name].first_updates.append(timings[name].start_again())
    if python is not None:
        timings |= {
            name: start(
                lambda cell, model, n=name: start_peer(n, cell, model, python),
                cell,
            )
            for name in PEERS
        }
    for timing in timings.values():
        warm_up(timing, round_secs, cell.most_updates)
    in_turn = list(timings.values())
    for turn in range(rounds):
        first = turn % len(in_turn)
        for timing in in_turn[first:] + in_turn[:first]:
            timing.rounds.append(
                seconds_per_update(timing.runner, timing.updates)
            )
    for timing in timings.values():
        timing.runner.close()
    return timings


def start(make_runner, cell):
    """Make the first update of a contender, `Timing` without rounds."""
    keras.utils.set_random_seed(0)
    model = cell.make_model()
    compiled = COMPILATIONS.count
    begun = time.perf_counter()
    runner = make_runner(cell, model)
    loss = runner.fit(1)
    secs = time.perf_counter() - begun
    if compiled is not None:
        compiled = COMPILATIONS.count - compiled
    is_peer = runner.name in PEERS.values()
    return Timing(
        runner=runner,
        first_updates=[] if is_peer else [secs],
        first_loss=loss,
        start_again=lambda: start(make_runner, cell).first_updates[0],
        compilations=None if is_peer else compiled,
    )


def warm_up(timing, round_secs, most_updates):
    """Find out how many updates a round affords."""
    secs = seconds_per_update(timing.runner, 1)
    if secs < round_secs:
        # The faster one is free of what happens only once.
        secs = min(seconds_per_update(timing.runner, 2) for _ in range(2))
        timing.updates = max(2, min(int(round_secs / secs), most_updates))
        timing.runner.fit(timing.updates)


def check_losses(timings):
    """Make sure that all begin with the same weights and the same data."""
    losses = {name: timing.first_loss for name, timing in timings.items()}
    if not np.allclose(list(losses.values()), min(losses.values()), rtol=1e-2):
        raise AssertionError(f"The first losses differ: {losses}")


def seconds_per_update(runner, updates):
    """Time one call of `fit`."""
    begun = time.perf_counter()
    runner.fit(updates)
    return (time.perf_counter() - begun) / updates


def interval_of_median(values):
    """Return the 95 % confidence interval of the median, from the ranks.

    How many of n values lie below the true median is binomial, with mean
    `n / 2` and standard deviation `sqrt(n) / 2`.

    Args:
        values: array `[n]`.
    """
    count = len(values)
    rank = max(0, math.floor(count / 2 - 1.96 * math.sqrt(count) / 2))
    ordered = np.sort(values)
    return ordered[rank], ordered[count - 1 - rank]


def start_backend():
    """Pay for what a process does once, at nobody's expense."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.zeros([2, 1]), np.zeros([2, 1]), verbose=0)
