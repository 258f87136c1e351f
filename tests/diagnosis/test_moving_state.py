"""Claims about the notes on state that moves once per micro-batch."""

import numpy as np
import pytest

from accumtrainer import Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")

layers = keras.layers
X = np.random.default_rng(0).normal(size=[16, 5]).astype("float32")
Y = X[:, :3]


class Centers(layers.Layer):
    """Keeps where its inputs have been, in a weight that is not trained."""

    def build(self, shape):
        self.center = self.add_weight(shape=shape[-1:], trainable=False)

    def call(self, x, training=False):
        if training:
            self.center.assign(0.9 * self.center + 0.1 * ops.mean(x, axis=0))
        return x


def make_model(*middle):
    return keras.Sequential([keras.Input([5]), *middle, layers.Dense(3)])


def notes(capsys, model, k, by, verbose=2):
    fitting = {"batch_size": 4, "verbose": verbose}
    if by == "Trainer":
        trainer = Trainer(model, optimizer="sgd", loss="mse", accumulation=k)
        trainer.fit(X, Y, **fitting)
    else:
        model.compile("sgd", "mse")
        model.fit(X, Y, callbacks=[GradientAccumulation(k)], **fitting)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("note: ")]


by_both = pytest.mark.parametrize("by", ["Trainer", "GradientAccumulation"])


@by_both
def test_layers_that_write_in_every_forward_pass_are_noted(capsys, by):
    model = make_model(
        layers.SpectralNormalization(layers.Dense(5), name="spectral"),
        Centers(name="centers"),
        layers.Dropout(0.5, name="drop"),
    )
    (note,) = notes(capsys, model, 4, by)
    assert "spectral (SpectralNormalization), centers (Centers)" in note
    assert "moves 4 times per update" in note
    assert "drop" not in note


@by_both
def test_batch_statistics_are_noted_beside_them(capsys, by):
    model = make_model(layers.BatchNormalization(), Centers(name="centers"))
    first, second = notes(capsys, model, 2, by)
    assert "BatchNormalization" in first
    assert "moves its averages 2 times per update" in first
    assert "what centers (Centers) keeps" in second


@by_both
def test_nothing_is_noted_where_nothing_moves_or_nobody_listens(capsys, by):
    assert not notes(capsys, make_model(layers.Dropout(0.5)), 4, by)
    assert not notes(capsys, make_model(Centers()), 1, by)
    assert not notes(capsys, make_model(Centers()), 4, by, verbose=0)
