"""Train on handwritten digits in several processes, as on several machines.

Every process is told how many there are and which one it is. Here are two on
one machine, to be started in two terminals; they make the same updates as one
process would:

    python examples/distributed.py --processes 2 --process 0
    python examples/distributed.py --processes 2 --process 1

    python examples/distributed.py

On several machines give `--address` the name of the first one. Each process
uses all devices it sees, on PyTorch one of them. Every one is given the same
arrays and takes its share; a loader would yield its process's share. Process 0
alone prints and saves. With `--checkpoints`, a folder all processes can read,
a run that was broken off goes on where it was.
"""

import argparse
import contextlib
import json
import os

import keras
import numpy as np
from sklearn.datasets import load_digits

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import Checkpoint

BATCH_SIZE = 128


def join(processes, process, address, port):
    """Join the other processes.

    Args:
        processes: int, how many there are.
        process: int, which of them this is.
        address: str, of the machine that process 0 runs on.
        port: int, a free port there; on TensorFlow every process takes the
            one that many further on.

    Returns:
        Scope for the model: its weights will be the same in all processes.
    """
    if keras.backend.backend() == "jax":
        import jax

        if processes > 1:
            jax.distributed.initialize(
                *(f"{address}:{port}", processes, process),
                # Until the others give up when one of them is gone.
                heartbeat_timeout_seconds=10,
            )
        return keras.distribution.DataParallel().scope()
    if processes == 1:
        return contextlib.nullcontext()
    if keras.backend.backend() == "torch":
        import torch

        has_gpus = torch.cuda.is_available()
        if has_gpus:
            torch.cuda.set_device(process % torch.cuda.device_count())
        torch.distributed.init_process_group(
            "nccl" if has_gpus else "gloo",
            init_method=f"tcp://{address}:{port}",
            world_size=processes,
            rank=process,
        )
        # The first update begins with the weights of process 0.
        return contextlib.nullcontext()
    import tensorflow as tf

    # TensorFlow wants to know where each one is; here all are on one machine.
    workers = [f"{address}:{port + index}" for index in range(processes)]
    task = {"type": "worker", "index": process}
    cluster = {"cluster": {"worker": workers}, "task": task}
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    return tf.distribute.MultiWorkerMirroredStrategy().scope()


def make_model():
    """Make a small network, not compiled."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([64]),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--address", default="localhost")
    parser.add_argument("--port", type=int, default=12321)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoints", metavar="FOLDER")
    parser.add_argument("--save", metavar="PATH", help="where to, .keras")
    return parser.parse_args()


def main():
    """Train, and say how well it went."""
    arguments = read_arguments()
    scope = join(
        arguments.processes,
        arguments.process,
        arguments.address,
        arguments.port,
    )
    keras.utils.set_random_seed(0)
    with scope:
        trainer = Trainer(
            make_model(),
            optimizer=keras.optimizers.Adam(0.003),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            accumulation=Accumulation(micro_batch_size=8),
            callbacks=[
                Checkpoint(folder)
                for folder in [arguments.checkpoints]
                if folder is not None
            ],
            seed=0,
        )
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target
    trainer.fit(
        *(x[:1400], y[:1400]),
        batch_size=BATCH_SIZE,
        epochs=arguments.epochs,
        verbose=2,
        resume_from="auto" if arguments.checkpoints else None,
    )
    loss, accuracy = trainer.evaluate(x[1400:], y[1400:], verbose=0)
    if trainer.is_chief:
        print(f"test accuracy {accuracy:.1%}, loss {loss:.4f}")
        if arguments.save:
            trainer.model.save(arguments.save)


if __name__ == "__main__":
    main()
