"""Kill training at random moments until it is done, and compare.

    KERAS_BACKEND=jax python tests/saving/soak.py --kills 200

Every attempt is a process of its own that goes on from the newest checkpoint
and is killed (SIGKILL) at a random moment, every other time at the next one at
which a checkpoint is being written. The last one ends by itself. Its weights,
its optimizer and its history must be those of a run that nobody killed, bit for
bit, and no kill may cost a checkpoint that was there before.

The processes are forked from this one, which imports the backend and never
uses it, so that an attempt need not import it again.
"""

import argparse
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

from accumtrainer import Accumulation, CheckpointDirectory, Every, LossScale
from accumtrainer import Trainer as PlainTrainer
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import BACKEND, keras
from accumtrainer.saving.checkpoint import UNFINISHED

SAMPLES, EPOCHS = 90, 6
SAVING_SECS = 0.002
"""Less than writing a checkpoint takes."""


def make_data():
    """Make regression data: x `[90, 16]` and y `[90, 4]`, float32."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=[SAMPLES, 16]).astype("float32")
    return x, np.tanh(x[:, :4] * 2).astype("float32")


def make_model(width=64):
    """Make a network with all that has a state: dropout and statistics."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input([16]),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2, seed=5),
            keras.layers.Dense(4, dtype="float32"),
        ]
    )


def make_carrying():
    """Dropout, shuffling, schedule, EMA, and a tail carried over."""
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 40)
    optimizer = keras.optimizers.AdamW(schedule, use_ema=True)
    return PlainTrainer(
        make_model(),
        optimizer=optimizer,
        loss="mse",
        metrics=["mae"],
        accumulation=Accumulation(steps=4, tail="carry"),
        seed=3,
    )


def make_scaled():
    """Float16 whose scale overflows again and again, and a flushed tail."""
    keras.config.set_dtype_policy("mixed_float16")
    return PlainTrainer(
        make_model(),
        optimizer=keras.optimizers.Adam(0.003),
        loss="mse",
        accumulation=Accumulation(steps=4),
        loss_scale=LossScale(
            initial=2.0**20, growth_interval=2, maximum=2.0**24
        ),
        max_consecutive_skips=None,
        seed=3,
    )


def make_watched():
    """Callbacks of Keras that remember things, and sliced batches."""
    return PlainTrainer(
        make_model(),
        optimizer=keras.optimizers.Adam(0.01),
        loss="mse",
        accumulation=Accumulation(micro_batch_size=3),
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", patience=3),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1),
        ],
        seed=3,
    )


CONFIGURATIONS = {
    "carrying": make_carrying,
    "scaled": make_scaled,
    "watched": make_watched,
}


class Tell(keras.callbacks.Callback):
    """Write a byte when training has begun."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def on_train_batch_begin(self, batch, logs=None):
        if self.pipe is not None:
            os.write(self.pipe, b".")
            self.pipe = None


def train(name, directory, result, pipe):
    """Train to the end, from wherever the last attempt came."""
    trainer = CONFIGURATIONS[name]()
    x, y = make_data()
    history = trainer.fit(
        x,
        y,
        batch_size=6,
        epochs=EPOCHS,
        validation_data=(x, y),
        verbose=0,
        callbacks=[Checkpoint(directory, Every(1, "updates")), Tell(pipe)],
        resume_from="auto",
    )
    values = trainer.snapshot().variables
    arrays = {
        f"{part}/{path}": array
        for part, group in values.items()
        for path, array in group.items()
    }
    for key, numbers in history.history.items():
        arrays[f"history/{key}"] = np.asarray(numbers)
    np.savez(result, **arrays)


def fork(name, directory, result):
    """Start an attempt.

    Returns:
        Pair: its process id, and a pipe that speaks when training begins.
    """
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid:
        os.close(sender)
        return pid, receiver
    os.close(receiver)
    status = 1
    try:
        train(name, directory, result, sender)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait_for(pid):
    """Wait for a process; return whether it ended by itself, in order."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("an attempt failed; see above")
    return True


def wait_for_save(pid, directory):
    """Wait until a checkpoint is being written, or the process has ended."""
    while not is_saving(directory):
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, pid, options) is not None:
            return
        time.sleep(0.0002)


def is_saving(directory):
    """Whether a checkpoint is being written, or was when its writer died."""
    return any(directory.glob(f"{UNFINISHED}*"))


def updates_saved(directory):
    """Count the updates in the newest checkpoint; damage is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = CheckpointDirectory(directory).newest()
    return -1 if saved is None else saved.progress["updates"]


def run_to_the_end(name, directory, result):
    """Run undisturbed.

    Returns:
        Pair: dict of the arrays that were left, and the seconds it took.
    """
    pid, pipe = fork(name, directory, result)
    select.select([pipe], [], [])
    begun = time.monotonic()
    wait_for(pid)
    os.close(pipe)
    return dict(np.load(result)), time.monotonic() - begun


def kill_again_and_again(name, directory, result, kills, seconds, rng):
    """Run until the end is reached, killing all attempts but the last.

    Args:
        name: of the configuration.
        directory: `Path` of the checkpoints.
        result: `Path` for what is left in the end.
        kills: how many at most.
        seconds: within which time after its beginning a run is killed.
        rng: `random.Random`.

    Returns:
        Triple: dict of the arrays that were left, number of kills, number of
        kills amid a save.
    """
    killed = killed_saving = 0
    while killed < kills:
        before = updates_saved(directory)
        pid, pipe = fork(name, directory, result)
        select.select([pipe], [], [])
        time.sleep(rng.uniform(0, seconds))
        if killed % 2 == 0:
            wait_for_save(pid, directory)
            time.sleep(rng.uniform(0, SAVING_SECS))
        os.kill(pid, signal.SIGKILL)
        has_ended = wait_for(pid)
        os.close(pipe)
        if has_ended:
            return dict(np.load(result)), killed, killed_saving
        killed += 1
        killed_saving += is_saving(directory)
        after = updates_saved(directory)
        if after < before:
            raise SystemExit(f"a kill took updates from {before} to {after}")
    return run_to_the_end(name, directory, result)[0], killed, killed_saving


def differences(one, other):
    """List the names under which two results differ in any bit."""
    names = sorted(set(one) | set(other))
    return [
        n
        for n in names
        if n not in one or n not in other or bits(one[n]) != bits(other[n])
    ]


def bits(array):
    """Return an array's bytes; a NaN of any sign counts as one NaN.

    What overflowed in a history is a NaN whose sign JSON does not write down.
    """
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.nan, array)
    return array.tobytes()


def soak(name, kills, rng):
    """Kill runs of one configuration, and compare where they end.

    Returns:
        int, number of kills.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder, result = Path(folder), Path(folder) / "left.npz"
        whole, seconds = run_to_the_end(name, folder / "whole", result)
        total = amid_save = ended = 0
        while total < kills:
            result.unlink()
            left, killed, saving = kill_again_and_again(
                name,
                folder / str(ended),
                result,
                kills - total,
                seconds / 3,
                rng,
            )
            total, amid_save, ended = (
                total + killed,
                amid_save + saving,
                ended + 1,
            )
            different = differences(whole, left)
            if different:
                raise SystemExit(f"{BACKEND}, {name} differs in {different}")
    print(
        f"{BACKEND}, {name}: {total} kills ({amid_save} of them amid a save), "
        f"{ended} runs to the end, 0 differences",
        flush=True,
    )
    return total


def main():
    """Read the arguments, soak every configuration, say what came out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--configurations", nargs="+", default=list(CONFIGURATIONS)
    )
    options = parser.parse_args()
    rng = random.Random(options.seed)
    share = -(-options.kills // len(options.configurations))
    total = sum(soak(name, share, rng) for name in options.configurations)
    print(f"{BACKEND}: {total} kills, 0 differences")


if __name__ == "__main__":
    main()
