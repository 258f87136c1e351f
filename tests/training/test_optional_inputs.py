"""Claims about models with an input that may be left out."""

import numpy as np
import pytest
from keras_core_gaps import keras_3_only
from linear import assert_same_weights

from accumtrainer import Accumulation, Every, Trainer
from accumtrainer.callbacks import Checkpoint, GradientAccumulation
from accumtrainer.keras_api import keras

pytestmark = keras_3_only("knows no optional inputs")

X = np.random.default_rng(0).normal(size=[12, 3]).astype("float32")
# By its name what is left out comes first.
WITHOUT = {"x": X, "added": None}
Y = X[:, :1]
ORDER = {"shuffle": False, "verbose": 0}


class AddIfThere(keras.layers.Layer):
    """Adds a tensor to another, if there is one."""

    def call(self, x, added):
        return x if added is None else x + added

    def compute_output_shape(self, x_shape, added_shape):
        return x_shape


def make_model():
    keras.utils.set_random_seed(0)
    x = keras.Input([3], name="x")
    added = keras.Input([3], name="added", optional=True)
    outputs = keras.layers.Dense(1)(AddIfThere()(x, added))
    return keras.Model({"x": x, "added": added}, outputs)


def rows(size):
    return [
        ({"x": X[i : i + size], "added": None}, Y[i : i + size])
        for i in range(0, 12, size)
    ]


ACCUMULATIONS = {
    "whole": (1, 4),
    "steps": (2, 2),
    "sliced": (Accumulation(micro_batch_size=3), 4),
    "each": (Accumulation(micro_batch_size=3, per_example=True), 4),
}


@pytest.fixture(scope="module")
def by_keras():
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(WITHOUT, Y, batch_size=4, epochs=2, **ORDER)
    return model


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("way", ACCUMULATIONS)
def test_input_that_is_left_out_trains_as_in_keras(by_keras, way, is_list):
    accumulation, size = ACCUMULATIONS[way]
    trainer = Trainer(
        make_model(),
        keras.optimizers.SGD(0.1),
        "mse",
        accumulation=accumulation,
    )
    if is_list:
        trainer.fit(rows(size), epochs=2, verbose=0)
    else:
        trainer.fit(WITHOUT, Y, batch_size=size, epochs=2, **ORDER)
    assert_same_weights(trainer.model, by_keras)
    found = trainer.evaluate(WITHOUT, Y, verbose=0)
    assert found == pytest.approx(by_keras.evaluate(WITHOUT, Y, verbose=0))
    np.testing.assert_allclose(
        trainer.predict(WITHOUT, verbose=0),
        by_keras.predict(WITHOUT, verbose=0),
        rtol=1e-5,
    )


class AddsLosses(keras.Model):
    """Uses more layers, and has more losses, where there is more to add."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(2)
        self.more = keras.layers.Dense(2, activity_regularizer="l2")
        self.last = keras.layers.Dense(1)

    def call(self, inputs):
        hidden = self.first(inputs["x"])
        if "added" in inputs:
            hidden += self.more(inputs["added"])
        return self.last(hidden)


def make_model_that_adds_losses():
    keras.utils.set_random_seed(0)
    model = AddsLosses()
    model({"x": X, "added": X})
    return model


OF_AN_UNUSED_LAYER = pytest.mark.filterwarnings("ignore:Gradients do not exist")


@OF_AN_UNUSED_LAYER
@pytest.mark.parametrize("way", ["whole", "sliced"])
@pytest.mark.parametrize("first", [0, 1])
def test_batches_of_a_fit_may_have_other_losses(way, first):
    data = [({"x": X[:6]}, Y[:6]), ({"x": X[:6], "added": X[6:]}, Y[:6])]
    data = data[first:] + data[:first] + data
    model = make_model_that_adds_losses()
    model.compile(keras.optimizers.AdamW(0.1), "mse", metrics=["mae"])
    for batch in data:
        model.train_on_batch(*batch)
    trainer = Trainer(
        make_model_that_adds_losses(),
        keras.optimizers.AdamW(0.1),
        "mse",
        metrics=["mae"],
        accumulation=ACCUMULATIONS[way][0],
    )
    history = trainer.fit(data[:2], verbose=0).history
    both = trainer.fit(data[2:], verbose=0).history
    assert_same_weights(trainer.model, model)
    assert set(history) == set(both)
    found = trainer.evaluate(data, verbose=0)
    each = [model.test_on_batch(*batch)[0] for batch in data]
    assert found[0] == pytest.approx(np.mean(each), rel=1e-5)


class LogsSizes(Trainer):
    """Logs what every kind of batch has, and what one has."""

    def compute_loss(self, batch, info):
        rows = keras.ops.cast(keras.ops.shape(batch.y)[0], "float32")
        self.log("rows", rows, reduce="sum")
        if "added" in batch.x:
            self.log("with_more", rows, reduce="sum")
        return super().compute_loss(batch, info)


def fit_with_other_losses(**options):
    without = ({"x": X[:6]}, Y[:6])
    more = ({"x": X[:6], "added": X[6:]}, Y[:6])
    data = [without, more, more, without, without, more]
    trainer = LogsSizes(
        make_model_that_adds_losses(),
        "adam",
        "mse",
        accumulation=Accumulation(micro_batch_size=3),
    )
    options |= {"epochs": 2, "verbose": 0, "validation_data": data}
    return trainer, trainer.fit(data, **options).history


@pytest.fixture(scope="module")
def unbroken():
    return fit_with_other_losses()


@OF_AN_UNUSED_LAYER
def test_logged_values_are_those_of_all_batches(unbroken):
    _, history = unbroken
    assert history["rows"] == history["val_rows"] == [36, 36]
    assert history["with_more"] == history["val_with_more"] == [18, 18]


@OF_AN_UNUSED_LAYER
@pytest.mark.parametrize("updates", [1, 2, 3, 4, 5, 7, 8])
def test_run_with_other_losses_goes_on_amid_an_epoch(
    updates, unbroken, tmp_path
):
    for limit in (updates, None):
        trainer, history = fit_with_other_losses(
            max_updates=limit,
            callbacks=[Checkpoint(tmp_path, Every(1, "updates"))],
            resume_from="auto",
        )
    assert_same_weights(trainer.model, unbroken[0].model, rtol=0, atol=0)
    assert history == unbroken[1]


@pytest.mark.parametrize("check_inputs", [False, True])
@pytest.mark.parametrize("way", ["whole", "sliced", "each"])
def test_batches_of_a_fit_may_have_other_parts(way, check_inputs):
    data = rows(6)
    data.insert(1, ({"x": X[:6], "added": X[6:]}, Y[:6]))
    data[2] = (*data[2], np.linspace(1, 2, 6, dtype="float32"))
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    for batch in data:
        model.train_on_batch(*batch)
    trainer = Trainer(
        make_model(),
        keras.optimizers.SGD(0.1),
        "mse",
        accumulation=ACCUMULATIONS[way][0],
    )
    history = trainer.fit(
        data,
        check_inputs=check_inputs,
        validation_data=data,
        verbose=0,
    )
    assert_same_weights(trainer.model, model)
    each = [model.test_on_batch(*batch) for batch in data]
    assert history.history["val_loss"] == pytest.approx([np.mean(each)])


def test_input_that_is_left_out_trains_inside_fit(by_keras):
    model = make_model()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    callbacks = [GradientAccumulation(steps=2)]
    model.fit(WITHOUT, Y, batch_size=2, epochs=2, callbacks=callbacks, **ORDER)
    assert_same_weights(model, by_keras)
