"""Measure what callbacks cost, where nearly everything is overhead.

The small perceptron of `bench.py`, 8 micro-batches of 32, is trained by turns
with and without a callback, and inside `Model.fit` by the callback and by what
Keras has of its own; the convolutions, whose epochs take about a second, with
and without checkpoints. A turn is one call of `fit` of several epochs, of
which the first, which starts things up, is not counted. Printed are medians
over rounds and in brackets the smallest and the largest; ratios of updates per
second are taken round by round.

    python benchmarks/callbacks.py
    KERAS_BACKEND=jax python benchmarks/callbacks.py --rounds 9
"""

import argparse
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from cells import conv, mlp, random_data

from accumtrainer import Accumulation, Every, Trainer
from accumtrainer.callbacks import (
    Checkpoint,
    GradientAccumulation,
    WandbLogger,
)
from accumtrainer.callbacks.background import Background

UPDATES = 200
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class EpochClock(keras.callbacks.Callback):
    """Collects when epochs begin, and when training ends."""

    def on_train_begin(self, logs=None):
        self.moments = []

    def on_epoch_begin(self, epoch, logs=None):
        self.moments.append(time.perf_counter())

    def on_train_end(self, logs=None):
        self.moments.append(time.perf_counter())

    def seconds(self):
        """Return the seconds of an epoch, the first one left out."""
        return (self.moments[-1] - self.moments[1]) / (len(self.moments) - 2)


class BareWandb(keras.callbacks.Callback):
    """Logs ten made-up numbers every 10 updates, and reads none.

    What W&B itself costs, in a thread of its own: nothing that logs as often
    can cost less.

    Args:
        options: dict of arguments of `wandb.init`.
    """

    looks_at_model = False

    def __init__(self, options):
        super().__init__()
        self._options = options

    def on_train_begin(self, logs=None):
        import wandb

        self._run = wandb.init(**self._options)
        self._background = Background("bare")
        self._updates = 0

    def on_train_batch_end(self, batch, logs=None):
        self._updates += 1
        if self._updates % 10 == 0:
            row = {f"number_{i}": self._updates + i / 10 for i in range(10)}
            self._background.do(self._run.log, row)

    def on_train_end(self, logs=None):
        self._background.finish(60, self._run.finish)


def fit(trains, data, batch_size, callbacks, epochs):
    """Train for some epochs, and return the seconds of one."""
    clock = EpochClock()
    trains.fit(
        *data,
        batch_size=batch_size,
        epochs=epochs,
        callbacks=[*callbacks, clock],
        verbose=0,
    )
    return clock.seconds()


def make_trainer(cell):
    """Make a Trainer of a fresh model."""
    return Trainer(
        cell.make_model(),
        optimizer="adam",
        loss=LOSS,
        accumulation=Accumulation(micro_batch_size=cell.micro_batch_size),
        seed=0,
    )


def beside_trainer(cell, data, epochs, callbacks):
    """List the contenders that train with a Trainer, the plain one first.

    Args:
        cell: `Cell`.
        data: pair of arrays.
        epochs: int.
        callbacks: dict by name of functions that return a list of callbacks.
    """

    def contender(make_callbacks):
        trainer = make_trainer(cell)

        def run():
            batch_size = cell.samples_per_update
            return fit(trainer, data, batch_size, make_callbacks(), epochs)

        return run

    return {
        name: contender(make)
        for name, make in ({"Trainer": list} | callbacks).items()
    }


def inside_fit(cell, data, epochs, steps_per_execution):
    """List the contenders inside `Model.fit`, Keras's own first."""

    def contender(callbacks, **options):
        model = cell.make_model()
        model.compile(
            keras.optimizers.Adam(**options),
            LOSS,
            steps_per_execution=steps_per_execution,
        )
        size = cell.micro_batch_size
        return lambda: fit(model, data, size, callbacks(), epochs)

    steps = cell.micro_batches
    return {
        "Keras accumulating": contender(
            list, gradient_accumulation_steps=steps
        ),
        "GradientAccumulation": contender(
            lambda: [GradientAccumulation(steps=steps)]
        ),
    }


def compare(title, contenders, rounds, updates):
    """Run contenders by turns, and print how they compare to the first."""
    seconds = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for turn in range(rounds):
        names = list(contenders)
        # Each comes first and last as often as the others.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds[name].append(contenders[name]())
    reference = np.array(next(iter(seconds.values())))
    print(f"\n{title}; {rounds} rounds")
    for name, values in seconds.items():
        ratios = np.sort(reference / np.array(values))
        millis = 1000 * np.median(values) / updates
        print(
            f"  {name:<36} {millis:7.3f} ms per update, "
            f"{np.median(ratios):.3f}x ({ratios[0]:.3f}x-{ratios[-1]:.3f}x)",
            flush=True,
        )


def main():
    """Read the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    cell = mlp()
    drawn = random_data(
        [784], classes=10, samples=UPDATES * cell.samples_per_update
    )
    data = (drawn["x"], drawn["y"])
    print(f"{keras.backend.backend()}, {cell.title}")
    with tempfile.TemporaryDirectory() as folder:
        wandb = {
            "project": "overhead",
            "mode": "offline",
            "dir": folder,
            "settings": {"silent": True},
        }
        checkpoints = {
            "with Checkpoint, every epoch": lambda: [
                Checkpoint(
                    Path(folder) / "checkpoints", every=Every(1, "epochs")
                )
            ]
        }
        loggers = {
            "with WandbLogger, every 10 updates": lambda: [
                WandbLogger(every=Every(10, "updates"), **wandb)
            ],
            "with W&B alone, every 10 updates": lambda: [BareWandb(wandb)],
        }
        contenders = beside_trainer(
            cell, data, options.epochs, loggers | checkpoints
        )
        compare("Trainer", contenders, options.rounds, UPDATES)
        images = conv()
        contenders = beside_trainer(
            images, (images.x, images.y), options.epochs, checkpoints
        )
        compare(images.title, contenders, options.rounds, images.most_updates)
    for steps in (1, cell.micro_batches):
        compare(
            f"inside fit, steps_per_execution={steps}",
            inside_fit(cell, data, max(3, options.epochs // 2), steps),
            options.rounds,
            UPDATES,
        )


if __name__ == "__main__":
    main()
