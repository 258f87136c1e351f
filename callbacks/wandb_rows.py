"""Which rows of a W&B run stand at which update."""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

UPDATES = "updates"
"""The x-axis of every chart."""

TIMESTAMP = "_timestamp"
"""Where W&B looks for the moment of a row, before it takes the present."""

SAME_EVERYWHERE = {"epoch", "loss_scale", "skipped_updates"}


def telling(names: Iterable[str]) -> set[str]:
    """Pick the names that tell one point at an update from another."""
    return {
        name
        for name in names
        if name not in SAME_EVERYWHERE and not name.startswith("learning_rate")
    }


def import_wandb() -> Any:
    """Import W&B where it is used.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            "WandbLogger needs W&B, which is not installed. "
            "Run: pip install 'accumtrainer[wandb]'"
        ) from error
    return wandb


class WandbRows:
    """Write rows, and have those of others stand where they were logged.

    W&B gives a row without an x-axis the one of the row before it, and joins
    what is logged to a row that is still open, as it is after `commit=False`
    or `step=`. Points are sent late, so either would put what a user logs to
    the wrong update. W&B has no hook for that. Hence `run.log` of this one
    run, which is `wandb.log` too, passes through here from now on: a row of
    anyone says at which update it was logged, and no row is of two.

    A `step=` that W&B would refuse only because other rows have come before
    gets the next free one. Those that go back are W&B's to refuse.

    Args:
        run: a `wandb.Run`.
        count_updates: function without arguments, called before a row of the
            user's. It sees to it that earlier points are sent, and returns
            the updates made, or `None` if nobody can tell.
        is_new: whether nobody can have logged to the run, and left a row open.
    """

    def __init__(
        self, run: Any, count_updates: Callable[[], int | None], *, is_new: bool
    ):
        self.count_updates = count_updates
        self._run = run
        self._write = run.log
        self._lock = threading.RLock()
        self._open_at: int | None = None
        self._open_names: set[str] = set()
        self._last_step = -1
        self._may_be_open = not is_new and self._has_steps
        # Asked now: W&B never answers for a run that has been finished.
        self._first_step = run.step + 1 if self._may_be_open else 0
        self._answer_instead_of(run.log, self.log)

    @classmethod
    def of(
        cls, run: Any, count_updates: Callable[[], int | None], *, is_new: bool
    ) -> "WandbRows":
        """Take over the rows of a run, from another logger if there is one.

        Args:
            run: a `wandb.Run`.
            count_updates: as for the class.
            is_new: as for the class.
        """
        rows = getattr(run.log, "__self__", None)
        if isinstance(rows, cls):
            rows.count_updates = count_updates
            return rows
        return cls(run, count_updates, is_new=is_new)

    def leave(self) -> None:
        """Have the run's own `log` answer again."""
        self._answer_instead_of(self.log, self._write)

    def add(self, row: dict[str, Any]) -> None:
        """Write a row of our own.

        Args:
            row: dict by name; one of the names is `"updates"`.
        """
        with self._lock:
            same = self._open_names & row.keys() - {UPDATES, TIMESTAMP}
            if self._open_at != row[UPDATES] or telling(same):
                self._close()
            self._put(row, None, commit=True)
            self._note(set(), at=None)

    def log(
        self,
        data: dict[str, Any],
        step: int | None = None,
        commit: bool | None = None,
        **options: Any,
    ) -> None:
        """Log as `wandb.Run.log` does, at the updates made so far."""
        if not isinstance(data, Mapping):
            self._write(data, step=step, commit=commit, **options)
            return
        updates = self.count_updates()
        at = {} if updates is None else {UPDATES: updates}
        with self._lock:
            if step is not None and step < self._last_step:
                self._write(data, step=step, commit=commit, **options)
                return  # W&B leaves it out, and says so
            if self._open_at != updates:
                self._close()
            if commit is None:
                commit = step is None
            step = self._free_step(step)
            self._put(at | {**data}, step, commit=commit, **options)
            names = set() if commit else self._open_names | data.keys()
            self._note(names, at=updates)

    def _free_step(self, step: int | None) -> int | None:
        """Return the step to ask for, `None` for the one W&B is at."""
        if step is None or not self._has_steps:
            return step
        is_same, self._last_step = step == self._last_step, step
        if step >= self._next_step():
            return step
        if not is_same:
            self._close()
        return None

    def _close(self) -> None:
        """Have W&B finish the row that is open, if one is."""
        if self._open_names:
            self._put({}, None, commit=True)
            self._note(set(), at=None)

    def _put(
        self, row: dict[str, Any], step: int | None, **options: Any
    ) -> None:
        """Write to a step, `None` for the one W&B is at."""
        if step is None and self._may_be_open:
            step = self._first_step
        self._may_be_open = False
        self._write(row, step=step, **options)

    def _next_step(self) -> int:
        """Return the least step of a row that is no older one's."""
        return self._first_step if self._may_be_open else self._run.step

    @property
    def _has_steps(self) -> bool:
        """Whether W&B numbers the rows of the run itself."""
        is_shared = self._run.settings.mode == "shared"
        return not (self._run.disabled or is_shared)

    def _note(self, names: set[str], at: int | None) -> None:
        """Remember what is in the open row."""
        self._open_names, self._open_at = names, at

    def _answer_instead_of(self, before: Any, after: Any) -> None:
        wandb = import_wandb()
        if wandb.log == before:
            wandb.log = after
        self._run.log = after
