"""Claims about TrainingPlot: the picture, when it is drawn, what it keeps."""

import json
import sys

import matplotlib.image
import numpy as np
import pytest

from accumtrainer import Every, LossScale, Trainer
from accumtrainer.callbacks import TrainingPlot
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")


def make_trainer(**options):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    options = {"optimizer": "sgd", "loss": "mse", "accumulation": 4} | options
    return Trainer(model, seed=0, **options)


def fit(plot, trainer=None, y=Y, **options):
    """Train, three updates an epoch."""
    trainer = trainer or make_trainer()
    options = {"epochs": 2, "batch_size": 2, "verbose": 0} | options
    trainer.fit(X, y, callbacks=plot, **options)
    return trainer


def words(path):
    """Read what is written in a picture: SVG keeps it beside the shapes."""
    return path.read_text()


def test_picture_is_there_and_alone_when_training_has_ended(tmp_path):
    fit(TrainingPlot(tmp_path / "deep" / "run.png"))
    (path,) = (tmp_path / "deep").iterdir()
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 500 and image.std() > 0


def test_picture_shows_every_number_there_is(tmp_path):
    path = tmp_path / "run.svg"
    optimizer = keras.optimizers.SGD(0.01, clipnorm=0.1)
    trainer = make_trainer(optimizer=optimizer)
    fit(TrainingPlot(path), trainer, validation_data=(X, Y))
    picture = words(path)
    for expected in (
        "val_loss, lowest",
        "learning rate",
        "gradient norm",
        "after clipping",
        "6 updates",
        "none skipped",
    ):
        assert expected in picture
    assert "loss scale" not in picture
    assert "skipped updates" not in picture


def test_picture_shows_loss_scale_and_skipped_updates(tmp_path):
    path = tmp_path / "run.svg"
    keras.config.set_dtype_policy("mixed_float16")
    trainer = make_trainer(loss_scale=LossScale(initial=2.0**24))
    plot = TrainingPlot(path, every=Every(1, "updates"))
    fit(plot, trainer, epochs=8)
    skipped = trainer.progress.skipped_updates
    assert skipped
    picture = words(path)
    assert f"{skipped} skipped" in picture
    assert "loss scale" in picture and "skipped updates" in picture


def test_picture_of_a_run_without_a_finite_update_says_so(tmp_path):
    path = tmp_path / "run.svg"
    fit(TrainingPlot(path), y=Y * np.nan, epochs=1)
    assert "no finite loss yet" in words(path)
    assert "3 skipped" in words(path)


def test_picture_waits_for_a_number_that_is_finite(tmp_path):
    path = tmp_path / "run.svg"
    # The first point is that of the validation, and is to be drawn at once.
    plot = TrainingPlot(path, every=Every(1, "epochs"), redraw_secs=0.0)
    fit(plot, validation_data=(X, Y * np.nan), epochs=1)
    assert "3 updates" in words(path)


def test_picture_of_one_update_is_drawn(tmp_path):
    path = tmp_path / "run.svg"
    fit(TrainingPlot(path), max_updates=1)
    assert "1 update " in words(path)


def test_several_validation_sets_have_a_curve_each(tmp_path):
    path = tmp_path / "run.svg"
    sets = {"near": (X, Y), "far": (X, Y + 1)}
    fit(TrainingPlot(path), validation_data=sets)
    assert "val_near_loss, lowest" in words(path)
    assert "val_far_loss, lowest" in words(path)


def test_metric_of_several_values_has_no_curve(tmp_path):
    class TaskLoss(keras.metrics.Mean):
        def result(self):
            return keras.ops.stack([super().result()] * 2)

        def update_state(self, y_true, y_pred, sample_weight=None):
            return super().update_state(y_pred)

    path = tmp_path / "run.svg"
    trainer = make_trainer(metrics=[TaskLoss("task_loss")])
    fit(TrainingPlot(path), trainer, validation_data=(X, Y))
    assert "val_loss, lowest" in words(path)
    assert "task_loss" not in words(path)


def test_picture_is_drawn_every_so_often_while_training(tmp_path):
    path = tmp_path / "run.png"
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(path.exists())

    moments = iter(range(0, 1000, 10))
    plot = TrainingPlot(
        path,
        every=Every(1, "updates"),
        redraw_secs=20.0,
        clock=moments.__next__,
    )
    fit([plot, Look()])
    assert seen == [False, False, False, True, True, True]


def test_drawing_takes_a_small_part_of_the_time(tmp_path):
    drawings = []

    class Slow(TrainingPlot):
        def _draw(self):
            drawings.append(now[0])
            super()._draw()

    now = [0.0]

    def clock():
        now[0] += 1.0  # Between the two looks at the clock lies a drawing.
        return now[0]

    plot = Slow(
        tmp_path / "run.png",
        every=Every(1, "updates"),
        redraw_secs=2.0,
        clock=clock,
    )
    fit(plot, epochs=20)
    assert len(drawings) == 3  # the first, after 50 seconds, the last
    assert drawings[1] - drawings[0] > 50


def test_curve_goes_on_after_a_resume(tmp_path):
    def make_plot(name):
        return TrainingPlot(tmp_path / name, every=Every(1, "updates"))

    whole, first, second = map(make_plot, ("a.svg", "b.svg", "c.svg"))
    trainer = fit([whole, first], epochs=1)
    state = json.loads(json.dumps(first.get_state(), allow_nan=False))

    class Resume(keras.callbacks.Callback):
        is_logger = True  # It is called after the plots.

        def on_train_begin(self, logs=None):
            second.set_state(state)

    fit([whole, second, Resume()], trainer, epochs=1)
    assert second.get_state()["curves"] == whole.get_state()["curves"]
    (points,) = (
        curve["points"]
        for name, curve in second.get_state()["curves"].items()
        if name == "loss"
    )
    assert [point[0] for point in points] == [1, 2, 3, 4, 5, 6]


def test_plot_of_another_trainer_begins_anew(tmp_path):
    plot = TrainingPlot(tmp_path / "run.svg", every=Every(1, "updates"))
    fit(plot)
    fit(plot, epochs=1)
    assert "3 updates" in words(plot.path)


def test_long_curve_is_thinned_and_keeps_its_spikes(tmp_path):
    plot = TrainingPlot(tmp_path / "run.png")
    rng = np.random.default_rng(0)
    norms = rng.normal(10, 1, size=20_000)
    norms[12_345] = 1000.0
    for update, norm in enumerate(norms, start=1):
        plot.write(update, {"gradient_norm": norm})
    curve = plot.get_state()["curves"]["gradient_norm"]
    points = np.array(curve["points"])
    assert len(points) <= 500
    assert points[:, 4].sum() == 20_000
    assert points[:, 2].max() == 1000.0
    np.testing.assert_allclose(points[:, 3].sum(), norms.sum())
    assert np.all(np.diff(points[:, 0]) > 0) and points[-1, 0] == 20_000


def test_disk_that_fails_is_one_warning_and_training_goes_on(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    plot = TrainingPlot(
        tmp_path / "file" / "run.png",
        every=Every(1, "updates"),
        redraw_secs=0.0,
    )
    with pytest.warns(RuntimeWarning, match="could not write") as warned:
        trainer = fit(plot)
    assert len(warned) == 1
    assert trainer.progress.updates == 6


def test_broken_drawing_leaves_the_last_picture_and_nothing_else(tmp_path):
    path = tmp_path / "run.png"
    trainer = fit(TrainingPlot(path))
    before = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:

        def fail(self, target, **options):
            target.write_bytes(b"half a pic")
            raise OSError("disk full")

        patch.setattr("matplotlib.figure.Figure.savefig", fail)
        with pytest.warns(RuntimeWarning, match="disk full"):
            fit(TrainingPlot(path), trainer)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_picture_is_drawn_when_training_fails(tmp_path):
    path = tmp_path / "run.svg"

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("power failure")

    with pytest.raises(RuntimeError, match="power failure"):
        fit([Fail(), TrainingPlot(path)])
    assert "3 updates" in words(path)


def test_trial_writes_nothing(tmp_path):
    fit(TrainingPlot(tmp_path / "run.png"), fast_dev_run=True)
    assert not list(tmp_path.iterdir())


def test_pyplot_is_left_alone(tmp_path):
    before = "matplotlib.pyplot" in sys.modules
    fit(TrainingPlot(tmp_path / "run.png"))
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_suffix_that_cannot_be_written_is_refused_before_training(tmp_path):
    trainer = make_trainer()
    with pytest.raises(ValueError, match="path must end in one of"):
        fit(TrainingPlot(tmp_path / "run.doc"), trainer)
    assert trainer.progress.updates == 0


def test_missing_matplotlib_is_an_error_naming_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"accumtrainer\[plot\]"):
        fit(TrainingPlot(tmp_path / "run.png"))
