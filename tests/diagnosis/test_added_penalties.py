"""Claims about penalties on weights that layers give to `add_loss`.

A bare scalar that does not depend on data counts as it is, whatever it is said
to be averaged over; that it does not is what a trial has to show.
"""

import warnings

import numpy as np
import pytest

from accumtrainer import Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")

layers = keras.layers
X = np.random.default_rng(0).normal(size=[22, 5]).astype("float32")
Y = X[:, :3] ** 2

by_both = pytest.mark.parametrize("by", ["Trainer", "GradientAccumulation"])


class Penalized(layers.Layer):
    """Adds a penalty on its kernel, which begins as some one number."""

    def __init__(self, begin="ones", **options):
        super().__init__(**options)
        self._begin = begin

    def build(self, shape):
        self.kernel = self.add_weight(shape=(8, 3), initializer=self._begin)

    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(self.kernel)))
        return ops.matmul(x, self.kernel)


class Coupling(Penalized):
    """Adds before that what couples examples."""

    def call(self, x):
        self.add_loss(ops.sum(ops.square(ops.mean(x, axis=0))))
        return super().call(x)


class Subclassed(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.hidden = layers.Dense(8)
        self.layer = layer

    def call(self, x):
        return self.layer(self.hidden(x))


def make_model(layer):
    keras.utils.set_random_seed(0)
    model = Subclassed(layer)
    model(X[:1])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


def train(model, by, k=4, x=X):
    """Train for two epochs of one update each; of k = 4 the last part has 4."""
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    options["batch_size"] = 6 if k == 4 else 22
    if by == "Trainer":
        Trainer(model, accumulation=k).fit(x, Y, **options)
    elif by == "GradientAccumulation":
        model.fit(x, Y, callbacks=[GradientAccumulation(k)], **options)
    else:
        model.fit(x, Y, **options)
    return model.get_weights()


@by_both
@pytest.mark.parametrize(
    ("k", "begin"), [(1, "ones"), (4, "ones"), (4, "zeros")]
)
def test_penalty_counts_once_per_update_with_a_warning(k, begin, by):
    expected = train(make_model(Penalized(begin)), "Keras", k=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "A loss should say")
        weights = train(make_model(Penalized(begin, name="layer")), by, k)
    for one, two in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (k > 1)
    for message in messages:
        assert "from add_loss of layer (Penalized)." in message
        assert "it is the same whatever the data" in message
        assert f"Say {by}(denominator='samples') to state that" in message


def test_penalty_does_not_hide_what_its_layer_adds_else():
    with pytest.raises(ValueError, match="must say what it was") as caught:
        train(make_model(Coupling(name="layer")), "Trainer")
    assert "from add_loss of layer (Coupling)." in str(caught.value)
    assert "couples examples" in str(caught.value)


def test_penalty_is_not_told_from_others_by_data_that_are_alike():
    with pytest.raises(ValueError, match="must say what it was") as caught:
        train(make_model(Penalized()), "Trainer", x=np.ones_like(X))
    assert "A trial" not in str(caught.value)
    assert "or a penalty on weights" in str(caught.value)
