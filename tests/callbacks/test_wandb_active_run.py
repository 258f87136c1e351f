"""Claims about runs of W&B that are there already when training begins."""

import pytest
from wandb_file import written_runs
from wandb_runs import QUIET, fit, make_logger, make_trainer, positions

from accumtrainer.callbacks import WandbLogger

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla", "away_from_wandb"),
]

wandb = pytest.importorskip("wandb", reason="W&B is not installed")


@pytest.fixture(scope="module")
def trainer():
    """Give a Trainer whose steps are compiled already."""
    return make_trainer()


def test_run_that_was_handed_in_is_left_running(trainer, tmp_path):
    run = wandb.init(mode="offline", dir=tmp_path, settings=QUIET)
    run.config["backend"] = "mine"
    logger = WandbLogger(run=run)
    fit(trainer, logger)
    assert logger.run is run
    run.log({"after": 1})
    run.finish()
    (only,) = written_runs(tmp_path)
    assert positions(only.history, "loss")
    assert only.history[-1]["after"] == 1
    assert only.config["backend"] == "mine"
    assert only.config["accumulation"]["steps"] == 2


def test_second_fit_says_in_a_run_that_was_handed_in_what_it_is(
    trainer, tmp_path
):
    run = wandb.init(mode="offline", dir=tmp_path, settings=QUIET)
    logger = WandbLogger(run=run)
    for epochs in (1, 2):
        fit(trainer, logger, epochs=epochs)
    run.finish()
    (only,) = written_runs(tmp_path)
    assert only.config["fit"]["epochs"] == 2


@pytest.mark.parametrize("options", [{}, {"project": "another"}])
def test_run_that_was_active_is_joined_and_left_running(
    trainer, tmp_path, options, monkeypatch
):
    # In a notebook, W&B would end it.
    monkeypatch.setattr("wandb.sdk.lib.ipython.in_notebook", lambda: True)
    run = wandb.init(mode="offline", dir=tmp_path, settings=QUIET)
    logger = WandbLogger(dir=tmp_path, **options)
    fit(trainer, logger)
    assert logger.run is run
    run.log({"after": 1})
    run.finish()
    (only,) = written_runs(tmp_path)
    assert positions(only.history, "loss")
    assert only.history[-1]["after"] == 1


@pytest.fixture
def disabled(tmp_path):
    """Give an active run that is disabled, as W&B leaves it after a `with`."""
    with wandb.init(mode="disabled", dir=tmp_path) as run:
        pass
    yield run
    run.finish()


def test_run_that_is_disabled_and_active_is_left_so(
    trainer, disabled, tmp_path
):
    for _ in range(2):
        logger = WandbLogger("another", dir=tmp_path)
        with pytest.warns(RuntimeWarning, match="is disabled.*a mode") as said:
            fit(trainer, logger)
        assert len(said) == 1
        assert logger.run is disabled
        assert wandb.run is disabled
    assert not written_runs(tmp_path)


def test_run_that_was_to_be_disabled_is_so_without_a_word(
    trainer, disabled, monkeypatch
):
    for options in ({"mode": "disabled"}, {}):
        logger = WandbLogger(**options)
        fit(trainer, logger)
        assert logger.run is disabled
        monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "offline"},
        {"settings": QUIET | {"mode": "offline"}},
        {"settings": wandb.Settings(mode="offline", **QUIET)},
    ],
    ids=["option", "dict", "settings"],
)
def test_run_of_another_mode_begins_where_a_disabled_one_is_left(
    trainer, disabled, tmp_path, options
):
    fit(trainer, WandbLogger(dir=tmp_path, **options))
    (written,) = written_runs(tmp_path)
    assert positions(written.history, "loss")
    assert written.exit_code == 0


def test_new_run_beside_an_active_one_can_be_had(trainer, tmp_path):
    with wandb.init(mode="offline", dir=tmp_path / "theirs", settings=QUIET):
        fit(trainer, make_logger(tmp_path / "ours", reinit="create_new"))
    (ours,) = written_runs(tmp_path / "ours")
    assert positions(ours.history, "loss")
