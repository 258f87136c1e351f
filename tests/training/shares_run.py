"""Train in one of two processes on loaders that yield its share of the data.

    python tests/training/shares_run.py FOLDER --process 0 --port 12321
    python tests/training/shares_run.py FOLDER --process 1 --port 12321

Writes into the folder what the cases of each process ended with: weights as
`case.npz`, by the chief, and errors as `case-process.txt`. On JAX each
process has two devices.
"""

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, Every, Trainer
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import BACKEND, keras

PROCESSES = 2
CLASSES = 3
TWO_DEVICES = BACKEND == "jax"


class Loader:
    """Yields a process's rows of every batch, again in every epoch.

    Args:
        sizes: list of int, samples of each batch, in all processes together.
        process: index of the process, `None` for all rows.
        is_weighted: whether to yield sample weights too.
        fails_at: index of a batch instead of which an error is raised.
    """

    def __init__(
        self, sizes, process=None, *, is_weighted=False, fails_at=None
    ):
        rng = np.random.default_rng(0)
        self._batches = []
        for size in sizes:
            batch = (
                rng.normal(size=[size, 6]).astype("float32"),
                rng.integers(CLASSES, size=size),
                rng.uniform(size=size) * (rng.uniform(size=size) > 0.3),
            )
            batch = batch if is_weighted else batch[:2]
            self._batches.append([take_share(a, process) for a in batch])
        self._fails_at = fails_at

    def __iter__(self):
        for index, batch in enumerate(self._batches):
            if index == self._fails_at:
                raise OSError("the disk is gone")
            yield tuple(batch)


def take_share(array, process):
    """Take the rows of a process, or all."""
    if process is None:
        return array
    size = len(array) // PROCESSES
    return array[process * size : (process + 1) * size]


def make_trainer(make_scope, outputs=1, **options):
    """Make a Trainer of a small network, the same in every process."""
    keras.utils.set_random_seed(0)
    with make_scope():
        inputs = keras.Input([6])
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        heads = {
            name: keras.layers.Dense(CLASSES, name=name)(hidden)
            for name in ("one", "other")[:outputs]
        }
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        return Trainer(
            keras.Model(inputs, heads if outputs > 1 else heads["one"]),
            optimizer=keras.optimizers.Adam(0.01),
            loss=loss if outputs == 1 else dict.fromkeys(heads, loss),
            seed=0,
            jit_compile=JIT_COMPILE,
            **options,
        )


def for_two_outputs(batches):
    """Give two outputs the targets and weights of batches."""
    for x, *others in batches:
        yield x, *({"one": part, "other": part} for part in others)


class Stop(keras.callbacks.Callback):
    """Stops at the end of an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


@dataclasses.dataclass(frozen=True)
class Run:
    """What a case is given.

    Args:
        folder: `Path`, for checkpoints.
        make_scope: function that makes a scope for models.
        process: index of the process, `None` for all rows on one device.
    """

    folder: Path
    make_scope: Any = contextlib.nullcontext
    process: int | None = None

    def load(self, sizes, *, is_weighted=True, fails_at=None):
        """Make the `Loader` of this process's rows."""
        return Loader(
            sizes, self.process, is_weighted=is_weighted, fails_at=fails_at
        )


# What is trained.


def train_weighted(run):
    """Make 21 updates of weighted samples, with tails, broken off once."""
    for max_updates in (8, None):
        trainer = make_trainer(
            run.make_scope, accumulation=Accumulation(steps=2)
        )
        history = trainer.fit(
            run.load([8, 8, 8, 8, 4]),
            epochs=7,
            max_updates=max_updates,
            verbose=0,
            validation_data=Loader([8, 4]),
            callbacks=[Checkpoint(run.folder / "saved", Every(4, "updates"))],
            resume_from="auto",
        )
    assert trainer.progress.updates == 21
    assert trainer.progress.samples == 7 * 36
    assert len(history.history["val_loss"]) == 7
    return trainer


def train_outputs(run):
    """Slice the batches of a generator unevenly, for two outputs."""
    trainer = make_trainer(
        run.make_scope, outputs=2, accumulation=Accumulation(micro_batch_size=2)
    )
    loader = run.load([12, 8] * 10)
    trainer.fit(for_two_outputs(loader), verbose=0)
    assert trainer.progress.updates == 20
    return trainer


def train_auto(run):
    """Choose the size of micro-batches, and weigh classes."""
    accumulation = Accumulation(
        micro_batch_size="auto", memory_limit_bytes=2**36
    )
    trainer = make_trainer(run.make_scope, accumulation=accumulation)
    loader = run.load([8, 8], is_weighted=False)
    trainer.fit(loader, epochs=2, verbose=0, class_weight={1: 3.0})
    return trainer


TRAINED = {
    "weighted": train_weighted,
    "outputs": train_outputs,
    "auto": train_auto,
}


# What is refused, in both processes at the same time. It is given to a Trainer
# that has trained.


def refuse_unequal_length(run, trainer):
    trainer.fit(run.load([8] * (6 - run.process)), verbose=0)


def refuse_unequal_sizes(run, trainer):
    trainer.fit(run.load([8, 8, 8 - 4 * run.process, 8]), verbose=0)


def refuse_failure(run, trainer):
    fails_at = 3 if run.process == 1 else None
    trainer.fit(run.load([8] * 6, fails_at=fails_at), verbose=0)


def refuse_number(run, trainer):
    batches = list(run.load([8] * 4))
    if run.process == 1:
        batches[3][0][1] = np.nan
    trainer.fit(batches, verbose=0, check_inputs=True)


def refuse_share_of_validation(run, trainer):
    held = run.load([8, 8])
    trainer.fit(run.load([8] * 4), verbose=0, validation_data=held)


def refuse_carried(run, trainer):
    for _ in range(2):
        trainer = make_trainer(
            run.make_scope,
            accumulation=Accumulation(steps=2, tail="carry"),
            callbacks=[Checkpoint(run.folder / "carried"), Stop()],
        )
        trainer.fit(run.load([8] * 3), epochs=2, verbose=0, resume_from="auto")


def refuse_undivided(run, trainer):
    trainer.fit(run.load([8, 8, 6]), verbose=0)


def refuse_replica_of_processes(run, trainer):
    import jax

    mesh = keras.distribution.DeviceMesh(
        (2, 2), ["model", "batch"], [f"cpu:{d.id}" for d in jax.devices()]
    )
    distribution = keras.distribution.ModelParallel(
        layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch"
    )
    trainer = make_trainer(distribution.scope)
    trainer.fit(run.load([8] * 4), verbose=0)


REFUSED = {
    name.removeprefix("refuse_"): function
    for name, function in globals().items()
    if name.startswith("refuse_")
}
NEED_TWO_DEVICES = ("undivided", "replica_of_processes")


def main():
    """Run all cases, and write down how each of them ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    process, folder = arguments.process, arguments.folder
    if TWO_DEVICES:
        import jax

        jax.config.update("jax_num_cpu_devices", 2)
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from distributed import join

    with join(PROCESSES, process, "localhost", arguments.port):
        make_scope = find_scope()
    run = Run(folder, make_scope, process)
    trainers = {name: train(run) for name, train in TRAINED.items()}
    for name, trainer in trainers.items():
        if trainer.is_chief:
            np.savez(folder / f"{name}.npz", *weights_of(trainer))
    trainer = trainers["weighted"]
    for name, refuse in REFUSED.items():
        if name in NEED_TWO_DEVICES and not TWO_DEVICES:
            continue
        try:
            refuse(run, trainer)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            (folder / f"{name}-{process}.txt").write_text(text)


def find_scope():
    """Return what makes the scope again that this is called in."""
    if BACKEND == "jax":
        return keras.distribution.distribution().scope
    if BACKEND == "torch":
        return contextlib.nullcontext
    import tensorflow as tf

    return tf.distribute.get_strategy().scope


def weights_of(trainer):
    """List the weights of a Trainer's model."""
    variables = trainer.model.trainable_variables
    return [keras.ops.convert_to_numpy(v) for v in variables]


def train_alone(name, folder):
    """Train on one device what a case trains in two processes."""
    return weights_of(TRAINED[name](Run(folder)))


if __name__ == "__main__":
    main()
