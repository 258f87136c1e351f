"""Count the bytes that an update adds up over devices, ours and Keras's.

    python benchmarks/reductions.py

On JAX, with two devices made of the processor. XLA writes down what it has
compiled; the all-reduces of the program that trains are counted from that.
Keras accumulates in its optimizer, and runs its program once per micro-batch.
"""

import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MICRO_BATCHES = (1, 4, 16)
MICRO_BATCH_SIZE = 32
DEVICES = 2
SIZES = {"f32": 4, "s32": 4, "u32": 4, "f16": 2, "bf16": 2, "pred": 1}


def train(contender, micro_batches):
    """Make one update of a multi-layer perceptron on two devices."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    import keras
    from cells import CELLS

    cell = CELLS["mlp"]().with_micro_batches(micro_batches)
    devices = [f"cpu:{index}" for index in range(DEVICES)]
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    model = cell.make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    samples = MICRO_BATCH_SIZE * DEVICES * micro_batches
    x, y = cell.x[:samples], cell.y[:samples]
    if contender == "Keras":
        steps = micro_batches if micro_batches > 1 else None
        optimizer = keras.optimizers.Adam(gradient_accumulation_steps=steps)
        model.compile(optimizer, loss)
        size = MICRO_BATCH_SIZE * DEVICES
        model.fit(x, y, batch_size=size, verbose=0)
        return
    from accumtrainer import Accumulation, Trainer

    trainer = Trainer(
        model,
        optimizer="adam",
        loss=loss,
        accumulation=Accumulation(micro_batch_size=MICRO_BATCH_SIZE),
    )
    trainer.fit(x, y, batch_size=samples, verbose=0)


def count(contender, micro_batches):
    """Count all-reduces and their bytes in one update.

    Returns:
        Pair of ints.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
        subprocess.run(
            [sys.executable, __file__, contender, str(micro_batches)],
            check=True,
            env=os.environ | {"XLA_FLAGS": flags},
            stderr=subprocess.DEVNULL,
        )
        found = max(
            map(_reductions, Path(folder).glob("*after_optimizations.txt")),
            key=sum,
        )
    times = micro_batches if contender == "Keras" else 1
    return times * len(found), times * sum(found)


def _reductions(path):
    """List the bytes of every all-reduce of a program."""
    text = path.read_text()
    return [
        sum(map(_bytes, re.findall(r"(\w+)\[([\d,]*)\]", shapes)))
        for shapes in re.findall(r"= (.*?) all-reduce\(", text)
    ]


def _bytes(shape):
    kind, sizes = shape
    return SIZES[kind] * math.prod(int(n) for n in sizes.split(",") if n)


def main():
    """Print a table."""
    print("| micro-batches | Keras, bytes | ours, bytes |")
    print("| ---: | ---: | ---: |")
    for micro_batches in MICRO_BATCHES:
        cells = [f"{micro_batches}"]
        for contender in ("Keras", "ours"):
            times, size = count(contender, micro_batches)
            cells.append(f"{size:,} in {times}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], int(sys.argv[2]))
    else:
        main()
