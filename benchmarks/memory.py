"""Compare the memory that updates are predicted to take with what they take.

    KERAS_BACKEND=jax python benchmarks/memory.py
    KERAS_BACKEND=jax python benchmarks/memory.py --cells gpt --sizes 4 16

Every size of micro-batches runs in a process of its own. Measured is by how
much the process's memory grows from the model to the peak of a later update,
see `measuring.peak_of_one`; predicted is what `trainer.memory_plan` says, less
the model, which is there before.
"""

import argparse
import dataclasses
import json
import subprocess
import sys

import keras
from cells import CELLS
from contenders import make_loss
from measuring import peak_of_one

from accumtrainer import Trainer

MODELS = ("mlp", "conv", "gpt", "gpt_medium", "vgg16", "text")
SIZES = (4, 16, 64)


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=MODELS, choices=CELLS)
    parser.add_argument("--sizes", nargs="+", default=SIZES, type=int)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name, size):
    """Predict and measure one, in this process; pair of bytes."""
    cell = dataclasses.replace(
        CELLS[name](), micro_batch_size=size, micro_batches=2
    )
    measured = peak_of_one(cell, "trainer")
    trainer = Trainer(
        cell.make_model(), optimizer="adam", loss=make_loss(), seed=0
    )
    x, y = cell.head(1)
    (row,) = trainer.memory_plan((x, y), [size]).rows
    model = sum(
        keras.ops.size(variable) * 4 for variable in trainer.model.variables
    )
    return row.peak_bytes - int(model), measured


def main():
    """Print a table."""
    arguments = read_arguments()
    if arguments.one:
        (name,), (size,) = arguments.cells, arguments.sizes
        print(json.dumps(measure(name, size)))
        return
    print("| cell | predicted | measured | predicted / measured |")
    print("| --- | ---: | ---: | ---: |")
    for name in arguments.cells:
        for size in arguments.sizes:
            command = [sys.executable, __file__, "--one", "--cells", name]
            finished = subprocess.run(
                [*command, "--sizes", str(size)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            predicted, peak = json.loads(finished.stdout.splitlines()[-1])
            print(
                f"| {name} {size}x2 | {predicted / 2**20:,.0f} MiB | "
                f"{peak / 2**20:,.0f} MiB | {predicted / peak:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
