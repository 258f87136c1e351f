"""Claims about saving layers that know windows, and exchanging them."""

import numpy as np
import pytest
from normalized import (
    SIZES,
    X,
    Y,
    assert_moved_once,
    cut,
    layers,
    make_model,
    make_trainer,
    numbers,
)

from accumtrainer import keras_api
from accumtrainer.keras_api import keras
from accumtrainer.layers import (
    AccumulatedBatchNormalization,
    accumulate_statistics,
    restore_plain_statistics,
)

pytestmark = pytest.mark.usefixtures("without_xla")


def test_layer_survives_being_saved(tmp_path):
    model = make_model(epsilon=0.01, axis=-1)
    make_trainer(model, 4).fit(cut(SIZES[0], X, Y), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    layer = loaded.get_layer("normalize")
    assert type(layer) is AccumulatedBatchNormalization
    assert (layer.momentum, layer.epsilon) == (0.75, 0.01)
    for old, new in zip(model.variables, loaded.variables, strict=True):
        np.testing.assert_array_equal(numbers(old), numbers(new))


def make_nested():
    keras.utils.set_random_seed(0)
    x = keras.Input([4])
    inner = keras.Sequential(
        [
            keras.Input([4]),
            layers.Dense(3),
            layers.BatchNormalization(momentum=0.5, scale=False),
            layers.Dropout(0.5),
        ]
    )
    hidden = layers.BatchNormalization(name="outer")(inner(x))
    return keras.Model(x, layers.Dense(2)(layers.Add()([hidden, inner(x)])))


def test_exchanging_layers_there_and_back_keeps_the_model():
    plain = make_nested()
    make_trainer(plain, 2, optimizer=keras.optimizers.SGD(0.1)).fit(
        cut(SIZES[0], X, Y), verbose=0
    )
    there = accumulate_statistics(plain)
    kinds = [type(layer) for layer in keras_api.flatten_layers(there)]
    assert kinds.count(AccumulatedBatchNormalization) == 2
    assert layers.BatchNormalization not in kinds
    back = restore_plain_statistics(there)
    kinds = [type(layer) for layer in keras_api.flatten_layers(back)]
    assert kinds.count(layers.BatchNormalization) == 2
    outputs = plain.predict(X, verbose=0)
    for model in (there, back):
        np.testing.assert_allclose(
            model.predict(X, verbose=0), outputs, rtol=1e-4, atol=1e-5
        )
    for old, new in zip(plain.weights, back.weights, strict=True):
        assert old is not new
        np.testing.assert_array_equal(numbers(old), numbers(new))


def test_exchanged_model_trains_with_statistics_of_the_update():
    model = accumulate_statistics(make_model(layers.BatchNormalization))
    make_trainer(model, 4).fit(cut((5, 1, 5, 5), X, Y), verbose=0)
    assert_moved_once(model, X)
    assert_moved_once(restore_plain_statistics(model), X)


def test_layers_out_of_reach_are_refused():
    wrapped = layers.TimeDistributed(layers.BatchNormalization(name="inside"))
    model = keras.Sequential([keras.Input([3, 4]), wrapped])
    with pytest.raises(ValueError, match="'inside' inside another layer"):
        accumulate_statistics(model)


@pytest.mark.parametrize("name", ["synchronized", "renorm"])
def test_options_without_a_meaning_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be left out"):
        AccumulatedBatchNormalization(**{name: True})


# The note before training.


def notes(capsys, model, k):
    make_trainer(model, k).fit(X, Y, batch_size=4, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("note: ")]


def test_statistics_per_micro_batch_are_noted_before_training(capsys):
    (note,) = notes(capsys, make_model(layers.BatchNormalization), 4)
    assert "moves its averages 4 times per update" in note
    assert AccumulatedBatchNormalization.__name__ in note


def test_nothing_is_noted_where_statistics_are_those_of_the_update(capsys):
    plain = layers.BatchNormalization
    assert not notes(capsys, make_model(), 4)
    assert not notes(capsys, make_model(plain), 1)
    frozen = make_model(plain)
    frozen.get_layer("normalize").trainable = False
    assert not notes(capsys, frozen, 4)
