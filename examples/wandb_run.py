"""Log the training of a digit classifier to W&B, offline unless you say so.

The data are scikit-learn's: 1,797 real images of 8 x 8 pixels, which come
with the library. Nothing is sent anywhere: the run is written into a folder,
which is printed at the end with what to do next.

    python examples/wandb_run.py
    KERAS_BACKEND=jax python examples/wandb_run.py --epochs 2
    python examples/wandb_run.py --online
"""

import argparse
import json
from pathlib import Path

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from accumtrainer import Accumulation, Every, Trainer
from accumtrainer.callbacks import RunLog, WandbLogger

BATCH_SIZE = 128


def load_data(seed):
    """Load the digits, split into a training and a validation set.

    Returns:
        Two pairs of arrays: images `[n, 64]`, float32, from 0 to 1, and
        labels `[n]`.
    """
    images, labels = load_digits(return_X_y=True)
    x, x_valid, y, y_valid = train_test_split(
        (images / 16).astype("float32"),
        labels,
        test_size=0.2,
        stratify=labels,
        random_state=seed,
    )
    return (x, y), (x_valid, y_valid)


def make_trainer(updates, seed):
    """Make a Trainer whose learning rate falls to zero in that many updates."""
    layers = [
        keras.Input([64]),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, updates)
    return Trainer(
        keras.Sequential(layers),
        optimizer=keras.optimizers.Adam(schedule, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        accumulation=Accumulation(micro_batch_size=8),
        seed=seed,
    )


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--online", action="store_true", help="send it to W&B")
    return parser.parse_args()


def main():
    """Train, and say where to look."""
    arguments = read_arguments()
    keras.utils.set_random_seed(arguments.seed)
    train, valid = load_data(arguments.seed)
    updates = Accumulation(micro_batch_size=8).updates(
        samples=len(train[0]), batch_size=BATCH_SIZE, epochs=arguments.epochs
    )
    logger = WandbLogger(
        project="accumtrainer-digits",
        mode="online" if arguments.online else "offline",
        every=Every(2, "updates"),
        watch="weights",
        watch_every=Every(1, "epochs"),
        tags=["example"],
        config={"seed": arguments.seed},
    )
    run_log = RunLog("wandb_run.jsonl", every=Every(2, "updates"))
    make_trainer(updates, arguments.seed).fit(
        *train,
        batch_size=BATCH_SIZE,
        epochs=arguments.epochs,
        validation_data=valid,
        callbacks=[logger, run_log],
    )
    points = map(json.loads, run_log.path.read_text().splitlines())
    last = [point for point in points if "loss" in point][-1]
    folder = Path(logger.run.settings.sync_dir)
    print()
    print(f"the last point of training: update {last['updates']}, {last}")
    print(f"as lines of JSON       {run_log.path}")
    print(f"the run of W&B         {folder}")
    if arguments.online:
        print(f"in the browser         {logger.run.url}")
    else:
        print("in the terminal        wandb leet")
        print(f"to the server          wandb sync {folder}")


if __name__ == "__main__":
    main()
