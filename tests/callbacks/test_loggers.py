"""What every logger that is shipped keeps to, in what it has written.

A new one needs an entry in `LOGGERS` below: how it is made, and how what it has
written is read back.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from faulty import Fail
from logged_points import (
    make_mlflow_logger,
    make_trackio_logger,
    read_mlflow,
    read_run_log,
    read_tensorboard,
    read_trackio,
    read_wandb,
)
from pointed import Points, X, Y, fit, make_trainer
from quickest import JIT_COMPILE

from accumtrainer import Every, Logger, Trainer, callbacks
from accumtrainer.keras_api import keras

pytestmark = pytest.mark.any_backend

TIMES = ("samples_per_second",)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a logger is made, and what it has written.

    Args:
        make: function from a folder and how often to the logger.
        read: function from the folder to a list of `Written`.
        continues: whether a folder shows a resumed run as one.
    """

    make: Callable
    read: Callable
    continues: bool = True


LOGGERS = {
    "MLflowLogger": Kind(
        make=make_mlflow_logger,
        read=read_mlflow,
        # A thread writes it, so that a copy is not of one moment; see its own
        # tests.
        continues=False,
    ),
    "RunLog": Kind(
        make=lambda folder, every: callbacks.RunLog(folder / "a.jsonl", every),
        read=read_run_log,
    ),
    "TensorBoardLogger": Kind(
        make=lambda folder, every: callbacks.TensorBoardLogger(folder, every),
        read=read_tensorboard,
    ),
    "TrackioLogger": Kind(
        make=make_trackio_logger,
        read=read_trackio,
        # It has one folder per process; see its own tests.
        continues=False,
    ),
    "WandbLogger": Kind(
        make=lambda folder, every: callbacks.WandbLogger(
            every=every,
            mode="offline",
            dir=folder,
            settings={"silent": True, "console": "off"},
            close_secs=600,
        ),
        read=read_wandb,
        # Without network it cannot know what W&B has; see its own tests.
        continues=False,
    ),
}


def each(*, that_continues=False):
    """Parametrize a test by the loggers."""
    kinds = {
        name: kind
        for name, kind in LOGGERS.items()
        if kind.continues or not that_continues
    }
    return pytest.mark.parametrize("kind", kinds.values(), ids=kinds.keys())


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Give a Trainer, and the checkpoint of how it begins."""
    trainer = make_trainer(jit_compile=JIT_COMPILE)
    path = tmp_path_factory.mktemp("begun") / "begun"
    trainer.save(path)
    return trainer, path


@pytest.fixture
def trainer(begun):
    """Give the Trainer as it begins, with what it has compiled before."""
    trainer, path = begun
    trainer.restore(path)
    return trainer


class KilledError(Exception):
    pass


class Killed(keras.callbacks.Callback):
    """Copies what is on disk in the ninth update, as a kill would leave it."""

    looks_at_model = False

    def __init__(self, folder, copy):
        super().__init__()
        self.folder, self.copy, self.updates = folder, copy, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.updates += 1
        if self.updates == 9:
            shutil.copytree(self.folder, self.copy)
            raise KilledError


def places(written):
    """List where numbers stand, without those that tell of time."""
    return sorted((w.name, w.updates) for w in written if w.name not in TIMES)


def values(written, name):
    return {w.updates: w.value for w in written if w.name == name}


def test_every_shipped_logger_is_listed_here():
    shipped = (getattr(callbacks, name) for name in callbacks.__all__)
    loggers = {
        cls.__name__
        for cls in shipped
        if isinstance(cls, type) and issubclass(cls, Logger)
    }
    assert loggers - {"TrainingPlot"} == set(LOGGERS)


@each()
def test_points_stand_at_their_updates(kind, trainer, tmp_path):
    every = Every(4, "updates")
    points = Points(every)
    fit(
        kind.make(tmp_path, every),
        points,
        trainer=trainer,
        epochs=2,
        validation_data=(X, Y),
    )
    written = kind.read(tmp_path)
    for name in ("loss", "gradient_norm", "learning_rate", "val_loss", "epoch"):
        expected = [(u, dict(p.items())) for u, p in points.points]
        expected = {u: p[name] for u, p in expected if name in p}
        assert values(written, name) == pytest.approx(expected, rel=1e-6), name
    assert values(written, "loss").keys() == {4, 8, 12}
    assert values(written, "val_loss").keys() == {6, 12}
    counts = places(w for w in written if w.name != "epoch")
    assert len(counts) == len(set(counts))


@each()
def test_last_point_is_always_written(kind, trainer, tmp_path):
    fit(kind.make(tmp_path, Every(100, "updates")), trainer=trainer)
    assert values(kind.read(tmp_path), "loss").keys() == {6}


@each()
@pytest.mark.parametrize("error", [RuntimeError("fire"), KeyboardInterrupt()])
def test_error_leaves_what_was_before_it(kind, error, trainer, tmp_path):
    logger = kind.make(tmp_path, Every(2, "updates"))
    with pytest.raises(type(error)):
        fit(logger, Fail(error, update=5), trainer=trainer)
    assert values(kind.read(tmp_path), "loss").keys() == {2, 4, 5}


@each()
def test_number_that_is_not_finite_is_told_and_spares_the_others(
    kind, trainer, tmp_path
):
    logger = kind.make(tmp_path, Every(3, "updates"))
    fit(logger, trainer=trainer, y=np.full_like(Y, np.nan))
    written = kind.read(tmp_path)
    for value in values(written, "loss").values():
        assert value is None or math.isnan(float(value))
    assert list(values(written, "skipped_updates").values())[-1] == 6


@each()
def test_what_is_no_number_ends_nothing(kind, trainer, tmp_path):
    class Writer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs["per_class"] = np.asarray([0.5, np.inf])
            logs["phase"] = "warm-up"
            logs["where"] = {"folder": tmp_path}
            logs["a name: with/signs%"] = 0.25

    logger = kind.make(tmp_path, Every(3, "updates"))
    fit(Writer(), logger, trainer=trainer)
    written = kind.read(tmp_path)
    assert values(written, "loss").keys() == {3, 6}
    odd = {w.value for w in written if w.name.startswith("a name")}
    assert odd == {0.25}


@each()
def test_process_that_is_not_the_chief_writes_nothing(
    kind, trainer, tmp_path, monkeypatch
):
    monkeypatch.setattr(Trainer, "is_chief", False)
    fit(kind.make(tmp_path, Every(1, "updates")), trainer=trainer)
    assert list(tmp_path.rglob("*")) == []


@each(that_continues=True)
@pytest.mark.parametrize("saved_at", [2, 4, 5, 6])
def test_run_resumed_after_a_kill_reads_as_if_it_had_never_stopped(
    kind, saved_at, begun, tmp_path
):
    trainer, beginning = begun

    def train(folder, *others, **options):
        logger = kind.make(tmp_path / folder, Every(3, "updates"))
        options = {"epochs": 2, "validation_data": (X, Y)} | options
        fit(logger, *others, trainer=trainer, **options)
        return kind.read(tmp_path / folder)

    def save():
        every = Every(saved_at, "updates")
        return callbacks.Checkpoint(tmp_path / "run", every=every)

    trainer.restore(beginning)
    whole = train("whole")
    trainer.restore(beginning)
    killed = Killed(tmp_path / "first", tmp_path / "second")
    with pytest.raises(KilledError):
        train("first", killed, save())
    trainer.restore(beginning)
    resumed = train("second", save(), resume_from="auto")
    assert places(resumed) == places(whole)
    for name in ("loss", "val_loss", "gradient_norm"):
        assert values(resumed, name) == pytest.approx(values(whole, name))
