"""Claims about what layers and metrics keep for themselves on PyTorch.

Training begins with a trial, and records what it runs: neither may show.
"""

import array
import collections
import types

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

import torch
from recorded import note_graphs

layers = keras.layers
X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(12, 3)).astype("float32")
HOW = {"batch_size": 12, "epochs": 3, "shuffle": False, "verbose": 0}


class Keeping(layers.Layer):
    """Adds to what it keeps, and to its inputs what it has kept so far."""

    def build(self, shape):
        self.begin()

    def call(self, x, training=False):
        kept = self.kept()
        if training:
            self.keep(1.0 + kept)
        return x + 0.1 * kept


class AsBuffer(Keeping):
    def begin(self):
        self.register_buffer("sum", torch.zeros(()), persistent=False)

    def kept(self):
        return self.sum

    def keep(self, value):
        self.sum = value


class InDict(Keeping):
    def begin(self):
        self.sums = {"one": torch.zeros(())}

    def kept(self):
        return self.sums["one"]

    def keep(self, value):
        self.sums["one"] = value


class InNewList(Keeping):
    def begin(self):
        self.sums = [torch.zeros(())]

    def kept(self):
        return self.sums[-1]

    def keep(self, value):
        self.sums = [*self.sums, value]


class InQueue(Keeping):
    def begin(self):
        self.sums = collections.deque([torch.zeros(())], maxlen=2)

    def kept(self):
        return self.sums[-1]

    def keep(self, value):
        self.sums.append(value)


class AsNumber(Keeping):
    def begin(self):
        self.sum = 0.0

    def kept(self):
        return self.sum

    def keep(self, value):
        self.sum = value


class CountInDict(AsNumber):
    def begin(self):
        self.sums = {"one": 0.0}

    def kept(self):
        return self.sums["one"]

    def keep(self, value):
        self.sums["one"] = value


class CountInList(AsNumber):
    def begin(self):
        self.sums = []

    def kept(self):
        return float(len(self.sums))

    def keep(self, value):
        self.sums.append(value)


def make_model(*more, **options):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input([4]), *more, layers.Dense(3)])
    model(X[:1])
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return model


def by_trainer(model):
    return Trainer(model).fit(X, Y, **HOW)


def by_trainer_eagerly(model):
    return Trainer(model, run_eagerly=True).fit(X, Y, **HOW)


def by_callback(model):
    return model.fit(X, Y, **HOW, callbacks=[GradientAccumulation(steps=1)])


EVERY_WAY = (by_trainer, by_trainer_eagerly, by_callback)


@pytest.mark.parametrize("train", EVERY_WAY)
@pytest.mark.parametrize("kind", [AsBuffer, InDict, InNewList, InQueue])
def test_trial_leaves_tensors_as_a_layer_has_kept_them(kind, train):
    expected = make_model(kind()).fit(X, Y, **HOW).history["loss"]
    found = train(make_model(kind())).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("train", EVERY_WAY)
@pytest.mark.parametrize("kind", [AsNumber, CountInDict, CountInList])
def test_layers_may_keep_numbers_of_their_own(kind, train):
    expected = make_model(kind()).fit(X, Y, **HOW).history["loss"]
    found = train(make_model(kind())).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


class Slot:
    """An object without a dict of attributes."""

    __slots__ = ("sum",)

    def __init__(self):
        self.sum = 0


def add_to_slot(kept):
    kept.sum += 1


def add_to_first(kept):
    kept[0] += 1


def add_within(kept):
    kept["more"]["one"] += 1


def add_to_locked(kept):
    kept.flags.writeable = True
    kept[0] += 1
    kept.flags.writeable = False


def replace_oldest(kept):
    kept[len(kept) + sum(kept)] = kept.popitem(last=False)[1] + 1


ANYTHING = {
    "array": (lambda: np.zeros(1), lambda kept: kept[0], add_to_first),
    "list of an array": (
        lambda: [np.zeros(1)],
        lambda kept: kept[0][0],
        lambda kept: add_to_first(kept[0]),
    ),
    "bytes": (lambda: bytearray(1), lambda kept: kept[0], add_to_first),
    "array of Python": (
        lambda: array.array("f", [0]),
        lambda kept: kept[0],
        add_to_first,
    ),
    "locked array": (lambda: np.zeros(1), lambda kept: kept[0], add_to_locked),
    "ordered dict": (
        lambda: collections.OrderedDict(enumerate([0.0, 1.0])),
        lambda kept: next(iter(kept.values())),
        replace_oldest,
    ),
    "slot": (Slot, lambda kept: kept.sum, add_to_slot),
    "dict in a dict": (
        lambda: {"more": {"one": 0}},
        lambda kept: kept["more"]["one"],
        add_within,
    ),
}


class InAnything(AsNumber):
    """Counts in what it is given."""

    def __init__(self, make, read, add):
        super().__init__()
        self.own, self.read, self.add = make(), read, add

    def begin(self):
        pass

    def kept(self):
        return float(self.read(self.own))

    def keep(self, value):
        self.add(self.own)


class AsScalarOfNumPy(AsNumber):
    def begin(self):
        self.sum = np.float32(0)


@pytest.mark.parametrize("train", EVERY_WAY)
@pytest.mark.parametrize("kind", [*ANYTHING, "scalar of NumPy"])
def test_layers_may_count_in_anything(kind, train):
    def make():
        if kind not in ANYTHING:
            return make_model(AsScalarOfNumPy())
        return make_model(InAnything(*ANYTHING[kind]))

    expected = make().fit(X, Y, **HOW).history["loss"]
    found = train(make()).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_layers_that_add_losses_are_recorded(monkeypatch):
    recorded = note_graphs(monkeypatch)
    by_trainer(make_model(layers.Dense(4, activity_regularizer="l2")))
    assert len(recorded) == 1


class OfClass(AsNumber):
    """Begins with what its class says."""

    sum = 0.0

    def begin(self):
        pass


class OfAllItsKind(OfClass):
    """Counts in its class."""

    def kept(self):
        return OfAllItsKind.sum

    def keep(self, value):
        OfAllItsKind.sum = value


class InAnObject(OfClass):
    """Counts in an object that it keeps."""

    def __init__(self):
        super().__init__()
        self.own = types.SimpleNamespace(sum=0.0)

    def kept(self):
        return self.own.sum

    def keep(self, value):
        self.own.sum = value


@pytest.mark.parametrize("train", EVERY_WAY)
@pytest.mark.parametrize("kind", [OfClass, OfAllItsKind, InAnObject])
def test_layers_may_count_wherever_they_like(kind, train, monkeypatch):
    monkeypatch.setattr(OfAllItsKind, "sum", 0.0)
    expected = make_model(kind()).fit(X, Y, **HOW).history["loss"]
    monkeypatch.setattr(OfAllItsKind, "sum", 0.0)
    found = train(make_model(kind())).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


class Growing:
    """Multiplies by how often it was called."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return self.calls * x


class GrowingLoss(keras.losses.Loss):
    calls = 0

    def call(self, y, y_pred):
        self.calls += 1
        return self.calls * ops.mean((y - y_pred) ** 2, -1)


class GrowingRegularizer(keras.regularizers.Regularizer):
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return self.calls * ops.sum(x**2)


class GrowingSGD(keras.optimizers.SGD):
    calls = 0

    def update_step(self, gradient, variable, learning_rate):
        self.calls += 1
        rate = self.calls * learning_rate
        super().update_step(gradient, variable, rate)


class Shrinking(keras.constraints.Constraint):
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * (1 - 0.01 * self.calls)


def growing_function(y, y_pred):
    growing_function.calls += 1
    return growing_function.calls * ops.mean((y - y_pred) ** 2, -1)


COUNTING = {
    "activation": lambda: {"activation": Growing()},
    "loss": lambda: {"loss": GrowingLoss()},
    "function": lambda: {"loss": growing_function},
    "regularizer": lambda: {"kernel_regularizer": GrowingRegularizer()},
    "optimizer": lambda: {"optimizer": GrowingSGD(0.01)},
    "constraint": lambda: {"kernel_constraint": Shrinking()},
}


@pytest.mark.parametrize("kind", COUNTING)
def test_what_counts_its_calls_counts_those_of_training(kind):
    def train(trainer_of):
        growing_function.calls = 0
        options = COUNTING[kind]()
        optimizer = options.pop("optimizer", keras.optimizers.SGD(0.0))
        loss = options.pop("loss", "mse")
        keras.utils.set_random_seed(0)
        layer = layers.Dense(3, **options)
        model = keras.Sequential([keras.Input([4]), layer])
        trains = trainer_of(model, optimizer, loss)
        counts = options | {"optimizer": optimizer, "loss": loss}
        counts = next(c for c in counts.values() if hasattr(c, "calls"))
        # From here on Keras, too, counts but the calls of its steps.
        trains.train_on_batch(X, Y)
        counts.calls = 0
        losses = [trains.train_on_batch(X, Y) for _ in range(4)]
        return [*map(float, losses), counts.calls], model.get_weights()

    def compiled(model, optimizer, loss):
        model.compile(optimizer, loss)
        return model

    (expected, weights), (found, others) = train(compiled), train(Trainer)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for one, other in zip(others, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


class Numbers(keras.metrics.Metric):
    """A mean of numbers of Python."""

    def __init__(self):
        super().__init__(name="own")
        self.total, self.count = 0.0, 0

    def update_state(self, y, y_pred, sample_weight=None):
        self.total += ops.sum(ops.abs(y - y_pred)).item()
        self.count += len(y)

    def result(self):
        return self.total / max(self.count, 1)

    def reset_state(self):
        self.total, self.count = 0.0, 0


class Listed(keras.metrics.Metric):
    """A mean of what it has collected."""

    def __init__(self):
        super().__init__(name="own")
        self.seen = []

    def update_state(self, y, y_pred, sample_weight=None):
        self.seen.append((y - y_pred).abs().detach())

    def result(self):
        return torch.cat(self.seen).mean() if self.seen else torch.zeros(())

    def reset_state(self):
        self.seen = []


@pytest.mark.parametrize("train", EVERY_WAY)
@pytest.mark.parametrize("kind", [Numbers, Listed])
def test_metrics_may_keep_numbers_of_their_own(kind, train):
    plain = make_model(metrics=[kind()])
    how = {**HOW, "batch_size": 4}
    expected = plain.fit(X, Y, **how).history["own"]
    model = make_model(metrics=[kind()])
    if train is by_callback:
        callbacks = [GradientAccumulation(steps=1)]
        history = model.fit(X, Y, **how, callbacks=callbacks).history
    else:
        trainer = Trainer(model, run_eagerly=train is by_trainer_eagerly)
        history = trainer.fit(X, Y, **how).history
        value = trainer.evaluate(X, Y, verbose=0, return_dict=True)["own"]
        other = model.evaluate(X, Y, verbose=0, return_dict=True)["own"]
        np.testing.assert_allclose(value, other, rtol=1e-5)
    np.testing.assert_allclose(history["own"], expected, rtol=1e-5)


@pytest.mark.parametrize("size", [4, 5])
def test_metrics_of_numbers_see_every_micro_batch(size):
    model = make_model(metrics=[Numbers()])
    plain = make_model(metrics=[Numbers()])
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=size))
    found = trainer.fit(X, Y, **HOW).history["own"]
    expected = plain.fit(X, Y, **HOW).history["own"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


calls = 0


def by_global(y, y_pred):
    global calls
    calls += 1
    return calls * ops.mean((y - y_pred) ** 2, -1)


def make_by_closure():
    own_calls = 0

    def by_closure(y, y_pred):
        nonlocal own_calls
        own_calls += 1
        return own_calls * ops.mean((y - y_pred) ** 2, -1)

    return by_closure


@pytest.mark.parametrize("make", [lambda: by_global, make_by_closure])
def test_functions_may_count_outside_of_themselves(make, monkeypatch):
    monkeypatch.setitem(globals(), "calls", 0)
    model = keras.Sequential([keras.Input([4]), layers.Dense(3)])
    trainer = Trainer(model, keras.optimizers.SGD(0.0), make())
    losses = [float(trainer.train_on_batch(X, Y)) for _ in range(4)]
    np.testing.assert_allclose(losses, losses[0] * np.arange(1, 5), rtol=1e-5)


class Forwards(layers.Layer):
    """Differentiates itself forwards."""

    def call(self, x):
        one = torch.ones_like(x)
        return torch.func.jvp(torch.tanh, (x,), (one,))[1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("train", EVERY_WAY)
def test_layer_may_differentiate_forwards(train):
    expected = make_model(Forwards()).fit(X, Y, **HOW).history["loss"]
    found = train(make_model(Forwards())).history["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
