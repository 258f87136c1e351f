"""Claims about runs of a sweep: what they are told, and how they end."""

import os
import shlex
import signal
import sys

import numpy as np
import pytest
from wandb_file import written_runs
from wandb_runs import QUIET, fit, make_logger, make_trainer

from accumtrainer import Accumulation, Callback, LossScale, Preempted
from accumtrainer.callbacks import WandbLogger

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla", "away_from_wandb"),
]

wandb = pytest.importorskip("wandb", reason="W&B is not installed")


class Kill(Callback):
    """Sends SIGTERM to this process in the third update."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_config_holds_what_was_fed_and_the_command_line(tmp_path):
    trainer = make_trainer()
    fit(trainer, make_logger(tmp_path))
    (run,) = written_runs(tmp_path)
    assert run.config["fit"] == {
        "epochs": 1,
        "steps": 6,
        "batch_size": 2,
        "samples": 24,
    }
    assert run.config["command"] == shlex.join(sys.argv)


def test_options_come_back_from_the_config_of_a_run(tmp_path):
    accumulation = Accumulation(steps={0: np.int64(2), 3: 4}, combine="mean")
    scale = LossScale(initial=64, growth_interval=np.int32(7))
    trainer = make_trainer(accumulation=accumulation, loss_scale=scale)
    fit(trainer, make_logger(tmp_path))
    (run,) = written_runs(tmp_path)
    config = run.config
    assert Accumulation.from_dict(config["accumulation"]) == accumulation
    assert LossScale.from_dict(config["loss_scale"]) == scale


def test_options_come_out_of_the_settings_of_a_sweep(tmp_path):
    settings = {"accumulation": {"steps": {"0": 1, "2": 4}}}
    with wandb.init(
        mode="offline", dir=tmp_path, settings=QUIET, config=settings
    ) as run:
        chosen = Accumulation.from_dict(run.config.accumulation)
    assert chosen == Accumulation(steps={0: 1, 2: 4})


def test_preempted_run_says_so_and_ends_as_the_program_does(tmp_path):
    trainer = make_trainer()
    with pytest.raises(Preempted):
        fit(trainer, Kill(), make_logger(tmp_path))
    assert trainer.progress.updates == 3
    (run,) = written_runs(tmp_path)
    assert run.is_preempting
    assert run.exit_code == 143
    assert run.history[-1]["updates"] == 3


def test_preempted_run_of_the_user_says_so_too(tmp_path):
    with pytest.raises(Preempted):
        with wandb.init(mode="offline", dir=tmp_path, settings=QUIET) as run:
            fit(make_trainer(), Kill(), WandbLogger(run=run))
    (run,) = written_runs(tmp_path)
    assert run.is_preempting
    assert run.exit_code == 1


def test_handler_of_the_user_is_called_and_training_goes_on(tmp_path):
    arrived = []
    before = signal.signal(
        signal.SIGTERM, lambda number, frame: arrived.append(number)
    )
    try:
        trainer = make_trainer()
        fit(trainer, Kill(), make_logger(tmp_path))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert arrived == [signal.SIGTERM]
    assert trainer.progress.updates == 6
    (run,) = written_runs(tmp_path)
    assert not run.is_preempting


def test_run_that_ended_by_itself_is_not_preempted(tmp_path):
    fit(make_trainer(), make_logger(tmp_path))
    (run,) = written_runs(tmp_path)
    assert not run.is_preempting
    assert run.exit_code == 0


def test_run_has_the_id_that_its_agent_has_given_it(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "given")
    wandb.teardown()  # it has read the environment before
    fit(make_trainer(), make_logger(tmp_path))
    wandb.teardown()
    (run,) = written_runs(tmp_path)
    assert run.run.run_id == "given"
