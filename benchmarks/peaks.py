"""How much memory updates take beyond the model, a process for each.

Only Linux tells; elsewhere nothing is measured.
"""

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from contenders import CONTENDERS, PEERS, Peer, command_of_peer
from measuring import start_backend

AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Has memory that was freed go back to the system at once."""


def measure_peak(command):
    """Measure a contender in a process of its own.

    Args:
        command: list of str, what has `bench.py` call `peak_of_one`.

    Returns:
        Dict from the contender's label to bytes; empty where the system does
        not tell, or the process failed.
    """
    finished = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | AT_ONCE,
    )
    if finished.returncode:
        return {}
    return json.loads(finished.stdout.splitlines()[-1])


def peak_of_one(cell, contender):
    """Measure the peak of an update in this process beyond the model.

    What the first updates leave behind, compilers above all, is given back to
    the system as far as it can be; then the peak of two more is taken. The
    optimizer's variables are counted in, and gradients where they are kept.

    Args:
        cell: `Cell`.
        contender: str.

    Yields:
        Dict from the contender's label to bytes.
    """
    if not status_of().exists():
        yield {}
        return
    start_backend()
    model = cell.make_model()
    give_back()
    before = read_status("VmRSS")
    runner = CONTENDERS[contender](cell, model)
    for _ in range(2):
        runner.fit(2)
    give_back()
    yield {runner.label: peak_of_updates(runner) - before}


def peak_of_peer(cell, name, python):
    """Measure the same of a contender in an environment without Keras.

    Args:
        cell: `Cell`.
        name: one of `contenders.PEERS`.
        python: path of that environment's interpreter.

    Returns:
        Dict from the contender's label to bytes.
    """
    if not status_of().exists():
        return {}
    peer = Peer(command_of_peer(name, cell, python), environment=AT_ONCE)
    before = read_status("VmRSS", peer.id)
    for _ in range(2):
        peer.fit(2)
    peak = peak_of_updates(peer, peer.id)
    peer.close()
    return {PEERS[name]: peak - before}


def give_back():
    """Give memory that nobody uses back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def peak_of_updates(runner, process="self"):
    """Make two updates, and return their peak in bytes."""
    status_of(process).with_name("clear_refs").write_text("5")
    runner.fit(2)
    return read_status("VmHWM", process)


def read_status(name, process="self"):
    """Read one of a process's sizes from the system, in bytes."""
    text = status_of(process).read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.M)
    return 1024 * int(found[1])


def status_of(process="self"):
    """Return where the system tells of a process."""
    return Path(f"/proc/{process}/status")
