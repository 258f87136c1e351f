"""Run many cases, and print the program of every one that fails.

PYTHONPATH=tests/support KERAS_BACKEND=jax python -m fuzz --cases 2000 --seed 0
"""

import argparse
import collections
import concurrent.futures
import gc
import multiprocessing
import os
import resource
import time

from xla_flags import quick_flags

# Programs this small run no faster for what XLA could still improve.
os.environ.setdefault("XLA_FLAGS", quick_flags())

from fuzz.run import run

FINE = ("same", "untold")

CASES_OF_POOL = 100
"""After so many, new processes start: backends keep what they compiled."""


def main():
    """Run the cases that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="no programs")
    options = parser.parse_args()
    counts = collections.Counter()
    made = collections.Counter()
    begun = time.monotonic()
    for result in results(options):
        counts[result.verdict] += 1
        made.update(result.case.features)
        if result.verdict not in FINE:
            print(f"--- case {result.case.seed}: {result.verdict}")
            print(result.text, flush=True)
            if not options.quiet:
                print(result.case.program, flush=True)
    seconds = time.monotonic() - begun
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    each = (usage.ru_utime + usage.ru_stime) / sum(counts.values())
    print(", ".join(f"{count} {name}" for name, count in made.most_common()))
    print(f"{dict(counts)} in {seconds:.0f} s, {each:.2f} s of the CPU each")
    raise SystemExit(any(verdict not in FINE for verdict in counts))


def results(options):
    """Yield the results of the cases, in order.

    Raises:
        BrokenProcessPool: a case has ended its process; it is among the first
            that were not reported.
    """
    end = options.seed + options.cases
    # Python 3.11 hangs where a pool itself replaces processes after so many.
    for start in range(options.seed, end, CASES_OF_POOL * options.processes):
        stop = min(start + CASES_OF_POOL * options.processes, end)
        with concurrent.futures.ProcessPoolExecutor(
            options.processes,
            multiprocessing.get_context("spawn"),
            # What modules hold need not be looked through again.
            initializer=gc.freeze,
        ) as pool:
            for result in pool.map(run, range(start, stop)):
                is_fine = result.verdict in FINE
                yield result if is_fine else optimized(result.case.seed)


def optimized(seed):
    """Run a case as XLA compiles by default.

    Without optimization it makes NaN of some finite gradients, Keras's too.
    """
    flags = os.environ.pop("XLA_FLAGS")
    try:
        with concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn")
        ) as pool:
            return pool.submit(run, seed).result()
    finally:
        os.environ["XLA_FLAGS"] = flags


if __name__ == "__main__":
    main()
