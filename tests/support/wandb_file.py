"""Reads the `.wandb` file of a run back.

Its framing is LevelDB's log format behind a header of seven bytes: blocks of
32 KiB that hold fragments, each with a checksum (4 bytes), a length (2) and a
type (1): whole, first, middle or last part of a record. The records are
`Record` messages of W&B's own `wandb.proto`.
"""

import json
import struct
import time
from pathlib import Path

BLOCK_BYTES = 32 * 1024
FRAGMENT = struct.Struct("<IHB")
HEADER = struct.Struct("<4sHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path):
    """List the records of a `.wandb` file, each as bytes."""
    content = Path(path).read_bytes()
    magic, number, version = HEADER.unpack_from(content)
    assert (magic, number, version) == (b":W&B", 0xBEE1, 0)
    records, parts, position = [], [], HEADER.size
    while position + FRAGMENT.size <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < FRAGMENT.size:
            position += left  # padding
            continue
        _, length, kind = FRAGMENT.unpack_from(content, position)
        position += FRAGMENT.size
        parts.append(content[position : position + length])
        position += length
        if kind in (WHOLE, LAST):
            records.append(b"".join(parts))
            parts = []
    assert not parts
    return records


class WandbFile:
    """What a run has written.

    Args:
        path: the `.wandb` file.

    Attributes:
        run: the message `RunRecord`.
        config: dict by name.
        history: list of dicts, one per point, without W&B's own names.
        moments: list of floats, when each of those points was made.
        summary: dict of what was set explicitly, by name.
        metrics: list of messages `MetricRecord`.
        artifacts: list of messages `ArtifactRecord`.
        is_preempting: whether it was marked so.
        exit_code: int, or `None` if the run was not finished.
    """

    def __init__(self, path):
        from wandb.proto import wandb_internal_pb2

        self.path = Path(path)
        self.run = self.exit_code = None
        self.is_preempting = False
        self.config, self.history, self.summary = {}, [], {}
        self.moments, self.metrics, self.artifacts = [], [], []
        for content in read_records(path):
            record = wandb_internal_pb2.Record.FromString(content)
            getattr(self, f"_add_{record.WhichOneof('record_type')}", _skip)(
                record
            )

    def _add_run(self, record):
        self.run = record.run
        self._add_config_items(record.run.config.update)

    def _add_config(self, record):
        self._add_config_items(record.config.update)

    def _add_config_items(self, items):
        self.config |= _read_items(items)

    def _add_history(self, record):
        row = _read_items(record.history.item)
        self.history.append(
            {name: row[name] for name in row if not name.startswith("_")}
        )
        self.moments.append(row["_timestamp"])

    def _add_summary(self, record):
        self.summary |= _read_items(record.summary.update)

    def _add_metric(self, record):
        self.metrics.append(record.metric)

    def _add_artifact(self, record):
        self.artifacts.append(record.artifact)

    def _add_preempting(self, record):
        self.is_preempting = True

    def _add_exit(self, record):
        self.exit_code = record.exit.exit_code


def _read_items(items):
    """Read items, whose name is a key or a path of keys."""
    return {
        item.key or ".".join(item.nested_key): json.loads(item.value_json)
        for item in items
    }


def media_of(run, name):
    """List what was logged under a name, as `(updates, value)`.

    The value is what W&B's own process keeps of it, a dict by name; `content`
    is added: of a table its rows, with `columns`; of another file its path.
    """
    found = []
    for row in run.history:
        value = {
            key.removeprefix(f"{name}."): item
            for key, item in row.items()
            if key.startswith(f"{name}.")
        } or row.get(name)
        if value is None:
            continue
        if isinstance(value, dict) and "path" in value:
            file = run.path.parent / "files" / value["path"]
            is_table = value["_type"] == "table-file"
            content = json.loads(file.read_bytes()) if is_table else file
            value["content"] = content["data"] if is_table else content
            value["columns"] = content["columns"] if is_table else None
        found.append((row["updates"], value))
    return found


def _skip(record):
    del record


def written_runs(folder):
    """Read every run below a folder, in the order they were started.

    W&B's own process writes some time after `finish` has returned: this waits
    until every run has ended, or no file has grown for some seconds; longer for
    the first file, which on a busy machine comes late. The folder of a run is
    there as soon as it is started.
    """
    files, sizes, quiet = [], None, 0
    if not any(Path(folder).rglob("*run-*")):
        return files
    while quiet < (30 if files else 100):
        files = sorted(Path(folder).rglob("*.wandb"), key=_started)
        before, sizes = sizes, [file.stat().st_size for file in files]
        quiet = quiet + 1 if sizes == before else 0
        if files and quiet >= 2:
            runs = [WandbFile(file) for file in files]
            if all(run.exit_code is not None for run in runs):
                return runs
        time.sleep(0.1)
    return [WandbFile(file) for file in files]


def _started(file):
    """Return what puts runs into the order in which they were started."""
    seconds = file.parent.name.rpartition("run-")[2].partition("-")[0]
    return seconds, file.stat().st_mtime_ns
