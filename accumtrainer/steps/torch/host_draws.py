"""What Python and NumPy draw random numbers from, in code of layers and hooks.

Keras runs that code in every step on PyTorch, and what it draws is new in each.
What is recorded would keep the numbers of one step.
"""

import contextlib
import functools
import inspect
import os
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

State = tuple[Callable[[], Any], Callable[[Any], None]]
"""Functions that get a state, and set it."""

DRAWN = "a random number of Python's or NumPy's"

URANDOM = "_urandom"
"""By what `random` gets bytes from the system, and by it `secrets`, and NumPy
for a generator without a seed; it has no public name."""


@contextlib.contextmanager
def host_draws_put_back(things: Iterable[Any]) -> Iterator[list[str]]:
    """Let what is drawn from in here be drawn from as if it had not been.

    Args:
        things: what code reads; generators among them are looked at, beside
            those that are everybody's.

    Returns:
        List that says what was drawn from, once the scope has ended.
    """
    states: list[State] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        *(state for thing in things for state in _states_of(thing)),
    ]
    before = [get() for get, _ in states]
    drawn: list[str] = []
    try:
        with _entropy_noted(drawn):
            yield drawn
    finally:
        for (get, put_back), state in zip(states, before, strict=True):
            # Some states hold arrays.
            if pickle.dumps(get()) != pickle.dumps(state):
                put_back(state)
                drawn.append(DRAWN)


@contextlib.contextmanager
def _entropy_noted(drawn: list[str]) -> Iterator[None]:
    """Note where code draws what no state foretells.

    A generator that is made in here without a seed does so. What other threads
    draw, as those that load data, is none of that, nor what Python's library
    and PyTorch draw for themselves, as for the name of a file.
    """
    thread = threading.get_ident()
    urandom, seed = os.urandom, random.Random.seed

    def note() -> None:
        frame = inspect.currentframe()
        for _ in range(2):  # this function, and what has called it
            frame = frame and frame.f_back
        if threading.get_ident() == thread and _is_for_users(frame):
            drawn.append(DRAWN)

    def note_and_draw(size: int) -> bytes:
        note()
        return urandom(size)

    def note_and_seed(
        self: random.Random, a: Any = None, version: int = 2
    ) -> None:
        if a is None:
            note()
        seed(self, a, version)

    patches: list[tuple[Any, str, Any, Any]] = [
        (os, "urandom", urandom, note_and_draw),
        (random, URANDOM, getattr(random, URANDOM), note_and_draw),
        (random.Random, "seed", seed, note_and_seed),
    ]
    for owner, name, _, noting in patches:
        setattr(owner, name, noting)
    try:
        yield
    finally:
        for owner, name, before, _ in patches:
            setattr(owner, name, before)


def _is_for_users(frame: types.FrameType | None) -> bool:
    """Whether code of users draws, or has a generator drawn for it."""
    package = "random"
    while frame is not None and package in ("random", "secrets"):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        frame = frame.f_back
    # The library has the name of a program that is run, too.
    is_library = package in sys.stdlib_module_names - {"__main__"}
    return not is_library and package != "torch"


def _states_of(thing: Any) -> list[State]:
    """List the states of a generator, none of anything else."""
    if isinstance(thing, random.SystemRandom):
        return []  # it has none
    if isinstance(thing, random.Random):
        return [(thing.getstate, thing.setstate)]
    if isinstance(thing, np.random.RandomState):
        return [(thing.get_state, thing.set_state)]
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return [
            (
                functools.partial(getattr, bits, "state"),
                functools.partial(setattr, bits, "state"),
            )
        ]
    return []
