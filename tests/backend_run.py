"""Train a few models on whatever backend Keras runs on, and save the weights.

    python tests/backend_run.py weights.npz

Initial weights and data come from NumPy, so that every backend begins alike.
"""

import sys

import numpy as np

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import keras

UPDATES = 20
layers = keras.layers


def make_mlp():
    """Make a perceptron and its data."""
    model = keras.Sequential(
        [
            keras.Input([12]),
            layers.Dense(16, activation="relu"),
            layers.Dense(5),
        ]
    )
    return model, data([12], targets=[])


def make_conv():
    """Make a convolutional network and its data."""
    model = keras.Sequential(
        [
            keras.Input([8, 8, 2]),
            layers.Conv2D(6, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 2, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5),
        ]
    )
    return model, data([8, 8, 2], targets=[])


def make_transformer():
    """Make a small language model with padding, and its data."""
    tokens = keras.Input([9], dtype="int32")
    x = layers.Embedding(11, 8, mask_zero=True)(tokens)
    y = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(num_heads=2, key_dim=4)
    x = layers.add([x, attention(y, y, use_causal_mask=True)])
    y = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.add([x, layers.Dense(8)(y)])
    model = keras.Model(tokens, layers.Dense(5)(x))
    rng = np.random.default_rng(2)
    x, y = data([9], targets=[9])
    x = rng.integers(1, 11, size=x.shape)
    lengths = rng.integers(3, 10, size=len(x))
    return model, (np.where(np.arange(9) < lengths[:, None], x, 0), y)


def data(shape, *, targets):
    """Draw inputs and labels for the updates of a run."""
    rng = np.random.default_rng(1)
    samples = UPDATES * 12
    return (
        rng.normal(size=[samples, *shape]).astype("float32"),
        rng.integers(5, size=[samples, *targets]),
    )


def trained_weights(make):
    """Train for some updates of unequal micro-batches.

    Returns:
        Dict from the path of a variable to its value. Biases of attention
        keys are left out: their gradient is zero but for rounding, which
        Adam amplifies.
    """
    model, (x, y) = make()
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        variable.assign(0.3 * rng.normal(size=variable.shape))
    trainer = Trainer(
        model,
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        accumulation=Accumulation(micro_batch_size=5),
        seed=0,
    )
    trainer.fit(x, y, batch_size=12, verbose=0)
    assert trainer.progress.updates == UPDATES
    return {
        f"{index} {variable.name}": keras.ops.convert_to_numpy(variable)
        for index, variable in enumerate(model.trainable_variables)
        if not ("key" in variable.path and variable.name == "bias")
    }


def main(path):
    """Train every model and write one file."""
    weights = {}
    for make in (make_mlp, make_conv, make_transformer):
        for name, value in trained_weights(make).items():
            weights[f"{make.__name__} {name}"] = value
    np.savez(path, **weights)


if __name__ == "__main__":
    main(sys.argv[1])
