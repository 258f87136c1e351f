"""Claims about TrackioLogger: one run for a training, whatever befalls it."""

import numpy as np
import pytest
from faulty import Fail
from logged_points import (
    make_trackio_logger,
    read_trackio,
    trackio_project,
    trackio_rows,
)
from pointed import X, Y, fit, make_trainer

from accumtrainer import Callback, Every, Histogram, Image, Table, Text
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import BACKEND, keras

pytestmark = pytest.mark.any_backend

trackio = pytest.importorskip("trackio", reason="Trackio is not installed")


def updates_of(folder, name):
    return [w.updates for w in read_trackio(folder) if w.name == name]


def runs_of(folder):
    return trackio_rows(trackio_project(folder))


def active_run():
    from trackio.context_vars import current_run

    return current_run.get()


@pytest.fixture
def finishes():
    """Finish what a test has left active."""
    yield
    if active_run() is not None:
        trackio.finish()


def test_run_says_what_was_configured_and_keeps_what_the_user_set(tmp_path):
    config = {"mine": 3, "backend": "my own"}
    logger = make_trackio_logger(tmp_path, name="first", config=config)
    fit(logger)
    ((run, _),) = runs_of(tmp_path)
    assert run.name == "first"
    assert run.config["accumulation"]["steps"] == 2
    assert run.config["versions"][keras.__name__.replace("_", "-")]
    assert (run.config["mine"], run.config["backend"]) == (3, "my own")
    assert active_run() is logger.run is None


def test_second_fit_continues_the_run(tmp_path):
    logger, trainer = make_trackio_logger(tmp_path), make_trainer()
    fit(logger, trainer=trainer)
    fit(logger, trainer=trainer)
    assert updates_of(tmp_path, "loss") == [6, 10, 12]
    ((run, _),) = runs_of(tmp_path)
    assert run.config["backend"] == BACKEND
    fit(logger)  # another training
    assert len(runs_of(tmp_path)) == 2


def test_active_run_gets_the_points_and_is_left_active(tmp_path, finishes):
    run = trackio.init(trackio_project(tmp_path), embed=False)
    fit(make_trackio_logger(tmp_path, project="another"))
    assert active_run() is run
    trackio.finish()
    assert updates_of(tmp_path, "loss") == [6]


def test_what_a_callback_logs_besides_goes_to_the_run(tmp_path):
    class Log(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            trackio.log({"mine": 7.0}, step=6)

    fit(make_trackio_logger(tmp_path), Log())
    assert updates_of(tmp_path, "mine") == [6]


@pytest.mark.parametrize("saved_at", [2, 5])
def test_resume_continues_the_run_and_repeats_no_point(tmp_path, saved_at):
    class Say(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.trainer.log_media("said", Text("something"))

    def train(*others, **options):
        every = Every(saved_at, "updates")
        fit(
            make_trackio_logger(tmp_path, Every(3, "updates")),
            Say(),
            *others,
            Checkpoint(tmp_path / "run", every=every),
            epochs=2,
            validation_data=(X, Y),
            **options,
        )

    with pytest.raises(RuntimeError, match="fire"):
        train(Fail(RuntimeError("fire"), update=2, epoch=1))
    assert updates_of(tmp_path, "loss") == [3, 6, 8]
    train(resume_from="auto")
    assert updates_of(tmp_path, "loss") == [3, 6, 8, 9, 12]
    assert updates_of(tmp_path, "val_loss") == [6, 12]
    assert updates_of(tmp_path, "said") == list(range(1, 13))


def resume_beside(tmp_path, project, **options):
    """Save a run, start a newer one of its name, and resume the first."""

    def train(*others, **more):
        logger = make_trackio_logger(tmp_path, project=project, **options)
        fit(logger, *others, **more)

    train(Checkpoint(tmp_path / "run"))
    train()
    train(Checkpoint(tmp_path / "run"), epochs=2, resume_from="auto")


def test_resume_finds_its_run_among_newer_ones_of_other_names(tmp_path):
    resume_beside(tmp_path, None)
    lengths = [
        [row["step"] for row in rows if "loss" in row]
        for _, rows in runs_of(tmp_path)
    ]
    assert sorted(lengths) == [[6], [6, 10, 12]]


def test_resume_that_would_write_into_a_newer_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Received: 'first' in 'my-runs'"):
        resume_beside(tmp_path, "my-runs", name="first")
    assert active_run() is None
    assert [len(rows) for _, rows in trackio_rows("my-runs")] == [1, 1]


def test_run_that_is_resumed_where_nothing_is_of_it_begins_anew(tmp_path):
    logger = make_trackio_logger(tmp_path)
    fit(logger, Checkpoint(tmp_path / "run"))
    elsewhere = make_trackio_logger(tmp_path, project=f"{tmp_path.name}-new")
    fit(elsewhere, Checkpoint(tmp_path / "run"), epochs=2, resume_from="auto")
    ((_, rows),) = trackio_rows(f"{tmp_path.name}-new")
    assert [row["step"] for row in rows if "loss" in row] == [10, 12]


def test_media_stand_at_their_update_as_trackio_shows_them(tmp_path):
    class Show(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            log = trainer.log_media
            gray = Image(np.eye(4), caption="one")
            log("gray", gray)
            log("color", Image(np.ones([4, 4, 3])))
            log("kernel", Histogram([1.0, 2.0, 2.0]))
            log("note", Text("# no title\nsecond line"))
            log("rows", Table(["name", "score"], [["a", 1.5], [gray, None]]))

    trainer = make_trainer()
    fit(Show(), make_trackio_logger(tmp_path), trainer=trainer)
    found = {w.name: w for w in read_trackio(tmp_path)}
    assert {found[n].updates for n in ("gray", "color", "rows")} == {6}
    assert found["gray"].value["caption"] == "one"
    assert found["color"].value["_type"] == "trackio.image"
    assert sum(found["kernel"].value["values"]) == 3
    note = found["note"].value["_value"]
    assert note == "    # no title\n    second line"
    first, second = found["rows"].value["_value"]
    assert first == {"name": "a", "score": 1.5}
    assert second["name"]["caption"] == "one"


def test_failure_is_one_warning_and_training_goes_on(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("the disk is full")

    monkeypatch.setattr(trackio.Run, "log", fail)
    logger = make_trackio_logger(tmp_path, Every(1, "updates"))
    with pytest.warns(RuntimeWarning, match="disk is full") as caught:
        trainer = fit(logger)
    assert len(caught) == 1
    assert trainer.progress.updates == 6


def test_unknown_option_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="Received: nam"):
        fit(make_trackio_logger(tmp_path, nam="first"))
