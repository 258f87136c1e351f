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
    KERAS_BACKEND=jax python benchmarks/bench.py --measure times peaks --write
    python benchmarks/bench.py --cells gpt --micro-batches 4 128 --measure peaks
    python benchmarks/bench.py --k1 --measure times peaks --write --missing
    KERAS_BACKEND=jax python benchmarks/bench.py --measure second-runs --write

`--write` keeps each cell as soon as it was measured; a run that was ended goes
on with `--missing`. `--measure` chooses what is measured. Of `peaks` and
`second-runs` each contender's stand in processes of their own: what an update
takes at its peak beyond the model, and how long the first update takes where an
earlier process has kept what it compiled.
"""

import argparse
import json
import sys

import keras
from apart import start_apart, train_when_told
from cells import CELLS
from contenders import BACKEND, CONTENDERS, PEERS
from measuring import STARTED_AGAIN, measure, start_backend
from peaks import measure_peak, peak_of_one, peak_of_peer
from results import PAGE, draw, keep, read, write_page
from second_runs import first_update_of_one, measure_second_run
from telling import (
    OURS,
    REFERENCE,
    compare_first_updates,
    compare_with_recorded,
    compare_with_targets,
    describe_cell,
    describe_machine,
    median_and_ends,
    numbers_of,
    summarize,
    tell,
    tell_second_runs,
)

QUICK_CELLS = ("mlp", "conv", "gpt")
QUICK_CONTENDERS = (OURS, REFERENCE)
ALL_CELLS = [name for name in CELLS if name != "deep"]

TIMES, PEAKS, SECOND_RUNS = "times", "peaks", "second-runs"
PARTS = (TIMES, PEAKS, SECOND_RUNS)
"""What can be measured of a cell, and is kept by these names."""

OF_ONE = {
    TIMES: train_when_told,
    PEAKS: peak_of_one,
    SECOND_RUNS: first_update_of_one,
}
"""What a process does that is there for one contender of a cell."""

HAVE_A_PROCESS_EACH = BACKEND == "torch"
"""Whether contenders run apart, as do the peers that are compared with them."""


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_what_is_measured(parser)
    add_what_is_made_of_it(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.cells = QUICK_CELLS
        arguments.contenders = QUICK_CONTENDERS
    return arguments


def add_what_is_measured(parser):
    """Add the arguments that choose cells, contenders and rounds."""
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
        "--micro-batches",
        type=int,
        nargs="+",
        metavar="COUNT",
        help="of an update, in place of each cell's own",
    )
    parser.add_argument("--precision", default="float32", metavar="POLICY")
    parser.add_argument(
        "--peers",
        metavar="PYTHON",
        help="interpreter that has Lightning and Accelerate",
    )


def add_what_is_made_of_it(parser):
    """Add the arguments that say what else to do."""
    parser.add_argument(
        "--measure",
        choices=PARTS,
        default=[TIMES],
        help=f"of {', '.join(PARTS)}; what was kept of others stays",
        nargs="+",
        metavar="PART",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="three cells, against what was recorded",
    )
    parser.add_argument(
        "--write", action="store_true", help=f"update {PAGE.name}"
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="leave out cells of which all was kept that is asked for, as when "
        "a run with --write that was ended goes on",
    )
    parser.add_argument("--of-one", choices=OF_ONE, help=argparse.SUPPRESS)


def make_cells(arguments):
    """Yield the cells asked for, pairs of name and `Cell`, each once."""
    yielded = set()
    for name in arguments.cells:
        cell = CELLS[name]()
        counts = arguments.micro_batches or [cell.micro_batches]
        for count in [*counts, 1] if arguments.k1 else counts:
            variant = cell.with_micro_batches(count)
            if variant.key not in yielded:
                yielded.add(variant.key)
                yield name, variant


def measure_times(name, cell, arguments):
    """Time the contenders of a cell, dict from name to `Timing`."""

    def start_one(contender):
        return start_apart(
            command_of_one(TIMES, contender, name, cell, arguments)
        )

    return measure(
        cell,
        arguments.contenders,
        rounds=arguments.rounds,
        round_secs=arguments.round_secs,
        starts=arguments.starts,
        python=arguments.peers,
        start_one=start_one if HAVE_A_PROCESS_EACH else None,
    )


def measure_peaks(name, cell, arguments):
    """Measure the contenders' memory, dict from labels to bytes."""
    peaks = {}
    for contender in arguments.contenders:
        peaks |= measure_peak(
            command_of_one(PEAKS, contender, name, cell, arguments)
        )
    if arguments.peers:
        for contender in PEERS:
            peaks |= peak_of_peer(cell, contender, arguments.peers)
    return peaks


def measure_second_runs(name, cell, arguments):
    """Measure first updates of later processes, dict from labels to secs."""
    second_runs = {}
    for contender in arguments.contenders:
        if contender in STARTED_AGAIN:
            second_runs |= measure_second_run(
                command_of_one(SECOND_RUNS, contender, name, cell, arguments),
                arguments.starts,
            )
    return second_runs


def command_of_one(part, contender, name, cell, arguments):
    """Return the arguments of Python that measure one contender of a cell."""
    return [
        *(__file__, "--cells", name, "--contenders", contender),
        *("--micro-batches", str(cell.micro_batches)),
        *("--precision", arguments.precision, "--of-one", part),
    ]


def key_of(cell):
    """Return how the cell is called in this precision."""
    policy = keras.config.dtype_policy().name
    return cell.key + f" {policy}" * (policy != "float32")


def is_kept(cell, arguments):
    """Return whether all was kept of a cell that would be measured."""
    kept = read().get(BACKEND, {}).get(key_of(cell), {})
    return all(part in kept for part in arguments.measure)


def describe(cell, arguments, timings, peaks, second_runs):
    """Return the lines that tell of a cell."""
    lines = [
        *(describe_cell(cell, arguments.rounds), "", describe_machine(), ""),
        *(tell(timings, peaks) if timings or peaks else ()),
        *tell_second_runs(second_runs),
    ]
    for line in [
        *compare_with_targets(key_of(cell), summarize(timings)),
        *compare_first_updates(timings),
    ]:
        lines += ["", line]
    return lines


def write(cell, arguments, timings, peaks, second_runs):
    """Keep what was measured of a cell, and make the page anew."""
    machine, parts = describe_machine(), {}
    if timings:
        parts[TIMES] = {
            "machine": machine,
            "rounds": arguments.rounds,
            "contenders": numbers_of(timings),
            "ratios": summarize(timings),
        }
    if peaks:
        mebibytes = {k: round(peak / 2**20) for k, peak in peaks.items()}
        parts[PEAKS] = {"machine": machine, "mib": mebibytes}
    if second_runs:
        secs = {k: median_and_ends(found) for k, found in second_runs.items()}
        parts[SECOND_RUNS] = {"machine": machine, "secs": secs}
    about = {
        "title": cell.title,
        "micro_batches": cell.micro_batches,
        "micro_batch_size": cell.micro_batch_size,
        "precision": arguments.precision,
    }
    keep(BACKEND, key_of(cell), about, parts)
    draw(BACKEND)
    write_page()


def main():
    """Measure, print, and write if asked to."""
    arguments = read_arguments()
    keras.config.set_dtype_policy(arguments.precision)
    if arguments.of_one:
        ((_, cell),) = make_cells(arguments)
        for found in OF_ONE[arguments.of_one](cell, *arguments.contenders):
            print(json.dumps(found), flush=True)
        return
    fallen = []
    start_backend()
    for name, cell in make_cells(arguments):
        timings, peaks, second_runs = {}, None, {}
        if arguments.missing and is_kept(cell, arguments):
            continue
        if TIMES in arguments.measure:
            timings = measure_times(name, cell, arguments)
            fallen += compare_with_recorded(key_of(cell), summarize(timings))
        if PEAKS in arguments.measure:
            peaks = measure_peaks(name, cell, arguments)
        if SECOND_RUNS in arguments.measure:
            second_runs = measure_second_runs(name, cell, arguments)
        found = timings, peaks, second_runs
        print(*describe(cell, arguments, *found), "", sep="\n", flush=True)
        if arguments.write:
            write(cell, arguments, *found)
    if fallen and not arguments.write:
        print("More than a tenth below what was recorded:", *fallen, sep="\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
