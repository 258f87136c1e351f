"""The ports of docs/train_step.md, and small models to train with them."""

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from accumtrainer.keras_api import keras, ops

PAGE = Path(__file__).parents[2] / "docs" / "train_step.md"
DEFINES = (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)


def definitions_of(page):
    """Run what a page of docs/ defines, and none of what it trains."""
    blocks = page.read_text(encoding="utf-8").split("```python\n")[1:]
    module = ast.parse("".join(b.partition("```")[0] for b in blocks))
    module.body = [node for node in module.body if isinstance(node, DEFINES)]
    names = {"__name__": page.stem}
    exec(compile(module, page.name, "exec"), names)
    return SimpleNamespace(**names)


PORTS = definitions_of(PAGE)


def fed(cls):
    """Make a port take as drawn what its batches have for targets."""
    return type(cls.__name__, (cls,), {"draw": lambda self, batch: batch.y})


SAMPLES = 36
BATCH_SIZE = 12
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=[SAMPLES, *shape]).astype("float32")


def uniform(*shape):
    return RNG.uniform(size=[SAMPLES, *shape]).astype("float32")


def mlp(inputs, outputs, seed=0):
    """Make a small model, always with the same weights for a seed."""
    initializers = keras.initializers.GlorotNormal
    return keras.Sequential(
        [
            keras.Input([inputs]),
            keras.layers.Dense(
                6, activation="tanh", kernel_initializer=initializers(seed)
            ),
            keras.layers.Dense(
                outputs, kernel_initializer=initializers(seed + 1)
            ),
        ]
    )


def vae_of(encoder, decoder):
    """Join both as the port's model, whose noise is given."""
    images, noise = keras.Input([5]), keras.Input([2])
    mean, log_variance = ops.split(encoder(images), 2, axis=-1)
    codes = mean + ops.exp(0.5 * log_variance) * noise
    outputs = [decoder(codes), mean, log_variance]
    return keras.Model([images, noise], outputs)


def denoiser_of(network):
    """Give a model the times beside the images."""
    noisy, times = keras.Input([5]), keras.Input([1])
    joined = ops.concatenate([noisy, times], axis=-1)
    return keras.Model([noisy, times], network(joined))


def autoencoder_of(network):
    """Have a model reconstruct three patches of two numbers."""
    patches = keras.Input([3, 2])
    found = network(keras.layers.Flatten()(patches))
    return keras.Model(patches, keras.layers.Reshape([3, 2])(found))


def sgd(rate=0.1):
    return keras.optimizers.SGD(rate, momentum=0.9)
