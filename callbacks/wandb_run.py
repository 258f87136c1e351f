"""The W&B side of a training: one run, used by one thread."""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from accumtrainer.callbacks.wandb_media import as_wandb
from accumtrainer.callbacks.wandb_rows import (
    TIMESTAMP,
    WandbRows,
    import_wandb,
    telling,
)

MARKER = "accumtrainer.json"
"""File beside an offline run: what was sent last."""


class WandbRun:
    """Start, feed and finish one run.

    Every method may wait for W&B and may raise what W&B raises; they are
    called in a thread of their own.

    Args:
        run: a run of the user's, or `None` to start one.
        options: dict of arguments of `wandb.init`.
        count_updates: function that `WandbRows` takes.

    Attributes:
        run: the run, `None` before there is one.
        trouble: why the run is kept on disk instead of sent, or `None`.
        is_silenced: whether an active run that is disabled takes what nobody
            wanted disabled here.
    """

    def __init__(
        self, run: Any, options: Any, count_updates: Callable[[], int | None]
    ):
        self.run = run
        self.trouble: str | None = None
        self.is_silenced = False
        self._is_ours = run is None
        self._options = options
        self._count_updates = count_updates
        self._rows: Any = None  # until started
        self._theirs: set[str] = set()
        self._sent_before: dict[str, Any] = {"updates": -1}
        self._leaves_marks = False
        self._marked: dict[str, Any] = {"updates": -1}
        self._marker: BinaryIO | None = None
        self._marker_bytes = 0

    def start(
        self, config: dict[str, Any], *, is_continued: bool, is_resumed: bool
    ) -> None:
        """Start the run, and say in its config what is trained.

        Args:
            config: dict of what JSON knows. What the user wrote into the
                config stays.
            is_continued: whether the run has been written to before.
            is_resumed: whether points may come again that were sent before.
        """
        if self.run is None:
            self.run = self._init()
        # W&B takes its time to say what never changes.
        self._leaves_marks = self.run.offline and not self.run.disabled
        self._theirs = set(self._options.get("config") or {})
        if not is_continued:
            self._theirs |= set(self.run.config.keys())
        self.update_config(config)
        self.run.define_metric("updates")
        self.run.define_metric("*", step_metric="updates")
        self._rows = WandbRows.of(
            self.run, self._count_updates, is_new=self._is_ours
        )
        if is_resumed:
            self._sent_before = self._last_sent()

    def update_config(self, config: dict[str, Any]) -> None:
        """Change the config, except for what the user wrote into it."""
        if self.run is None:
            return
        self.run.config.update(
            {k: v for k, v in config.items() if k not in self._theirs},
            allow_val_change=True,
        )

    @property
    def folder(self) -> Path:
        """Where W&B keeps the run on this machine."""
        return Path(self.run.settings.sync_dir)

    def log(
        self,
        updates: int,
        numbers: dict[str, Any],
        best: dict[str, Any],
        moment: Any,
    ) -> None:
        """Send a point, unless it was sent before a resume.

        Args:
            numbers: dict of numbers by name.
            best: dict for the summary.
            moment: when the point was made, as `time.time()` has it.
        """
        row = {"updates": updates} | numbers
        if self.run is None or self._was_sent(row):
            return
        self._rows.add(row | {TIMESTAMP: moment})
        if best:
            self.run.summary.update(best)
        self._mark(row)

    def log_media(
        self, updates: int, make: Callable[[], dict[str, Any]], moment: Any
    ) -> None:
        """Send what is no point: media, or numbers of their own.

        Args:
            make: function that returns it by name.
            moment: when it was made, as `time.time()` has it.
        """
        if self.run is None or updates <= self._sent_before["updates"]:
            return
        media = {name: as_wandb(value) for name, value in make().items()}
        self._rows.add({"updates": updates, TIMESTAMP: moment} | media)

    def log_directory(self, directory: str, updates: int) -> None:
        """Send a directory as an artifact, a new version of the run's."""
        if self.run is None:
            return
        aliases = ["latest", f"u{updates}"]
        artifact = self._artifact(directory, updates)
        self.run.log_artifact(artifact, aliases=aliases)

    def log_checkpoint(
        self, directory: str, updates: int, aliases: list[str]
    ) -> None:
        """Send a directory likewise, unless it is removed before that."""
        if self.run is None:
            return
        try:
            artifact = self._artifact(directory, updates)
        except (OSError, ValueError):
            if Path(directory).is_dir():
                raise
            return
        if Path(directory).is_dir():  # or else a part may be missing
            self.run.log_artifact(artifact, aliases=aliases)

    def mark_preempting(self) -> None:
        """Say that the run was stopped from outside, and may go on later."""
        if self.run is not None:
            self.run.mark_preempting()

    def finish(self, exit_code: int | None) -> None:
        """End the run, if it was started here."""
        if self._marker is not None:
            self._marker.close()
            self._marker = None
        if self._is_ours and self.run is not None:
            if self._rows is not None:
                self._rows.leave()
            self.run.finish(exit_code=exit_code)

    def _artifact(self, directory: str, updates: int) -> Any:
        artifact = import_wandb().Artifact(
            f"checkpoint-{self.run.id}",
            type="model",
            metadata={"updates": updates},
        )
        artifact.add_dir(str(directory))
        return artifact

    def _init(self) -> Any:
        wandb = import_wandb()
        active = wandb.run
        joining = _joining(active, self._options)
        mode = _asked(self._options, "mode")
        if joining and active.disabled and mode in (None, "disabled"):
            self._is_ours = False
            mode = mode or os.environ.get("WANDB_MODE")
            self.is_silenced = mode != "disabled"
            return active  # `wandb.init` would make another one
        try:
            run = wandb.init(**joining | self._options)
        except wandb.errors.AuthenticationError:
            raise
        except (wandb.errors.CommError, TimeoutError, OSError) as error:
            run = wandb.init(**self._options | self._offline_options())
            self.run, self.trouble = run, str(error).splitlines()[0]
        # Where a run was active, `wandb.init` may join it.
        self._is_ours = run is not active
        return run

    def _offline_options(self) -> dict[str, Any]:
        """Return options for a run on disk, in place of one that failed.

        W&B goes on to hold the ID of a run that could not be started.
        """
        options: dict[str, Any] = {"mode": "offline"}
        if "id" in self._options:
            options |= {"id": secrets.token_hex(4), "resume": None}
        return options

    def _was_sent(self, row: dict[str, Any]) -> bool:
        """Say whether a point of a resumed run was sent by the first one.

        The run knows the last update of which something was sent. There may
        be several points of one update; those that were sent have the same
        numbers again.
        """
        before = self._sent_before
        if row["updates"] != before["updates"]:
            return row["updates"] < before["updates"]
        names = telling(row)
        names = {name for name in names if "loss" in name} or names
        return all(row[name] == before.get(name) for name in names)

    def _last_sent(self) -> dict[str, Any]:
        """Find out what was sent last: ask W&B, or offline look on disk."""
        known: list[dict[str, Any]] = [{"updates": -1}, dict(self.run.summary)]
        if self.run.offline:
            runs = self.folder.parent
            markers = runs.glob(f"*run-*-{self.run.id}*/{MARKER}")
            known += [_read_mark(marker) for marker in markers]
        return max(known, key=lambda row: row.get("updates", -1))

    def _mark(self, row: dict[str, Any]) -> None:
        """Leave word on disk of what was sent, as nobody else knows."""
        if not self._leaves_marks:
            return
        is_new = row["updates"] != self._marked["updates"]
        self._marked = row if is_new else self._marked | row
        if self._marker is None:
            path = self.folder / MARKER
            self._marker = path.open("wb", buffering=0)
        # One write in place, since a new file for every point takes longer
        # than W&B does; spaces cover what a longer one has left behind.
        text = json.dumps(self._marked, default=str).encode()
        self._marker_bytes = max(self._marker_bytes, len(text))
        self._marker.seek(0)
        self._marker.write(text.ljust(self._marker_bytes))


def _read_mark(path: Path) -> dict[str, Any]:
    """Read what was sent last; nothing, if a kill has cut it off."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return {}


def _joining(active: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return options that have `wandb.init` join a run, if one is active.

    In a notebook it would end that run, and where nobody is logged in it asks
    for a key, though the run is offline. Who says `reinit` has his way.
    """
    reinit = _asked(options, "reinit") or "default"
    if active is None or reinit != "default":
        return {}
    joining = {"reinit": "return_previous"}
    return joining | ({"mode": "offline"} if active.offline else {})


def _asked(options: dict[str, Any], name: str) -> Any:
    """Return what the user's options or settings say, `None` if neither."""
    settings = options.get("settings") or {}
    if not isinstance(settings, dict):
        settings = settings.model_dump(include=settings.model_fields_set)
    return options.get(name) or settings.get(name)
