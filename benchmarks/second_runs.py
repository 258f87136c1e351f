"""How long the first update takes where an earlier process has compiled it.

Backends keep what they compile as `docs/compiling.md` says. PyTorch compiles
nothing by default; there nothing is measured.
"""

import json
import os
import subprocess
import sys
import tempfile

from contenders import BACKEND, CONTENDERS
from measuring import start, start_backend


def keeping(folder):
    """Return the environment in which a backend keeps what it compiles.

    Args:
        folder: str.

    Returns:
        Dict of str, empty where the backend keeps nothing.
    """
    return {
        "jax": {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        "tensorflow": {
            "TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={folder} "
            "--tf_xla_persistent_cache_device_types=CPU"
        },
    }.get(BACKEND, {})


def measure_second_run(command, times):
    """Measure a contender in processes that follow one another.

    Args:
        command: list of str, what has `bench.py` call `first_update_of_one`.
        times: int, processes after the one that compiles.

    Returns:
        Dict from the contender's label to seconds, list of `times` floats;
        empty where the backend keeps nothing.
    """
    second_runs = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = keeping(folder)
        if not environment:
            return {}
        for turn in range(1 + times):
            finished = subprocess.run(
                [sys.executable, *command],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | environment,
            )
            measured = json.loads(finished.stdout.splitlines()[-1])
            for label, secs in measured.items():
                second_runs.setdefault(label, []).extend([secs] * bool(turn))
    return second_runs


def first_update_of_one(cell, contender):
    """Make a first update in this process.

    Args:
        cell: `Cell`.
        contender: str.

    Yields:
        Dict from the contender's label to seconds.
    """
    start_backend()
    timing = start(CONTENDERS[contender], cell)
    timing.runner.close()
    yield {timing.runner.label: timing.first_updates[0]}
