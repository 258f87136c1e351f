"""Iterators that take their time to close: nobody waits for them."""

import threading

import numpy as np
import pytest

from accumtrainer import Trainer
from accumtrainer.data.closing import THREAD_NAME, begin
from accumtrainer.keras_api import keras


class Closing:
    """Yields a few batches; an iterator waits for leave before it closes.

    Attributes:
        may_close: event that is waited for.
        closed_in: the threads in which iterators were closed.
    """

    def __init__(self):
        self.may_close = threading.Event()
        self.closed_in = []

    def __iter__(self):
        return ClosesSlowly(self)


class ClosesSlowly:
    def __init__(self, owner):
        self._owner = owner
        self._left = 3

    def __iter__(self):
        return self

    def __next__(self):
        if not self._left:
            raise StopIteration
        self._left -= 1
        return np.ones([2, 4], "float32"), np.ones([2, 1], "float32")

    def __del__(self):
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            self._owner.may_close.wait()
        self._owner.closed_in.append(thread)


@pytest.fixture
def data(monkeypatch):
    monkeypatch.setattr(ClosesSlowly, "__module__", "tensorflow.data")
    made = Closing()
    yield made
    close_all(made)


def close_all(data):
    data.may_close.set()
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join()


def make_trainer():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    return Trainer(model, optimizer="sgd", loss="mse", seed=0)


def test_training_does_not_wait_for_iterators_of_tf_data_to_close(data):
    trainer = make_trainer()
    trainer.fit(data, epochs=3, validation_data=data, verbose=0)
    trainer.evaluate(data, verbose=0)
    assert trainer.predict(data, verbose=0).shape == (6, 1)
    assert trainer.progress.updates == 9
    assert not data.closed_in  # as none may yet
    close_all(data)
    assert len(data.closed_in) > 5
    assert threading.main_thread() not in data.closed_in


def test_iterator_closes_at_once_where_no_thread_can_start(data, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    iterator = begin(data)
    assert len(list(iterator)) == 3
    monkeypatch.setattr(threading.Thread, "start", refuse)
    del iterator
    assert data.closed_in == [threading.main_thread()]


def test_other_iterators_are_handed_on_as_they_are():
    iterator = iter([1, 2])
    assert begin(iterator) is iterator
