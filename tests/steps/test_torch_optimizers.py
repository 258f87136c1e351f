"""Claims about optimizers of Keras that have one of `torch.optim`."""

import types

import numpy as np
import pytest

from accumtrainer import Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

import torch
from recorded import note_graphs

layers = keras.layers
X = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")


def make_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(3),
        ]
    )


@pytest.fixture
def recorded(monkeypatch):
    """List the programs that are recorded."""
    return note_graphs(monkeypatch)


class HandingOn(keras.optimizers.Optimizer):
    """Has an optimizer of PyTorch update parameters, by their `.grad`."""

    def build(self, variables):
        super().build(variables)
        self.inner = [torch.optim.Adam([v.value for v in variables])]

    def apply(self, gradients, trainable_variables=None):
        for variable, gradient in zip(
            self._trainable_variables, gradients, strict=True
        ):
            variable.value.grad = gradient
        self.inner[0].step()
        self.iterations.assign_add(1)


class Lazily(HandingOn):
    """Makes it where it first has something to update."""

    def build(self, variables):
        keras.optimizers.Optimizer.build(self, variables)
        self.inner = []

    def apply(self, gradients, trainable_variables=None):
        if not self.inner:
            values = [v.value for v in self._trainable_variables]
            self.inner.append(torch.optim.Adam(values))
        super().apply(gradients)


class AfterAssigning(Lazily):
    """Makes it of values that are soon no longer those of the variables."""

    def apply(self, gradients, trainable_variables=None):
        for variable in self._trainable_variables:
            variable.assign(0.9 * variable)
        super().apply(gradients)
        for variable in self._trainable_variables:
            variable.assign(0.9 * variable)


class ByHelper(HandingOn):
    """Keeps it in an object of its own."""

    def build(self, variables):
        super().build(variables)
        self.helper, self.inner = types.SimpleNamespace(made=self.inner), None

    def apply(self, gradients, trainable_variables=None):
        self.inner = self.helper.made
        super().apply(gradients)


class OfCopies(keras.optimizers.SGD):
    """Has an optimizer of PyTorch for other tensors, and keys of two kinds."""

    def build(self, variables):
        super().build(variables)
        self.names = {1: "one", "two": 2}
        copies = [v.value.detach().clone() for v in variables]
        self.copies = torch.optim.Adam(copies)


def test_optimizers_may_keep_one_of_torch_for_other_tensors():
    model = make_model()
    model.compile(OfCopies(0.1), "mse")
    trainer = Trainer(model)
    trainer.fit(X, X[:, :3], batch_size=12, verbose=0)
    assert trainer.progress.updates == 2


def rate_of_scheduler(model):
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    by = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
    return keras.optimizers.SGD(lambda: by.get_last_lr()[0])


class ByScheduler(keras.optimizers.schedules.LearningRateSchedule):
    """Makes a scheduler of PyTorch where it is first asked."""

    by = None

    def __call__(self, step):
        if self.by is None:
            inner = torch.optim.SGD([torch.zeros(1)], lr=0.05)
            self.by = torch.optim.lr_scheduler.LambdaLR(inner, lambda k: 1.0)
        return self.by.get_last_lr()[0]


class ByDummy(keras.optimizers.SGD):
    """Reads a number of an optimizer of PyTorch that it makes late."""

    dummy = None

    def update_step(self, gradient, variable, learning_rate):
        if self.dummy is None:
            self.dummy = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        rate = learning_rate * self.dummy.param_groups[0]["lr"]
        super().update_step(gradient, variable, rate)


FOR_A_NUMBER = {
    "rate of a scheduler": rate_of_scheduler,
    "schedule with a scheduler": lambda _: keras.optimizers.SGD(ByScheduler()),
    "number of a dummy": lambda _: ByDummy(0.1),
}


@pytest.mark.parametrize("kind", FOR_A_NUMBER)
def test_optimizers_may_read_a_number_of_one_of_torch(kind, recorded):
    def weights(by):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input([5]), layers.Dense(1)])
        model.compile(FOR_A_NUMBER[kind](model), "mse")
        for _ in range(2):
            by(model).train_on_batch(X, X[:, :1])
        return model.get_weights()

    expected = weights(lambda model: model)
    assert not recorded
    for one, other in zip(weights(Trainer), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert recorded


class OfMasters(keras.optimizers.Optimizer):
    """Has one of PyTorch update copies, which it makes late, and reads them."""

    inner = None

    def apply(self, gradients, trainable_variables=None):
        if self.inner is None:
            self.make()
        pairs = list(zip(self._trainable_variables, self.masters, strict=True))
        for (_, master), gradient in zip(pairs, gradients, strict=True):
            master.grad = gradient.detach().clone()
        self.inner.step()
        for variable, master in pairs:
            variable.assign(master.detach())
        self.iterations.assign_add(1)

    def make(self):
        values = [v.value.detach() for v in self._trainable_variables]
        self.masters = [torch.nn.Parameter(value.clone()) for value in values]
        self.inner = torch.optim.Adam(self.masters, lr=0.05)


class OfEarlyMasters(OfMasters):
    """Makes them as soon as it can."""

    def build(self, variables):
        super().build(variables)
        self.make()


class Stepping(keras.optimizers.SGD):
    """Steps a scheduler of PyTorch that says its learning rate."""

    def __init__(self, rate):
        inner = torch.optim.SGD([torch.zeros(1)], lr=rate)
        by = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        super().__init__(lambda: by.get_last_lr()[0])
        self.by = by

    def apply(self, gradients, trainable_variables=None):
        super().apply(gradients, trainable_variables)
        self.by.optimizer.step()
        self.by.step()


def scaled(model):
    by = rate_of_scheduler(model)
    return keras.optimizers.LossScaleOptimizer(by, initial_scale=4.0)


AS_IN_KERAS = {
    "copies made late": lambda _: OfMasters(0.1),
    "copies": lambda _: OfEarlyMasters(0.1),
    "scheduler stepped": lambda _: Stepping(0.1),
    "scheduler of a scaled one": scaled,
}


@pytest.mark.parametrize("by_callback", [False, True])
@pytest.mark.parametrize("kind", AS_IN_KERAS)
def test_optimizers_may_have_one_of_torch_as_in_keras(kind, by_callback):
    def weights(size, *callbacks, by=lambda model: model):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input([5]), layers.Dense(1)])
        model.compile(AS_IN_KERAS[kind](model), "mse")
        how = {"batch_size": size, "epochs": 2, "verbose": 0}
        by(model).fit(X, X[:, :1], callbacks=callbacks, shuffle=False, **how)
        return model.get_weights()

    if by_callback:
        ours = weights(4, GradientAccumulation(steps=2))
    else:
        ours = weights(8, by=Trainer)
    for one, other in zip(ours, weights(8), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("by_callback", [False, True])
@pytest.mark.parametrize("kind", [HandingOn, Lazily, AfterAssigning, ByHelper])
def test_optimizers_that_hand_gradients_to_torch_are_refused(
    kind, by_callback, run_eagerly
):
    model = make_model()
    model.compile(kind(0.01), "mse", run_eagerly=run_eagerly)
    how = {"batch_size": 12, "verbose": 0}
    before = model.get_weights()
    with pytest.raises(ValueError, match=f"{kind.__name__}, which .* Adam"):
        if by_callback:
            how["callbacks"] = [GradientAccumulation(steps=2)]
            model.fit(X, X[:, :3], **how)
        else:
            Trainer(model).fit(X, X[:, :3], **how)
    if issubclass(kind, Lazily):
        # It is there only once an update was made.
        with pytest.raises(ValueError, match=f"{kind.__name__}, which"):
            Trainer(model).fit(X, X[:, :3], batch_size=12, verbose=0)
        return
    for weight, one in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, one)
