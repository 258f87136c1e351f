"""Claims about ids without a row and labels without a class.

Keras refuses them on a CPU by TensorFlow, which compiles nothing by XLA there.
"""

import functools

import numpy as np
import pytest

from accumtrainer import Accumulation, DataError, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, KERAS_NAME, keras

pytestmark = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="Keras on JAX refuses no index either"
)

if BACKEND == "tensorflow":
    import tensorflow as tf

layers, ops = keras.layers, keras.ops
IDS = np.arange(40, dtype="int32").reshape(8, 5) % 10
LABELS = np.arange(8, dtype="int32") % 3


def make_model(shift=0):
    """Make a classifier of ids, which it moves by `shift` first."""
    keras.utils.set_random_seed(0)
    ids = keras.Input([5], dtype="int32")
    hidden = layers.Embedding(10, 4)(ids + shift if shift else ids)
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(ids, layers.Dense(3)(hidden))


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **options
    )


def by_trainer(model, *data, micro_batch_size=2, loss=None):
    trainer = Trainer(
        model,
        optimizer="adam",
        loss=loss or cross_entropy(),
        accumulation=Accumulation(micro_batch_size=micro_batch_size),
    )
    trainer.fit(*data, batch_size=8, verbose=0)


def inside_fit(model, *data):
    model.compile("adam", cross_entropy(), jit_compile=True)
    callbacks = [GradientAccumulation(4)]
    model.fit(*data, batch_size=2, verbose=0, callbacks=callbacks)


def changed(array, value):
    array = array.copy()
    array[(3,) * array.ndim] = value
    return array


WAYS = [
    pytest.param(by_trainer, id="fused"),
    pytest.param(
        functools.partial(by_trainer, micro_batch_size=3), id="streamed"
    ),
    pytest.param(
        functools.partial(by_trainer, micro_batch_size=8), id="one micro-batch"
    ),
    pytest.param(
        inside_fit,
        id="inside fit",
        marks=pytest.mark.skipif(
            KERAS_NAME != "keras", reason="Keras Core's fit is refused"
        ),
    ),
]


@pytest.mark.parametrize("train", WAYS)
@pytest.mark.parametrize(
    "data, operation",
    [
        pytest.param((changed(IDS, 10), LABELS), "embedding", id="id"),
        pytest.param((IDS, changed(LABELS, 3)), "entropy", id="label"),
        pytest.param((IDS, changed(LABELS, -1)), "entropy", id="negative"),
    ],
)
def test_what_indexes_nothing_is_refused_and_not_trained_on(
    train, data, operation
):
    model = make_model()
    before = model.get_weights()
    with pytest.raises(DataError, match=f"{operation}.*0 to .*nothing was"):
        train(model, *data)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_ids_that_the_model_computes_are_looked_at_too():
    with pytest.raises(DataError, match="embedding"):
        by_trainer(make_model(shift=1), IDS, LABELS)


class Table(layers.Layer):
    """Looks ids up in a table of ten rows; the ids come as numbers."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight((10, 4))

    def call(self, ids):
        return self.look_up(ops.cast(ids, "int32"))


class InLoop(Table):
    def look_up(self, ids):
        table = tf.convert_to_tensor(self.table)
        return tf.map_fn(
            lambda row: tf.gather(table, row),
            ids,
            fn_output_signature="float32",
        )


class InBranch(Table):
    def look_up(self, ids):
        return ops.cond(
            ops.sum(ids) > 0,
            lambda: ops.take(self.table, ids, axis=0),
            lambda: ops.take(self.table, 0 * ids, axis=0),
        )


class InFunction(Table):
    def look_up(self, ids):
        look_up = tf.function(lambda ids: ops.take(self.table, ids, axis=0))
        return look_up(ids)


class OfVariable(Table):
    def look_up(self, ids):
        return tf.nn.embedding_lookup(self.table.value, ids)


class Several(Table):
    def look_up(self, ids):
        table = ops.reshape(self.table, (2, 5, 4))
        return tf.gather_nd(table, ops.stack([0 * ids, ids - 5], axis=-1))


class Segments(Table):
    def look_up(self, ids):
        flat = ops.reshape(ids, (-1,))
        counts = ops.segment_sum(ops.ones_like(flat), flat, num_segments=10)
        return ops.take(self.table, ids % 10, axis=0) * ops.sum(
            ops.cast(counts, "float32")
        )


class Asserted(Table):
    def look_up(self, ids):
        tf.debugging.assert_less(ids, 10)
        return ops.take(self.table, ids % 10, axis=0)


class AssertedInBranch(Asserted):
    def look_up(self, ids):
        def look_up():
            return Asserted.look_up(self, ids)

        return ops.cond(ops.sum(ids) > 0, look_up, look_up)


class Single(Table):
    def look_up(self, ids):
        row = tf.convert_to_tensor(self.table)[tf.reduce_max(ids)]
        return tf.ones_like(ids, "float32")[..., None] * row


class Slice(Table):
    def look_up(self, ids):
        rows = ops.slice(self.table, [ops.max(ids), 0], (1, 4))
        return tf.ones_like(ids, "float32")[..., None] * rows


class Reversed(Table):
    def look_up(self, ids):
        looked_up = ops.take(self.table, ids % 10, axis=0)
        lengths = tf.reduce_max(ids, axis=[1, 2]) - 5
        return tf.reverse_sequence(looked_up, lengths, seq_axis=1)


class InGradient(Table):
    def look_up(self, ids):
        rows = ops.take(self.table, ids, axis=0)

        @tf.custom_gradient
        def read_backwards(x):
            return x, lambda gradient: gradient * rows

        return read_backwards(tf.ones_like(rows) * self.table[0])


class Cell(Table):
    state_size = 4

    def call(self, ids, states):
        ids = ops.cast(ids[:, 0], "int32")
        state = states[0] + ops.take(self.table, ids, axis=0)
        return state, [state]


@pytest.mark.parametrize("size", [2, 3], ids=["fused", "streamed"])
@pytest.mark.parametrize(
    "make",
    [
        InLoop,
        InBranch,
        InFunction,
        OfVariable,
        Several,
        Segments,
        Asserted,
        AssertedInBranch,
        Single,
        Slice,
        Reversed,
        InGradient,
        lambda: layers.RNN(Cell(), return_sequences=True),
        lambda: layers.TimeDistributed(layers.Embedding(10, 4)),
    ],
    ids=[
        "loop",
        "branch",
        "function",
        "variable",
        "several",
        "segments",
        "asserted",
        "asserted in a branch",
        "single",
        "slice",
        "reversed",
        "in a gradient",
        "cell",
        "distributed",
    ],
)
def test_it_does_not_matter_how_the_model_looks_them_up(make, size):
    ids = keras.Input([5, 1])
    hidden = layers.Reshape((5, -1))(make()(ids))
    hidden = layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(ids, layers.Dense(3)(hidden))
    before = model.get_weights()
    data = changed(IDS, 10)[..., None].astype("float32"), LABELS
    # What TensorFlow refuses of itself.
    refusals = DataError, tf.errors.InvalidArgumentError
    with pytest.raises(refusals):
        by_trainer(model, *data, micro_batch_size=size)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_training_goes_on_with_good_data_after_a_refusal():
    trainer = Trainer(
        make_model(), optimizer="adam", loss=cross_entropy(), accumulation=2
    )
    with pytest.raises(DataError):
        trainer.fit(changed(IDS, 12), LABELS, batch_size=4, verbose=0)
    trainer.fit(IDS, LABELS, batch_size=4, verbose=0)
    assert trainer.progress.updates == 1


def test_a_check_of_equivalence_refuses_them_too():
    trainer = Trainer(
        make_model(), optimizer="adam", loss=cross_entropy(), accumulation=2
    )
    with pytest.raises(DataError, match="embedding"):
        trainer.check_equivalence((changed(IDS, 12), LABELS))


def test_labels_to_be_ignored_are_not_refused():
    loss = cross_entropy(ignore_class=-1)
    by_trainer(make_model(), IDS, changed(LABELS, -1), loss=loss)


def recurrent(hidden):
    return layers.Bidirectional(layers.GRU(4, return_sequences=True))(hidden)


def causal(hidden):
    attention = layers.MultiHeadAttention(2, 2)
    return hidden + attention(hidden, hidden, use_causal_mask=True)


class Positions(layers.Layer):
    """Adds what is learnt of every place."""

    def build(self, shape):
        self.table = self.add_weight((8, shape[-1]))

    def call(self, hidden):
        steps = ops.arange(ops.shape(hidden)[1])
        return hidden + ops.take(self.table, steps, axis=0)


def positional(hidden):
    return Positions()(hidden)


def make_positional(length):
    ids = keras.Input([length], dtype="int32")
    hidden = positional(layers.Embedding(10, 4)(ids))
    hidden = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(ids, layers.Dense(3)(hidden))


@pytest.mark.parametrize("train", WAYS)
@pytest.mark.parametrize("length", [9, None])
def test_places_without_a_row_are_refused(train, length):
    model = make_positional(length)
    before = model.get_weights()
    with pytest.raises(DataError, match="0 to 7.*nothing was"):
        train(model, np.tile(IDS, 2)[:, :9], LABELS)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def size_alone(table, ids):
    rows = tf.shape(tf.gather(tf.reshape(tf.range(40.0), [10, 4]), [12]))[0]
    columns = tf.shape(tf.expand_dims(tf.gather(table, [12, 13]), 0))[1]
    return tf.ones_like(ids, "float32")[..., None] * tf.cast(
        rows + columns, "float32"
    )


def passed_over(table, ids):
    rows = tf.reshape(tf.range(40.0), [10, 4])
    places = tf.reshape(ids, [-1, 1])
    found = tf.gather_nd(rows, places, bad_indices_policy="IGNORE")
    return tf.reshape(found, [-1, 5, 4])


def dropped_rows(table, ids):
    ops.take(table, ops.arange(7, 7 + ops.shape(ids)[1]), axis=0) * 2.0 + 1.0
    return tf.ones_like(ids, "float32")[..., None]


def dropped_ids(table, ids):
    ops.take(table, ops.take(ops.arange(10), ids), axis=0) * 1.0
    return tf.ones_like(ids, "float32")[..., None]


class PassedOver(Table):
    """Looks up what is not there, as nobody reads or minds it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def look_up(self, ids):
        found = self.function(tf.convert_to_tensor(self.table), ids)
        # Nobody reads the second output.
        return found * self.table[0], ops.take(self.table, ids + 9, axis=0)


@pytest.mark.parametrize(
    "size", [2, 3, 8], ids=["fused", "streamed", "one micro-batch"]
)
@pytest.mark.parametrize(
    "function", [size_alone, passed_over, dropped_rows, dropped_ids]
)
def test_what_is_not_read_or_to_be_passed_over_is_not_refused(function, size):
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        ids = keras.Input([5])
        found, _ = PassedOver(function)(ids)
        hidden = layers.GlobalAveragePooling1D()(found)
        models.append(keras.Model(ids, layers.Dense(3)(hidden)))
    data = changed(IDS, 10).astype("float32"), LABELS
    by_trainer(models[0], *data, micro_batch_size=size)
    models[1].compile("adam", cross_entropy(), jit_compile=False)
    models[1].fit(*data, batch_size=8, verbose=0)
    for one, other in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


class Logging(Trainer):
    """Looks up what is logged and nothing else."""

    def on_micro_batch(self, batch, info):
        self.log("found", ops.mean(ops.take(ops.arange(9.0), batch.x)))
        return batch


class Keeping(Trainer):
    """Looks up what a later hook reads."""

    def compute_loss(self, batch, info):
        self.kept = ops.mean(ops.take(ops.arange(9.0), batch.x))
        return super().compute_loss(batch, info)

    def on_accumulate(self, gradients, info):
        return [gradient * self.kept for gradient in gradients]


@pytest.mark.parametrize("size", [2, 3, 8], ids=["fused", "streamed", "whole"])
@pytest.mark.parametrize("kind", [Logging, Keeping])
def test_what_hooks_read_later_is_refused(kind, size):
    model = make_model()
    trainer = kind(
        model,
        optimizer="adam",
        loss=cross_entropy(),
        accumulation=Accumulation(micro_batch_size=size),
    )
    before = model.get_weights()
    with pytest.raises((DataError, tf.errors.InvalidArgumentError)):
        trainer.fit(IDS, LABELS, batch_size=8, verbose=0)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_longer_sequences_may_have_places_without_a_row():
    trainer = Trainer(
        make_positional(None),
        optimizer="adam",
        loss=cross_entropy(),
        accumulation=2,
    )
    for length in (5, 8, 6):
        ids = np.tile(IDS, 2)[:, :length]
        trainer.fit(ids, LABELS, batch_size=4, verbose=0)
    with pytest.raises(DataError, match="0 to 7"):
        trainer.fit(np.tile(IDS, 2)[:, :9], LABELS, batch_size=4, verbose=0)
    assert trainer.progress.updates == 3


def convolutional(hidden):
    return layers.Conv1D(4, 2, padding="causal")(hidden)


@pytest.mark.parametrize("body", [recurrent, causal, positional, convolutional])
def test_what_no_data_decide_does_not_cost_a_model_xla(body, monkeypatch):
    from accumtrainer.steps.tensorflow.programs import XlaShapes

    left = []
    monkeypatch.setattr(XlaShapes, "close", lambda self: left.append(True))
    ids = keras.Input([None], dtype="int32")
    hidden = layers.Embedding(10, 4, mask_zero=body is recurrent)(ids)
    model = keras.Model(ids, layers.Dense(10)(body(hidden)))
    by_trainer(model, IDS, IDS)
    assert not left
