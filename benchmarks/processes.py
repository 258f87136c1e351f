"""Measure what a second process gains, on a machine with two cores or more.

The same updates are made by one process that has one core, and by two that
have a core each and share every batch out. Both stand ready and are asked by
turns. Printed are the medians of the ratios of updates per second, taken round
by round, and in brackets the interval that holds the true median in 95 of 100
such measurements; 2 is all that a second core can give.

    python benchmarks/processes.py
    KERAS_BACKEND=jax python benchmarks/processes.py --cells gpt --rounds 21
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROCESSES = 2
READY = "ready"


def train(options):
    """Make as many updates as standard input says, line by line."""
    # Before a backend looks how many cores there are.
    os.sched_setaffinity(0, {options.process})
    sys.path.append(str(ROOT / "examples"))
    import keras
    from cells import CELLS
    from distributed import join

    from accumtrainer import Accumulation, Trainer

    scope = join(options.among, options.process, "localhost", options.port)
    cell = CELLS[options.cells[0]]().with_micro_batches(options.micro_batches)
    keras.utils.set_random_seed(0)
    with scope:
        trainer = Trainer(
            cell.make_model(),
            optimizer=keras.optimizers.Adam(1e-4),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            accumulation=Accumulation(micro_batch_size=cell.micro_batch_size),
            seed=0,
        )
    print(READY, cell.most_updates, flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        trainer.fit(
            *cell.head(int(line)),
            batch_size=cell.samples_per_update,
            shuffle=False,
            verbose=0,
        )
        # The loss of an epoch is read at its end: nothing is still under way.
        print(READY, time.perf_counter() - begun, flush=True)


class Team:
    """Processes that train together, and wait to be asked.

    Args:
        count: int, how many.
        cell: str, name of what they train.
        micro_batches: int, in an update of all of them.
    """

    def __init__(self, count, cell, micro_batches):
        port = free_port(count)
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--cells", cell),
                    *("--micro-batches", str(micro_batches)),
                    *("--among", str(count), "--process", str(index)),
                    *("--port", str(port)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for index in range(count)
        ]
        self.most_updates = int(self._answers()[0])

    def secs(self, updates):
        """Make updates, and return the seconds that one took."""
        for process in self._processes:
            process.stdin.write(f"{updates}\n")
            process.stdin.flush()
        return max(self._answers()) / updates

    def close(self):
        """Let the processes end."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()

    def _answers(self):
        return [float(self._answer(process)) for process in self._processes]

    def _answer(self, process):
        for line in process.stdout:
            if line.startswith(READY):
                return line.split()[1]
        raise RuntimeError(f"A process ended with code {process.wait()}.")


def free_port(count):
    """Find a port that is free, as are those after it."""
    while True:
        with contextlib.ExitStack() as stack:
            sockets = [
                stack.enter_context(socket.socket()) for _ in range(count)
            ]
            sockets[0].bind(("localhost", 0))
            first = sockets[0].getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                for index in range(1, count):
                    sockets[index].bind(("localhost", first + index))
                return first


def compare(cell, micro_batches, rounds, round_secs):
    """Compare two processes with one, and print it."""
    import numpy as np
    from measuring import interval_of_median

    teams = [Team(n, cell, micro_batches) for n in (1, PROCESSES)]
    updates = []
    for team in teams:
        team.secs(2)
        secs = team.secs(2)
        updates.append(max(1, min(int(round_secs / secs), team.most_updates)))
    secs = [[], []]
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            secs[index].append(teams[index].secs(updates[index]))
    for team in teams:
        team.close()
    alone, together = map(np.array, secs)
    ratios = alone / together
    low, high = interval_of_median(ratios)
    print(
        f"{cell}, {micro_batches} micro-batches, {rounds} rounds: "
        f"{1000 * np.median(alone):.0f} and {1000 * np.median(together):.0f} "
        f"ms per update, {np.median(ratios):.2f}x ({low:.2f}x-{high:.2f}x)",
        flush=True,
    )


def main():
    """Read the arguments, and compare or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=["gpt", "conv", "mlp"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--round-secs", type=float, default=2.0)
    parser.add_argument("--micro-batches", type=int, nargs="+")
    for name in ("--among", "--process", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        (options.micro_batches,) = options.micro_batches
        train(options)
        return
    for cell in options.cells:
        for micro_batches in options.micro_batches or (2, 16):
            compare(cell, micro_batches, options.rounds, options.round_secs)


if __name__ == "__main__":
    main()
