"""Claims about points on their way to W&B: gathered, hindered, or left out."""

import functools
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from wandb_file import written_runs
from wandb_runs import QUIET, Run, fit, make_logger, make_trainer, positions

from accumtrainer import Callback, Every
from accumtrainer.callbacks import Checkpoint, WandbLogger
from accumtrainer.callbacks.background import Background
from accumtrainer.callbacks.tracker import Tracker
from accumtrainer.keras_api import keras
from accumtrainer.observers.logs import Logs

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla", "away_from_wandb"),
]

wandb = pytest.importorskip("wandb", reason="W&B is not installed")


@pytest.fixture(scope="module")
def trainer():
    """Give a Trainer whose steps are compiled already."""
    return make_trainer()


# --- W&B out of reach, slow, or failing ---


def free_port():
    """Find a port of this machine where nothing listens."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_server_out_of_reach_is_one_warning_and_the_run_kept(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(sys.modules[WandbLogger.__module__], "START_SECS", 0.1)
    times = []

    class Watch(keras.callbacks.Callback):
        is_logger = True  # is called after the logger

        def on_epoch_begin(self, epoch, logs=None):
            times.append(time.monotonic())

        def on_epoch_end(self, epoch, logs=None):
            times.append(time.monotonic())

    logger = make_logger(
        tmp_path,
        mode="online",
        settings=QUIET | {"init_timeout": 1},
        every=Every(1, "updates"),
    )
    trainer = make_trainer()
    wandb.teardown()  # it has read the environment before
    with pytest.warns(RuntimeWarning) as caught:
        fit(trainer, logger, Watch())
    wandb.teardown()
    assert len(caught) == 1
    assert "W&B could not be reached" in str(caught[0].message)
    assert trainer.progress.updates == 6
    last = written_runs(tmp_path)[-1]
    assert positions(last.history, "loss") == [1, 2, 3, 4, 5, 6]
    assert str(last.path.parent) in str(caught[0].message)


@pytest.mark.parametrize("options", [{}, {"finish_timeout": 300.0}])
def test_wandb_itself_waits_no_longer_than_close_secs(
    trainer, tmp_path, options
):
    logger = make_logger(tmp_path, settings=QUIET | options)
    fit(trainer, logger)
    waits = options.get("finish_timeout", 600.0)  # the user has the last word
    assert logger.run.settings.finish_timeout == waits


def test_checkpoint_made_before_wandb_has_answered_knows_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys.modules[WandbLogger.__module__], "START_SECS", 0.0)
    init, may_answer, states = wandb.init, threading.Event(), []

    @functools.wraps(init)
    def answer_late(**options):
        may_answer.wait()
        return init(**options)

    class Save(Callback):
        def on_train_batch_end(self, batch, logs=None):
            states.append(logger.get_state())
            may_answer.set()

    monkeypatch.setattr(wandb, "init", answer_late)
    logger = make_logger(tmp_path)
    fit(make_trainer(), Save(), logger)
    (run,) = written_runs(tmp_path)
    assert states[0]["run_id"] == run.run.run_id


def test_service_that_hangs_is_one_warning_and_stops_nothing(trainer):
    hanging = threading.Event()
    logger = WandbLogger(
        run=Run(log=lambda row: hanging.wait()),
        every=Every(1, "updates"),
        close_secs=0.1,
    )
    before = trainer.progress.updates
    with pytest.warns(RuntimeWarning, match="close_secs=0.1") as caught:
        fit(trainer, logger)
    hanging.set()
    assert len(caught) == 1
    assert trainer.progress.updates == before + 6


def test_points_that_come_too_fast_are_left_out_with_one_warning(trainer):
    rows, hanging = [], threading.Event()

    def log(row):
        hanging.wait()
        rows.append(row)

    module = sys.modules[WandbLogger.__module__]
    make = module.Background

    class LetGo(Callback):
        def on_train_end(self, logs=None):
            hanging.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Background", lambda name, **_: make(name, 2))
        logger = WandbLogger(run=Run(log=log), every=Every(1, "updates"))
        with pytest.warns(RuntimeWarning, match="more slowly") as caught:
            fit(trainer, LetGo(), logger)
    assert len(caught) == 1
    assert 2 <= len(rows) < 6


def test_checkpoint_removed_before_it_was_taken_is_left_out(tmp_path):
    hanging, sent = threading.Event(), []
    run = Run(log=lambda row: hanging.wait())
    run.log_artifact = lambda artifact, aliases: sent.append(aliases)

    class LetGo(Callback):
        def on_train_end(self, logs=None):
            hanging.set()

    every = Every(1, "updates")
    checkpoint = Checkpoint(tmp_path, every=every, keep=1)
    logger = WandbLogger(run=run, every=every, log_checkpoints=checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fit(make_trainer(), checkpoint, LetGo(), logger)
    # The first one may be there before the first point is.
    assert sent in ([["latest", "u6"]], [["latest", "u1"], ["latest", "u6"]])


# --- Points are gathered, and read in the thread ---


class Pause(Callback):
    """Lets time pass between updates."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)


def test_gathered_points_keep_the_moments_they_were_made_at(tmp_path):
    trainer = make_trainer()
    fit(trainer, Pause(), make_logger(tmp_path, every=Every(1, "updates")))
    (run,) = written_runs(tmp_path)
    assert positions(run.history, "loss") == [1, 2, 3, 4, 5, 6]
    # The last two are made when the epoch ends, one right after the other.
    assert min(np.diff(run.moments[:-1])) > 0.04


def test_points_wait_for_others_until_somebody_asks_for_them():
    said, background = [], Background("gathering", gather_secs=3600.0)
    for word in "abc":
        background.do(said.append, word)
    time.sleep(0.05)
    assert not said
    assert background.wait(600)
    assert said == ["a", "b", "c"]
    assert background.finish(600, said.append, "d")
    assert said == ["a", "b", "c", "d"]


def test_points_that_wait_too_long_are_read_where_they_are_made(
    trainer, monkeypatch
):
    module = sys.modules[WandbLogger.__module__]
    monkeypatch.setattr(module, "GATHER_SECS", 3600.0)
    waiting = sys.modules[Tracker.__module__]
    monkeypatch.setattr(waiting, "MOST_UNREAD_POINTS", 3)
    handed_over = []
    send = WandbLogger._send

    def keep(self, function, updates, numbers, *others):
        handed_over.append(type(numbers))
        return send(self, function, updates, numbers, *others)

    logger = WandbLogger(run=Run(), every=Every(1, "updates"))
    with monkeypatch.context() as patch:
        patch.setattr(WandbLogger, "_send", keep)
        fit(trainer, logger)
    # The first three are in the thread's hands, or wait for it.
    assert handed_over[:3] == [Logs] * 3
    assert handed_over[4:] == [dict] * 2


def test_best_of_training_is_found_where_it_is_asked_for(trainer):
    rows = []
    run = Run(log=rows.append)
    logger = WandbLogger(
        run=run, every=Every(1, "updates"), best={"mae": "min"}
    )
    fit(trainer, logger)
    assert len(rows) == 6
    assert run.summary["best_mae"] == min(row["mae"] for row in rows)


def test_checkpoint_leaves_no_point_waiting(tmp_path, monkeypatch):
    module = sys.modules[WandbLogger.__module__]
    monkeypatch.setattr(module, "GATHER_SECS", 3600.0)
    has_come = threading.Event()

    class WaitsForThePoint(Callback):
        """Called before the logger, thus after a checkpoint's update."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4:
                self.has_seen_it = has_come.wait(600)

    # The first points are not gathered, as the start of the run was awaited.
    run = Run(log=lambda row: row["updates"] == 4 and has_come.set())
    wait = WaitsForThePoint()
    fit(
        make_trainer(),
        wait,
        Checkpoint(tmp_path / "run", every=Every(4, "updates")),
        WandbLogger(run=run, every=Every(1, "updates")),
    )
    assert wait.has_seen_it


class Tell(Callback):
    """Tells of a checkpoint after the third update."""

    last_saved = None

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.last_saved = self.folder


def test_checkpoint_itself_waits_for_no_points(tmp_path, monkeypatch):
    module = sys.modules[WandbLogger.__module__]
    monkeypatch.setattr(module, "GATHER_SECS", 3600.0)
    has_come = threading.Event()

    class WaitsForIt(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 4:
                self.has_seen_it = has_come.wait(600)

    (tmp_path / "weights").write_bytes(b"1")
    run, tell, wait = Run(), Tell(tmp_path), WaitsForIt()
    run.log_artifact = lambda artifact, aliases: has_come.set()
    logger = WandbLogger(run=run, log_checkpoints=tell)
    fit(make_trainer(), tell, wait, logger)
    assert wait.has_seen_it


def test_checkpoint_that_cannot_be_read_is_one_warning(
    trainer, tmp_path, monkeypatch
):
    def fail(self, path):
        raise PermissionError(f"{path} is not yours")

    # Where a file fails, W&B leaves threads behind, of which Python warns.
    monkeypatch.setattr(wandb.Artifact, "add_dir", fail)
    tell = Tell(tmp_path)
    logger = WandbLogger(run=Run(), log_checkpoints=tell)
    with pytest.warns(RuntimeWarning, match="is not yours") as caught:
        fit(trainer, tell, logger)
    assert len(caught) == 1


def test_run_that_fails_midway_is_one_warning(trainer, tmp_path):
    run = wandb.init(mode="offline", dir=tmp_path, settings=QUIET)

    class Finish(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                run.finish()
            time.sleep(0.05)

    logger = WandbLogger(run=run, every=Every(1, "updates"))
    before = trainer.progress.updates
    with pytest.warns(RuntimeWarning, match="did not take every") as caught:
        fit(trainer, logger, Finish())
    assert len(caught) == 1
    assert trainer.progress.updates == before + 6


def test_nothing_is_said_where_nothing_is_wrong(trainer, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(trainer, make_logger(tmp_path))


def test_training_that_begins_while_an_error_is_handled_ends_well(tmp_path):
    try:
        raise KeyError("the user's, who goes on")
    except KeyError:
        fit(make_trainer(), make_logger(tmp_path))
    (run,) = written_runs(tmp_path)
    assert run.exit_code == 0


def test_trainer_that_is_put_back_begins_another_run(tmp_path):
    trainer, logger = make_trainer(), make_logger(tmp_path / "runs")
    trainer.save(tmp_path / "begun")
    fit(trainer, logger)
    trainer.restore(tmp_path / "begun")
    fit(trainer, logger)
    first, second = written_runs(tmp_path / "runs")
    assert first.run.run_id != second.run.run_id
    assert positions(second.history, "loss") == [6]
