"""How a few small windows run soonest, where a test is not about that.

TensorFlow and PyTorch run operations as they come, and what a function takes
to trace, let alone to compile, is more than a test saves by it. JAX compiles
every operation it comes across, and all of a function in the time of a few of
them.
"""

from accumtrainer.keras_api import BACKEND

RUN_EAGERLY = BACKEND != "jax"

JIT_COMPILE = BACKEND == "jax"
"""For what runs often enough to be traced, or cannot run eagerly."""
