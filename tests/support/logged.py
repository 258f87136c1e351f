"""A linear model with its data, whose losses and logs are easy to foretell."""

import numpy as np
from quickest import JIT_COMPILE, RUN_EAGERLY

from accumtrainer import Accumulation
from accumtrainer.keras_api import keras

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = 2 * X[:, :1]
QUICKEST = {"jit_compile": JIT_COMPILE, "run_eagerly": RUN_EAGERLY}
TWO = Accumulation(micro_batch_size=2)


def make_model():
    """Make one whose weights are ones."""
    return keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )
