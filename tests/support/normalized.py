"""Models with batch statistics, for tests of layers that know windows."""

import numpy as np

from accumtrainer import Trainer
from accumtrainer.keras_api import keras, ops
from accumtrainer.layers import (
    AccumulatedBatchNormalization,
)

layers = keras.layers

X = np.random.default_rng(0).normal(3.0, 2.0, size=(16, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 2)).astype("float32")
SIZES = [(4, 4, 4, 4), (5, 1, 5, 5), (16,)]


def numbers(tensor):
    return np.array(ops.convert_to_numpy(tensor))


def make_model(cls=AccumulatedBatchNormalization, shape=(4,), **options):
    """Make a model that normalizes its inputs."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input(shape),
            cls(momentum=0.75, name="normalize", **options),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def make_trainer(model, k, cls=Trainer, **options):
    """Make a Trainer that moves no weight but by the layers themselves."""
    options = {
        "optimizer": keras.optimizers.SGD(0.0),
        "loss": "mse",
        "accumulation": k,
        "seed": 0,
    } | options
    return cls(model, **options)


def cut(sizes, *arrays):
    """Cut arrays into batches of some sizes."""
    stops = np.cumsum(sizes)[:-1]
    return list(zip(*(np.split(a, stops) for a in arrays), strict=True))


def averages(model):
    layer = model.get_layer("normalize")
    return numbers(layer.moving_mean), numbers(layer.moving_variance)


def assert_moved_once(model, x, axes=0):
    """Assert that averages have moved once towards the moments of x."""
    mean, variance = averages(model)
    np.testing.assert_allclose(
        mean, 0.25 * x.mean(axes, dtype="float64"), rtol=1e-5, atol=1e-6
    )
    expected = 0.75 + 0.25 * x.var(axes, dtype="float64")
    np.testing.assert_allclose(variance, expected, rtol=1e-5)


# The averages.
