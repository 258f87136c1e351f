"""Finds out where a window stopped being finite."""

import os
import pathlib
import warnings
from typing import Any

from accumtrainer import Callback
from accumtrainer.callbacks.arguments import require_path, require_whole


class NaNLocator(Callback):
    """Report what was first not finite in a window that was skipped.

    Such a window is run again at once, micro-batch by micro-batch and
    operation by operation, with the weights it had: see `Trainer.inspect`.
    The report says which micro-batch, and in it which input, which layer's
    output, which loss or which variable's gradient came first. A warning
    names the file.

    A loss scale that was only too high is no reason for a report: that is how
    a good one is found. After `most_reports` reports the callback has nothing
    more to do, and costs nothing.

    Until then it learns before each update whether the last one was skipped,
    when the data of the next is there already. So the host waits for the
    device once per update, but no longer prepares the updates to come
    meanwhile; with `stop=True` it waits right after each update.

    Args:
        directory: where to write the reports, one text file each.
        stop: whether to stop training at the first report.
        most_reports: reports to write in one training.

    Raises:
        ValueError: `most_reports` is not above 0.

    Examples:
        >>> locator = NaNLocator("reports", stop=True)
        >>> locator.reports
        []

    Attributes:
        reports: list of the reports written so far, paths.
    """

    has_state = True
    looks_at_model = False
    needs_trainer = True

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        stop: bool = False,
        most_reports: int = 3,
    ):
        super().__init__()
        self.directory = require_path("directory", directory, "reports")
        require_whole(
            "most_reports",
            most_reports,
            "Leave the callback out to get none.",
        )
        self.stop = stop
        self.most_reports = most_reports
        self.reports: list[pathlib.Path] = []
        self._unchecked = None
        self._seen = None
        self._is_open = False
        self._left = 0
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._unchecked = None
        self._seen = self.trainer.last_window
        self._left = self.most_reports
        self._is_open = self.may_write

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._check()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._look()
        if self.stop:
            self._check()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._check()

    def on_train_end(self, logs: Any = None) -> None:
        # No hook tells of a window with which training ended in an error.
        if self.trainer.last_window is not self._seen:
            self._look()
        self._check()
        self._is_open = False

    def get_state(self) -> dict[str, Any]:
        return {"reports": [str(path) for path in self.reports]}

    def set_state(self, state: dict[str, Any]) -> None:
        self.reports = [pathlib.Path(path) for path in state["reports"]]

    def _look(self) -> None:
        """Remember the last window, to be checked when that costs nothing."""
        self._seen = self.trainer.last_window
        if self._is_open and self._left:
            self._unchecked = self.trainer.window_logs

    def _check(self) -> None:
        logs, self._unchecked = self._unchecked, None
        if logs is None or logs["applied"]:
            return
        inspection = self.trainer.inspect()
        if inspection.scale_overflows:
            return
        self._left -= 1
        self._report(logs, inspection)
        if self.stop:
            self.trainer.model.stop_training = True

    def _report(self, logs: Any, inspection: Any) -> None:
        updates, skipped = logs["updates"], logs["skipped_updates"]
        path = self.directory / f"after_update_{updates}_skip_{skipped}.txt"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path.write_text(_describe(logs, self._epoch, inspection), "utf-8")
        except OSError as error:
            more = f"The report could not be written: {error}."
        else:
            self.reports.append(path)
            more = f"See {path}."
        warnings.warn(
            f"The window after update {updates} was not finite and has been "
            f"skipped. {inspection.verdict} {more}",
            RuntimeWarning,
            stacklevel=3,
        )


def _describe(logs: Any, epoch: int, inspection: Any) -> str:
    numbers = {name: logs[name] for name in logs if name != "applied"}
    rows = [f"  {name:<22}{value:g}" for name, value in numbers.items()]
    return "\n".join(
        [
            f"The window after update {logs['updates']}, in epoch {epoch}, "
            "was not finite and has been skipped.",
            "",
            str(inspection),
            "",
            "What was logged of it:",
            *rows,
            "",
            "It was run again by itself, with the weights it had. Layers "
            "that draw, such as dropout, drew anew.",
            "",
        ]
    )
