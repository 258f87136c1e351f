"""Measure on a GPU, in less than ten minutes, and write RESULTS-GPU.md.

    make bench-gpu
    make bench-gpu GPU_PYTHON=python3.12 BENCH_ARGS="--backends torch"
    make bench-gpu BENCH_ARGS="--small --out page.md"   on a CPU, to try it

It needs a Python with JAX or PyTorch and with Keras, no TensorFlow, and no
network; the page says how to bring Keras to where there is none. Each part
runs in a process of its own. A part that fails, or does not end in its time,
is written down so, and the others run.
"""

import argparse
import importlib.util
import os
import time
from pathlib import Path

from gpu.page import write_page
from gpu.processes import Outcome, run_part

PAGE = Path(__file__).parents[1] / "RESULTS-GPU.md"
BACKENDS = ("jax", "torch")
SECS = 570

PARTS = {
    # name: seconds of one backend, to be scaled to what there is
    "machine": 10,
    "filling": 110,  # it compiles longest
    "precisions": 55,
    "contests": 50,
    "limits": 25,
    "memory": 60,
}
COUNTS = {"small": (2, 4), "full": (4, 16, 64, 128)}
"""Micro-batches of the updates whose memory is measured."""


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--backends", nargs="+", choices=BACKENDS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument(
        "--small",
        action="store_true",
        help="models of a few weights, without bounds of time",
    )
    parser.add_argument(
        "--secs", type=float, default=SECS, help="for everything together"
    )
    parser.add_argument("--out", type=Path, default=PAGE)
    return parser.parse_args()


def installed_backends():
    """List those that are installed and that accumtrainer knows."""
    folder = Path(importlib.util.find_spec("accumtrainer").origin).parent
    return [
        name
        for name in BACKENDS
        if importlib.util.find_spec(name) and (folder / "steps" / name).is_dir()
    ]


def runs_of(part, is_small):
    """List the options of each process of a part."""
    small = ("--small",) if is_small else ()
    if part != "memory":
        return [small]
    return [
        ("--micro-batches", str(count), *small)
        for count in COUNTS["small" if is_small else "full"]
    ]


def main():
    """Run every part on every backend, and write the page after each."""
    arguments = read_arguments()
    backends = arguments.backends or installed_backends()
    if arguments.small:
        # PyTorch's threads wait for each other longer than they compute.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    begun = time.monotonic()
    to_come = len(backends) * sum(PARTS[name] for name in arguments.parts)
    outcomes = {name: {} for name in backends}
    for part in arguments.parts:
        runs = runs_of(part, arguments.small)
        for backend in backends:
            outcome = outcomes[backend].setdefault(part, Outcome())
            for options in runs:
                budget = None
                if not arguments.small:
                    left = arguments.secs - (time.monotonic() - begun)
                    # What one does not take is for those that follow.
                    share = PARTS[part] / len(runs)
                    budget = max(0, left * share / to_come)
                    to_come -= share
                print(backend, part, *options, flush=True)
                outcome.add(run_part(backend, part, options, budget))
            write_page(arguments.out, outcomes, is_small=arguments.small)
    took = time.monotonic() - begun
    print(f"Wrote {arguments.out} after {took:.0f} s.")


if __name__ == "__main__":
    main()
