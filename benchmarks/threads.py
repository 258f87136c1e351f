"""How many threads PyTorch computes with, chosen for each contender."""

import dataclasses
import time


def choose_threads(runner):
    """Have a contender run with the threads with which it is faster.

    That is one, or as many as PyTorch takes by itself, as for the peers: small
    operations take longer where several threads share them.

    Args:
        runner: `Runner`, which runs in this process.

    Returns:
        `Runner`.
    """
    import torch  # which other backends do without

    default = torch.get_num_threads()

    def fit_with(threads, updates):
        torch.set_num_threads(threads)
        try:
            return runner.fit(updates)
        finally:
            torch.set_num_threads(default)

    def seconds_per_update(threads):
        fit_with(threads, 1)  # compilers make another program for each
        secs = []
        for _ in range(2):
            begun = time.perf_counter()
            fit_with(threads, 2)
            secs.append(time.perf_counter() - begun)
        return min(secs)

    threads = min((default, 1), key=seconds_per_update)
    details = [runner.describe, lambda: "1 thread" if threads == 1 else ""]
    return dataclasses.replace(
        runner,
        fit=lambda updates: fit_with(threads, updates),
        describe=lambda: ", ".join(filter(None, (d() for d in details))),
    )
