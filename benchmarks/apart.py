"""Contenders that have a process each, as peers do.

Who shares a process shares its heap: what one contender has taken and given
back decides how memory lies for another, and whether its pages come back from
the system in every update.
"""

import json
import sys

from contenders import CONTENDERS, Peer, Runner, start_fastest
from measuring import Timing, start, start_backend


def train_when_told(cell, contender):
    """Train as many updates as standard input says, line by line.

    Args:
        cell: `Cell`.
        contender: str.

    Yields:
        Dict, what is known after the first update, then one for each line with
        the mean loss of the updates that were made.
    """
    start_backend()
    timing = start(CONTENDERS[contender], cell)
    yield {
        "name": timing.runner.name,
        "detail": timing.runner.describe(),
        "first update": timing.first_updates[0],
        "loss": timing.first_loss,
    }
    for line in sys.stdin:
        yield {"loss": timing.runner.fit(json.loads(line)["updates"])}
    timing.runner.close()


def start_apart(command):
    """Start a contender in a process of its own.

    Args:
        command: list of str, what has `bench.py` call `train_when_told`.

    Returns:
        `Timing` without rounds.
    """

    def start_again():
        again = Peer(command, process.threads)
        again.close()
        return again.about["first update"]

    command = [sys.executable, *command]
    process = start_fastest(command)
    about = process.about
    detail = ", ".join(filter(None, (about["detail"], process.detail)))
    runner = Runner(
        name=about["name"],
        fit=process.fit,
        describe=lambda: detail,
        close=process.close,
    )
    return Timing(
        runner=runner,
        first_updates=[about["first update"]],
        first_loss=about["loss"],
        start_again=start_again,
    )
