"""Claims about loader batches of a `PyDataset`."""

import threading

import numpy as np
import pytest
from sourced import Rows, epoch_of

from accumtrainer import Trainer, errors
from accumtrainer.data.position import Position
from accumtrainer.data.sources import (
    make_source,
)
from accumtrainer.keras_api import keras


class EndlessRows(keras.utils.PyDataset):
    """Batch `[index]` for every index there is."""

    num_batches = None

    def __getitem__(self, index):
        return (np.array([index]),)


class Batches(Rows):
    """Three batches to train on."""

    def __init__(self):
        super().__init__(3)

    def __getitem__(self, index):
        return np.ones([2, 3], "float32"), np.ones([2, 1], "float32")


def test_pydataset_is_shuffled_by_seed_and_epoch():
    source = make_source(Rows(10), seed=2)
    assert source.batches_per_epoch == 10
    first, second = epoch_of(source, 0), epoch_of(source, 1)
    assert (
        sorted(first)
        == sorted(second)
        == epoch_of(make_source(Rows(10), shuffle=False), 0)
    )
    assert first != second
    assert epoch_of(make_source(Rows(10), seed=2), 1) == second


@pytest.mark.parametrize("max_queue_size", [1, 3, 10])
def test_pydataset_workers_keep_the_order_and_the_limit(max_queue_size):
    plain = epoch_of(make_source(Rows(12)), 0)
    dataset = Rows(12, workers=4, max_queue_size=max_queue_size)
    assert epoch_of(make_source(dataset), 0) == plain
    assert dataset.most_loading <= min(4, max_queue_size)


def test_pydataset_workers_stop_when_the_epoch_is_left_early():
    before = threading.active_count()
    items = make_source(Rows(50, workers=3)).iterate(0)
    next(items)
    items.close()
    assert threading.active_count() == before


def test_pydataset_errors_reach_the_loop_from_threads():
    class Broken(Rows):
        def __getitem__(self, index):
            raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        list(make_source(Broken(3, workers=2)).iterate(0))


def test_pydataset_is_told_of_its_epochs():
    dataset = Rows(2)
    source = make_source(dataset)
    epoch_of(source, 0)
    epoch_of(source, 1)
    assert dataset.calls == ["begin", "end", "begin", "end"]


def test_pydataset_is_told_of_the_end_of_an_epoch_that_is_left_early():
    dataset = Rows(2)
    source = make_source(dataset)
    next(source.iterate(0))
    epoch_of(source, 0)
    assert dataset.calls == ["begin", "end"] * 2


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pydataset_is_told_of_epochs_whatever_a_window_takes(k):
    dataset = Batches()
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    Trainer(model, accumulation=k).fit(dataset, epochs=2, verbose=0)
    # As in Keras on JAX, one is begun before callbacks know of the training.
    assert dataset.calls == ["begin", "end"] * 3


def test_pydataset_is_told_of_as_many_epochs_where_a_run_goes_on():
    source = make_source(Rows(3))
    epoch_of(source, 5)
    next(source.iterate(6))
    state, dataset = source.get_state(), Rows(3)
    again = make_source(dataset)
    again.go_to(Position(epoch=6, batches=1), state, fast_forward=False)
    assert dataset.calls == ["begin", "end", "begin"]
    assert again.get_state() == state
    list(again.iterate(6, 1))
    assert dataset.calls == ["begin", "end", "begin", "end"]


@pytest.mark.parametrize("workers", [1, 2])
def test_endless_pydataset_goes_on_over_epochs(workers):
    source = make_source(EndlessRows(workers=workers), steps=3)
    assert epoch_of(source, 0) == [[0], [1], [2]]
    assert epoch_of(source, 1) == [[3], [4], [5]]


def test_pydataset_without_length_is_endless():
    class Unmeasured(keras.utils.PyDataset):
        def __getitem__(self, index):
            return (np.array([index]),)

    source = make_source(Unmeasured())
    assert source.batches_per_epoch is None
    items = source.iterate(0)
    assert [next(items).x[0] for _ in range(3)] == [0, 1, 2]


def test_pydataset_with_processes_is_refused():
    with pytest.raises(ValueError, match="Use workers=n"):
        make_source(Rows(2, workers=2, use_multiprocessing=True))


def test_empty_pydataset_is_refused():
    with pytest.raises(ValueError, match="length 0"):
        make_source(Rows(0))


def test_pydataset_that_empties_itself_is_reported_with_its_epoch():
    dataset = Rows(1)
    source = make_source(dataset)
    epoch_of(source, 0)
    dataset.length = 0
    with pytest.raises(errors.DataError, match="none in epoch 1"):
        epoch_of(source, 1)


# --- Shares of several processes. ---
