"""Streams of random numbers, which no two of a window may share."""

import functools

import numpy as np

from accumtrainer.window.state import (
    EXAMPLE_DISTANCE,
    MICRO_BATCH_DISTANCE,
    PERTURB_DISTANCE,
    REPLICA_DISTANCE,
)

STREAMS = {
    MICRO_BATCH_DISTANCE: 64,
    EXAMPLE_DISTANCE: 256,
    REPLICA_DISTANCE: 8,
    PERTURB_DISTANCE: 1,
}
"""How many of each are to be told apart, whatever their others are."""


def test_streams_of_a_window_stay_apart():
    apart = functools.reduce(
        lambda sums, one: np.add.outer(sums, one) % 2**32,
        (
            distance * np.arange(-count, count + 1)
            for distance, count in STREAMS.items()
        ),
    ).ravel()
    apart = np.minimum(apart, 2**32 - apart)
    apart[len(apart) // 2] = 2**32  # none from itself
    # On PyTorch a stream that is drawn from n times reaches n further.
    assert apart.min() > 4_000
