"""What Python and NumPy draw random numbers from, in code of layers and hooks.

Keras runs that code in every step on PyTorch, and what it draws is new in each.
What is recorded would keep the numbers of one step.
"""

import contextlib
import functools
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

State = tuple[Callable[[], Any], Callable[[Any], None]]
"""Functions that get a state, and set it."""


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
        yield drawn
    finally:
        for (get, put_back), state in zip(states, before, strict=True):
            # Some states hold arrays.
            if pickle.dumps(get()) != pickle.dumps(state):
                put_back(state)
                drawn.append("a random number of Python's or NumPy's")


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
