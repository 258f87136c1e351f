"""Compare the memory that updates are predicted to take with what they take.

    KERAS_BACKEND=jax python benchmarks/memory.py
    KERAS_BACKEND=jax python benchmarks/memory.py --cells gpt --sizes 4 16

Every size of micro-batches runs in a process of its own. Predicted is what
`trainer.memory_plan` says. Measured are the arrays that are there between two
updates, model and optimizer above all, and by how much the process grows from
there to the peak of the next updates. What a process keeps besides arrays,
compiled code and the compiler's memory, is left out that way; a CPU has no
allocator of its own that could be asked.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
from cells import CELLS
from contenders import make_loss
from peaks import read_status

from accumtrainer import Accumulation, Trainer

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
    x, y = cell.head(1)
    trainer = Trainer(
        cell.make_model(),
        optimizer="adam",
        loss=make_loss(),
        accumulation=Accumulation(micro_batch_size=size),
        seed=0,
    )

    def update():
        trainer.fit(x, y, batch_size=len(x), epochs=2, verbose=0)

    for _ in range(2):
        update()
    ctypes.CDLL(None).malloc_trim(0)
    arrays = sum(array.nbytes for array in jax.live_arrays())
    at_rest = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    update()
    measured = arrays + read_status("VmHWM") - at_rest
    (row,) = trainer.memory_plan((x, y), [size]).rows
    return row.peak_bytes, measured


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
                # Memory that was freed goes back to the system at once.
                env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
            )
            predicted, peak = json.loads(finished.stdout.splitlines()[-1])
            print(
                f"| {name} {size}x2 | {predicted / 2**20:,.0f} MiB | "
                f"{peak / 2**20:,.0f} MiB | {predicted / peak:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
