"""A log of a training as lines of JSON, for people without W&B."""

import json
import math
import os
from pathlib import Path
from typing import Any

from accumtrainer import Every
from accumtrainer.callbacks.arguments import require_path
from accumtrainer.callbacks.warning_logger import WarningLogger

UNWRITABLE = (
    "path must name a file that can be written. Received: path={path!r} "
    "({reason}). Give a file in a folder of yours; missing folders are made."
)

FAILED = (
    "{path} could not be written ({reason}). Training goes on; points are "
    "missing from the file until writing works again."
)


class RunLog(WarningLogger):
    """Write every point of a training into a file, one line of JSON each.

    A line holds `updates` and the numbers of the point. It is on disk when the
    update after it has been made. Numbers that are not finite are written as
    `null`, since JSON has no others. A file that exists is appended to. After a
    resume, points that are in it already are not repeated; where training
    went otherwise since, as with other settings, both are in it, the later
    ones below. The end of a line that a crash cut off is removed.

    If a point cannot be written, because the disk is full for example, a
    warning says so once and training goes on.

    Args:
        path: where to write; missing folders are made.
        every: how often; default every 10 updates, and once an epoch at
            least.

    Raises:
        TypeError: `every` is no `Every`.
        ValueError: the file cannot be written; raised when training begins.

    Examples:
        >>> from accumtrainer import Every
        >>> run_log = RunLog("runs/a.jsonl", every=Every(100, "updates"))
        >>> run_log.path.name
        'a.jsonl'
    """

    def __init__(self, path: str | os.PathLike, every: Every | None = None):
        super().__init__(every)
        self.path = require_path("path", path, "runs/a.jsonl")
        self._file: Any = None
        self._size = 0
        self._begin = 0  # from here on lie points that may come again
        self._present: set[str] = set()

    def open(self) -> None:
        self._present = set()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)
            self._begin = self._size = _repair(self.path)
        except OSError as error:
            self.close()
            raise ValueError(
                UNWRITABLE.format(
                    path=str(self.path), reason=error.strerror or error
                )
            ) from error

    def write(self, updates: int, numbers: dict[str, Any]) -> None:
        point = _strict({"updates": updates} | numbers)
        if self._present and _telling(point) in self._present:
            return
        line = json.dumps(point) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            reason = error.strerror or error
            self._warn_once(FAILED.format(path=self.path, reason=reason))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()  # may write a point
        return state | {"begin_bytes": self._begin}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._begin = state.get("begin_bytes", 0)
        if self._file is not None:
            # Earlier points may be another run's.
            lines = self.path.read_bytes()[self._begin :].splitlines()
            self._present = {_telling(_parse(line)) for line in lines}

    def _append(self, line: bytes) -> None:
        """Write a whole line, or nothing."""
        try:
            written = self._file.write(line)
            if written < len(line):
                self._file.write(line[written:])
        except OSError:
            _truncate(self.path, self._size)
            raise
        self._size += len(line)
        self._begin = self._size


def _telling(point: dict[str, Any]) -> str:
    """Pick of a point what is the same when it comes again: not the speed."""
    return json.dumps(
        {
            name: value
            for name, value in point.items()
            if not any(word in name for word in ("second", "memory", "time"))
        },
        sort_keys=True,
    )


def _strict(value: Any) -> Any:
    """Turn what a point may hold into what JSON knows."""
    if isinstance(value, dict):
        return {str(name): _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    is_known = value is None or isinstance(value, bool | int | str)
    return value if is_known else str(value)


def _repair(path: Path) -> int:
    """Make a file end with a whole line; return its size in bytes."""
    if not path.is_file():
        return 0  # a device or a pipe
    content = path.read_bytes()
    whole, end, rest = content.rpartition(b"\n")
    if _parse(rest):
        with open(path, "ab") as file:
            file.write(b"\n")
        return len(content) + 1
    size = len(whole + end)
    if rest:
        _truncate(path, size)
    return size


def _parse(line: bytes) -> dict[str, Any]:
    """Read a point, or an empty dict where there is none."""
    try:
        point = json.loads(line)
    except ValueError:
        return {}
    return point if isinstance(point, dict) else {}


def _truncate(path: Path, size: int) -> None:
    if path.is_file():
        os.truncate(path, size)
