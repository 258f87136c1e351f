"""How Keras draws random numbers on PyTorch, for which it has private names.

`tests/steps/test_torch.py` notices when one of them changes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import keras.src.backend.torch.random as keras_random

from accumtrainer.keras_api.types import Tensor


def lacks_seed(generator: Any) -> bool:
    """Whether a `keras.random.SeedGenerator` was made without a seed.

    `keras.random.dropout` then draws from the one state of PyTorch.
    """
    return generator._initial_seed is None


def give_seed(generator: Any, seed: int) -> None:
    """Have a generator pass for one that was made with a seed."""
    generator._initial_seed = seed


def draw_seed(seed: Any) -> Tensor:
    """Draw the number with which Keras seeds a generator of PyTorch."""
    first, second = keras_random.draw_seed(seed)
    return first + second


def making_generators(make: Callable[[Any], Any]) -> AbstractContextManager:
    """Make a scope in which another function makes Keras's generators.

    Args:
        make: from what was given as `seed` to a `torch.Generator`.
    """
    return mock.patch.object(keras_random, "torch_seed_generator", make)
