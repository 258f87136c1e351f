"""Claims about what goes wrong around training: it is said, nothing is lost."""

import itertools
import os
import threading
import warnings

import numpy as np
import pytest
from faulty import (
    KeepsWeights,
    X,
    Y,
    assert_same,
    batches,
    make_trainer,
    values_of,
)
from quickest import RUN_EAGERLY

from accumtrainer import (
    Accumulation,
    CheckpointDirectory,
    Every,
    NonFiniteError,
    Trainer,
)
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")


def test_a_ragged_last_batch_weighs_what_it_holds():
    trained = []
    for size in (5, 12):
        keras.utils.set_random_seed(1)
        trainer = make_trainer(accumulation=Accumulation(steps=3))
        trainer.fit(X, Y, batch_size=size, shuffle=False, verbose=0)
        assert trainer.progress.updates == 1
        trained.append(values_of(trainer))
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    "accumulation, batch_size",
    [(Accumulation(micro_batch_size=5), 12), (Accumulation(steps=3), 5)],
)
def test_error_that_only_a_smaller_micro_batch_provokes_says_so(
    accumulation, batch_size
):
    def fails_on_two(y, outputs):
        if outputs.shape[0] == 2:
            raise ValueError("on purpose")
        return ops.mean((y - outputs) ** 2)

    trainer = make_trainer(
        accumulation=accumulation, loss=fails_on_two, denominator="samples"
    )
    with pytest.raises(ValueError, match="on purpose") as error:
        trainer.fit(X, Y, batch_size=batch_size, verbose=0)
    note = error.value.__notes__[-1]
    assert "provoked this: 2;" in note and "did not: 5." in note


@pytest.mark.parametrize("tail", ["flush", "carry"])
def test_an_epoch_shorter_than_a_window_loses_nothing(tail):
    trainer = make_trainer(accumulation=Accumulation(steps=5, tail=tail))
    trainer.fit(X, Y, batch_size=4, epochs=5, verbose=0)
    assert trainer.progress.samples == 60
    assert trainer.progress.updates == {"flush": 5, "carry": 3}[tail]


class Endless(keras.utils.PyDataset):
    """Yields the same few samples for ever."""

    def __init__(self):
        super().__init__()

    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        return X[:2], Y[:2]


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_data_that_are_known_never_to_end_are_refused(method):
    argument = "steps_per_epoch" if method == "fit" else "steps"
    with pytest.raises(ValueError, match=f"^{argument} must be given.*never"):
        getattr(make_trainer(), method)(Endless(), verbose=0)


def test_validation_data_that_never_end_are_refused():
    with pytest.raises(ValueError, match="^validation_steps must be given"):
        make_trainer().fit(X, Y, validation_data=Endless(), verbose=0)


def test_tf_data_that_never_end_are_refused():
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    trainer = make_trainer()
    with pytest.raises(ValueError, match="steps_per_epoch must be given"):
        trainer.fit(data.repeat(), verbose=0)
    trainer.fit(data.repeat(2), verbose=0)
    assert trainer.progress.updates == 6


@pytest.mark.parametrize(
    "end",
    [{"steps_per_epoch": 3}, {"max_updates": 3, "epochs": 1}],
    ids=["steps", "updates"],
)
@pytest.mark.parametrize("is_dataset", [True, False])
def test_data_without_an_end_are_taken_as_far_as_asked(end, is_dataset):
    data = Endless() if is_dataset else itertools.repeat((X[:2], Y[:2]))
    trainer = make_trainer()
    trainer.fit(data, verbose=0, **end)
    assert trainer.progress.updates == 3


class Shrinking:
    """Has fewer batches with every epoch."""

    def __init__(self, *counts):
        self.counts = iter(counts)

    def __iter__(self):
        return iter(batches(next(self.counts)))


def test_data_may_end_earlier_in_a_later_epoch():
    trainer = make_trainer(accumulation=2)
    history = trainer.fit(Shrinking(6, 3, 1), epochs=3, verbose=0)
    assert trainer.progress.updates == 3 + 2 + 1
    assert trainer.progress.samples == 2 * (6 + 3 + 1)
    assert len(history.history["loss"]) == 3


def test_data_that_have_nothing_left_in_a_later_epoch_end_the_training():
    trainer = make_trainer()
    with pytest.warns(UserWarning, match="nothing for epoch 1, counting"):
        history = trainer.fit(Shrinking(2, 0), epochs=2, verbose=0)
    assert trainer.progress.updates == 2
    assert len(history.history["loss"]) == 1


# Data that fail.


def failing():
    yield from batches(3)
    raise OSError("the disk of the data is gone")


def test_an_error_of_the_data_comes_through_after_the_updates_made():
    trainer = make_trainer(accumulation=2)
    keeps = KeepsWeights(trainer)
    with pytest.raises(OSError, match="is gone"):
        trainer.fit(failing(), verbose=0, callbacks=[keeps])
    assert trainer.progress.updates == 1
    assert_same(keeps.seen[-1], values_of(trainer))


class Dying(keras.utils.PyDataset):
    """Ends the thread that loads its fourth batch."""

    def __init__(self):
        super().__init__(workers=2, max_queue_size=2)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            raise SystemExit(3)
        return batches()[index]


def test_a_worker_thread_that_dies_ends_training_without_loss(tmp_path):
    before = threading.enumerate()
    trainer = make_trainer()
    checkpoint = Checkpoint(tmp_path, Every(1, "updates"), keep=10)
    with pytest.raises(SystemExit):
        trainer.fit(Dying(), shuffle=False, verbose=0, callbacks=[checkpoint])
    assert trainer.progress.updates == 3
    assert len(checkpoint.checkpoints.names()) == 3
    another = make_trainer()
    another.restore(tmp_path)
    assert_same(values_of(trainer), values_of(another))
    assert not [
        thread
        for thread in threading.enumerate()
        if "ThreadPoolExecutor" in thread.name and thread not in before
    ]


def test_a_storm_of_nans_stops_and_leaves_the_last_good_state(tmp_path):
    x = X.copy()
    x[6:] = np.nan
    trainer = make_trainer(max_consecutive_skips=2)
    checkpoint = Checkpoint(tmp_path, Every(1, "updates"), keep=10)
    keeps = KeepsWeights(trainer)
    with pytest.raises(NonFiniteError, match="after update 3"):
        trainer.fit(
            x,
            Y,
            batch_size=2,
            shuffle=False,
            verbose=0,
            callbacks=[checkpoint, keeps],
        )
    assert trainer.progress.updates == 3
    assert_same(keeps.seen[3], values_of(trainer))
    names = checkpoint.checkpoints.names()
    assert len(names) == 3
    another = make_trainer()
    another.restore(tmp_path)
    assert another.progress.updates == 3
    assert_same(keeps.seen[3], values_of(another))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_window_without_weight_moves_weights_as_keras_does(optimizer):
    def make(**options):
        keras.utils.set_random_seed(1)
        layer = keras.layers.Dense(1, kernel_regularizer="l2")
        model = keras.Sequential([keras.Input([2]), layer])
        model.compile(
            optimizer=getattr(keras.optimizers, optimizer)(
                0.1, weight_decay=0.01
            ),
            loss="mse",
            run_eagerly=RUN_EAGERLY,
        )
        return model

    nothing = np.zeros(12, "float32")
    theirs, ours = make(), make()
    theirs.fit(X, Y, sample_weight=nothing, batch_size=12, verbose=0)
    trainer = Trainer(ours, accumulation=3, run_eagerly=RUN_EAGERLY)
    trainer.fit(X, Y, sample_weight=nothing, batch_size=4, verbose=0)
    assert trainer.progress.updates == 1
    for one, other in zip(theirs.weights, ours.weights, strict=True):
        assert np.all(np.isfinite(ops.convert_to_numpy(one)))
        np.testing.assert_allclose(
            ops.convert_to_numpy(one), ops.convert_to_numpy(other), rtol=1e-6
        )


# Disks that fail.


@pytest.fixture
def fill_disk(monkeypatch):
    """Return a function after which no file of a checkpoint reaches a disk."""

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", refuse)


def test_a_full_disk_while_saving_leaves_what_was_there(tmp_path, fill_disk):
    trainer = make_trainer()
    trainer.fit(X, Y, verbose=0)
    trainer.save(tmp_path / "run")
    saved = values_of(trainer)
    trainer.fit(X, Y, verbose=0)
    fill_disk()
    with pytest.raises(OSError, match="No space left"):
        trainer.save(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    trainer.restore(tmp_path / "run")
    assert_same(saved, values_of(trainer))


def test_a_full_disk_is_told_of_and_the_older_checkpoint_stays(
    tmp_path, fill_disk
):
    trainer = make_trainer()
    checkpoint = Checkpoint(tmp_path)
    trainer.fit(X, Y, verbose=0, callbacks=[checkpoint])
    saved, names = values_of(trainer), checkpoint.checkpoints.names()
    fill_disk()
    with (
        warnings.catch_warnings(),
        pytest.raises(OSError, match="No space left"),
    ):
        warnings.simplefilter("ignore")
        trainer.fit(X, Y, epochs=2, verbose=0, callbacks=[checkpoint])
    assert CheckpointDirectory(tmp_path).names() == names
    another = make_trainer()
    another.restore(tmp_path)
    assert_same(saved, values_of(another))


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    # A directory below a file cannot be made, not even by root, who may
    # write to directories that are read-only.
    (tmp_path / "file").write_text("not a directory")
    trainer = make_trainer()
    with pytest.raises(OSError):
        trainer.save(tmp_path / "file" / "run")
    checkpoint = Checkpoint(tmp_path / "file" / "runs", Every(100, "updates"))
    with pytest.raises(OSError):
        trainer.fit(X, Y, verbose=0, callbacks=[checkpoint])
    assert (tmp_path / "file").read_text() == "not a directory"
