"""Claims about what breaks a run off: signals, failing data and disks."""

import os
import signal

import pytest
from resumable import (
    Batches,
    assert_same,
    fit_arrays,
    fit_dataset,
    make_trainer,
    plain,
)

from accumtrainer import (
    Every,
    Preempted,
)
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras


class At(keras.callbacks.Callback):
    """Do something after a number of updates."""

    def __init__(self, updates, action):
        super().__init__()
        self.updates, self.action, self.seen = updates, action, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.updates:
            self.action()


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted)],
)
def test_a_signal_saves_and_the_run_goes_on(number, error, tmp_path):
    whole = plain()
    history = fit_arrays(whole)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    stopped = plain()
    with pytest.raises(error) as raised:
        fit_arrays(
            stopped,
            callbacks=[
                At(4, lambda: signal.raise_signal(number)),
                Checkpoint(tmp_path, Every(100, "updates")),
            ],
        )
    if error is Preempted:
        assert raised.value.code == 143
    assert stopped.progress.updates == 4
    now = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert now == handlers
    pieces = plain()
    last = fit_arrays(
        pieces, callbacks=[Checkpoint(tmp_path)], resume_from="auto"
    )
    assert_same(pieces, whole)
    assert last.history == history.history


def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    def press_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    trainer = plain()
    checkpoint = Checkpoint(tmp_path, Every(100, "updates"))
    with pytest.raises(KeyboardInterrupt):
        fit_arrays(trainer, callbacks=[At(2, press_twice), checkpoint])
    assert checkpoint.checkpoints.names() == []


class Broken(Batches):
    """Raises in the middle of the second epoch."""

    taken = 0

    def __getitem__(self, index):
        self.taken += 1
        if self.taken == 9:
            raise OSError("the disk of the data is gone")
        return super().__getitem__(index)


def test_data_that_fail_lose_no_update(tmp_path):
    whole = plain()
    fit_dataset(whole)
    checkpoint = Checkpoint(tmp_path, Every(100, "updates"))
    broken = Broken()
    broken._workers = 1
    with pytest.raises(OSError, match="is gone"):
        plain().fit(broken, epochs=3, verbose=0, callbacks=[checkpoint])
    assert len(checkpoint.checkpoints.names()) == 1
    pieces = plain()
    fit_dataset(pieces, callbacks=[Checkpoint(tmp_path)], resume_from="auto")
    assert_same(pieces, whole)


def test_a_callback_that_raises_leaves_the_last_checkpoint(tmp_path):
    def fail():
        raise RuntimeError("out of ideas")

    checkpoint = Checkpoint(tmp_path, Every(2, "updates"))
    with pytest.raises(RuntimeError, match="out of ideas"):
        fit_arrays(plain(), callbacks=[checkpoint, At(3, fail)])
    assert checkpoint.checkpoints.newest().progress["updates"] == 2


def test_a_save_that_fails_is_told_and_tried_again(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path, Every(1, "updates"))
    write, attempts = checkpoint.checkpoints.write, []

    def fail_once(snapshot, score=None):
        attempts.append(snapshot)
        if len(attempts) == 2:
            raise OSError(28, "No space left on device")
        return write(snapshot, score)

    monkeypatch.setattr(checkpoint.checkpoints, "write", fail_once)
    with pytest.warns(UserWarning, match="No space left.*tries again"):
        fit_arrays(make_trainer(), callbacks=[checkpoint], max_updates=4)
    assert checkpoint.checkpoints.newest().progress["updates"] == 4


def test_a_last_save_that_fails_is_an_error(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path)

    def fail(snapshot, score=None):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checkpoint.checkpoints, "write", fail)
    trainer = make_trainer()
    with pytest.raises(OSError, match="Read-only"):
        fit_arrays(trainer, epochs=1, callbacks=[checkpoint])
    assert trainer.progress.updates == 3


def test_a_trial_saves_nothing(tmp_path):
    fit_arrays(
        make_trainer(), callbacks=[Checkpoint(tmp_path)], fast_dev_run=True
    )
    assert os.listdir(tmp_path) == []
