"""Claims about what a user logs to W&B himself, beside WandbLogger."""

import gc
import threading
import weakref

import numpy as np
import pytest
from wandb_file import written_runs
from wandb_runs import (
    QUIET,
    X,
    Y,
    fit,
    make_logger,
    make_trainer,
    positions,
)

from accumtrainer import Callback, Every
from accumtrainer.callbacks import WandbLogger
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla", "away_from_wandb"),
]

wandb = pytest.importorskip("wandb", reason="W&B is not installed")


@pytest.fixture(scope="module")
def trainer():
    """Give a Trainer whose steps are compiled already."""
    return make_trainer()


@pytest.fixture
def run(tmp_path):
    """Give a run of the user's."""
    run = wandb.init(mode="offline", dir=tmp_path, settings=QUIET)
    yield run
    run.finish()


def in_a_thread(row):
    thread = threading.Thread(target=wandb.log, args=[row])
    thread.start()
    thread.join()


def in_two_parts(row):
    wandb.log({"first": row["mine"]}, commit=False)
    wandb.log(row)


WAYS = {
    "log": lambda row: wandb.log(row),
    "log_to_run": lambda row: wandb.run.log(row),
    "log_twice": lambda row: [wandb.log(row), wandb.log(row)],
    "in_two_parts": in_two_parts,
    "without_commit": lambda row: wandb.log(row, commit=False),
    "at_that_step": lambda row: wandb.log(row, step=row["mine"]),
    "at_larger_steps": lambda row: wandb.log(row, step=8 * row["mine"]),
    "name_of_ours": lambda row: wandb.log(row | {"loss": -1}, commit=False),
    "in_a_thread": in_a_thread,
    "image": lambda row: wandb.log(
        row | {"seen": wandb.Image(np.zeros([4, 4, 3], "uint8"))}
    ),
    "table": lambda row: wandb.log(
        row
        | {
            "values": wandb.Histogram([1, 2, 3]),
            "cells": wandb.Table(columns=["a"], data=[[1]]),
        }
    ),
}


class Log(Callback):
    """Logs the updates made, from one hook, in one way."""

    def __init__(self, hook, log):
        super().__init__()
        setattr(self, hook, self._log)
        self._way = log

    def _log(self, *_, **__):
        self._way({"mine": self.trainer.progress.updates})


def assert_mine_stand_where_logged(runs, expected, *, is_sorted=True):
    rows = [row for run in runs for row in run.history]
    mine = [(row["mine"], row["updates"]) for row in rows if "mine" in row]
    assert mine == [(updates, updates) for updates in expected]
    for run in runs if is_sorted else ():
        updates = [row["updates"] for row in run.history]
        assert updates == sorted(updates)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_row_of_the_user_stands_at_the_update_it_was_logged_at(
    trainer, run, tmp_path, way, every
):
    before = trainer.progress.updates
    fit(
        trainer,
        WandbLogger(run=run, every=Every(every, "updates")),
        Log("on_train_batch_end", WAYS[way]),
        validation_data=(X, Y),
        epochs=2,
    )
    run.finish()
    (written,) = written_runs(tmp_path)
    expected = range(before + 1, before + 13)
    if way == "log_twice":
        expected = np.repeat(expected, 2)
    # In no other thread than training's are earlier points seen to first.
    is_sorted = way != "in_a_thread"
    assert_mine_stand_where_logged([written], expected, is_sorted=is_sorted)
    points = [row for row in written.history if row.get("loss", -1) != -1]
    due = {u for u in range(before + 1, before + 13) if u % every == 0}
    assert due <= {row["updates"] for row in points}
    assert sorted(positions(written.history, "val_loss")) == [
        before + 6,
        before + 12,
    ]


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_batch_begin",
        "on_micro_batch",
        "on_apply",
        "on_test_end",
        "on_validation_end",
        "on_epoch_end",
        "on_train_end",
    ],
)
def test_row_logged_in_any_hook_stands_where_progress_is(tmp_path, hook):
    logger = make_logger(tmp_path, every=Every(2, "updates"), watch="weights")
    log = Log(hook, WAYS["log"])
    fit(make_trainer(), logger, log, validation_data=(X, Y))
    expected = {
        "on_train_batch_begin": range(6),
        "on_micro_batch": np.repeat(range(6), 2),
        "on_apply": range(1, 7),
    }
    written = written_runs(tmp_path)
    assert_mine_stand_where_logged(written, expected.get(hook, [6]))
    assert set(positions(written[0].history, "loss")) == {2, 4, 6}


def test_row_logged_between_fits_stands_at_the_updates_made(run, tmp_path):
    trainer = make_trainer()
    for _ in range(2):
        fit(trainer, WandbLogger(run=run))
        wandb.log({"mine": trainer.progress.updates})
        trainer.train_on_batch(X[:4], Y[:4])
        wandb.log({"mine": trainer.progress.updates}, step=7)
    run.finish()
    assert_mine_stand_where_logged(written_runs(tmp_path), [6, 7, 13, 14])


def test_row_of_each_run_and_trainer_stands_at_its_own_updates(tmp_path):
    runs, trainers, logs = [], [], []
    for name in "ab":
        options = {"id": name, "mode": "offline", "reinit": "create_new"}
        run = wandb.init(dir=tmp_path, settings=QUIET, **options)
        runs.append(run)
        trainers.append(make_trainer())
        logs.append(Log("on_apply", lambda row, run=run: run.log(row)))
    for _ in range(2):
        for run, trainer, log in zip(runs, trainers, logs, strict=True):
            fit(trainer, WandbLogger(run=run), log)
        trainers[0].train_on_batch(X[:4], Y[:4])
    for run in runs:
        run.finish()
    first, second = written_runs(tmp_path)
    if first.run.run_id != "a":
        first, second = second, first
    expected = [*range(1, 7), *range(8, 14)]
    assert_mine_stand_where_logged([first], expected)
    assert_mine_stand_where_logged([second], range(1, 13))


def test_row_of_a_user_whose_window_was_skipped_stands_before_it(tmp_path):
    x = X.copy()
    x[5] = np.nan
    logger = make_logger(tmp_path, every=Every(1, "updates"))
    log = Log("on_train_batch_end", WAYS["log"])
    make_trainer().fit(
        x, Y, batch_size=2, verbose=0, shuffle=False, callbacks=[logger, log]
    )
    expected = [1, 1, 2, 3, 4, 5]
    assert_mine_stand_where_logged(written_runs(tmp_path), expected)


def test_row_left_open_before_training_does_not_move_into_it(run, tmp_path):
    run.log({"before": 1}, commit=False)
    fit(make_trainer(), WandbLogger(run=run))
    run.finish()
    (written,) = written_runs(tmp_path)
    (row,) = [row for row in written.history if "before" in row]
    assert "loss" not in row and row.get("updates", 0) == 0


def test_number_of_the_same_name_overwrites_no_point(run, tmp_path):
    logger = WandbLogger(run=run, every=Every(1, "updates"))
    log = Log("on_apply", WAYS["name_of_ours"])
    history = fit(make_trainer(), logger, log, epochs=2)
    run.finish()
    (written,) = written_runs(tmp_path)
    losses = [row["loss"] for row in written.history if "mine" not in row]
    assert len(losses) == 12 and min(losses) > 0
    assert np.isclose(np.mean(losses[6:]), history.history["loss"][1])


def test_only_steps_that_go_back_among_the_user_s_own_are_left_out(
    run, tmp_path
):
    def log(row):
        wandb.log({"epochs": row["mine"] // 6}, step=row["mine"] // 6)
        wandb.log({"left_out": 1}, step=0)

    logger = WandbLogger(run=run, every=Every(1, "updates"))
    fit(make_trainer(), logger, Log("on_epoch_end", log), epochs=3)
    run.finish()
    (written,) = written_runs(tmp_path)
    assert positions(written.history, "epochs") == [6, 12, 18]
    assert not positions(written.history, "left_out")


def test_rows_of_one_step_and_update_are_one_row(run, tmp_path):
    def log(row):
        wandb.log(row, step=row["mine"])
        wandb.log({"more": 1}, step=row["mine"])

    fit(make_trainer(), WandbLogger(run=run), Log("on_apply", log), epochs=2)
    run.finish()
    (written,) = written_runs(tmp_path)
    assert_mine_stand_where_logged([written], range(1, 13))
    assert all("more" in row for row in written.history if "mine" in row)


def test_rows_of_one_step_and_several_updates_are_several(run, tmp_path):
    log = Log("on_apply", lambda row: wandb.log(row, step=3))
    fit(make_trainer(), WandbLogger(run=run, every=Every(1, "updates")), log)
    run.finish()
    assert_mine_stand_where_logged(written_runs(tmp_path), range(1, 7))


def test_updates_that_the_user_logs_himself_stay(run, tmp_path):
    log = Log("on_apply", lambda row: wandb.log(row | {"updates": 100}))
    fit(make_trainer(), WandbLogger(run=run), log)
    run.finish()
    (written,) = written_runs(tmp_path)
    assert positions(written.history, "mine") == [100] * 6


@pytest.mark.parametrize("wrong", [[1], {1: 2}])
def test_what_wandb_refuses_it_refuses_where_it_is_logged(run, wrong):
    log = Log("on_apply", lambda row: wandb.log(wrong))
    with pytest.raises(TypeError, match="wandb.log"):
        fit(make_trainer(), WandbLogger(run=run), log)


def test_run_that_was_started_here_answers_itself_when_it_has_ended(tmp_path):
    logger = make_logger(tmp_path)
    fit(make_trainer(), logger)
    assert logger.run.log.__self__ is logger.run
    assert wandb.run is None
    with pytest.raises(wandb.Error, match="must call wandb.init"):
        wandb.log({"mine": 1})


def test_disabled_run_takes_every_call(trainer):
    def log(row):
        wandb.log(row)
        wandb.log(row, step=3)
        wandb.log(row, step=2)

    fit(trainer, WandbLogger(mode="disabled"), Log("on_apply", log))


def test_run_that_goes_on_keeps_no_trainer_alive(run):
    trainer = make_trainer()
    fit(trainer, WandbLogger(run=run))
    seen = weakref.ref(trainer)
    keras.backend.clear_session()
    del trainer
    gc.collect()
    assert seen() is None
    run.log({"mine": 6})
