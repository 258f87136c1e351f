"""Claims about batches, and how loader batches become windows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumtrainer import Trainer, errors
from accumtrainer.data.batches import (
    ALIGNMENT,
    Batch,
    Window,
    count_samples,
    window_of_batches,
)
from accumtrainer.data.position import Position
from accumtrainer.data.reading import unpack, weigh_classes
from accumtrainer.data.source import groups
from accumtrainer.data.sources import make_source
from accumtrainer.keras_api import keras, ops, tree


def windows(source, position, *, micro_batch_size=None, **options):
    """Yield the windows that a fit makes of the rest of an epoch."""
    for items in groups(source, position, **options):
        yield source.window(items, micro_batch_size)


def all_windows(source, *, epochs=1, steps=1, tail="flush", size=None):
    """List the windows of every epoch, and what is left in the end."""
    position, made = Position(), []
    for _ in range(epochs):
        made.append(
            list(
                windows(
                    source,
                    position,
                    steps_at=lambda: steps,
                    micro_batch_size=size,
                    tail=tail,
                )
            )
        )
        position.begin_next_epoch()
    return made, position.carried


def rows_of(made):
    """List the rows of windows in the order training sees them."""
    return [
        int(row) for window in made for part in window.split() for row in part.x
    ]


@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    steps=st.integers(1, 6),
    shuffle=st.booleans(),
    is_array=st.booleans(),
)
def test_flush_shows_every_sample_once_per_epoch(
    samples, batch_size, steps, shuffle, is_array
):
    source = make_source(
        np.arange(samples), batch_size=batch_size, shuffle=shuffle
    )
    if not is_array:
        source = _same_batches_from_a_list(source)
    (made,), carried = all_windows(source, steps=steps)
    assert sorted(rows_of(made)) == list(range(samples))
    assert carried == []
    batches = -(-samples // batch_size)
    counts = [window.micro_batches for window in made]
    assert counts[:-1] == [steps] * (len(counts) - 1)
    assert sum(counts) == batches
    assert sum(window.samples for window in made) == samples
    if not shuffle:
        assert rows_of(made) == list(range(samples))


def _same_batches_from_a_list(source):
    items = list(source.iterate(0))
    parts = [source.window([item], None).split()[0] for item in items]
    return make_source([tuple(part) for part in parts])


@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    size=st.integers(1, 12),
    is_array=st.booleans(),
)
def test_micro_batches_are_slices_of_one_loader_batch(
    samples, batch_size, size, is_array
):
    source = make_source(
        np.arange(samples), batch_size=batch_size, shuffle=False
    )
    if not is_array:
        source = _same_batches_from_a_list(source)
    (made,), _ = all_windows(source, size=size)
    assert rows_of(made) == list(range(samples))
    for window in made:
        assert all(micro == size for micro in window.sizes[:-1])
        assert 1 <= window.sizes[-1] <= size
        assert window.samples <= batch_size
        assert window.is_even == (len(set(window.sizes)) == 1)


@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    steps=st.integers(1, 6),
    epochs=st.integers(1, 4),
)
def test_carry_loses_nothing_over_epochs(samples, batch_size, steps, epochs):
    source = make_source(np.arange(samples), batch_size=batch_size, seed=3)
    made, carried = all_windows(
        source, epochs=epochs, steps=steps, tail="carry"
    )
    every = [window for epoch in made for window in epoch]
    assert all(window.micro_batches == steps for window in every)
    assert len(carried) < steps
    rows = rows_of(every)
    if carried:
        rows += rows_of([source.window(carried, None)])
    expected = [
        int(row)
        for epoch in range(epochs)
        for item in source.iterate(epoch)
        for row in item
    ]
    assert rows == expected


@given(
    batches=st.integers(1, 20),
    steps=st.integers(1, 6),
    epochs=st.integers(1, 3),
)
def test_drop_forgets_what_fills_no_window(batches, steps, epochs):
    source = make_source(np.arange(2 * batches), batch_size=2, shuffle=False)
    if steps > batches:
        with pytest.raises(errors.DataError, match="tail='drop'"):
            all_windows(source, steps=steps, tail="drop")
        return
    made, carried = all_windows(source, epochs=epochs, steps=steps, tail="drop")
    assert carried == []
    for epoch in made:
        assert len(epoch) == batches // steps
        assert rows_of(epoch) == list(range(2 * steps * len(epoch)))


def test_carried_batches_that_fill_a_shorter_window_are_used_at_once():
    source = make_source(np.arange(5), batch_size=1, shuffle=False)
    position = Position()
    sizes = []
    for steps in (4, 2):
        made = windows(
            source,
            position,
            steps_at=lambda steps=steps: steps,
            micro_batch_size=None,
            tail="carry",
        )
        sizes.append([window.micro_batches for window in made])
        position.begin_next_epoch()
    assert sizes == [[4], [2, 2, 2]]
    assert position.carried == []


def test_steps_are_asked_once_before_each_window():
    source = make_source(np.arange(10), batch_size=1, shuffle=False)
    answers = iter([1, 2, 3, 9])
    made = windows(
        source,
        Position(),
        steps_at=lambda: next(answers),
        micro_batch_size=None,
        tail="flush",
    )
    assert [window.micro_batches for window in made] == [1, 2, 3, 4]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    size=st.none() | st.integers(1, 5),
)
def test_arrays_and_loaders_make_equal_windows(sizes, size):
    if size is not None:
        sizes = sizes[:1]
    x = {"a": np.arange(20.0), "b": np.arange(40).reshape(20, 2)}
    y = np.arange(20)
    source = make_source(x, y, shuffle=False)
    stops = np.cumsum(sizes)
    items = [
        np.arange(stop - count, stop)
        for stop, count in zip(stops, sizes, strict=True)
    ]
    batches = [
        Batch({name: leaf[item] for name, leaf in x.items()}, y[item])
        for item in items
    ]
    _assert_equal_windows(
        source.window(items, size),
        window_of_batches([unpack(batch) for batch in batches], size),
    )


def _assert_equal_windows(left, right):
    assert left.sizes == right.sizes
    assert left.is_even == right.is_even == (len(set(left.sizes)) == 1)
    for one, other in zip(left.split(), right.split(), strict=True):
        pairs = zip(tree.flatten(one), tree.flatten(other), strict=True)
        for leaf, twin in pairs:
            np.testing.assert_array_equal(leaf, twin)
    if left.is_even:
        pairs = zip(
            tree.flatten(left.stacked), tree.flatten(right.stacked), strict=True
        )
        for leaf, twin in pairs:
            np.testing.assert_array_equal(leaf, twin)


@pytest.mark.parametrize("source", ["arrays", "loader"])
@pytest.mark.parametrize("dtype", ["float32", "int64", "U2"])
def test_large_windows_begin_where_a_device_can_use_them(source, dtype, rng):
    # Three times, as memory may happen to begin well.
    x = rng.normal(size=[12, 20_000]).astype(dtype)
    for rows in rng.permuted(np.tile(np.arange(12), [3, 1]), axis=1):
        items = np.split(rows, 4)
        parts = [Batch(np.zeros(3), x[item]) for item in items]
        window = (
            window_of_batches(parts, None)
            if source == "loader"
            else make_source(np.zeros(12), x).window(items, None)
        )
        np.testing.assert_array_equal(
            window.stacked.y, x[rows].reshape(4, 3, -1)
        )
        assert window.stacked.y.ctypes.data % ALIGNMENT == 0


def test_split_gives_views_of_the_stacked_window():
    stacked = Batch(np.zeros([3, 2, 5]), None, np.ones([3, 2]))
    window = Window(stacked, None, (2, 2, 2))
    parts = window.split()
    assert len(parts) == 3
    assert parts[0].y is None
    assert all(np.shares_memory(part.x, stacked.x) for part in parts)
    assert (window.micro_batches, window.samples) == (3, 6)


def test_batches_of_different_lengths_inside_are_not_stacked():
    window = window_of_batches(
        [unpack(np.zeros([2, 5])), unpack(np.zeros([2, 7]))], None
    )
    assert not window.is_even
    assert [part.x.shape for part in window.split()] == [(2, 5), (2, 7)]


@pytest.mark.parametrize("make", [np.asarray, ops.convert_to_tensor])
def test_unpack_reads_the_forms_keras_reads(make):
    x, y = make(np.zeros([2, 3])), make(np.ones([2]))
    forms = [x, (x,), (x, y), [x, y], (x, y, y), Batch(x, y), {"a": x}]
    batches = [unpack(form) for form in forms]
    assert [batch.y is None for batch in batches] == [
        True, True, False, False, False, False, True,
    ]  # fmt: skip
    assert isinstance(batches[0].x, np.ndarray)
    assert batches[-1].x["a"].shape == (2, 3)
    assert [batch.sample_weight is None for batch in batches].count(False) == 1


@pytest.mark.parametrize("parts", [(), (1, 2, 3, 4)])
def test_unpack_refuses_tuples_of_the_wrong_length(parts):
    with pytest.raises(ValueError, match=f"tuple of {len(parts)} parts"):
        unpack(parts)


def test_unpack_casts_floats_to_floatx_and_keeps_the_rest():
    batch = unpack(
        (
            {"a": np.zeros([2], "float64"), "b": np.zeros([2], "uint8")},
            np.zeros([2], "float16"),
            np.zeros([2], "int64"),
        )
    )
    dtypes = [leaf.dtype.name for leaf in tree.flatten(batch)]
    assert dtypes == ["float32", "uint8", "float32", "int64"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_unpack_gives_arrays_of_their_own(dtype):
    x = np.zeros([2, 3], dtype)
    x.flags.writeable = False
    own = unpack(x).x
    assert not np.shares_memory(own, x)
    assert own.flags.writeable and own.flags.c_contiguous


@pytest.mark.parametrize(
    "leaf",
    [
        3.0,
        np.float32(3.0),
        np.array([[1], [2, 3]], dtype=object),
        object(),
    ],
)
def test_unpack_refuses_what_is_no_dense_array(leaf):
    with pytest.raises(TypeError, match=r"y must hold dense arrays"):
        unpack((np.zeros([2]), leaf))


def test_unpack_lets_text_through():
    text = np.array(["a", "bc"], dtype=object)
    np.testing.assert_array_equal(unpack((text,)).x, text)


def test_count_samples_names_the_lengths():
    batch = Batch((np.zeros(3), np.zeros(4)), np.zeros(3))
    with pytest.raises(ValueError, match="x: 3 and 4, y: 3 samples"):
        count_samples(batch)


@pytest.mark.parametrize("x", [np.zeros([0, 2]), None])
def test_count_samples_refuses_empty_data(x):
    with pytest.raises(ValueError, match="at least 1, in every array"):
        count_samples(Batch(x))


LABELS = np.array([0, 2, 1, 2, 0])


@pytest.mark.parametrize(
    "y",
    [
        LABELS,
        LABELS[:, None],
        LABELS.astype("float32"),
        np.eye(3)[LABELS],
        np.eye(3, dtype="int32")[LABELS],
        np.eye(3)[LABELS] * 0.8 + 0.1,
    ],
    ids=["numbers", "column", "floats", "one-hot", "integer", "smoothed"],
)
def test_class_weights_become_sample_weights(y):
    batch = weigh_classes(Batch(np.zeros(5), y), {0: 3.0, 2: 0.5})
    np.testing.assert_array_equal(
        batch.sample_weight, np.float32([3, 0.5, 1, 0.5, 3])
    )
    assert batch.sample_weight.dtype == "float32"


@pytest.mark.parametrize("is_one_hot", [False, True])
def test_class_weights_weigh_every_step_of_a_sequence(is_one_hot, rng):
    tf = pytest.importorskip("tensorflow")
    x = rng.normal(size=[6, 3, 4]).astype("float32")
    labels = rng.integers(0, 3, size=[6, 3])
    y = np.eye(3, dtype="float32")[labels] if is_one_hot else labels[..., None]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    class_weight = {0: 0.3, 2: 5.0}
    model = _small_classifier(is_one_hot, [3, 4])
    weights = model.get_weights()
    options = {"class_weight": class_weight, "shuffle": False, "verbose": 0}
    model.fit(data, **options)
    expected = model.get_weights()
    for arguments in ((data,), (x, y)):
        model.set_weights(weights)
        Trainer(model).fit(*arguments, **options)
        for ours, of_keras in zip(model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(ours, of_keras, rtol=1e-5)


@pytest.mark.parametrize("is_one_hot", [False, True])
def test_class_weights_train_as_those_of_keras(is_one_hot, rng):
    x = rng.normal(size=[12, 4]).astype("float32")
    labels = rng.integers(0, 3, size=12)
    y = np.eye(3, dtype="float32")[labels] if is_one_hot else labels
    class_weight = {0: 0.3, 2: 5.0}
    weighted = weigh_classes(Batch(x, y), class_weight)
    models = [_small_classifier(is_one_hot) for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    options = {"batch_size": 12, "shuffle": False, "verbose": 0}
    models[0].fit(x, y, class_weight=class_weight, **options)
    models[1].fit(x, y, sample_weight=weighted.sample_weight, **options)
    for left, right in zip(
        models[0].get_weights(), models[1].get_weights(), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-6)


def _small_classifier(is_one_hot, shape=(4,)):
    model = keras.Sequential(
        [keras.Input(shape), keras.layers.Dense(3, activation="softmax")]
    )
    prefix = "" if is_one_hot else "sparse_"
    model.compile("sgd", f"{prefix}categorical_crossentropy")
    return model


@pytest.mark.parametrize(
    ("batch", "class_weight", "error", "message"),
    [
        (Batch(LABELS, LABELS), [1.0, 2.0], TypeError, "must be a dict"),
        (Batch(LABELS, LABELS, LABELS), {0: 2}, ValueError, "Received: both"),
        (Batch(LABELS), {0: 2}, ValueError, "Received: no y"),
        (Batch(LABELS, {"a": LABELS}), {0: 2}, ValueError, "Received: dict"),
        (
            Batch(LABELS, np.full([5, 2, 2], 7)),
            {0: 2},
            ValueError,
            r"shape \(5, 2, 2\)",
        ),
        (
            Batch(LABELS, np.full([5, 2], 7)),
            {0: 2},
            ValueError,
            r"shape \(5, 2\)",
        ),
    ],
)
def test_class_weights_refuse_what_they_cannot_mean(
    batch, class_weight, error, message
):
    with pytest.raises(error, match=message):
        weigh_classes(batch, class_weight)
