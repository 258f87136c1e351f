"""Claims about where loader batches come from."""

import types

import numpy as np
import pytest
from sourced import Rows, Unmeasured, epoch_of

from accumtrainer import errors
from accumtrainer.data.batches import Batch
from accumtrainer.data.position import Position
from accumtrainer.data.processes import ShardSource
from accumtrainer.data.sources import (
    ArraySource,
    IterableSource,
    make_source,
    recognize,
)
from accumtrainer.keras_api import BACKEND, ops


def test_order_depends_on_seed_and_epoch_alone():
    x = np.arange(50)
    one, two = (make_source(x, batch_size=8, seed=4) for _ in range(2))
    first, second = epoch_of(one, 0), epoch_of(one, 1)
    assert epoch_of(two, 1) == second
    assert epoch_of(two, 0) == first
    assert first != second
    assert epoch_of(make_source(x, batch_size=8, seed=5), 0) != first


def test_arrays_keep_a_short_last_batch():
    source = make_source(np.arange(10), batch_size=4, shuffle=False)
    assert epoch_of(source, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (source.batches_per_epoch, source.samples_per_epoch) == (3, 10)


@pytest.mark.parametrize("shuffle", [True, False])
def test_windows_of_arrays_have_memory_of_their_own(shuffle):
    x = np.zeros([8, 3], "float32")
    source = make_source(x, batch_size=2, shuffle=shuffle)
    window = source.window(list(source.iterate(0)), None)
    assert window.stacked.x.shape == (4, 2, 3)
    assert not np.shares_memory(window.stacked.x, x)


@pytest.mark.parametrize("steps", [None, 2])
def test_windows_of_loaders_have_memory_of_their_own(steps):
    x = np.zeros([8, 3], "float32")
    source = make_source([(x,), (x,)])
    items = list(source.iterate(0))[: steps or 1]
    window = source.window(items, None if steps else 4)
    assert not np.shares_memory(window.stacked.x, x)


def test_shuffled_windows_stay_aligned_across_leaves():
    x = {"a": np.arange(12), "b": -np.arange(12)}
    source = make_source(x, np.arange(12) * 10, batch_size=3)
    batch = source.window(list(source.iterate(0)), None).stacked
    assert batch.x["a"].shape == (4, 3)
    np.testing.assert_array_equal(batch.x["a"], -batch.x["b"])
    np.testing.assert_array_equal(batch.x["a"] * 10, batch.y)


def test_array_epochs_of_some_steps_go_on_where_they_stopped():
    source = make_source(np.arange(5), batch_size=1, shuffle=False, steps=3)
    with pytest.warns(UserWarning, match="had 2 loader batches where 3 steps"):
        rows = [epoch_of(source, epoch) for epoch in range(3)]
    assert rows == [[[0], [1], [2]], [[3], [4]], [[0], [1], [2]]]
    assert source.batches_per_epoch == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: make_source(np.arange(10), batch_size=2, **o),
        lambda **o: make_source(Rows(5), **o),
        lambda **o: make_source([(np.array([i, i]),) for i in range(5)], **o),
        lambda **o: make_source(Unmeasured(5), **o),
    ],
    ids=["arrays", "pydataset", "list", "iterable"],
)
def test_epochs_of_more_steps_than_there_are_end_with_the_data(make):
    source = make(steps=8, shuffle=False)
    whole = epoch_of(make(shuffle=False), 0)
    for epoch in range(3):
        with pytest.warns(UserWarning, match="5 loader batches where 8 steps"):
            assert epoch_of(source, epoch) == whole
    assert source.batches_per_epoch in (5, 8)


def test_exactly_as_many_steps_as_there_are_warn_of_nothing():
    for x in ([(np.array([i]),) for i in range(4)], Unmeasured(4), Rows(4)):
        source = make_source(x, steps=2)
        rows = [epoch_of(source, epoch) for epoch in range(4)]
        assert [len(epoch) for epoch in rows] == [2, 2, 2, 2]
        assert sorted(rows[0] + rows[1]) == sorted(rows[2] + rows[3])


def test_array_epochs_of_some_steps_need_no_history():
    def make():
        return make_source(np.arange(7), batch_size=2, steps=2, seed=1)

    source = make()
    rows = [epoch_of(source, epoch) for epoch in range(4)]
    assert epoch_of(make(), 3) == rows[3]


def test_orders_of_the_epochs_before_do_not_come_again():
    def orders(*epochs, **options):
        source = make_source(np.arange(8), batch_size=2, **options)
        return [epoch_of(source, epoch) for epoch in epochs]

    assert orders(0, 1, epochs_before=2) == orders(2, 3)
    by_steps = {"steps": 2}  # Two epochs are a pass.
    assert orders(0, epochs_before=2, **by_steps) == orders(2, **by_steps)
    (begun,) = orders(0, epochs_before=1, **by_steps)
    assert begun == orders(1)[0][:2]


def test_the_first_epoch_begins_with_the_first_batch():
    source = make_source(
        np.arange(10), batch_size=2, steps=2, shuffle=False, first_epoch=1
    )
    rows = [epoch_of(source, epoch) for epoch in (1, 2)]
    assert np.ravel(rows).tolist() == list(range(8))


def test_steps_without_batch_size_divide_the_data():
    source = make_source(np.arange(10), steps=4)
    assert (source.batch_size, source.batches_per_epoch) == (3, 4)


def test_default_batch_size_is_that_of_keras():
    assert make_source(np.arange(100)).batch_size == 32


def test_one_sample_weight_serves_every_output():
    weight = np.arange(4.0)
    y = {"a": np.zeros(4), "b": np.zeros([4, 2])}
    source = make_source(np.zeros(4), y, weight, shuffle=False)
    batch = source.window(list(source.iterate(0)), None).split()[0]
    np.testing.assert_array_equal(batch.sample_weight["a"], weight)
    np.testing.assert_array_equal(batch.sample_weight["b"], weight)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"x": np.zeros(4), "y": np.zeros(3)},
            ValueError,
            "x: 4, y: 3 samples",
        ),
        ({"x": np.zeros([0, 2])}, ValueError, "x: 0 samples"),
        ({"x": np.zeros(4), "batch_size": 0}, ValueError, "batch_size=0"),
        ({"x": np.zeros(4), "batch_size": 2.5}, TypeError, "batch_size=2.5"),
        ({"x": np.zeros(4), "steps": 0}, ValueError, "steps_per_epoch=0"),
        ({"x": np.zeros(4), "shuffle": "rows"}, TypeError, "shuffle='rows'"),
        ({"x": np.zeros(4), "y": [1, 2, 3, 4]}, TypeError, "y must hold dense"),
        (
            {
                "x": np.zeros(4),
                "y": {"a": np.zeros(4)},
                "sample_weight": {"b": np.zeros(4)},
            },
            ValueError,
            "sample_weight must be nested as y is",
        ),
        (
            {
                "x": np.zeros(4),
                "y": {"a": np.zeros(4)},
                "sample_weight": np.zeros([4, 3]),
            },
            ValueError,
            r"shape \(4, 3\)",
        ),
        (
            {
                "x": np.zeros(4),
                "y": np.zeros(4),
                "sample_weight": np.zeros(4),
                "class_weight": {0: 1.0},
            },
            ValueError,
            "class_weight must not be combined",
        ),
    ],
)
def test_arrays_refuse_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        make_source(**arguments)


def test_class_weights_reach_array_windows():
    y = np.array([0, 1, 1, 0])
    source = make_source(
        np.zeros(4), y, class_weight={1: 7.0}, shuffle=False, batch_size=2
    )
    batch = source.window(list(source.iterate(0)), None).stacked
    np.testing.assert_array_equal(batch.sample_weight, [[1, 7], [7, 1]])


def test_class_weights_reach_loader_batches():
    y = np.array([0, 1])
    source = make_source([(np.zeros(2), y)], class_weight={1: 7.0})
    (batch,) = source.iterate(0)
    np.testing.assert_array_equal(batch.sample_weight, [1, 7])


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(4),
        ops.zeros([4]),
        [np.zeros(4), np.zeros([4, 2])],
        (np.zeros(4), np.zeros([4, 2])),
        {"a": np.zeros(4), "b": [np.zeros(4)]},
    ],
    ids=["array", "tensor", "list", "tuple", "dict"],
)
def test_nests_of_arrays_are_array_data(x):
    assert isinstance(make_source(x), ArraySource)


def test_pandas_objects_are_array_data():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    source = make_source(table, table["a"], shuffle=False)
    batch = source.window(list(source.iterate(0)), None).split()[0]
    assert (batch.x.shape, batch.y.shape) == ((2, 2), (2, 1))
    assert batch.x.dtype == "float32"


def test_columns_of_floats_and_bools_are_one_array():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1.5, 2.5], "b": [True, False], "c": [3, 4]})
    source = make_source(table, shuffle=False)
    batch = source.window(list(source.iterate(0)), None).split()[0]
    assert batch.x.dtype == "float32"
    assert batch.x.tolist() == [[1.5, 1.0, 3.0], [2.5, 0.0, 4.0]]


@pytest.mark.parametrize(
    "item", [(np.zeros(2),), (np.zeros(2), np.ones(2)), Batch(np.zeros(2))]
)
def test_lists_of_tuples_are_loader_batches(item):
    source = make_source([item, item])
    assert isinstance(source, IterableSource)
    assert (source.batches_per_epoch, source.is_one_shot) == (2, False)


def _generate():
    yield (np.zeros(2),)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1.0, 2.0], TypeError, r"Received: \[1.0, 2.0\]"),
        ([], ValueError, "list of length 0"),
        ({}, TypeError, "x must hold dense arrays"),
        ("data", TypeError, "Received: 'data'"),
        (3, TypeError, "Received: 3"),
        (None, TypeError, "Received: None"),
        (_generate, TypeError, "Call it first"),
    ],
)
def test_what_yields_no_batches_is_refused(x, error, message):
    with pytest.raises(error, match=message):
        make_source(x)


def test_shuffle_batch_keeps_the_samples_of_a_batch_together():
    source = make_source(np.arange(22), batch_size=8, shuffle="batch", seed=3)
    first, second = epoch_of(source, 0), epoch_of(source, 1)
    plain = epoch_of(make_source(np.arange(22), batch_size=8, shuffle=False), 0)
    assert first != second and first != plain
    assert [sorted(batch) for batch in first] == plain
    assert [sorted(batch) for batch in second] == plain
    assert epoch_of(source, 1) == second
    pydataset = make_source(Rows(9), shuffle="batch", seed=3)
    assert epoch_of(pydataset, 0) == epoch_of(make_source(Rows(9), seed=3), 0)


@pytest.mark.parametrize(
    "beside",
    [
        {"y": np.zeros(2)},
        {"sample_weight": np.zeros(2)},
    ],
)
@pytest.mark.parametrize("make", [_generate, lambda: Rows(2)])
def test_loaders_refuse_what_they_should_yield(make, beside):
    (name,) = beside
    with pytest.raises(ValueError, match=f"{name} must be left out"):
        make_source(make(), **beside)


def test_iterables_are_iterated_afresh_for_every_epoch():
    source = make_source([(np.arange(2),), (np.arange(3),)])
    assert epoch_of(source, 0) == epoch_of(source, 1) == [[0, 1], [0, 1, 2]]


def test_iterable_epochs_of_some_steps_go_on_and_begin_again():
    source = make_source([(np.array([i]),) for i in range(5)], steps=3)
    with pytest.warns(UserWarning, match="had 2 loader batches where 3 steps"):
        rows = [epoch_of(source, epoch) for epoch in range(3)]
    assert rows == [[[0], [1], [2]], [[3], [4]], [[0], [1], [2]]]


def test_iterable_that_is_begun_again_begins_with_its_first_batch():
    source = make_source([(np.array([i]),) for i in range(5)], steps=2)
    assert epoch_of(source, 0) == epoch_of(source, 0) == [[0], [1]]
    assert epoch_of(source, 1) == [[2], [3]]


def test_one_generator_serves_all_epochs():
    source = make_source(((np.array([i]),) for i in range(5)), steps=2)
    assert source.is_one_shot
    with pytest.warns(UserWarning, match="had 1 loader batches where 2 steps"):
        rows = [epoch_of(source, epoch) for epoch in range(3)]
    assert rows == [[[0], [1]], [[2], [3]], [[4]]]
    with pytest.raises(errors.DataError, match="none in epoch 3"):
        epoch_of(source, 3)


def test_generator_that_is_used_up_is_reported_with_its_epoch():
    source = make_source(_generate())
    assert source.batches_per_epoch is None
    assert len(epoch_of(source, 0)) == 1
    with pytest.raises(errors.DataError, match="none in epoch 1"):
        epoch_of(source, 1)


@pytest.mark.parametrize("steps", [None, 2])
def test_iterable_that_yields_nothing_is_reported(steps):
    class Nothing:
        def __iter__(self):
            return iter(())

    source = make_source(Nothing(), steps=steps)
    with pytest.raises(errors.DataError, match="none in epoch 0"):
        epoch_of(source, 0)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="needs tf.data")
def test_tf_data_is_read_batch_by_batch():
    import tensorflow as tf

    dataset = tf.data.Dataset.range(5).batch(2)
    source = make_source(dataset)
    assert source.batches_per_epoch == 3
    assert epoch_of(source, 0) == epoch_of(source, 1) == [[0, 1], [2, 3], [4]]
    endless = make_source(dataset.repeat(), steps=4)
    assert (endless.batches_per_epoch, endless.is_one_shot) == (4, False)
    assert make_source(dataset.repeat()).batches_per_epoch is None


@pytest.mark.skipif(BACKEND != "tensorflow", reason="needs ragged tensors")
def test_ragged_tensors_are_refused():
    import tensorflow as tf

    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    with pytest.raises(TypeError, match="RaggedTensor"):
        make_source(ragged)
    with pytest.raises(TypeError, match="RaggedTensor"):
        list(make_source([(ragged,)]).iterate(0))


def share_of(source, *, is_chief):
    """Make the source of one of two processes, the other doing the same."""
    engine = types.SimpleNamespace(
        processes=2,
        count=4,
        is_chief=is_chief,
        gather=lambda numbers: np.array([numbers, numbers]),
    )
    return ShardSource(source, engine)


def test_share_counts_the_samples_of_all_processes():
    share = share_of(make_source([(np.arange(6),)]), is_chief=True)
    window = share.window(list(share.iterate(0)), 8)
    assert window.sizes == (8, 4)
    assert [len(batch.x) for batch in window.split()] == [4, 2]
    assert window.recut(4).sizes == (4, 4, 4)
    assert [len(batch.x) for batch in window.recut(4).split()] == [2, 2, 2]


class Placed:
    """Yields numbers; knows its place, as Grain's iterators do."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        return (np.array([self.next - 1, 0]),)

    def get_state(self):
        return self.next

    def set_state(self, state):
        self.next = state


def test_share_goes_to_its_place_by_the_number_of_batches():
    share = share_of(make_source(Placed(), steps=3), is_chief=True)
    items = share.iterate(0)
    position = Position()
    for _ in range(2):
        position.take(next(items))
    state = share.get_state()
    assert state["processes"] == state["taken"] == 2
    assert "iterator" not in state  # whose place is that of one process
    position = Position.of_state(position.get_state())
    for is_chief in (True, False):
        again = share_of(make_source(Placed(), steps=3), is_chief=is_chief)
        with pytest.raises(errors.DataError, match="fast_forward"):
            again.go_to(position, state, fast_forward=False)
        again.go_to(position, state, fast_forward=True)
        assert next(again.iterate(0, 2)).x[0] == 2


def test_only_the_chief_knows_its_last_batch_again():
    position = Position(batches=1, last="that of the chief")
    state = share_of(make_source(Rows(3)), is_chief=True).get_state()
    share_of(make_source(Rows(3)), is_chief=False).go_to(
        position, state, fast_forward=False
    )
    with pytest.warns(UserWarning, match="is not the one"):
        share_of(make_source(Rows(3)), is_chief=True).go_to(
            position, state, fast_forward=False
        )


def test_validation_split_takes_the_last_samples():
    x, y = {"a": np.arange(10)}, np.arange(10) * 2
    train, validation = recognize(x, y).split(0.3)
    np.testing.assert_array_equal(train.batch.x["a"], np.arange(7))
    np.testing.assert_array_equal(validation.batch.y, [14, 16, 18])
    assert train.batch.sample_weight is None


@pytest.mark.parametrize(
    ("x", "fraction", "error", "message"),
    [
        (np.zeros(4), 0.0, ValueError, "between 0 and 1"),
        (np.zeros(4), 1.0, ValueError, "between 0 and 1"),
        (np.zeros(4), True, ValueError, "between 0 and 1"),
        (np.zeros(4), "0.5", ValueError, "between 0 and 1"),
        ([(np.zeros(4),)], 0.5, TypeError, "x of type list"),
        (np.zeros(1), 0.5, ValueError, "on both sides"),
        (iter([np.zeros(4)]), 0.5, TypeError, "validation_data instead"),
        (types.SimpleNamespace(), 0.5, TypeError, "x must hold dense arrays"),
    ],
)
def test_validation_split_refuses_what_it_cannot_split(
    x, fraction, error, message
):
    with pytest.raises(error, match=message):
        recognize(x).split(fraction)
