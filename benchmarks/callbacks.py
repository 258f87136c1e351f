"""Measure what callbacks cost, where nearly everything is overhead.

The small perceptron of `bench.py`, 8 micro-batches of 32, is trained by turns
with and without a callback, and inside `Model.fit` by the callback and by what
Keras has of its own; the convolutions, whose epochs take a second or more,
with and without checkpoints. A turn is one call of `fit`, whose first epoch,
which starts things up, is not counted, and the time in which a callback ends
is: a logger has handed everything over by then. Turns are short and many,
because what is looked for is smaller than what a shared machine changes within
seconds. Printed are medians of the ratios of updates per second, taken round by
round, and in brackets the interval that holds the true median in 95 of 100 such
measurements.

    python benchmarks/callbacks.py
    KERAS_BACKEND=jax python benchmarks/callbacks.py --rounds 21
"""

import argparse
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from cells import conv, mlp
from measuring import interval_of_median

from accumtrainer import Accumulation, Every, Logger, Trainer
from accumtrainer.callbacks import Checkpoint, GradientAccumulation, WandbLogger
from accumtrainer.callbacks.background import Background

UPDATES = 100
LOGGED_EPOCHS = 10
SETTLE_SECS = 0.2
"""Time for W&B's own process to do what it was given, between turns."""

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
    """Logs eight made-up numbers every so often, and reads none.

    What W&B itself costs, in a thread of its own: nothing that logs as often
    can cost less.

    Args:
        run: the `wandb.Run`.
        every: `Every` so many updates.
        gather_secs: seconds to gather points before they are handed over.
    """

    looks_at_model = False

    def __init__(self, run, every, gather_secs):
        super().__init__()
        self.every = every
        self._run = run
        self._gather_secs = gather_secs
        self._updates = 0

    def on_train_begin(self, logs=None):
        self._background = Background("bare", gather_secs=self._gather_secs)

    def on_train_batch_end(self, batch, logs=None):
        self._updates += 1
        if self._updates % self.every.n == 0:
            row = {f"number_{i}": self._updates + i / 10 for i in range(8)}
            self._background.do(self._run.log, row)

    def on_train_end(self, logs=None):
        self._background.finish(60, int)


class LogsNowhere(Logger):
    """Reads what every logger reads, and throws it away."""

    def write(self, updates, numbers):
        pass


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
    """List the contenders that train one Trainer, without callbacks first.

    It is the same Trainer, since two of them are not equally fast: what they
    compile lies elsewhere in memory.

    Args:
        cell: `Cell`.
        data: pair of arrays.
        epochs: int.
        callbacks: dict by name of functions that return a list of callbacks.
    """
    trainer = make_trainer(cell)

    def contender(make_callbacks):
        size = cell.samples_per_update
        return lambda: fit(trainer, data, size, make_callbacks(), epochs)

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
            time.sleep(SETTLE_SECS)
    reference = np.array(next(iter(seconds.values())))
    print(f"\n{title}; {rounds} rounds")
    for name, values in seconds.items():
        show(name, np.array(values), reference, updates)


def show(name, seconds, reference, updates):
    """Print how one contender compares to another, round by round."""
    ratios = reference / seconds
    low, high = interval_of_median(ratios)
    millis = 1000 * np.median(seconds) / updates
    print(
        f"  {name:<36} {millis:7.3f} ms per update, "
        f"{np.median(ratios):.3f}x ({low:.3f}x-{high:.3f}x)",
        flush=True,
    )


def main():
    """Read the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--only", choices=COMPARISONS, nargs="*")
    options = parser.parse_args()
    print(f"{keras.backend.backend()}")
    for name in options.only or COMPARISONS:
        COMPARISONS[name](options.rounds)


def compare_loggers(rounds):
    """Compare training with a point every 10 updates to training without."""
    import wandb

    cell = mlp()
    often = Every(10, "updates")
    with tempfile.TemporaryDirectory() as folder:
        run = wandb.init(
            project="overhead",
            mode="offline",
            dir=folder,
            settings={"silent": True},
        )
        loggers = {
            "with a logger to nowhere": lambda: [LogsNowhere(often)],
            "with WandbLogger": lambda: [WandbLogger(run=run, every=often)],
            "with W&B alone": lambda: [BareWandb(run, often, 1.0)],
            "with W&B alone, point by point": lambda: [
                BareWandb(run, often, 0.0)
            ],
        }
        contenders = beside_trainer(
            cell, cell.head(UPDATES), LOGGED_EPOCHS + 1, loggers
        )
        compare(cell.title, contenders, rounds, UPDATES)
        run.finish()


def compare_checkpoints(rounds):
    """Compare training with a checkpoint every epoch to training without."""
    cell = conv()
    data = cell.head(cell.most_updates)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = {
            "with Checkpoint, every epoch": lambda: [
                Checkpoint(
                    Path(folder) / "checkpoints", every=Every(1, "epochs")
                )
            ]
        }
        contenders = beside_trainer(cell, data, 2, callbacks)
        compare(cell.title, contenders, rounds, cell.most_updates)


def compare_accumulation_in_fit(rounds):
    """Compare the callback with what Keras's optimizers do."""
    cell = mlp()
    for steps in (1, cell.micro_batches):
        compare(
            f"inside fit, steps_per_execution={steps}",
            inside_fit(cell, cell.head(UPDATES), 2, steps),
            rounds,
            UPDATES,
        )


COMPARISONS = {
    "loggers": compare_loggers,
    "checkpoints": compare_checkpoints,
    "fit": compare_accumulation_in_fit,
}


if __name__ == "__main__":
    main()
