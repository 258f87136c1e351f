"""Run a sweep of W&B, or the grid of one without W&B's server.

`train` is what an agent of W&B calls: it starts a run, reads the settings that
the sweep has chosen from `run.config`, and trains. Without a server nobody
chooses, so the same function is called with each of the grid's settings, and
the runs are written into a folder. The data are scikit-learn's: 1,797 real
images of 8 x 8 pixels, which come with the library.

    python examples/sweep_wandb.py
    KERAS_BACKEND=jax python examples/sweep_wandb.py --epochs 2
    python examples/sweep_wandb.py --online
"""

import argparse
import itertools

import keras
import wandb
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import WandbLogger

PROJECT = "accumtrainer-sweep"

SWEEP = {
    "method": "grid",
    "metric": {"name": "val_loss", "goal": "minimize"},
    "parameters": {
        "learning_rate": {"values": [0.001, 0.01]},
        "units": {"values": [32, 64]},
    },
}


def load_data():
    """Load the digits, split into a training and a validation set."""
    images, labels = load_digits(return_X_y=True)
    return train_test_split(
        (images / 16).astype("float32"),
        labels,
        test_size=0.2,
        stratify=labels,
        random_state=0,
    )


def train(epochs, **options):
    """Train with the settings of one run.

    Args:
        epochs: times through the data.
        **options: what `wandb.init` is given.

    Returns:
        The run's settings, and the validation loss it ended with.
    """
    x, x_valid, y, y_valid = load_data()
    with wandb.init(project=PROJECT, **options) as run:
        keras.utils.set_random_seed(0)
        layers = [
            keras.Input([64]),
            keras.layers.Dense(run.config.units, activation="relu"),
            keras.layers.Dense(10),
        ]
        trainer = Trainer(
            keras.Sequential(layers),
            optimizer=keras.optimizers.Adam(run.config.learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            accumulation=Accumulation(micro_batch_size=32),
            callbacks=[WandbLogger(run=run)],
            seed=0,
        )
        settings = {name: run.config[name] for name in SWEEP["parameters"]}
        history = trainer.fit(
            x,
            y,
            batch_size=128,
            epochs=epochs,
            validation_data=(x_valid, y_valid),
            verbose=0,
        )
    return settings, history.history["val_loss"][-1]


def grid():
    """Yield each choice of the sweep's settings."""
    names = SWEEP["parameters"]
    values = [parameter["values"] for parameter in names.values()]
    for choice in itertools.product(*values):
        yield dict(zip(names, choice, strict=True))


def main():
    """Sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--online", action="store_true", help="ask W&B")
    arguments = parser.parse_args()
    if arguments.online:
        sweep = wandb.sweep(SWEEP, project=PROJECT)
        wandb.agent(sweep, lambda: train(arguments.epochs))
        return
    found = [
        train(arguments.epochs, mode="offline", config=settings)
        for settings in grid()
    ]
    print()
    for settings, loss in found:
        print(f"val_loss {loss:.4f}  {settings}")
    best, _ = min(found, key=lambda one: one[1])
    print(f"best             {best}")


if __name__ == "__main__":
    main()
