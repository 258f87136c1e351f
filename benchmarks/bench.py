"""Compare the speed of a Trainer with that of Keras's own `fit`, and of peers.

Every cell (a model with its batch) is trained by every contender in turn,
round after round, so that whatever else the machine does meets all of them
alike. A round is one call of `fit` that takes about a second. Printed are the
medians over rounds and in brackets the smallest and the largest; ratios are
taken round by round.

    python benchmarks/bench.py
    python benchmarks/bench.py --cells mlp --k1 --rounds 9
    python benchmarks/bench.py --precision mixed_bfloat16
    python benchmarks/bench.py --peers .venv-peers/bin/python
    KERAS_BACKEND=jax python benchmarks/bench.py --memory --write

`--memory` runs every contender once more, in a process of its own, and
measures what an update takes at its peak beyond the model.
"""

import argparse
import json
import sys

import keras
from cells import CELLS
from contenders import CONTENDERS
from measuring import measure, measure_peak, peak_of_one, start_backend
from telling import (
    OURS,
    REFERENCE,
    RESULTS,
    compare_first_updates,
    compare_with_recorded,
    compare_with_targets,
    describe_cell,
    describe_machine,
    draw,
    record,
    summarize,
    tell,
    write_results,
)

QUICK_CELLS = ("mlp", "conv", "gpt")
QUICK_CONTENDERS = (OURS, REFERENCE)
ALL_CELLS = [name for name in CELLS if name not in ("tiny", "deep")]


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, known, default in (
        ("cells", CELLS, ALL_CELLS),
        ("contenders", CONTENDERS, list(CONTENDERS)),
    ):
        parser.add_argument(
            f"--{name}",
            choices=known,
            default=default,
            help="of " + ", ".join(known),
            nargs="+",
            metavar="NAME",
        )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-secs", type=float, default=1.0)
    parser.add_argument(
        "--starts",
        type=int,
        default=3,
        help="first updates, of those who are compared by them",
    )
    parser.add_argument(
        "--k1", action="store_true", help="also updates of one micro-batch"
    )
    parser.add_argument(
        "--only-k1", action="store_true", help="no others than those"
    )
    parser.add_argument("--precision", default="float32", metavar="POLICY")
    parser.add_argument(
        "--peers",
        metavar="PYTHON",
        help="interpreter that has Lightning and Accelerate",
    )
    parser.add_argument(
        "--memory", action="store_true", help="measure peak memory too"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="three cells, against what was recorded",
    )
    parser.add_argument(
        "--write", action="store_true", help=f"update {RESULTS.name}"
    )
    parser.add_argument(
        "--peak-of-one", action="store_true", help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.cells = QUICK_CELLS
        arguments.contenders = QUICK_CONTENDERS
    return arguments


def make_cells(arguments):
    """Yield the cells asked for, pairs of name and `Cell`."""
    yielded = set()
    for name in arguments.cells:
        cell = CELLS[name]()
        single = cell.without_accumulation()
        if not arguments.only_k1:
            yield name, cell
        if (arguments.k1 or arguments.only_k1) and single.key not in yielded:
            yielded.add(single.key)
            yield name, single


def add_peaks(timings, arguments, name, cell):
    """Measure the peak memory of those contenders that run here."""
    command = [__file__, "--precision", arguments.precision]
    if cell.micro_batches == 1:
        command.append("--only-k1")
    for contender, timing in timings.items():
        if contender in CONTENDERS:
            timing.peak_bytes = measure_peak(command, name, contender)


def main():
    """Measure, print, and write if asked to."""
    arguments = read_arguments()
    keras.config.set_dtype_policy(arguments.precision)
    if arguments.peak_of_one:
        ((_, cell),) = make_cells(arguments)
        print(json.dumps(peak_of_one(cell, *arguments.contenders)))
        return
    fallen = []
    start_backend()
    for name, cell in make_cells(arguments):
        lines = [describe_cell(cell, arguments.rounds), "", describe_machine()]
        timings = measure(
            cell,
            arguments.contenders,
            rounds=arguments.rounds,
            round_secs=arguments.round_secs,
            starts=arguments.starts,
            python=arguments.peers,
        )
        if arguments.memory:
            add_peaks(timings, arguments, name, cell)
        lines += ["", *tell(timings)]
        ratios = summarize(timings)
        key = cell.key
        if arguments.precision != "float32":
            key += f" {arguments.precision}"
        for line in [
            *compare_with_targets(key, ratios),
            *compare_first_updates(timings),
        ]:
            lines += ["", line]
        print(*lines, "", sep="\n", flush=True)
        fallen += compare_with_recorded(key, ratios)
        if arguments.write:
            write_results(lines)
            record({key: ratios})
            draw()
    if fallen and not arguments.write:
        print("More than a tenth below what was recorded:", *fallen, sep="\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
