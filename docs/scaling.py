"""Compute when accumulation hides the network, and draw docs/scaling.png."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

PARAMETERS = 124e6  # GPT-2 small
BYTES = 4 * PARAMETERS
SECS = 0.12  # of a micro-batch on one device
DEVICES = 8
NETWORKS = {
    "1 Gbit/s": 0.125e9,
    "10 Gbit/s": 1.25e9,
    "100 Gbit/s": 12.5e9,
}


def reduce_secs(size, devices, bandwidth, latency=50e-6):
    """Estimate how long a ring adds up arrays of all devices.

    Every device sends `2 (n - 1) / n` times the bytes, in `2 (n - 1)` steps
    (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    steps = 2 * (devices - 1)
    return steps / devices * size / bandwidth + steps * latency


def efficiency(micro_batches, secs, reduction, reductions):
    """Return the part of an update's time in which devices compute."""
    computing = micro_batches * secs
    return computing / (computing + reductions * reduction)


def draw(path):
    """Draw the efficiency over the number of micro-batches."""
    figure = Figure(figsize=(8, 4), layout="tight")
    axes = figure.subplots()
    micro_batches = 2 ** np.arange(9)
    for color, (name, bandwidth) in enumerate(NETWORKS.items()):
        secs = reduce_secs(BYTES, DEVICES, bandwidth)
        ours = [efficiency(k, SECS, secs, 1) for k in micro_batches]
        each = [efficiency(k, SECS, secs, k) for k in micro_batches]
        axes.plot(micro_batches, ours, f"C{color}", label=f"{name}, once")
        axes.plot(
            *(micro_batches, each, f"C{color}--"),
            label=f"{name}, per micro-batch",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(micro_batches, map(str, micro_batches))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("micro-batches per update on each device")
    axes.set_ylabel("part of the time spent computing")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def main():
    """Print how many micro-batches keep devices busy, and draw."""
    print("network     one sum   micro-batches for 90 %")
    for name, bandwidth in NETWORKS.items():
        secs = reduce_secs(BYTES, DEVICES, bandwidth)
        needed = int(np.ceil(9 * secs / SECS))
        print(f"{name:<10} {secs:>7.3f} s {needed:>24}")
    draw(Path(__file__).with_name("scaling.png"))


if __name__ == "__main__":
    main()
