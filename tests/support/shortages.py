"""What a backend raises where memory runs out."""

from accumtrainer.keras_api import BACKEND


def out_of_memory():
    """Make an error like the backend's own."""
    if BACKEND == "jax":
        import jax

        return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")
    if BACKEND == "torch":
        import torch

        return torch.OutOfMemoryError("injected")
    import tensorflow as tf

    return tf.errors.ResourceExhaustedError(None, None, "injected")
