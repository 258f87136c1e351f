"""Draws the same random numbers twice: to look ahead, and then to train.

Layers draw from the states of their own seeds, which every micro-batch moves.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np

from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Variable
from accumtrainer.window.objective import is_random_state
from accumtrainer.window.state import Scratch


@contextlib.contextmanager
def only_drawing(variables: Sequence[Variable]) -> Iterator[None]:
    """Leave nothing but how far random states have moved.

    Args:
        variables: that may be read or written.
    """
    states = list(filter(is_random_state, variables))
    with Scratch(variables) as scope:
        yield
        moved = [(v, v.value) for v in states if scope.has_written(v)]
    for state, value in moved:
        state.assign(value)


@contextlib.contextmanager
def drawing_again(variables: Sequence[Variable]) -> Iterator[None]:
    """Draw in here what is drawn again afterwards.

    Args:
        variables: as above.
    """
    states = filter(is_random_state, variables)
    # Of TensorFlow's variables the value is the variable.
    before = [(state, ops.copy(state.value)) for state in states]
    yield
    for state, value in before:
        state.assign(value)


@contextlib.contextmanager
def host_drawing_again() -> Iterator[None]:
    """Draw again afterwards what Python and NumPy draw in here, unless told.

    Where code of layers draws from their own states, which are everybody's.
    """
    before, numpy_before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)
