"""Claims about what loggers do at a resume, at an end and on errors."""

import json

import numpy as np
import pytest
from pointed import Points, X, Y, fit, make_trainer, positions

from accumtrainer import Callback, Every, Logger, NonFiniteError
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]


def test_point_after_a_resume_reaches_back_to_before_it():
    states = []

    class Save(Callback):
        is_logger = True

        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                states.append(json.dumps(logger.get_state()))

    class Restore(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            resumed.set_state(json.loads(states[0]))

    logger = Points(Every(5, "updates"))
    fit(logger, Save(), shuffle=False)
    resumed = Points(Every(5, "updates"))
    # Three updates, then the other three in a training of their own.
    trainer = fit(x=X[:12], y=Y[:12], shuffle=False)
    fit(Restore(), resumed, trainer=trainer, x=X[12:], y=Y[12:], shuffle=False)
    assert positions(resumed.points) == positions(logger.points) == [5, 6]
    for (_, one), (_, other) in zip(logger.points, resumed.points, strict=True):
        for name in ("loss", "gradient_norm", "learning_rate"):
            assert one[name] == other[name]


class Distance(keras.callbacks.Callback):
    """Writes into the logs of an epoch alone."""

    def on_epoch_end(self, epoch, logs=None):
        logs["distance"] = 1.5


class Fail(keras.callbacks.Callback):
    """Raises when an epoch ends."""

    def on_epoch_end(self, epoch, logs=None):
        raise RuntimeError("power failure")


def fit_saved(folder, *callbacks, **options):
    """Train with checkpoints, one of them at the epoch's last update."""
    checkpoint = Checkpoint(folder, every=Every(3, "updates"))
    return fit(checkpoint, Distance(), *callbacks, **options)


def test_point_that_a_checkpoint_has_made_is_not_told_again(tmp_path):
    logger = Points(Every(3, "updates"))
    fit_saved(tmp_path, logger)
    assert positions(logger.training) == [3, 6]
    assert logger.points[-1] == (6, {"distance": 1.5, "epoch": 0})


@pytest.mark.parametrize(("every", "rest"), [(3, []), (4, [6])])
def test_resume_at_the_end_of_an_epoch_tells_nothing_again(
    every, rest, tmp_path
):
    crashed, resumed, late = (Points(Every(every, "updates")) for _ in "123")
    validation = {"validation_data": (X, Y)}
    validation |= {"validation_every": Every(3, "updates")}
    with pytest.raises(RuntimeError, match="power failure"):
        fit_saved(tmp_path, crashed, Fail(), **validation)
    fit_saved(tmp_path, resumed, late, resume_from="auto", **validation)
    assert resumed.points[0] == (6, {"distance": 1.5, "epoch": 0})
    assert positions(resumed.training) == rest
    assert resumed.validation == []
    assert late.points == []  # the checkpoint knows nothing of it


def test_state_can_be_asked_for_before_any_training():
    state = json.loads(json.dumps(Points().get_state()))
    Points().set_state(state)


def test_nothing_is_opened_or_written_in_a_trial():
    logger = Points(Every(1, "updates"))
    fit(logger, fast_dev_run=2, validation_data=(X, Y))
    assert logger.points == [] and logger.told == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_last_point_is_written_and_the_logger_closed_on_errors(error):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                raise error

    logger = Points()
    with pytest.raises(error):
        fit(logger, Fail())
    assert positions(logger.points) == [3]
    assert logger.told == ["open", "close"]
    logger.on_train_end()
    assert logger.told == ["open", "close"]


def test_last_point_tells_of_too_many_bad_windows():
    logger = Points()
    trainer = make_trainer(max_consecutive_skips=2)
    with pytest.raises(NonFiniteError):
        fit(logger, trainer=trainer, y=np.full_like(Y, np.nan))
    # The third such window ended the training before it was told of.
    assert logger.points[0][1]["skipped_updates"] == 2
    assert logger.told == ["open", "close"]


def test_logger_is_closed_where_writing_fails():
    class Full(Points):
        def write(self, updates, numbers):
            raise OSError("disk full")

    logger = Full(Every(100, "updates"))
    with pytest.raises(OSError, match="disk full"):
        fit(logger)
    assert logger.told == ["open", "close"]


def test_logger_of_an_evaluation_writes_nothing():
    logger = Points()
    trainer = fit()
    trainer.evaluate(X, Y, verbose=0, callbacks=[logger])
    assert logger.points == [] and logger.told == []


def test_every_must_be_an_every():
    with pytest.raises(TypeError, match="every must be an Every.*10"):
        Points(every=10)


def test_logger_that_writes_nothing_cannot_be_made():
    with pytest.raises(TypeError, match="write"):
        Logger()
