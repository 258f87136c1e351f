"""Variables of one path: layers of one name in models built apart."""

import numpy as np
import pytest

from accumtrainer import Trainer
from accumtrainer.callbacks import KeepGradientNorms, KeepGradients
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]

X = np.random.default_rng(0).normal(1.0, size=[8, 2]).astype("float32")
DATA = [X, 2 * X], [X[:, :1], X[:, :1]]


class Centered(keras.layers.Layer):
    """Couples the examples of a batch."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


def make_tower(name, *layers):
    inputs = outputs = keras.Input([2])
    for layer in [*layers, keras.layers.Dense(1, name="hidden")]:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs, name=name)


def make_trainer(cls=Trainer):
    keras.utils.set_random_seed(0)
    inputs = [keras.Input([2]), keras.Input([2])]
    towers = [make_tower("user", Centered()), make_tower("item")]
    outputs = [t(x) for t, x in zip(towers, inputs, strict=True)]
    model = keras.Model(inputs, outputs)
    assert len({v.path for v in model.trainable_variables}) == 2
    return cls(model, optimizer="sgd", loss="mse", accumulation=4)


def test_each_is_compared_with_its_own():
    report = make_trainer().check_equivalence(DATA)
    assert len(report.errors) == 4
    assert not report.is_exact


@pytest.mark.parametrize("cls", [KeepGradients, KeepGradientNorms])
def test_gradients_of_each_are_kept(cls):
    trainer = make_trainer(cls)
    trainer.fit(*DATA, batch_size=2, verbose=0)
    norms = [float(norm) for norm in trainer.kept_norms().values()]
    assert len(set(norms)) == 4 and min(norms) > 0
