"""Claims about layers and hooks that change tensors of PyTorch in place."""

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

import torch
from recorded import names_of, note_graphs

layers = keras.layers
X = np.random.default_rng(0).normal(size=(12, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(12, 3)).astype("float32")


class Doubling(layers.Layer):
    """Doubles what it is given, in place; sums of rows may be masked."""

    def __init__(self, masks=False):
        super().__init__()
        self.supports_masking = True
        self.masks = masks

    def compute_mask(self, inputs, mask=None):
        return inputs[:, 0] > 0 if self.masks else None

    def call(self, inputs):
        return inputs.mul_(2.0)


class Counting(layers.Layer):
    """Adds up what it is given, in the memory of a variable."""

    def build(self, shape):
        self.total = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False
        )

    def call(self, inputs):
        with torch.no_grad():
            self.total.value.add_(inputs.sum(0))
        return inputs


class Centering(layers.Layer):
    """Assigns to a variable what depends on the inputs, and reads it."""

    def __init__(self, trainable=False):
        super().__init__()
        self.is_trained = trainable

    def build(self, shape):
        self.center = self.add_weight(
            shape=shape[1:], initializer="ones", trainable=self.is_trained
        )

    def call(self, inputs):
        mean = ops.mean(inputs, axis=0)
        self.center.assign(0.9 * self.center + 0.1 * mean)
        return inputs * (1.5 - self.center)


def make_model(*makers):
    keras.utils.set_random_seed(3)
    more = [make() for make in makers]
    return keras.Sequential([keras.Input([5]), *more, layers.Dense(3)])


def fit(trainer, x=X, y=Y, **options):
    trainer.fit(
        x, y, batch_size=6, epochs=2, shuffle=False, verbose=0, **options
    )


def train(model, *, x=X, y=Y, trainer_type=Trainer, micro_batch_size=2, **kw):
    trainer = trainer_type(
        model,
        optimizer=keras.optimizers.SGD(0.1),
        **{"loss": "mse"} | kw,
        accumulation=Accumulation(micro_batch_size=micro_batch_size),
    )
    fit(trainer, x, y)
    return trainer


def fit_plainly(model, y=Y, **options):
    model.compile(keras.optimizers.SGD(0.1), **{"loss": "mse"} | options)
    fit(model, y=y)
    return model


def assert_close(model, other):
    weights = zip(model.get_weights(), other.get_weights(), strict=True)
    for one, two in weights:
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


run_eagerly = pytest.mark.parametrize(
    "run_eagerly", [False, True], ids=["recorded", "eager"]
)


@run_eagerly
def test_inputs_that_a_layer_changes_are_changed_once(use_plan, run_eagerly):
    use_plan("streamed")
    x = X.copy()
    trainer = train(make_model(Doubling), x=x, run_eagerly=run_eagerly)
    plain = fit_plainly(make_model(Doubling))
    assert_close(trainer.model, plain)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_allclose(
        trainer.evaluate(x, Y, verbose=0),
        plain.evaluate(x, Y, verbose=0),
        rtol=1e-5,
    )


@run_eagerly
def test_targets_that_a_loss_changes_are_changed_once(run_eagerly):
    def loss(y, outputs):
        return torch.mean(torch.square(y.mul_(2.0) - outputs), dim=-1)

    y = Y.copy()
    options = {"y": y, "loss": loss}
    trainer = train(make_model(), run_eagerly=run_eagerly, **options)
    assert_close(trainer.model, fit_plainly(make_model(), loss=loss))
    np.testing.assert_array_equal(y, Y)


@run_eagerly
@pytest.mark.parametrize("plan", ["streamed", "fused"])
def test_measuring_denominators_changes_no_inputs(use_plan, plan, run_eagerly):
    use_plan(plan)

    def make():
        keras.utils.set_random_seed(3)
        inputs = keras.Input([5])
        doubled = Doubling(masks=True)(inputs)
        outputs = [layers.Dense(3)(doubled), layers.Dense(3)(doubled)]
        return keras.Model(inputs, outputs)

    y = {"y": [Y, Y], "loss": ["mse", "mae"]}
    trainer = train(make(), run_eagerly=run_eagerly, **y)
    assert_close(trainer.model, fit_plainly(make(), **y))


@run_eagerly
def test_variable_that_is_changed_in_place_counts_no_trial(run_eagerly):
    trainer = train(make_model(Counting), run_eagerly=run_eagerly)
    total = trainer.model.layers[0].total
    np.testing.assert_allclose(total, 2 * X.sum(0), rtol=1e-5, atol=1e-5)


@run_eagerly
def test_variable_that_is_changed_in_place_is_put_back(run_eagerly):
    x = X.copy()
    x[0] = np.inf
    trainer = train(make_model(Counting), x=x, run_eagerly=run_eagerly)
    assert trainer.progress.skipped_updates == 2
    total = trainer.model.layers[0].total
    np.testing.assert_allclose(total, 2 * X[6:].sum(0), rtol=1e-5, atol=1e-5)


def test_tracked_variable_is_changed_in_place_once_per_update():
    class Teaching(Trainer):
        def __init__(self, model, **options):
            super().__init__(model, **options)
            self.updates = self.track(keras.Variable(0.0, trainable=False))

        def after_apply(self, info):
            self.updates.value.add_(1.0)

    trainer = train(make_model(), trainer_type=Teaching)
    assert float(trainer.updates.value) == trainer.progress.updates == 4


@run_eagerly
@pytest.mark.parametrize(
    "make_layer",
    [
        Centering,
        lambda: Centering(trainable=True),
        lambda: layers.SpectralNormalization(layers.Dense(5)),
    ],
    ids=["state", "weight", "spectral"],
)
def test_what_is_assigned_is_differentiated_as_by_keras(
    make_layer, run_eagerly
):
    trainer = train(
        make_model(make_layer), micro_batch_size=6, run_eagerly=run_eagerly
    )
    assert_close(trainer.model, fit_plainly(make_model(make_layer)))


class Keeping(layers.Layer):
    """Assigns what it computes to two variables."""

    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def build(self, shape):
        zeros = {"initializer": "zeros", "trainable": False}
        self.kernel = self.add_weight(shape=(5, 5))
        self.one = self.add_weight(shape=(5, 5), **zeros)
        self.other = self.add_weight(shape=(5, 5), **zeros)

    def call(self, inputs, training=False):
        outputs = inputs @ self.kernel.value
        if training:
            self.keep(self, outputs.detach().T @ inputs / 100)
        return outputs @ self.one.value.view(-1).view(5, 5) + outputs


def change_the_source(layer, product):
    layer.one.assign(product)
    product.mul_(0.5)
    layer.other.assign(product)


def change_the_variable(layer, product):
    layer.one.assign(product)
    with torch.no_grad():
        layer.one.value.mul_(0.5)
    layer.other.assign(product)


def assign_one_to_the_other(layer, product):
    layer.one.assign(product)
    layer.other.assign(layer.one)
    with torch.no_grad():
        layer.one.value.mul_(0.5)


def assign_what_lies_otherwise(layer, product):
    layer.one.assign(product.T)


@run_eagerly
@pytest.mark.parametrize(
    "keep",
    [
        change_the_source,
        change_the_variable,
        assign_one_to_the_other,
        assign_what_lies_otherwise,
    ],
)
def test_variables_have_copies_of_what_they_are_assigned(keep, run_eagerly):
    def make():
        return make_model(lambda: Keeping(keep))

    ours = train(make(), micro_batch_size=6, run_eagerly=run_eagerly)
    assert_close(ours.model, fit_plainly(make()))


def test_copies_that_nobody_changes_are_not_made():
    def is_copied(function):
        return "clone" in names_of(function, torch.ones(3))

    assert not is_copied(lambda given: [given[0].clone() + 1])
    assert is_copied(lambda given: [given[0].clone().mul_(2)])
    assert is_copied(lambda given: [given[0].clone()[1:]])
    assert is_copied(lambda given: [given[0].clone() + given[0].add_(1)])


class DoublingRows(layers.Layer):
    """Doubles a copy by what may be a view of it, or another copy."""

    def call(self, inputs):
        copied = inputs.clone()
        copied.reshape(-1).mul_(2.0)
        return copied


def turned(x):
    return np.ascontiguousarray(x.T).T


@pytest.mark.parametrize(
    "layouts",
    [(turned, np.copy), (np.copy, turned)],
    ids=["turned first", "turned later"],
)
@pytest.mark.parametrize("make_batch", [np.asarray, torch.from_numpy])
def test_batches_may_lie_otherwise_than_those_before(
    monkeypatch, layouts, make_batch
):
    def batches(layouts):
        for lay_out in layouts:
            yield make_batch(lay_out(X[:6])), Y[:6]

    def fit(layouts):
        model = make_model(DoublingRows)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(
            batches(layouts),
            steps_per_epoch=6,
            shuffle=False,
            verbose=0,
            callbacks=[GradientAccumulation(3)],
        )
        return model

    recorded = note_graphs(monkeypatch)
    expected = fit([np.copy] * 6)
    once = len(recorded)
    ours = fit([layout for layout in layouts for _ in range(3)])
    assert len(recorded) == 2 * once > 0
    assert_close(ours, expected)
