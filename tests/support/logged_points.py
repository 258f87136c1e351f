"""Reads back what each of the shipped loggers has written."""

import json
import sys
import types
from typing import NamedTuple

from wandb_file import written_runs


class Written(NamedTuple):
    """One number that a logger has written, and where it stands."""

    name: str
    updates: int
    value: object


def read_run_log(folder):
    """Read `a.jsonl` in a folder."""
    lines = (folder / "a.jsonl").read_text().splitlines()
    return _of_points(map(json.loads, lines))


def read_wandb(folder):
    """Read the only run of W&B below a folder."""
    (run,) = written_runs(folder)
    return _of_points(run.history)


def read_tensorboard(folder):
    """Read a folder as TensorBoard shows it."""
    # Where this module is there, TensorBoard does without TensorFlow.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing import event_accumulator

    everything = {event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
    shown = event_accumulator.EventAccumulator(str(folder), everything)
    shown.Reload()
    return [
        Written(tag, event.step, event.value)
        for tag in shown.Tags()["scalars"]
        for event in shown.Scalars(tag)
        if tag != "updates"
    ]


def _of_points(points):
    return [
        Written(name, point["updates"], value)
        for point in points
        for name, value in point.items()
        if name != "updates"
    ]
