"""Claims about RunLog: lines of JSON that a crash or a full disk spares."""

import json
import os
import resource
import warnings

import numpy as np
import pytest

from accumtrainer import Every, Trainer
from accumtrainer.callbacks import RunLog
from accumtrainer.keras_api import keras

pytestmark = pytest.mark.any_backend

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")

FULL = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="there is no /dev/full here"
)


def make_trainer():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    return Trainer(model, optimizer="sgd", loss="mse", accumulation=2, seed=0)


@pytest.fixture(scope="module")
def trainer():
    """Give a Trainer whose steps are compiled already."""
    return make_trainer()


def fit(run_log, trainer, y=Y, **options):
    """Train, six updates an epoch."""
    options = {"batch_size": 2, "verbose": 0} | options
    return trainer.fit(X, y, callbacks=[run_log], **options)


def strictly(word):
    raise ValueError(f"{word} is no JSON")


def read(path):
    """Read a log, refusing what is no strict JSON."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=strictly) for line in lines]


def test_every_point_is_a_line(tmp_path):
    path = tmp_path / "new" / "folders" / "run.jsonl"
    history = fit(
        RunLog(path, every=Every(4, "updates")),
        make_trainer(),
        validation_data=(X, Y),
    )
    points = read(path)
    assert [p["updates"] for p in points] == [4, 6, 6]
    assert [p["epoch"] for p in points] == [0, 0, 0]
    names = {"loss", "learning_rate", "gradient_norm", "loss_scale"}
    names |= {"skipped_updates", "samples_per_second"}
    assert all(names <= set(p) for p in (points[0], points[2]))
    assert points[1]["val_loss"] == history.history["val_loss"][0]


def test_line_is_on_disk_when_the_next_update_is_done(trainer, tmp_path):
    path, lines = tmp_path / "run.jsonl", []

    class Count(keras.callbacks.Callback):
        is_logger = True  # is called after the log

        def on_train_batch_end(self, batch, logs=None):
            lines.append(len(read(path)))

    callbacks = [RunLog(path, every=Every(1, "micro_batches")), Count()]
    fit(callbacks, trainer)
    assert lines == [0, 1, 2, 3, 4, 5]
    assert len(read(path)) == 6


def test_numbers_that_are_not_finite_are_null(trainer, tmp_path):
    path = tmp_path / "run.jsonl"
    run_log = RunLog(path, every=Every(1, "epochs"))
    fit(run_log, trainer, y=np.full_like(Y, np.nan))
    (point,) = read(path)
    assert point["loss"] is None and point["gradient_norm"] is None


def test_what_other_callbacks_write_is_written_as_well_as_can_be(
    trainer, tmp_path
):
    class Writer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs["per_class"] = np.asarray([0.5, np.inf])
            logs["phase"] = "warm-up"
            logs["shape"] = (2, None)
            logs["where"] = {"folder": tmp_path}

    path = tmp_path / "run.jsonl"
    fit([RunLog(path, every=Every(1, "epochs")), Writer()], trainer)
    (point,) = read(path)
    assert point["per_class"] == [0.5, None]
    assert point["phase"] == "warm-up"
    assert point["shape"] == [2, None]
    assert point["where"] == {"folder": str(tmp_path)}


def test_second_fit_appends(tmp_path):
    path = tmp_path / "run.jsonl"
    run_log, trainer = RunLog(path), make_trainer()
    fit(run_log, trainer)
    fit(run_log, trainer)
    assert [p["updates"] for p in read(path)] == [6, 10, 12]


@pytest.mark.parametrize(
    ("torn", "expected"),
    [
        (b'{"updates": 5, "lo', [4]),
        (b'{"updates": 5}', [4, 5]),
        (b"\xff\xfe", [4]),
        (b"7", [4]),
        (b"", [4]),
    ],
)
def test_line_that_a_crash_cut_off_is_removed(torn, expected, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"updates": 4}\n' + torn)
    run_log = RunLog(path)
    run_log.open()
    run_log.write(9, {"loss": 0.5})
    run_log.close()
    assert [p["updates"] for p in read(path)] == [*expected, 9]


def test_resume_repeats_no_point_that_is_in_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    crashed = RunLog(path)
    crashed.open()
    state = json.loads(json.dumps(crashed.get_state()))
    for updates in (2, 4):
        crashed.write(
            updates, {"loss": 0.5, "samples_per_second": 2, "epoch": 0}
        )
        if updates == 2:
            crashed.write(updates, {"val_loss": 1.0, "epoch": 0})
    crashed.close()
    resumed = RunLog(path)
    resumed.open()
    resumed.set_state(state)
    for updates in (2, 4, 6):
        resumed.write(
            updates, {"loss": 0.5, "samples_per_second": 1, "epoch": 0}
        )
        resumed.write(updates, {"val_loss": 1.0, "epoch": 0})
    resumed.close()
    # The validation after update 4 had not been written before the crash.
    assert [(p["updates"], p.get("loss")) for p in read(path)] == [
        (2, 0.5),
        (2, None),
        (4, 0.5),
        (4, None),
        (6, 0.5),
        (6, None),
    ]


@pytest.mark.parametrize("name", ["loss", "learning_rate", "f1"])
def test_resume_with_other_settings_writes_what_it_does(name, tmp_path):
    path = tmp_path / "run.jsonl"
    run_log = RunLog(path)
    for values, state in (([1, 2, 3], {}), ([1, 4], {"begin_bytes": 0})):
        run_log.open()
        if state:
            run_log.set_state(run_log.get_state() | state)
        for updates, value in enumerate(values):
            point = {"loss": 1.0, "val_mae": 1.0, name: float(value)}
            run_log.write(updates, point)
        run_log.close()
    assert [(p["updates"], p[name]) for p in read(path)] == [
        (0, 1.0),
        (1, 2.0),
        (2, 3.0),
        (1, 4.0),
    ]


@pytest.mark.parametrize("before_the_crash", [[], [2], [2, 4]])
def test_resume_writes_what_is_in_the_file_of_another_run(
    before_the_crash, tmp_path
):
    path = tmp_path / "run.jsonl"
    run_log = RunLog(path)

    def write(points, state=None):
        run_log.open()
        if state is not None:
            run_log.set_state(state)
        begun = run_log.get_state()
        for updates in points:
            run_log.write(updates, {"loss": 0.5})
        run_log.close()
        return begun

    write([2, 4, 6, 8])
    state = write(before_the_crash)
    write([2, 4, 6, 8], state)
    assert [p["updates"] for p in read(path)] == 2 * [2, 4, 6, 8]


def test_second_resume_repeats_no_point_of_before_the_first(tmp_path):
    path = tmp_path / "run.jsonl"
    run_log = RunLog(path)
    run_log.open()
    state = run_log.get_state()
    for updates in (2, 4, 6):
        run_log.write(updates, {"loss": 0.5})
    run_log.close()
    for points in ([2], [4, 6, 8]):
        run_log.open()
        run_log.set_state(state)
        for updates in points:
            run_log.write(updates, {"loss": 0.5})
        state = run_log.get_state()
        run_log.close()
    assert [p["updates"] for p in read(path)] == [2, 4, 6, 8]


def test_file_that_is_no_log_is_only_appended_to(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n[1]\n")
    run_log = RunLog(path)
    run_log.open()
    run_log.set_state(run_log.get_state())
    run_log.write(1, {"loss": 0.5})
    run_log.close()
    assert path.read_text() == 'my notes\n[1]\n{"updates": 1, "loss": 0.5}\n'


@pytest.mark.parametrize("name", [".", "file/run.jsonl"])
def test_path_that_cannot_be_written_is_refused(name, tmp_path, trainer):
    (tmp_path / "file").write_text("")
    before = trainer.progress.updates
    with pytest.raises(ValueError, match="path must name a file.*Received"):
        fit(RunLog(tmp_path / name), trainer)
    assert trainer.progress.updates == before


@FULL
def test_full_disk_is_one_warning_and_training_goes_on(trainer):
    before = trainer.progress.updates
    run_log = RunLog("/dev/full", every=Every(1, "updates"))
    with pytest.warns(RuntimeWarning, match="/dev/full could not") as caught:
        fit(run_log, trainer)
    assert len(caught) == 1
    assert trainer.progress.updates == before + 6


def test_line_that_fitted_only_half_leaves_no_trace(tmp_path):
    path = tmp_path / "run.jsonl"
    run_log = RunLog(path)
    run_log.open()
    run_log.write(1, {"loss": 0.5})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_log.write(2, {"loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [str(w.message).count("File too large") for w in caught] == [1]
    run_log.write(3, {"loss": 0.5})
    run_log.close()
    assert [p["updates"] for p in read(path)] == [1, 3]
