"""Claims about `check_inputs` and batches that cannot be used."""

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
from linear import assert_same_weights
from quickest import RUN_EAGERLY

from accumtrainer import (
    DataError,
    Trainer,
)
from accumtrainer.keras_api import keras

pytestmark = pytest.mark.usefixtures("without_xla")


LABELS = np.arange(12, dtype="int32") % 3


def classifier(**options):
    """Make a Trainer of a linear model of three classes."""
    loss = options.pop(
        "loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return make_trainer(loss, units=3, **options)


def with_value(array, place, value):
    """Copy an array, with another value in one place."""
    array = array.copy()
    array[place] = value
    return array


def fit_until_error(trainer, x, y=None, *, updates, **options):
    """Train until the data are refused, after so many updates.

    Returns:
        The message.
    """
    keeps = KeepsWeights(trainer)
    with pytest.raises(DataError) as raised:
        trainer.fit(x, y, verbose=0, callbacks=[keeps], **options)
    # A first window that is refused is refused before training begins.
    told = keeps.seen or [values_of(trainer)]
    assert trainer.progress.updates == updates == len(told) - 1
    assert_same(told[-1], values_of(trainer))
    return str(raised.value)


# What check_inputs finds.


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_found_before_it_does_harm(value):
    trainer = make_trainer(accumulation=2)
    message = fit_until_error(
        trainer,
        with_value(X, (11, 1), value),
        Y,
        updates=1,
        batch_size=3,
        shuffle=False,
        check_inputs=True,
    )
    assert message.startswith("x must be finite with check_inputs=True. ")
    where = "row 2 of micro-batch 1, window 1 of epoch 0"
    assert f"Received: {value} in {where}" in message


@pytest.mark.parametrize("field", ["y", "sample_weight"])
def test_targets_and_weights_are_checked_too(field):
    data = {"y": Y, "sample_weight": np.ones(12, "float32")}
    data[field] = with_value(data[field], 1, np.nan)
    message = fit_until_error(
        make_trainer(),
        X,
        updates=0,
        shuffle=False,
        check_inputs=True,
        **data,
    )
    assert message.startswith(f"{field} must be finite")
    assert "nan in row 1 of micro-batch 0, window 0 of epoch 0" in message


def test_the_path_in_a_nest_is_named():
    one, two = keras.Input([2], name="one"), keras.Input([2], name="two")
    outputs = keras.layers.Dense(1)(keras.layers.add([one, two]))
    trainer = Trainer(
        keras.Model({"one": one, "two": two}, outputs),
        optimizer="sgd",
        loss="mse",
        run_eagerly=RUN_EAGERLY,
    )
    x = {"one": X, "two": with_value(X, (3, 0), np.nan)}
    message = fit_until_error(
        trainer, x, Y, updates=0, shuffle=False, check_inputs=True
    )
    assert message.startswith("x['two'] must be finite")


@pytest.mark.parametrize(
    "loss",
    [
        "sparse_categorical_crossentropy",
        "crossentropy",
        keras.losses.sparse_categorical_crossentropy,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ],
    ids=["name", "short-name", "function", "class"],
)
@pytest.mark.parametrize("label", [3, -1])
def test_a_label_of_no_class_is_found(loss, label):
    message = fit_until_error(
        classifier(loss=loss),
        X,
        with_value(LABELS, 7, label),
        updates=1,
        batch_size=4,
        shuffle=False,
        check_inputs=True,
    )
    assert message.startswith("y must hold class numbers from 0 to 2")
    assert f"Received: {label} in row 3 of micro-batch 0, window 1" in message
    assert "ignore_class" in message


@pytest.mark.parametrize("shape", [(12,), (12, 1)])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
def test_labels_of_every_class_pass_in_any_form(shape, dtype):
    trainer = classifier()
    labels = LABELS.reshape(shape).astype(dtype)
    trainer.fit(X, labels, verbose=0, check_inputs=True)
    assert trainer.progress.updates == 1


def test_the_label_to_be_ignored_passes():
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=-1
    )
    trainer = classifier(loss=loss)
    trainer.fit(X, with_value(LABELS, 7, -1), verbose=0, check_inputs=True)
    message = fit_until_error(
        classifier(loss=loss),
        X,
        with_value(LABELS, 7, -2),
        updates=0,
        check_inputs=True,
    )
    assert "Received: -2" in message


@pytest.mark.parametrize("wrong", [-1, 5])
@pytest.mark.parametrize("nest", [None, dict, list])
def test_an_id_without_a_row_is_found_before_it_does_harm(nest, wrong):
    number, word = (
        keras.Input([2], name="number"),
        keras.Input([3], name="word"),
    )
    rows = keras.layers.Flatten()(keras.layers.Embedding(5, 2)(word))
    inputs = {
        None: word,
        dict: {"number": number, "word": word},
        list: [number, word],
    }[nest]
    if nest is not None:
        rows = keras.layers.concatenate([number, rows])
    model = keras.Model(inputs, keras.layers.Dense(1)(rows))
    ids = with_value(np.arange(36).reshape(12, 3) % 5, (7, 1), wrong)
    x = {None: ids, dict: {"number": X, "word": ids}, list: [X, ids]}[nest]
    trainer = Trainer(
        model,
        optimizer="sgd",
        loss="mse",
        accumulation=2,
        run_eagerly=RUN_EAGERLY,
    )
    message = fit_until_error(
        *(trainer, x, Y),
        updates=1,
        batch_size=3,
        shuffle=False,
        check_inputs=True,
    )
    path = {None: "", dict: "['word']", list: "[1]"}[nest]
    assert message.startswith(f"x{path} must hold ids from 0 to 4, as ")
    assert f"{wrong} in row 1 of micro-batch 0, window 1 of epoch 0" in message


@pytest.mark.parametrize("nest", [dict, list])
def test_each_output_has_labels_of_its_own(nest):
    inputs = keras.Input([2])
    model = keras.Model(
        inputs,
        [
            keras.layers.Dense(1, name="number")(inputs),
            keras.layers.Dense(3, name="kind")(inputs),
        ],
    )
    losses = {"number": "mse", "kind": "sparse_categorical_crossentropy"}
    targets = {"number": Y + 9, "kind": with_value(LABELS, 5, 4)}
    if nest is list:
        losses, targets = list(losses.values()), list(targets.values())
    trainer = Trainer(
        model, optimizer="sgd", loss=losses, run_eagerly=RUN_EAGERLY
    )
    message = fit_until_error(
        trainer, X, targets, updates=0, shuffle=False, check_inputs=True
    )
    path = "['kind']" if nest is dict else "[1]"
    assert message.startswith(f"y{path} must hold class numbers from 0 to 2")


def test_other_losses_may_have_any_targets():
    trainer = make_trainer("mse")
    trainer.fit(X, Y * 1000 - 5, verbose=0, check_inputs=True)
    assert trainer.progress.updates == 1


def test_labels_of_tokens_are_checked():
    model = keras.Sequential(
        [keras.Input([None], dtype="int32"), keras.layers.Embedding(5, 5)]
    )
    trainer = Trainer(
        model,
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=RUN_EAGERLY,
    )
    tokens = np.arange(12).reshape(3, 4) % 5
    trainer.fit(tokens, tokens, verbose=0, check_inputs=True)
    message = fit_until_error(
        trainer_like(trainer),
        tokens,
        with_value(tokens, (2, 1), 5),
        updates=0,
        shuffle=False,
        check_inputs=True,
    )
    assert "Received: 5 in row 2" in message


def trainer_like(trainer):
    """Make another Trainer of the same model, beginning anew."""
    return Trainer(
        trainer.model,
        optimizer="sgd",
        loss=trainer.model.loss,
        accumulation=trainer.accumulation,
        run_eagerly=RUN_EAGERLY,
    )


def test_nothing_is_looked_at_unless_asked_for():
    trainer = make_trainer(max_consecutive_skips=None)
    trainer.fit(with_value(X, 3, np.nan), Y, verbose=0)
    assert trainer.progress.skipped_updates == 1


# Data that change.


def test_types_may_change_between_batches():
    pairs = [(X[:4], LABELS[:4]), (X[4:8], LABELS[4:8]), (X[8:], LABELS[8:])]
    types = [("float32", "int32"), ("float64", "int64"), ("float32", "uint8")]
    changing = [
        (x.astype(one), y.astype(other))
        for (x, y), (one, other) in zip(pairs, types, strict=True)
    ]
    trained = []
    for data in (pairs, changing):
        keras.utils.set_random_seed(1)
        trainer = classifier(accumulation=3)
        trainer.fit(data, verbose=0)
        trained.append(values_of(trainer))
    # Windows of several types run in another way, which rounds differently.
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_lengths_may_change_where_the_model_lets_them():
    inputs = keras.Input([None, 2])
    pooled = keras.layers.GlobalAveragePooling1D()(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(pooled))
    trainer = Trainer(
        model,
        optimizer="sgd",
        loss="mse",
        accumulation=2,
        run_eagerly=RUN_EAGERLY,
    )
    data = [(np.ones([2, n, 2]), np.ones([2, 1])) for n in (3, 5, 4, 4)]
    trainer.fit(data, verbose=0)
    assert trainer.progress.updates == 2
    wider = [*data[:3], (np.ones([2, 5, 3]), np.ones([2, 1]))]
    message = fit_until_error(trainer_like(trainer), wider, updates=1)
    assert "Received: 3 on axis 2, where it was 2, in micro-batch 1" in message


@pytest.mark.parametrize("accumulation", [1, 2])
def test_another_number_of_features_is_refused(accumulation):
    data = batches(5)
    data[3] = (np.ones([2, 3]), data[3][1])
    message = fit_until_error(
        make_trainer(accumulation=accumulation),
        data,
        updates=3 // accumulation,
    )
    assert message.startswith("x must keep the sizes that the model fixes.")
    assert "Received: 3 on axis 1, where it was 2" in message


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_sequential_takes_other_sizes_than_it_was_built_for(
    is_told, accumulation
):
    def make():
        keras.utils.set_random_seed(1)
        inputs = [keras.Input([6, 2])] if is_told else []
        return keras.Sequential(
            [
                *inputs,
                keras.layers.Conv1D(4, 3, activation="relu"),
                keras.layers.Reshape([-1, 8]),
            ]
        )

    rng = np.random.default_rng(0)
    data = [
        (rng.normal(size=[2, n, 2]), rng.normal(size=[2, n // 2 - 1, 8]))
        for n in (6, 10, 8, 8, 6, 10)
    ]
    data = [(x.astype("float32"), y.astype("float32")) for x, y in data]
    trainer = Trainer(make(), "sgd", "mse", accumulation=accumulation)
    trainer.fit(data, verbose=0)
    assert trainer.progress.updates == 6 // accumulation
    if accumulation == 1:
        model = make()
        model.compile("sgd", "mse")
        for batch in data:
            model.train_on_batch(*batch)
        assert_same_weights(trainer.model, model)


def test_another_number_of_targets_is_refused():
    data = batches(3)
    data[2] = (data[2][0], np.ones([2, 2]))
    message = fit_until_error(make_trainer(), data, updates=2)
    assert message.startswith("y must keep the sizes that the model fixes.")


def remove_weights(batch):
    return batch[:2]


def remove_axis(batch):
    return (batch[0], batch[1][:, 0], batch[2])


def rename(batch):
    return ({"x": batch[0]}, *batch[1:])


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (remove_weights, "nothing in sample_weight, where the first batch of"),
        (remove_axis, "1 axes in y, where the first batch of the update had 2"),
        (
            rename,
            "2 axes in x['x'], where the first batch of the update had no",
        ),
    ],
)
def test_batches_of_an_update_that_are_built_otherwise_are_refused(
    change, difference
):
    data = [(*batch, np.ones(2)) for batch in batches()]
    data[3] = change(data[3])
    message = fit_until_error(make_trainer(accumulation=2), data, updates=1)
    assert message.startswith("The batches of one update must have the same")
    assert f"Received: {difference}" in message
    assert "in batch 3 of epoch 0" in message


def test_numbers_of_parts_that_appear_are_checked():
    data = [*batches(2), (*batches()[2], np.array([1, np.nan]))]
    message = fit_until_error(
        make_trainer(), data, updates=2, check_inputs=True
    )
    assert message.startswith("sample_weight must ")


@pytest.mark.parametrize("rows", [(0, 0), (2, 1)])
def test_a_batch_that_cannot_be_used_is_named(rows):
    data = batches()
    data[4] = tuple(array[:n] for array, n in zip(data[4], rows, strict=True))
    message = fit_until_error(make_trainer(accumulation=2), data, updates=2)
    assert "at least one sample" in message
    assert f"Received: {rows[0]} samples in x, {rows[1]} samples in" in message
    assert "in batch 4 of epoch 0" in message


# Data that end early, late or never.


class LooksUp(keras.Model):
    """A model written as a class, of whose inputs only its code knows."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(10, 2)
        self.dense = keras.layers.Dense(3)

    def call(self, inputs):
        first = self.embedding(keras.ops.cast(inputs[:, 0] > 0, "int32"))
        return self.dense(inputs) + self.dense(keras.ops.tile(first, (1, 2)))


def test_numbers_for_a_model_written_as_a_class_are_taken_for_no_ids():
    model = LooksUp()
    inputs = np.random.default_rng(0).normal(size=[12, 4]).astype("float32")
    model(inputs)
    trainer = Trainer(
        model,
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=RUN_EAGERLY,
    )
    trainer.fit(inputs, LABELS, verbose=0, check_inputs=True)
    assert trainer.progress.updates == 1


def make_crossed():
    """Make a model whose dicts have the names of its tensors crossed."""
    tokens = keras.Input([None], name="b", dtype="int32")
    groups = keras.Input([4], name="a", dtype="int32")
    pool = keras.layers.GlobalAveragePooling1D
    joined = keras.layers.Add()(
        [
            pool()(keras.layers.Embedding(100, 2)(tokens)),
            pool()(keras.layers.Embedding(5, 2)(groups)),
        ]
    )
    few = keras.layers.Dense(2, activation="softmax", name="q")(joined)
    many = keras.layers.Dense(9, activation="softmax", name="p")(joined)
    return keras.Model({"a": tokens, "b": groups}, {"p": few, "q": many})


def crossed_batch(length):
    x = {"a": np.full([4, length], 50), "b": np.full([4, 4], 3)}
    return x, {"p": np.full([4], 1), "q": np.full([4], 8)}


@pytest.mark.filterwarnings("ignore:When providing `inputs` as a dict")
def test_dicts_are_paired_by_the_keys_that_the_model_was_made_with():
    trainer = Trainer(
        make_crossed(),
        optimizer="sgd",
        loss=dict.fromkeys("pq", "sparse_categorical_crossentropy"),
    )
    both = iter([crossed_batch(4), crossed_batch(7)])
    trainer.fit(both, steps_per_epoch=2, check_inputs=True, verbose=0)
    assert trainer.progress.updates == 2
    x, y = crossed_batch(4)
    for name, wrong in (
        ("x", ({**x, "b": x["b"] + 2}, y)),
        ("y", (x, {**y, "p": y["p"] + 1})),
    ):
        with pytest.raises(DataError, match=name):
            trainer.fit(*wrong, check_inputs=True, verbose=0)
