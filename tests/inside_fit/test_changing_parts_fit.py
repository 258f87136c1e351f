"""Data that change their parts amid one `Model.fit`, accumulated inside it."""

import numpy as np
import pytest
from accumulating import executions
from keras_core_gaps import keras_3_only
from quickest import JIT_COMPILE

from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, tree

pytestmark = [
    # Of variables that some batches leave alone.
    pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning"),
    keras_3_only("has a fit of its own kind, which is refused"),
    pytest.mark.skipif(
        BACKEND == "tensorflow",
        reason="fit of TensorFlow takes batches of one structure alone",
    ),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed"),
]

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class WithExtra(keras.Model):
    """Uses a second part where there is one, and adds a loss then."""

    def __init__(self):
        super().__init__()
        self.always = keras.layers.Dense(1)
        self.sometimes = keras.layers.Dense(1, activity_regularizer="l2")
        self.always.build([None, 3])
        self.sometimes.build([None, 3])
        self.built = True

    def call(self, x):
        outputs = self.always(x["x"])
        return outputs + self.sometimes(x["z"]) if "z" in x else outputs


def make():
    keras.utils.set_random_seed(0)
    model = WithExtra()
    optimizer = keras.optimizers.Adam(0.05)
    model.compile(optimizer, "mse", jit_compile=JIT_COMPILE)
    return model


def batches(with_extra, samples=4):
    """List batches; those whose index is in `with_extra` have both parts."""
    parts = [slice(i, i + samples) for i in range(0, len(X), samples)]
    return [
        ({"x": X[part], **({"z": X[part]} if i in with_extra else {})}, Y[part])
        for i, part in enumerate(parts)
    ]


class Data(keras.utils.PyDataset):
    """Yields batches as they are."""

    def __init__(self, listed):
        super().__init__()
        self.listed = listed

    def __len__(self):
        return len(self.listed)

    def __getitem__(self, index):
        return self.listed[index]


def fit(model, listed, *callbacks, **options):
    arguments = {"verbose": 0, "shuffle": False, "callbacks": list(callbacks)}
    return model.fit(Data(listed), **arguments, **options).history


LATE = (4, 5, 6, 7)
NOW_AND_THEN = (2, 3, 6, 7)


@pytest.mark.parametrize("steps_per_execution", executions(1, 3, 8))
@pytest.mark.parametrize("with_extra", [LATE, NOW_AND_THEN])
def test_parts_that_come_amid_a_fit_are_trained_as_in_big_batches(
    with_extra, steps_per_execution
):
    model, plain = make(), make()
    model.steps_per_execution = steps_per_execution
    listed = batches(with_extra)
    fit(model, listed, GradientAccumulation(2), epochs=2)
    pairs = zip(listed[::2], listed[1::2], strict=True)
    joined = [
        tree.map_structure(lambda *parts: np.concatenate(parts), *pair)
        for pair in pairs
    ]
    fit(plain, joined, epochs=2)
    for one, other in zip(
        model.get_weights(), plain.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("with_extra", [LATE, NOW_AND_THEN])
def test_losses_of_an_epoch_are_averaged_over_all_of_its_kinds(with_extra):
    listed = batches(with_extra)
    received = fit(make(), listed, GradientAccumulation(1), epochs=2)
    expected = fit(make(), listed, epochs=2)
    np.testing.assert_allclose(received["loss"], expected["loss"], rtol=1e-5)


def test_window_of_batches_with_other_losses_is_refused_and_fit_goes_on():
    model = make()
    with pytest.raises(ValueError, match="amid a window of 2"):
        fit(model, batches((3, 4, 5, 6, 7)), GradientAccumulation(2))
    other = make()
    fit(other, batches(())[:2], GradientAccumulation(2))
    for one, another in zip(
        model.get_weights(), other.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, another, atol=1e-6)
    fit(model, batches(LATE), GradientAccumulation(2))
