"""Train a few models on whatever backend Keras runs on, and save the weights.

    python tests/steps/backend_run.py weights.npz

Initial weights and data come from NumPy, so that every backend begins alike.
With a folder of checkpoints, the first model alone is trained, from the newest
of them on.
"""

import argparse

import numpy as np

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import Checkpoint
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


def trained_weights(make, updates=UPDATES, checkpoints=None):
    """Train for some updates of unequal micro-batches.

    Args:
        make: function that returns a model and its data.
        updates: int, how many there are at the end.
        checkpoints: folder to go on from and to save in, or `None`.

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
    resumption = {}
    if checkpoints is not None:
        resumption["callbacks"] = [Checkpoint(checkpoints)]
        resumption["resume_from"] = "auto"
    trainer.fit(
        x, y, batch_size=12, verbose=0, max_updates=updates, **resumption
    )
    assert trainer.progress.updates == updates
    return {
        f"{index} {variable.name}": keras.ops.convert_to_numpy(variable)
        for index, variable in enumerate(model.trainable_variables)
        if not ("key" in variable.path and variable.name == "bias")
    }


def main():
    """Train every model and write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="where the weights go, .npz")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--checkpoints", metavar="FOLDER")
    options = parser.parse_args()
    models = [make_mlp, make_conv, make_transformer]
    weights = {}
    for make in models[:1] if options.checkpoints else models:
        trained = trained_weights(make, options.updates, options.checkpoints)
        for name, value in trained.items():
            weights[f"{make.__name__} {name}"] = value
    np.savez(options.path, **weights)


if __name__ == "__main__":
    main()
