"""A logger that sends points to Weights & Biases."""

import os
import secrets
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from accumtrainer import Every, Preempted
from accumtrainer.callbacks.arguments import require_every
from accumtrainer.callbacks.background import Background
from accumtrainer.callbacks.best_values import BestValues
from accumtrainer.callbacks.tracker import Tracker
from accumtrainer.callbacks.wandb_checkpoints import SentCheckpoints
from accumtrainer.callbacks.wandb_rows import import_wandb
from accumtrainer.callbacks.wandb_run import WandbRun
from accumtrainer.callbacks.wandb_watch import WATCHED, Watch

GATHER_SECS = 1.0
"""How long points are gathered; W&B pays two to three times for one alone."""

START_SECS = 10.0
TYPING_SECS = 60.0
"""How long a person may take to type an API key."""

UNREACHABLE = (
    "W&B could not be reached ({reason}). Training goes on, and the run is "
    "kept in {folder}. Upload it with: wandb sync --id {run_id} {folder}"
)
DISABLED = (
    "The active run of W&B is disabled, and takes nothing that WandbLogger "
    "sends. Give WandbLogger a mode, as in mode='online', or end that run "
    "before: wandb.finish(). `with wandb.init(mode='disabled')` does not."
)
UNFINISHED = (
    "W&B did not finish within close_secs={secs:g} seconds. Its own folder "
    "holds what it has taken; see: wandb sync --help"
)
ANOTHER_RUN = (
    "run must be the one that was logged to before the checkpoint was made. "
    "Received: run {received!r} where the checkpoint has {expected!r}. Leave "
    "run and id out to continue that run, or start without the checkpoint."
)


class WandbLogger(Tracker):
    """Send points to W&B; training does not wait for it.

    Points are handed to a thread of their own, which gathers them for a
    second, as W&B takes many together with less effort. The x-axis of every
    chart is `updates`. The run's config holds what was configured:
    accumulation, loss scale, optimizer, schedule, model, plan, backend and
    versions; keys that the user has set stay. The summary holds the last value
    of every number, and of validation the best, as `best_val_loss` for
    example, with the update it was at; of a metric whose name does not say
    which way is better, and of numbers that callbacks write into the logs of
    an update, only if `best` says so.

    If W&B cannot be reached, the run is kept on disk, ready for `wandb sync`.
    If it is slow or fails, points are left out. Either is one warning, and
    training goes on. Errors of the user, a wrong API key among them, are
    raised before the first update.

    What is logged besides, by `run.log` or `wandb.log` from callbacks or
    between two fits, stands at `trainer.progress.updates` of that moment; no
    row is of two updates. It is sent after the points that are due by then,
    for which it waits. `commit=False` and `step=` join what is logged at one
    update. W&B's steps must still not go back: among the user's own they are
    left out, and one that other rows have overtaken gets the next free one.
    To that end the run's `log` is replaced: look it up when you log. One that
    was looked up before training, as in `Log(wandb.log)`, is not followed.
    The run is there from the first update on; to log earlier, hand one in.

    At SIGTERM the running update is finished, W&B is told that the run is
    preempted, so that the agent of a sweep can run it again, and `fit` raises
    `Preempted`, which ends the program and the run with status 143. Where the
    program has a handler of its own for SIGTERM, that one is called instead.

    A run that was started here is finished when training ends; a second
    `fit` of the same Trainer continues it. A run that was handed in, or was
    active already, is left running; one that is disabled is joined too, with a
    warning, unless `mode` is given. After a resume the same run goes on, and
    points that it has already are not sent again.

    Needs W&B: `pip install 'accumtrainer[wandb]'`.

    Args:
        project: name of the project; default W&B's own.
        run: a run to log to, instead of one that is started here.
        every: how often to send a point; default every 10 updates, and once
            an epoch at least.
        watch: `"weights"`, `"gradients"` or `"all"` sends histograms of them
            too; gradients of a `KeepGradients` trainer. `"norms"` sends the
            norm of each variable and of its gradient, of a
            `KeepGradientNorms` trainer.
        watch_every: how often to send these; default every 100 updates.
        best: dict from names of metrics to `"min"` or `"max"`.
        log_checkpoints: a callback with `last_saved`, the directory it saved
            last, such as `Checkpoint`; each is sent as an artifact, except
            one that is removed before W&B has taken it, or followed by
            another within an update. Its aliases are `latest`, its updates
            as in `u500`, and with `Checkpoint(keep_best=)` `best`.
            `fit(resume_from="wandb:...")` goes on from one on any machine.
        close_secs: seconds that W&B may take to finish when training ends.
        **init_options: what else `wandb.init` takes.

    Raises:
        TypeError: an option is of the wrong kind, or `wandb.init` has none of
            this name; the latter is raised when training begins.
        ValueError: options contradict each other.
        ImportError: W&B is not installed; raised when training begins.

    Examples:
        >>> logger = WandbLogger("digits", mode="offline", tags=["first"])
        >>> logger.every
        Every(n=10, unit='updates')
    """

    tool = "W&B"
    starter = "wandb.init"
    unfinished = UNFINISHED
    _run_id: str | None

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        every: Every | None = None,
        watch: str | None = None,
        watch_every: Every | None = None,
        best: dict[str, str] | None = None,
        log_checkpoints: Any = None,
        close_secs: float = 60.0,
        **init_options: Any,
    ):
        super().__init__(every, init_options, close_secs)
        _check_options(run, project, init_options, watch, watch_every, best)
        _check_checkpoints(log_checkpoints)
        if project is not None:
            init_options["project"] = project
        self.watch = watch
        self.watch_every = watch_every or Every(100, "updates")
        self._watch = Watch(watch, self.watch_every)
        # Weights are read in a hook, gradients too.
        self.looks_at_model = watch is not None
        self._given_run = run
        self._best = BestValues(best or {})
        self._sent_checkpoints = SentCheckpoints(log_checkpoints)
        self._sent_plan: str | None = None
        self._wandb: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_wandb": None}

    @property
    def run(self) -> Any:
        """The `wandb.Run`; `None` before W&B has answered."""
        return self._wandb.run if self._wandb else self._given_run

    @property
    def signals(self) -> tuple[str, ...]:
        """SIGTERM, unless the user has a handler of his own for it.

        Looked up when a `fit` begins, which is why it is no plain attribute.
        """
        handler = signal.getsignal(signal.SIGTERM)
        return ("SIGTERM",) if handler == signal.SIG_DFL else ()

    # What every logger does.

    def get_starter(self) -> Callable[..., Any]:
        init: Callable[..., Any] = import_wandb().init
        return init

    def open(self) -> None:
        super().open()
        self._watch.start(self.trainer)
        self._sent_checkpoints.start()

    def forget_run(self) -> None:
        super().forget_run()
        self._best.values = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        if not self._is_open:
            return
        seen = self._watch.look_if_due(self.trainer)
        if seen is not None:
            self._send(self._wandb.log_media, *seen, time.time())

    def send_point(self, updates: int, numbers: dict[str, Any]) -> None:
        best = {}
        if self._best.concerns(numbers):
            best = self._best.update({"updates": updates} | numbers)
        self._send(self._wandb.log, updates, numbers, best, time.time())
        self._send_plan_if_changed()

    def write_media(self, updates: int, name: str, value: Any) -> None:
        background = self._begin()
        media = {name: value}
        self._send(self._wandb.log_media, updates, lambda: media, time.time())
        self._warn_of_failures(background)

    def on_safe_point(self, reason: str, logs: Any = None) -> None:
        if self._is_open and self._background is not None:
            self._send_new_checkpoints(is_last=False)

    def finish(self) -> None:
        self._send_new_checkpoints(is_last=True)
        failure = self._failure()
        if isinstance(failure, Preempted):
            self._background.do(self._wandb.mark_preempting)
        self._end_thread(self._wandb.finish, _exit_code(failure))

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()  # may write a point
        if self._background is not None:
            # A resume from here does not make these points again.
            self._background.hurry()
        return state | {"best": self._best.values}

    def set_state(self, state: dict[str, Any]) -> None:
        run_id = state["run_id"]
        if run_id is not None:
            self._check_same_run(run_id)
        super().set_state(state)
        self._best.values = dict(state["best"])

    # What this one does besides.

    def upload(self, directory: str) -> None:
        """Send a directory as an artifact, of type "model".

        Args:
            directory: path; what lies there must stay until it is sent.

        Raises:
            RuntimeError: no training is running.
        """
        if self._background is None:
            raise RuntimeError(
                "upload must be called while training runs. Received: "
                f"directory={str(directory)!r} outside of it. Use the W&B run "
                "itself there."
            )
        self._send(self._wandb.log_directory, directory, self._updates_made())

    def send_what_is_due(self) -> None:
        """Send the points of earlier updates, and wait until W&B has them."""
        if self._is_open and self._background is not None:
            self._write_what_was_due()
            self._background.wait(START_SECS)

    def start(self) -> None:
        is_continued = self._run_id is not None
        options = self._init_options()
        self._wandb = WandbRun(self._given_run, options, _counter(self))
        self._background = Background(
            "accumtrainer-wandb", gather_secs=GATHER_SECS
        )
        config = self._description()
        self._sent_plan = self.trainer.plan
        self._background.do(self._begin_run, config, is_continued)
        is_typing = self._given_run is None and _is_at_a_terminal()
        self._background.wait(TYPING_SECS if is_typing else START_SECS)
        if self._background.failures:
            failure = self._background.failures.pop()
            self._background.finish(self.close_secs, self._wandb.finish, 1)
            self._background = None
            raise failure
        self._warn_of_failures(self._background)

    def _begin_run(self, config: dict[str, Any], is_continued: bool) -> None:
        """Start the run; called in the thread."""
        self._wandb.start(
            config, is_continued=is_continued, is_resumed=self._is_resumed
        )
        if self._wandb.trouble is not None:
            return  # A resume shall try to reach the run it should have been.
        if self._is_resumed and self._run_id is not None:
            _check_id(self._wandb.run.id, self._run_id)
        self._run_id = self._wandb.run.id

    def _init_options(self) -> dict[str, Any]:
        wandb = import_wandb()
        options = dict(self._options)
        settings = options.get("settings") or {}
        if isinstance(settings, dict) and "finish_timeout" in vars(
            wandb.Settings()
        ):
            limit = {"finish_timeout": self.close_secs}
            options["settings"] = limit | settings
        if self._run_id is not None:
            return options | {"id": self._run_id, "resume": "allow"}
        is_known = "id" in options or "WANDB_RUN_ID" in os.environ
        if not is_known and wandb.run is None:
            # Known at once, for a checkpoint made before W&B has answered.
            self._run_id = options["id"] = secrets.token_hex(4)
        return options

    def _check_same_run(self, expected: Any) -> None:
        """Refuse a run of the user's that is not the one to continue."""
        given = self._options.get("id")
        if self._given_run is not None:
            given = self._given_run.id
        if given is not None:
            _check_id(given, expected)

    def _send_new_checkpoints(self, *, is_last: bool) -> None:
        """Send what was saved last, as soon as it has been written."""
        new = self._sent_checkpoints.new(self._updates_made, is_last=is_last)
        for checkpoint in new:
            self._send(self._wandb.log_checkpoint, *checkpoint)
            self._background.hurry()  # it may be removed soon

    def _updates_made(self) -> int:
        made: int = self.trainer.progress.updates
        return made

    def _send_plan_if_changed(self) -> None:
        """Say what has been measured since the run was started."""
        plan = self.trainer.plan
        if plan != self._sent_plan:
            self._sent_plan = plan
            self._send(self._wandb.update_config, {"plan": str(plan)})

    def _warn_of_failures(self, background: Background) -> None:
        if self._wandb.trouble is not None:
            self._warn_once(
                UNREACHABLE.format(
                    reason=self._wandb.trouble,
                    folder=self._wandb.folder,
                    run_id=self._run_id or self._wandb.run.id,
                )
            )
        elif self._wandb.is_silenced:
            self._warn_once(DISABLED)
        else:
            super()._warn_of_failures(background)


def _counter(logger: Any) -> Callable[[], int | None]:
    """Make the function that `WandbRows` takes; it keeps nothing alive."""
    logger, trainer = weakref.ref(logger), weakref.ref(logger.trainer)
    thread = threading.get_ident()

    def count_updates() -> int | None:
        watched = trainer()
        if watched is None:
            return None
        if threading.get_ident() != thread:
            # Only the thread that trains may ask the device.
            return watched.progress_at_most.updates
        if logger() is not None:
            logger().send_what_is_due()
        return watched.progress.updates

    return count_updates


def _exit_code(failure: BaseException | None) -> int:
    """Return with which status the program would end."""
    if failure is None:
        return 0
    code = failure.code if isinstance(failure, Preempted) else 1
    return code if isinstance(code, int) else 1


def _is_at_a_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _check_id(received: str, expected: str | None) -> None:
    if received != expected:
        raise ValueError(
            ANOTHER_RUN.format(received=received, expected=expected)
        )


def _check_options(
    run: Any,
    project: Any,
    init_options: Any,
    watch: Any,
    watch_every: Any,
    best: Any,
) -> None:
    if run is not None and (project is not None or init_options):
        given = ["project"] if project is not None else []
        raise ValueError(
            "run must be given without project and options of wandb.init, "
            "which would be ignored. Received: run and "
            f"{', '.join([*given, *init_options])}. Give them to wandb.init."
        )
    if watch not in WATCHED:
        raise ValueError(
            f"watch must be one of {WATCHED}. Received: watch={watch!r}. Use "
            "'weights' for histograms of the weights."
        )
    if watch_every is not None:
        require_every("watch_every", watch_every, "Use Every(100, 'updates').")
    wrong = {k: v for k, v in (best or {}).items() if v not in ("min", "max")}
    if wrong:
        raise ValueError(
            "best must map names to 'min' or 'max'. Received: "
            f"best={wrong!r}. Write for example {{'val_bleu': 'max'}}."
        )


def _check_checkpoints(callback: Any) -> None:
    if callback is not None and not hasattr(callback, "last_saved"):
        raise TypeError(
            "log_checkpoints must be a callback with last_saved, the directory "
            f"it saved last. Received: {callback!r}. Use "
            "accumtrainer.callbacks.Checkpoint(directory), and give it to fit "
            "as well."
        )
