"""A logger that writes TensorBoard's files, without TensorFlow."""

import os
import socket
import time
from pathlib import Path
from typing import Any

from accumtrainer import Every
from accumtrainer.callbacks.arguments import require_path
from accumtrainer.callbacks.scalars import as_scalars
from accumtrainer.callbacks.warning_logger import WarningLogger

UNWRITABLE = (
    "directory must name a folder that can be written to. Received: "
    "directory={path!r} ({reason}). Give a folder of yours; missing ones are "
    "made."
)
FAILED = (
    "{path} could not be written ({reason}). Training goes on; points are "
    "missing from TensorBoard until writing works again."
)


class TensorBoardLogger(WarningLogger):
    """Write every point of a training for TensorBoard.

    Each number of a point is a scalar of that name, over updates. Where a
    metric has several values, each is a scalar of its own, as `per_class/0`.
    Text that other callbacks put into the logs is left out. Look at them with
    `tensorboard --logdir runs`, each folder below which is a run.

    A point is on disk when the update after it has been made. After a resume a
    new file goes on where the checkpoint was made, and TensorBoard drops what
    the old one has from there on. If a point cannot be written, because the
    disk is full for example, a warning says so once and training goes on.

    TensorFlow is neither needed nor loaded.

    Needs TensorBoard: `pip install 'accumtrainer[tensorboard]'`.

    Args:
        directory: folder of this run; missing ones are made.
        every: how often to write a point; default every 10 updates.

    Raises:
        TypeError: `every` is no `Every`, or `directory` no path.
        ValueError: the folder cannot be written to; raised when training
            begins.
        ImportError: TensorBoard is not installed; raised when training begins.

    Examples:
        >>> logger = TensorBoardLogger("runs/a", every=Every(100, "updates"))
        >>> logger.directory.name
        'a'
    """

    def __init__(
        self, directory: str | os.PathLike, every: Every | None = None
    ):
        super().__init__(every)
        self.directory = require_path("directory", directory, "runs/a")
        self._events: _EventFile | None = None
        # What was written at the last update that has a point.
        self._last_updates = -1
        self._last: dict[str, float] = {}

    def open(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._events = _EventFile(self.directory)
        except OSError as error:
            raise ValueError(
                UNWRITABLE.format(
                    path=str(self.directory), reason=error.strerror or error
                )
            ) from error

    def write(self, updates: int, numbers: dict[str, Any]) -> None:
        if updates != self._last_updates:
            self._last_updates, self._last = updates, {}
        # A second point at an update has its epoch, too.
        scalars = {
            name: value
            for name, value in as_scalars(numbers).items()
            if self._last.get(name) != value
        }
        self._last |= scalars
        self._add(updates, scalars)

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
        self._events = None

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()  # may write a point
        last = {"updates": self._last_updates, "scalars": self._last}
        return state | {"last": last}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        last = state.get("last", {"updates": -1, "scalars": {}})
        self._last_updates = last["updates"]
        self._last = dict(last["scalars"])
        if self._events is None:
            return
        if not self._last:
            self._guard(self._events.restart, self._since.updates + 1)
            return
        # Of the points at the last update, some may have come after the
        # checkpoint. All are dropped, and those of before it written again.
        self._guard(self._events.restart, self._last_updates)
        self._add(self._last_updates, self._last)

    def _add(self, updates: int, scalars: dict[str, float]) -> None:
        assert self._events is not None
        self._guard(self._events.add, updates, scalars)

    def _guard(self, write: Any, *arguments: Any) -> None:
        """Write, or warn once that it is not possible."""
        try:
            write(*arguments)
        except OSError as error:
            reason = error.strerror or error
            self._warn_once(FAILED.format(path=self.directory, reason=reason))


class _EventFile:
    """One file of events, whole after each of them.

    The writers of TensorBoard itself are not used, as they load TensorFlow
    where it is installed, which takes seconds and memory of the device.

    Args:
        directory: folder to make it in.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path):
        event_pb2, records = import_tensorboard()
        self._make = event_pb2.Event
        self._started = event_pb2.SessionLog.START
        # TensorBoard knows files by their names, and reads them in their order.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}"
        self.path = directory / f"{name}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self.path, "xb", buffering=0)
        self._size = 0
        self._records = records.RecordWriter(self)
        self._append(file_version="brain.Event:2")

    def add(self, updates: int, scalars: dict[str, float]) -> None:
        """Add scalars at an update."""
        values = [
            {"tag": name, "simple_value": value}
            for name, value in scalars.items()
        ]
        self._append(step=updates, summary={"value": values})

    def restart(self, updates: int) -> None:
        """Have TensorBoard drop what earlier files have from an update on."""
        self._append(step=updates, session_log={"status": self._started})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, record: bytes) -> None:
        """Write a whole record, or nothing; called by TensorBoard."""
        try:
            written = self._file.write(record)
            if written < len(record):
                self._file.write(record[written:])
        except OSError:
            os.truncate(self.path, self._size)
            self._file.seek(self._size)
            raise
        self._size += len(record)

    def _append(self, **content: Any) -> None:
        event = self._make(wall_time=time.time(), **content)
        self._records.write(event.SerializeToString())


def import_tensorboard() -> Any:
    """Import what writes events, where it is used.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer import record_writer
    except ImportError as error:
        raise ImportError(
            "TensorBoardLogger needs TensorBoard, which is not installed. "
            "Run: pip install 'accumtrainer[tensorboard]'"
        ) from error
    return event_pb2, record_writer
