"""What every callback that is shipped keeps to.

A new class in `accumtrainer.callbacks` needs an entry in `SHIPPED` below: one
line that makes it, and a reason for what it costs, if it costs anything.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from copied import in_every_way
from faulty import Fail
from logged_points import make_mlflow_logger, make_trackio_logger
from quickest import JIT_COMPILE

from accumtrainer import Callback, Every, Logger, Trainer, callbacks
from accumtrainer.keras_api import keras
from accumtrainer.observers.callback import is_overridden
from accumtrainer.steps import Report

pytestmark = pytest.mark.any_backend

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")

# Whoever overrides one of these is asked to come at every micro-batch, or
# makes the host wait for the device at every update.
COSTLY_HOOKS = ("on_micro_batch", "on_accumulate", "on_apply")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Give a Trainer, and the checkpoint of how it begins."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input([3]), keras.layers.Dense(1, name="dense")]
    )
    trainer = Trainer(
        model,
        optimizer="sgd",
        loss="mse",
        accumulation=2,
        jit_compile=JIT_COMPILE,
    )
    path = tmp_path_factory.mktemp("begun") / "begun"
    trainer.save(path)
    return trainer, path


@pytest.fixture
def trainer(begun):
    """Give the Trainer as it begins, with what it has compiled before."""
    trainer, path = begun
    trainer.restore(path)
    return trainer


class TakesMedia(Logger):
    """Takes whatever callbacks show, and does nothing with it."""

    def write(self, updates, numbers):
        pass

    def write_media(self, updates, name, value):
        pass


def train(trainer, callback, *others, **options):
    """Train with a Trainer, six updates."""
    options = {"batch_size": 2, "verbose": 0} | options
    given = [callback, *others, TakesMedia(Every(100, "updates"))]
    trainer.fit(X, Y, validation_data=(X, Y), callbacks=given, **options)


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """How a shipped callback is made and what it may cost.

    Args:
        make: function from a folder, for what it writes, to the callback.
        looks_at_model: why its hooks need the model current, if they do.
        reads_always: why it reads numbers or counters at every update, if it
            does.
        is_for_fit: whether it belongs into `keras.Model.fit`; then what needs
            a Trainer is not asked of it.
    """

    make: Callable[[Path], keras.callbacks.Callback]
    looks_at_model: str = ""
    reads_always: str = ""
    is_for_fit: bool = False


def make_wandb_logger(folder):
    return callbacks.WandbLogger(
        mode="offline",
        dir=folder,
        settings={"silent": True, "console": "off"},
        close_secs=600,
    )


SHIPPED = {
    "Checkpoint": Shipped(
        make=lambda folder: callbacks.Checkpoint(folder / "run")
    ),
    "GradientAccumulation": Shipped(
        make=lambda folder: callbacks.GradientAccumulation(2), is_for_fit=True
    ),
    "GradientNoiseScale": Shipped(
        make=lambda folder: callbacks.GradientNoiseScale()
    ),
    "MLflowLogger": Shipped(make=make_mlflow_logger),
    "NaNLocator": Shipped(
        make=lambda folder: callbacks.NaNLocator(folder),
        reads_always="it asks before each update whether the last was skipped",
    ),
    "Predictions": Shipped(
        make=lambda folder: callbacks.Predictions(X[:4], Y[:4]),
    ),
    "Profile": Shipped(
        make=lambda folder: callbacks.Profile(
            folder, first_update=1, updates=2
        ),
        reads_always="it waits where its trace begins and where it ends",
    ),
    "RunLog": Shipped(make=lambda folder: callbacks.RunLog(folder / "a.jsonl")),
    "TensorBoardLogger": Shipped(
        make=lambda folder: callbacks.TensorBoardLogger(folder)
    ),
    "Throughput": Shipped(
        make=lambda folder: callbacks.Throughput(),
        reads_always="it waits for the device when the first update ends",
    ),
    "TrackioLogger": Shipped(make=make_trackio_logger),
    "TrainingPlot": Shipped(
        make=lambda folder: callbacks.TrainingPlot(folder / "a.png")
    ),
    "Unfreeze": Shipped(
        make=lambda folder: callbacks.Unfreeze(Every(1, "epochs"), ["dense"]),
    ),
    "WandbLogger": Shipped(make=make_wandb_logger),
}

NAMES = sorted(
    name
    for name in callbacks.__all__
    if isinstance(getattr(callbacks, name), type)
    and issubclass(getattr(callbacks, name), keras.callbacks.Callback)
)


def each(*, with_trainer=False):
    """Parametrize a test by the shipped callbacks."""
    return pytest.mark.parametrize(
        "name",
        [
            name
            for name in NAMES
            if name in SHIPPED
            and not (with_trainer and SHIPPED[name].is_for_fit)
        ],
    )


def files_in(folder):
    """Find the sizes of all files, but for what W&B tells of itself."""
    return {
        path: path.stat().st_size
        for path in folder.rglob("*")
        if not path.name.startswith("debug") and path.suffix != ".wandb"
    }


def test_every_shipped_callback_is_listed_here():
    assert set(NAMES) == set(SHIPPED), (
        "Every callback in accumtrainer.callbacks needs an entry in SHIPPED "
        "of this test, which says how it is made and what it costs."
    )


@each(with_trainer=True)
def test_callback_is_ours(name):
    assert issubclass(getattr(callbacks, name), Callback)


@each(with_trainer=True)
def test_callback_says_whether_it_has_state(name):
    """Say it in its own class, or be a Logger, which says it."""
    cls = getattr(callbacks, name)
    assert "has_state" in vars(cls) or issubclass(cls, Logger)
    if cls.has_state:
        assert cls.get_state is not Callback.get_state
        assert cls.set_state is not Callback.set_state


@each(with_trainer=True)
def test_callback_costs_nothing_that_it_does_not_need(name, tmp_path):
    entry, callback = SHIPPED[name], SHIPPED[name].make(tmp_path)
    costly = [hook for hook in COSTLY_HOOKS if is_overridden(callback, hook)]
    assert not costly or entry.reads_always
    assert not callback.looks_at_model or entry.looks_at_model


@each(with_trainer=True)
def test_device_is_not_read_between_the_points(
    name, trainer, tmp_path, monkeypatch
):
    entry = SHIPPED[name]
    read, counts, section = set(), [], Report.section

    def count(self, part):
        read.add(id(self))
        return section(self, part)

    class Count(keras.callbacks.Callback):
        looks_at_model = False
        is_logger = True

        def on_train_batch_end(self, batch, logs=None):
            counts.append(len(read))

    monkeypatch.setattr(Report, "section", count)
    train(trainer, entry.make(tmp_path), Count())
    assert counts == [0] * 6 or entry.reads_always


@each(with_trainer=True)
def test_callback_serves_a_second_training_and_can_be_closed_twice(
    name, trainer, tmp_path
):
    callback = SHIPPED[name].make(tmp_path)
    train(trainer, callback)
    before = files_in(tmp_path)
    train(trainer, callback)
    after = files_in(tmp_path)
    assert trainer.progress.updates == 12
    # What writes files writes again.
    assert not before or after != before
    callback.on_train_end({})
    assert files_in(tmp_path) == after


@in_every_way
@each(with_trainer=True)
def test_callback_that_has_trained_trains_on_beside_its_copy(
    name, copied, trainer, tmp_path
):
    callback = SHIPPED[name].make(tmp_path)
    train(trainer, callback)
    train(trainer, copied(callback))
    train(trainer, callback)
    assert trainer.progress.updates == 18


@each(with_trainer=True)
def test_state_goes_through_json_into_another_training(name, trainer, tmp_path):
    callback = SHIPPED[name].make(tmp_path)
    if not callback.has_state:
        return
    states = []

    class Save(Callback):
        is_logger = True

        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                states.append(json.dumps(callback.get_state()))

    class Restore(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            resumed.set_state(json.loads(states[0]))
            states.append(json.dumps(resumed.get_state()))

    train(trainer, callback, Save())
    resumed = SHIPPED[name].make(tmp_path)
    train(trainer, resumed, Restore())
    assert json.loads(states[0]) == json.loads(states[1])


@each(with_trainer=True)
@pytest.mark.parametrize("error", [RuntimeError("fire"), KeyboardInterrupt()])
def test_callback_is_closed_on_errors(name, error, trainer, tmp_path):
    callback = SHIPPED[name].make(tmp_path)
    with pytest.raises(type(error)):
        train(trainer, callback, Fail(error, update=3))
    after = files_in(tmp_path)
    # All that was to be written has been, and nothing is left open.
    callback.on_train_end({})
    assert files_in(tmp_path) == after
    train(trainer, callback)


@each(with_trainer=True)
def test_callback_in_a_fit_without_a_trainer_is_refused(
    name, trainer, tmp_path
):
    callback = SHIPPED[name].make(tmp_path)
    model = keras.models.clone_model(trainer.model)
    model.compile("sgd", "mse")
    # Having served one before does not help.
    for _ in range(2):
        with pytest.raises(TypeError, match=f"{name} must be given to a Train"):
            model.fit(
                X,
                Y,
                verbose=0,
                callbacks=[callbacks.GradientAccumulation(2), callback],
            )
        assert int(model.optimizer.iterations) == 0
        train(trainer, callback)


@each(with_trainer=True)
def test_nothing_is_written_in_a_trial(name, trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(trainer, SHIPPED[name].make(tmp_path), fast_dev_run=True)
    assert files_in(tmp_path) == {}
