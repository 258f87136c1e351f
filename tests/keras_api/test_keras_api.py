"""The private Keras names in `keras_api` still do what they are used for."""

import runpy

import numpy as np
import pytest

from accumtrainer import keras_api
from accumtrainer.keras_api import keras, ops


class TwoDense(keras.layers.Layer):
    """A subclassed layer that keeps one layer in a list."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(2)
        self.others = [keras.layers.Dense(2)]

    def call(self, x):
        return self.others[0](self.first(x))


def test_flatten_layers_reaches_layers_inside_a_subclassed_layer():
    block = TwoDense()
    model = keras.Sequential([keras.Input((3,)), block])

    layers = keras_api.flatten_layers(model)

    assert block.first in layers
    assert block.others[0] in layers


def test_flatten_layers_reaches_layers_inside_a_nested_model():
    dense = keras.layers.Dense(2)
    inner = keras.Sequential([keras.Input((3,)), dense])
    inputs = keras.Input((3,))
    model = keras.Model(inputs, inner(inputs))

    assert dense in keras_api.flatten_layers(model)


def test_flatten_layers_lists_parents_before_children():
    block = TwoDense()
    model = keras.Sequential([keras.Input((3,)), block])

    layers = keras_api.flatten_layers(model)

    assert layers[0] is model
    assert layers.index(block) < layers.index(block.first)


def test_keras_mask_is_the_one_an_embedding_attached():
    embedding = keras.layers.Embedding(5, 2, mask_zero=True)

    mask = keras_api.keras_mask(embedding(np.array([[1, 4, 0]])))

    np.testing.assert_array_equal(
        ops.convert_to_numpy(mask), [[True, True, False]]
    )


def test_keras_mask_reaches_the_outputs_of_a_model():
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(5, 2, mask_zero=True),
            keras.layers.Dense(1),
        ]
    )

    mask = keras_api.keras_mask(model(np.array([[1, 4, 0]])))

    np.testing.assert_array_equal(
        ops.convert_to_numpy(mask), [[True, True, False]]
    )


def test_keras_mask_of_a_tensor_without_one_is_none():
    assert keras_api.keras_mask(ops.ones((2, 3))) is None


def test_compiled_arguments_are_the_objects_given_to_compile():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    loss = keras.losses.MeanSquaredError()
    metrics = [keras.metrics.MeanAbsoluteError()]
    weighted_metrics = [keras.metrics.MeanSquaredError()]
    model.compile(
        loss=loss,
        loss_weights=2.0,
        metrics=metrics,
        weighted_metrics=weighted_metrics,
    )

    arguments = keras_api.compiled_arguments(model)

    assert arguments["loss"] is loss
    assert arguments["loss_weights"] == 2.0
    assert arguments["metrics"][0] is metrics[0]
    assert arguments["weighted_metrics"][0] is weighted_metrics[0]


def test_compiled_arguments_keep_a_loss_function_as_it_is():
    def my_loss(y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred), axis=-1)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(loss=my_loss)

    assert keras_api.compiled_arguments(model)["loss"] is my_loss


def test_compiled_arguments_are_none_where_nothing_was_given():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(loss="mse")

    assert keras_api.compiled_arguments(model) == {
        "loss": "mse",
        "loss_weights": None,
        "metrics": None,
        "weighted_metrics": None,
    }


def test_optimizer_knows_the_variables_it_was_built_for_and_no_others():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    kernel, bias = model.trainable_variables
    optimizer = keras.optimizers.Adam()

    assert keras_api.is_known_to(optimizer, bias)
    optimizer.build([kernel])
    assert keras_api.is_known_to(optimizer, kernel)
    assert not keras_api.is_known_to(optimizer, bias)


def test_backend_is_the_one_keras_computes_with():
    assert keras.backend.backend() == keras_api.BACKEND


def test_an_unknown_keras_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setenv("ACCUMTRAINER_KERAS", "theano")

    with pytest.raises(ImportError, match="ACCUMTRAINER_KERAS='theano'. Unset"):
        runpy.run_path(keras_api.__file__)


def test_schedule_of_an_optimizer_is_the_object_given():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    optimizer = keras.optimizers.SGD(schedule)
    assert keras_api.schedule_of(optimizer) is schedule
    assert keras_api.schedule_of(keras.optimizers.SGD(0.1)) is None


def test_epoch_that_backup_and_restore_asks_for_is_taken_once(tmp_path):
    if keras_api.KERAS_NAME == "keras_core":
        pytest.skip("Keras Core has no BackupAndRestore")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert keras_api.take_initial_epoch(model) is None
    (tmp_path / "training_metadata.json").write_text('{"epoch": 3}')
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    backup.set_model(model)
    backup.on_train_begin()
    assert keras_api.take_initial_epoch(model) == 3
    assert keras_api.take_initial_epoch(model) is None


def test_limits_are_those_of_keras_config():
    assert keras_api.global_limit("max_epochs") is None
    assert keras_api.global_limit("no_such_limit") is None
