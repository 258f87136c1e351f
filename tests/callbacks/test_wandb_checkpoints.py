"""Claims about checkpoints in W&B, and runs that go on from them.

A server of W&B is not to be had in a test. What a run would send to it is
read from its records, and downloading is played by copying those files.
"""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from wandb_file import written_runs
from wandb_runs import X, Y, fit, make_logger, make_trainer, positions

from accumtrainer import Callback, CheckpointError, Every
from accumtrainer.callbacks import Checkpoint
from accumtrainer.callbacks.wandb_checkpoints import SentCheckpoints
from accumtrainer.saving import wandb_artifacts

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla", "away_from_wandb"),
]

wandb = pytest.importorskip("wandb", reason="W&B is not installed")


def saved(run):
    """List the checkpoints that a run has sent, as artifacts."""
    return [sent for sent in run.artifacts if sent.type == "model"]


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Give the names asked for; each is what the runs in `runs` have sent."""
    asked = []

    def download(name, folder):
        asked.append(name)
        alias = name.rpartition(":")[2]
        runs = written_runs(tmp_path / "runs")
        sent = [a for run in runs for a in saved(run) if alias in a.aliases]
        if not sent:
            raise wandb.errors.CommError("artifact not found")
        for file in sent[-1].manifest.contents:
            shutil.copy(file.local_path, Path(folder) / file.path)

    monkeypatch.setattr(wandb_artifacts, "_download", download)
    (tmp_path / "runs").mkdir()
    return asked


class Fail(Callback):
    """Raises in the second epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        if self.trainer.progress.updates == 9:
            raise RuntimeError("power failure")


def test_run_goes_on_from_an_artifact_on_another_machine(server, tmp_path):
    whole = make_trainer()
    fit(whole, epochs=3)
    first = Checkpoint(tmp_path / "first")
    logger = make_logger(tmp_path / "runs", log_checkpoints=first)
    with pytest.raises(RuntimeError, match="power failure"):
        fit(make_trainer(), Fail(), first, logger, epochs=3)
    shutil.rmtree(tmp_path / "first")
    there = make_trainer()
    fit(
        there,
        Checkpoint(tmp_path / "second"),
        make_logger(tmp_path / "runs"),
        epochs=3,
        resume_from="wandb:me/claims/checkpoint-x:latest",
    )
    assert server == ["me/claims/checkpoint-x:latest"]
    assert there.progress.updates == whole.progress.updates == 18
    for mine, other in zip(
        there.model.get_weights(), whole.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(mine, other)
    before, after = written_runs(tmp_path / "runs")
    assert before.run.run_id == after.run.run_id
    sent = positions(before.history, "loss") + positions(after.history, "loss")
    assert sent == sorted(set(sent)) and sent[-1] == 18


class Judge(Callback):
    """Says how good each epoch was."""

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = [1.0, 3.0, 2.0][epoch]


class Wait(Callback):
    """Has an epoch begin when the checkpoint of the last one is written."""

    def __init__(self, checkpoint):
        super().__init__()
        self.checkpoint = checkpoint

    def on_epoch_begin(self, epoch, logs=None):
        while len(self.checkpoint.checkpoints.names()) < epoch:
            pass


def test_best_checkpoint_has_an_alias_of_its_own(server, tmp_path):
    checkpoint = Checkpoint(
        tmp_path / "saved", keep=9, keep_best="score", mode="max"
    )
    logger = make_logger(tmp_path / "runs", log_checkpoints=checkpoint)
    fit(make_trainer(), Judge(), Wait(checkpoint), checkpoint, logger, epochs=3)
    (run,) = written_runs(tmp_path / "runs")
    aliases = [tuple(sorted(sent.aliases)) for sent in saved(run)]
    assert aliases == [
        ("best", "latest", "u6"),
        ("best", "latest", "u12"),
        ("latest", "u18"),
    ]
    trainer = make_trainer()
    fit(trainer, epochs=2, resume_from="wandb:claims/checkpoint-x:best")
    assert trainer.progress.updates == 12


def test_last_checkpoint_may_turn_out_to_be_the_best(server, tmp_path):
    """It is saved amid an epoch, and judged by a validation after that."""
    checkpoint = Checkpoint(
        tmp_path / "saved", every=Every(100, "updates"), keep_best="val_loss"
    )
    logger = make_logger(tmp_path / "runs", log_checkpoints=checkpoint)
    options = {"max_updates": 4, "validation_data": (X, Y)}
    fit(make_trainer(), checkpoint, logger, **options)
    (run,) = written_runs(tmp_path / "runs")
    # Whether it was sent before it was judged is a matter of time.
    assert set(saved(run)[-1].aliases) == {"best", "latest", "u4"}


@pytest.mark.parametrize("is_judged_late", [False, True])
def test_earlier_checkpoint_that_turns_out_to_be_the_best_is_not_the_latest(
    is_judged_late,
):
    """Whatever is sent, W&B calls it the latest; thus the latest comes last."""
    best = [None]
    checkpoints = SimpleNamespace(best_path=lambda: best[-1])
    saver = SimpleNamespace(last_saved=None, checkpoints=checkpoints)
    sent = SentCheckpoints(saver)
    sent.start()
    saver.last_saved = "update-4"
    new = list(sent.new(int, is_last=False))
    assert new == [("update-4", 4, ["latest", "u4"])]
    saver.last_saved = "update-8"
    if is_judged_late:
        new = list(sent.new(int, is_last=False))
        assert new == [("update-8", 8, ["latest", "u8"])]
    best.append("update-4")
    new = list(sent.new(int, is_last=True))
    assert new == [
        ("update-4", 4, ["best", "u4"]),
        ("update-8", 8, ["latest", "u8"]),
    ]
    assert list(sent.new(int, is_last=True)) == []


def test_artifact_that_is_not_there_is_refused(server):
    with pytest.raises(CheckpointError, match="'wandb:p/n:no'.*not found"):
        fit(make_trainer(), resume_from="wandb:p/n:no")


@pytest.mark.parametrize("place", ["", "name:latest", "a/b/c/d:e", "a/b"])
def test_reference_that_is_none_is_refused(place):
    with pytest.raises(ValueError, match="entity/project/name:alias"):
        fit(make_trainer(), resume_from=f"wandb:{place}")


def test_artifact_without_wandb_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"accumtrainer\[wandb\]"):
        fit(make_trainer(), resume_from="wandb:p/n:best")


def test_download_asks_wandb_for_a_model(monkeypatch, tmp_path):
    """Hold the one place that needs a server to W&B's own signature."""
    asked = []

    class Api:
        def artifact(self, name, type=None):
            asked.append((name, type))
            return self

        def download(self, root=None):
            asked.append(root)

    monkeypatch.setattr(wandb, "Api", Api)
    wandb_artifacts._download("e/p/n:best", str(tmp_path))
    assert asked == [("e/p/n:best", "model"), str(tmp_path)]


class SaveElsewhere(Callback):
    """Saves after the third update, under a name that does not tell it."""

    last_saved = None

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.folder.mkdir()
            (self.folder / "weights").write_bytes(b"1")
            self.last_saved = self.folder


def test_checkpoint_of_any_name_has_the_updates_made(tmp_path):
    saver = SaveElsewhere(tmp_path / "saved")
    logger = make_logger(tmp_path / "runs", log_checkpoints=saver)
    fit(make_trainer(), saver, logger)
    (run,) = written_runs(tmp_path)
    (sent,) = saved(run)
    # No point was sent before: the first one is of the sixth update.
    assert set(sent.aliases) == {"latest", "u3"}
    assert json.loads(sent.metadata) == {"updates": 3}


def test_directory_that_is_uploaded_has_the_updates_made(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "words.txt").write_text("some")

    class Upload(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                logger.upload(tmp_path / "saved")

    logger = make_logger(tmp_path)
    fit(make_trainer(), Upload(), logger)
    (run,) = written_runs(tmp_path)
    (sent,) = saved(run)
    assert set(sent.aliases) == {"latest", "u4"}
    assert json.loads(sent.metadata) == {"updates": 4}
    assert [file.path for file in sent.manifest.contents] == ["words.txt"]


@pytest.mark.parametrize("keep_best", [None, "loss"])
def test_checkpoint_of_an_earlier_training_is_not_sent_again(
    tmp_path, keep_best
):
    checkpoint = Checkpoint(tmp_path / "saved", keep_best=keep_best)
    trainer = make_trainer()
    fit(trainer, checkpoint)
    logger = make_logger(tmp_path / "runs", log_checkpoints=checkpoint)
    with pytest.raises(RuntimeError, match="before the first update"):
        fit(trainer, Refuse(), logger)
    (run,) = written_runs(tmp_path / "runs")
    assert saved(run) == []


class Refuse(Callback):
    """Raises before anything is trained."""

    def on_train_batch_begin(self, batch, logs=None):
        raise RuntimeError("before the first update")
