"""Run many cases, and print the program of every one that fails.

PYTHONPATH=tests/support KERAS_BACKEND=jax python -m fuzz --cases 2000 --seed 0
"""

import argparse
import collections
import gc
import os
import time

# Programs this small run no faster for what XLA could still improve.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1",
)

from fuzz.run import run

FINE = ("same", "untold")


def main():
    """Run the cases that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--quiet", action="store_true", help="no programs")
    options = parser.parse_args()
    counts = collections.Counter()
    made = collections.Counter()
    begun = time.monotonic()
    gc.freeze()  # What modules hold need not be looked through again.
    for seed in range(options.seed, options.seed + options.cases):
        result = run(seed)
        counts[result.verdict] += 1
        made.update(result.case.features)
        if result.verdict not in FINE:
            print(f"--- case {seed}: {result.verdict}", flush=True)
            print(result.text, flush=True)
            if not options.quiet:
                print(result.case.program, flush=True)
    seconds = time.monotonic() - begun
    print(", ".join(f"{count} {name}" for name, count in made.most_common()))
    print(f"{dict(counts)} in {seconds:.0f} s")
    raise SystemExit(any(verdict not in FINE for verdict in counts))


if __name__ == "__main__":
    main()
