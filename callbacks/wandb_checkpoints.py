"""Which checkpoints W&B has yet to get, and under which aliases."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUMBER_OF_UPDATES = re.compile(r"update-(\d+)$")
"""What the name of a checkpoint ends in."""


class SentCheckpoints:
    """Remember what was sent.

    Args:
        callback: what saves them, with `last_saved`, or `None`.
    """

    def __init__(self, callback: Any):
        self._callback = callback
        self._latest: Any = None
        self._best: Any = None

    def start(self) -> None:
        """Take what is there when a training begins for sent."""
        self._latest, self._best = self._find_latest(), self._find_best()

    def new(
        self, count_updates: Callable[[], int], *, is_last: bool
    ) -> Iterator[tuple[Any, int, list[str]]]:
        """Yield what is to be sent: directory, updates and aliases.

        One that turns out to be the best after it was sent is sent again; W&B
        stores no file twice. As it calls `latest` whatever is sent, the latest
        one follows again.

        Args:
            count_updates: function that returns the updates made, those of a
                checkpoint whose name does not tell.
            is_last: whether training has ended, and the last one may have
                been judged since it was written.
        """
        latest = self._find_latest()
        is_new = latest is not None and latest != self._latest
        if not is_new and not is_last:
            return  # after most updates; the best takes files to be read
        best = self._find_best()
        is_new_best = best is not None and best != self._best
        aliases: dict[Any, list[str]] = {best: ["best"]} if is_new_best else {}
        if is_new or is_new_best:
            aliases.setdefault(latest, []).append("latest")
        self._latest, self._best = latest, best
        for directory, names in aliases.items():
            named = NUMBER_OF_UPDATES.search(Path(directory).name)
            made = int(named[1]) if named else count_updates()
            yield directory, made, [*names, f"u{made}"]

    def _find_latest(self) -> Any:
        return self._callback.last_saved if self._callback else None

    def _find_best(self) -> Any:
        directory = getattr(self._callback, "checkpoints", None)
        return None if directory is None else directory.best_path()
