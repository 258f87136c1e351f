"""Predictions: read some batches late, so that a device is never idle."""

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import keras
from accumtrainer.training.predictions import LIMIT_BYTES, MOST, Predictions


class Counts(keras.layers.Layer):
    """Returns how often it was called, which is its state."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(
            shape=[1, 1], initializer="zeros", trainable=False
        )

    def call(self, x):
        self.count.assign(self.count + 1)
        return keras.ops.convert_to_tensor(self.count)


class OnDevice:
    """Stands for a tensor; tells when it is read."""

    def __init__(self, number, reads, size_bytes=8):
        self._number = number
        self._reads = reads
        self._size_bytes = size_bytes

    def __array__(self, dtype=None, copy=None):
        self._reads.append(self._number)
        return np.full([self._size_bytes // 8], self._number, "int64")


def gather(count, *, size_bytes=8, batch_bytes=8):
    reads = []
    predictions = Predictions(lambda first, other: None)
    for number in range(count):
        predicted = OnDevice(number, reads, size_bytes)
        predictions.add(predicted, batch_bytes)
    return predictions, reads


def test_only_the_first_predictions_are_waited_for_at_once():
    predictions, reads = gather(MOST + 1)
    assert reads == [0]
    assert [int(a[0]) for a in predictions.read()] == list(range(MOST + 1))
    assert reads == list(range(MOST + 1))


def test_not_many_batches_are_in_flight():
    _, reads = gather(MOST + 11)
    assert reads == list(range(11))


def test_few_large_batches_are_in_flight():
    _, reads = gather(9, size_bytes=LIMIT_BYTES // 4, batch_bytes=8)
    assert reads == list(range(6))
    _, reads = gather(9, batch_bytes=LIMIT_BYTES // 4)
    assert reads == list(range(6))


def test_one_is_at_work_while_another_is_read_however_large_they_are():
    _, reads = gather(9, batch_bytes=10 * LIMIT_BYTES)
    assert reads == list(range(8))


def test_all_predictions_are_compared_with_the_first():
    pairs, reads = [], []
    predictions = Predictions(lambda *pair: pairs.append(pair))
    for number in range(3):
        predictions.add(OnDevice(number, reads), 8)
    first, *_ = predictions.read()
    assert [int(other[0]) for _, other in pairs] == [0, 1, 2]
    assert all(one is first for one, _ in pairs)


def test_more_batches_than_are_in_flight_are_predicted_in_their_order():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    trainer = Trainer(model, optimizer="sgd", loss="mse", seed=0)
    x = np.random.default_rng(0).normal(size=[3 * MOST, 3]).astype("float32")
    expected = keras.ops.convert_to_numpy(model(x))
    found = trainer.predict(x, batch_size=1, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_predictions_that_are_state_are_those_of_their_batch():
    inputs = keras.Input([2])
    model = keras.Model(inputs, Counts()(inputs))
    trainer = Trainer(model, optimizer="sgd", loss="mse", seed=0)
    found = trainer.predict(np.zeros([5, 2]), batch_size=1, verbose=0)
    assert found[:, 0].tolist() == [1, 2, 3, 4, 5]


class Notes(keras.callbacks.Callback):
    """Keeps what it is told of the predictions of batches."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def on_predict_batch_end(self, batch, logs=None):
        self.outputs.append(logs["outputs"])


def test_callbacks_get_the_predictions_of_each_batch():
    inputs = keras.Input([2])
    outputs = {
        "sum": keras.layers.Dense(1, kernel_initializer="ones")(inputs),
        "same": keras.layers.Identity()(inputs),
    }
    model = keras.Model(inputs, outputs)
    accumulation = Accumulation(micro_batch_size=2)
    trainer = Trainer(model, optimizer="sgd", accumulation=accumulation)
    x, notes = np.arange(14, dtype="float32").reshape(7, 2), Notes()
    predicted = trainer.predict(x, batch_size=4, verbose=0, callbacks=[notes])
    assert [len(told["sum"]) for told in notes.outputs] == [4, 3]
    for name, values in predicted.items():
        told = np.concatenate([outputs[name] for outputs in notes.outputs])
        np.testing.assert_array_equal(told, values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_predictions_of_few_bits_are_those_of_keras(dtype):
    dense = keras.layers.Dense(1, dtype=dtype)
    model = keras.Sequential([keras.Input([2]), dense])
    x = np.arange(14, dtype="float32").reshape(7, 2)
    predicted = Trainer(model, optimizer="sgd").predict(x, verbose=0)
    expected = model.predict(x, verbose=0)
    assert predicted.dtype == expected.dtype
    np.testing.assert_array_equal(predicted, expected)
