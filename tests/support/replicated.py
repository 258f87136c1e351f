"""Models trained on one device and on several, for comparison."""

import contextlib
from unittest import mock

import numpy as np
import pytest
from joined import JOINED
from quickest import JIT_COMPILE

from accumtrainer import (
    Accumulation,
    Trainer,
)
from accumtrainer.keras_api import BACKEND, keras

PROCESSES = int(JOINED.split()[1]) if JOINED else 1


def distributed(count):
    """Make a scope in which models have so many replicas."""
    if count == 1:
        return alone()
    if count == PROCESSES:
        return contextlib.nullcontext()
    need_devices()
    if BACKEND == "jax":
        devices = [f"cpu:{index}" for index in range(count)]
        return keras.distribution.DataParallel(devices=devices).scope()
    import tensorflow as tf

    devices = [f"CPU:{index}" for index in range(count)]
    # Collectives of TensorFlow know one group of devices in a process.
    return tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
    ).scope()


def alone():
    """Make a scope in which models have one replica, whoever has joined."""
    if not JOINED:
        return contextlib.nullcontext()
    from accumtrainer.steps.torch import replicas

    return mock.patch.object(replicas, "has_group", lambda: False)


def need_devices():
    """Skip the test where a process has but one device."""
    if BACKEND == "torch":
        reason = "on PyTorch a process has one device"
        print(f"Not run: {reason}.")
        pytest.skip(reason)


def make_trainer(replicas, make_model, trainer_type=Trainer, **options):
    """Make a Trainer of replicas, whose model begins as any other."""
    options = {
        "optimizer": lambda: keras.optimizers.Adam(0.01, clipnorm=1.0),
        "loss": "mse",
        "accumulation": Accumulation(micro_batch_size=3),
        "seed": 0,
        "jit_compile": JIT_COMPILE,
    } | options
    keras.utils.set_random_seed(0)
    with distributed(replicas):
        model = make_model()
        rng = np.random.default_rng(0)
        for variable in model.trainable_variables:
            variable.assign(0.3 * rng.normal(size=variable.shape))
        options["optimizer"] = options["optimizer"]()
        return trainer_type(model, **options)


def make_mlp():
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(2),
        ]
    )


def weights_of(trainer):
    return [
        keras.ops.convert_to_numpy(variable)
        for variable in [
            *trainer.model.variables,
            *trainer.optimizer.variables,
        ]
        if "seed" not in variable.path
    ]


def assert_close(ours, theirs, tolerance=1e-5):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


def targets(rng, samples):
    return (
        rng.normal(size=[samples, 6]).astype("float32"),
        rng.normal(size=[samples, 2]).astype("float32"),
    )


# --- What is exact. ---


def make_tagger():
    tokens = keras.Input([5], dtype="int32")
    embedded = keras.layers.Embedding(7, 4, mask_zero=True)(tokens)
    named = keras.layers.Dense(3, name="tag")(embedded)
    pooled = keras.layers.GlobalAveragePooling1D()(embedded)
    return keras.Model(
        tokens, {"tag": named, "size": keras.layers.Dense(1)(pooled)}
    )


def losses_of_tagger():
    """Make options for two losses with denominators of their own."""
    tag = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    return {
        "loss": {"tag": tag, "size": "mse"},
        "loss_weights": {"tag": 1.0, "size": 0.3},
    }


def sentences(rng, samples):
    x = rng.integers(1, 7, size=[samples, 5])
    x *= np.arange(5) < rng.integers(1, 6, size=[samples, 1])
    y = {
        "tag": rng.integers(3, size=[samples, 5]),
        "size": rng.normal(size=[samples, 1]).astype("float32"),
    }
    return x, y
