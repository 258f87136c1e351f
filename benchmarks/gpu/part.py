"""Run one part of the benchmark in this process, row by row."""

import argparse
import importlib

from gpu.devices import this_device
from gpu.processes import tell
from gpu.sizes import FULL, SMALL


def main():
    """Read the arguments, and run the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=8)
    arguments = parser.parse_args()
    sizes = SMALL if arguments.small else FULL
    module = importlib.import_module(f"gpu.{arguments.part}")
    count = arguments.micro_batches
    for row in module.rows(this_device(), sizes, micro_batches=count):
        tell(row)


if __name__ == "__main__":
    main()
