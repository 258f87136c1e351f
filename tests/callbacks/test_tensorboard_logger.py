"""Claims about TensorBoardLogger: whole files, without TensorFlow."""

import json
import resource
import subprocess
import sys
import warnings

import pytest
from logged_points import read_tensorboard
from pointed import fit, make_trainer

from accumtrainer.callbacks import TensorBoardLogger
from accumtrainer.keras_api import KERAS_NAME

pytestmark = pytest.mark.any_backend


def write(folder, *points, state=None):
    """Write points by a new logger; return its state before them and after."""
    logger = TensorBoardLogger(folder)
    logger.open()
    if state is not None:
        logger.set_state(state)
    before = json.loads(json.dumps(logger.get_state()))
    for updates, numbers in points:
        logger.write(updates, numbers)
    after = json.loads(json.dumps(logger.get_state()))
    logger.close()
    return before, after


def losses(folder):
    return [
        (w.updates, w.value) for w in read_tensorboard(folder) if w.name == "x"
    ]


def test_tensorflow_is_not_loaded(tmp_path):
    code = f"""if True:
        import sys
        from accumtrainer.callbacks import TensorBoardLogger
        from {KERAS_NAME} import backend
        before = set(sys.modules)
        logger = TensorBoardLogger({str(tmp_path)!r})
        logger.open()
        logger.write(1, {{"loss": 0.5}})
        logger.close()
        print({{"tensorflow", "jax"}} & (set(sys.modules) - before))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=-1, text=True
    )
    assert done.stdout.strip() == "set()"
    assert [w.name for w in read_tensorboard(tmp_path)] == ["loss"]


def test_event_is_on_disk_before_the_file_is_closed(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.open()
    logger.write(1, {"x": 0.5})
    assert losses(tmp_path) == [(1, 0.5)]
    logger.close()


def test_values_of_a_list_are_scalars_of_their_own(tmp_path):
    write(tmp_path, (3, {"f1": [0.5, 0.25], "phase": "warm-up", "on": True}))
    assert [(w.name, w.value) for w in read_tensorboard(tmp_path)] == [
        ("f1/0", 0.5),
        ("f1/1", 0.25),
        ("on", 1.0),
    ]


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    _, state = write(tmp_path, (2, {"x": 2.0}), (4, {"x": 4.0}))
    write(tmp_path, (4, {"y": 9.0}), (6, {"x": 9.0}), state=state)
    write(tmp_path, (8, {"x": 8.0}), state=state)
    assert losses(tmp_path) == [(2, 2.0), (4, 4.0), (8, 8.0)]
    assert "y" not in [w.name for w in read_tensorboard(tmp_path)]


def test_resume_from_before_the_first_point_drops_all_later_ones(tmp_path):
    state, _ = write(tmp_path, (2, {"x": 9.0}))
    write(tmp_path, (2, {"x": 2.0}), state=state)
    assert losses(tmp_path) == [(2, 2.0)]


def test_resume_leaves_what_an_earlier_training_has_written(tmp_path):
    write(tmp_path, (6, {"x": 6.0}))
    state, _ = write(tmp_path, (8, {"x": 9.0}))
    state["since"]["updates"] = 6
    write(tmp_path, (8, {"x": 8.0}), state=state)
    assert losses(tmp_path) == [(6, 6.0), (8, 8.0)]


def test_many_files_are_read_in_the_order_they_were_begun(tmp_path):
    for updates in range(12):
        write(tmp_path, (updates, {"x": updates}))
    assert losses(tmp_path) == [(u, u) for u in range(12)]


def test_second_fit_goes_on_in_the_same_folder(tmp_path):
    trainer, logger = make_trainer(), TensorBoardLogger(tmp_path)
    fit(logger, trainer=trainer)
    fit(logger, trainer=trainer)
    shown = read_tensorboard(tmp_path)
    assert [w.updates for w in shown if w.name == "loss"] == [6, 10, 12]


def test_path_that_is_none_is_refused():
    with pytest.raises(TypeError, match="directory must be .* Received"):
        TensorBoardLogger(7)


def test_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = make_trainer()
    with pytest.raises(ValueError, match="directory must name .*Received"):
        fit(TensorBoardLogger(tmp_path / "file" / "a"), trainer=trainer)
    assert trainer.progress.updates == 0


def test_tensorboard_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(ImportError, match=r"accumtrainer\[tensorboard\]"):
        fit(TensorBoardLogger(tmp_path))


def test_full_disk_is_one_warning_and_leaves_whole_events(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.open()
    logger.write(1, {"x": 1.0})
    (file,) = tmp_path.iterdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 9, hard))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logger.write(2, {"x": 2.0})
            logger.write(3, {"x": 3.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [str(w.message).count("File too large") for w in caught] == [1]
    logger.write(4, {"x": 4.0})
    logger.close()
    assert losses(tmp_path) == [(1, 1.0), (4, 4.0)]
