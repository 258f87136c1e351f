"""Claims about what layers, losses and optimizers keep, and a user changes.

Keras runs their Python code in every step on PyTorch, and sees it.
"""

import array
import collections
import dataclasses
import functools
import threading
import weakref

import numpy as np
import pytest

from accumtrainer import Accumulation, Callback, Trainer
from accumtrainer.keras_api import BACKEND, keras

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

import torch
from samples import HOW, X, Y

from accumtrainer.steps.torch import programs

layers = keras.layers


class Plain:
    """An object as people write it, which computes with a number."""

    # As if it came with a package of its own.
    __module__ = "somewhere.else"

    def __init__(self):
        self.factor = 1.0

    def __call__(self, x):
        return self.factor * x

    def squared(self, y, y_pred):
        return self.factor * keras.ops.mean((y - y_pred) ** 2, -1)


@dataclasses.dataclass(slots=True)
class Slots:
    """An object without a dict of attributes."""

    factor: float = 1.0


class Watching(Callback):
    """A callback that keeps a number beside what its base keeps."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0


class Boxed(list):
    """A list with attributes."""


class Reading(layers.Layer):
    """Multiplies by what is read from an object that it keeps."""

    def __init__(self, kept, read, **options):
        super().__init__(**options)
        self.read = functools.partial(read, kept)
        self.kept = kept

    def call(self, x):
        return x * self.read()


def set_factor(kept):
    kept.factor = 2.0


def factor_of(kept):
    return kept.factor


def set_first(kept):
    kept[0] = 2


def first_of(kept):
    return kept[0]


def make_function():
    return lambda: None


def make_boxed():
    boxed = Boxed()
    boxed.factor = 1.0
    return (boxed,)  # Keras would make a list of its own of it


ALIVE = []
"""What others have weak references to."""


def make_weak_reference():
    ALIVE.append(Plain())
    return weakref.ref(ALIVE[-1])


def array_of(one):
    """Put an object into an array."""
    made = np.empty(1, object)
    made[0] = one
    return made


KEPT = {
    "object": (Plain, factor_of, set_factor),
    "slots": (Slots, factor_of, set_factor),
    "method": (
        lambda: Plain().__call__,
        lambda kept: kept(1.0),
        lambda kept: set_factor(kept.__self__),
    ),
    "function": (
        make_function,
        lambda kept: vars(kept).get("factor", 1.0),
        set_factor,
    ),
    "partial": (
        lambda: functools.partial(Plain(), 1.0),
        lambda kept: kept(),
        lambda kept: set_factor(kept.func),
    ),
    "user dict": (
        lambda: collections.UserDict({0: 1}),
        first_of,
        set_first,
    ),
    "chain": (lambda: collections.ChainMap({0: 1}), first_of, set_first),
    "array": (lambda: array.array("f", [1]), first_of, set_first),
    "bytes": (lambda: bytearray([1]), first_of, set_first),
    "array of objects": (
        lambda: array_of(Plain()),
        lambda kept: kept[0].factor,
        lambda kept: set_factor(kept[0]),
    ),
    "list with attributes": (
        make_boxed,
        lambda kept: kept[0].factor,
        lambda kept: set_factor(kept[0]),
    ),
    "callback": (Watching, factor_of, set_factor),
    "weak reference": (
        make_weak_reference,
        lambda kept: kept().factor,
        lambda kept: set_factor(kept()),
    ),
    "event": (
        threading.Event,
        lambda kept: 2.0 if kept.is_set() else 1.0,
        lambda kept: kept.set(),
    ),
    **{
        f"tensor, {name}": (lambda: torch.ones(()), read, torch.Tensor.zero_)
        for name, read in {
            "scaled": lambda kept: kept * 2.0,
            "of another dtype": lambda kept: kept.to(torch.float64),
            "looked at": lambda kept: 1.0 if kept + 0.0 > 0 else 2.0,
        }.items()
    },
    "none": (
        lambda: collections.UserDict({0: None}),
        lambda kept: 1.0 if kept[0] is None else 2.0,
        lambda kept: kept.update({0: False}),
    ),
}


@pytest.mark.parametrize("kind", KEPT)
def test_next_call_reads_what_a_layer_keeps(kind):
    make, read, change = KEPT[kind]
    kept = make()
    model = keras.Sequential(
        [keras.Input([6]), Reading(kept, read), layers.Dense(3)]
    )
    trainer = Trainer(model, "sgd", "mse")
    trainer.predict(X, **HOW)
    change(kept)
    expected = keras.ops.convert_to_numpy(model(X))
    found = trainer.predict(X, **HOW)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class OwnLoss(keras.losses.Loss):
    """A loss with a factor."""

    factor = 1.0

    def call(self, y, y_pred):
        return self.factor * keras.ops.mean((y - y_pred) ** 2, -1)


class OwnOptimizer(keras.optimizers.SGD):
    """An optimizer with a factor."""

    factor = 1.0

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(self.factor * gradient, variable, learning_rate)


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that a factor changes."""

    factor = 1.0

    def __call__(self, step):
        return 0.1 * self.factor


class OwnRegularizer(keras.regularizers.Regularizer):
    """A penalty with a factor."""

    factor = 1.0

    def __call__(self, x):
        return self.factor * keras.ops.sum(x**2)


PENALTY = 1.0


def penalized_by_global(y, y_pred):
    return PENALTY * keras.ops.mean((y - y_pred) ** 2, -1)


def penalized_by_closure(kept):
    return lambda y, y_pred: kept.squared(y, y_pred)


def set_global(kept, monkeypatch):
    monkeypatch.setitem(globals(), "PENALTY", 2.0)


OWN = {
    "loss": (OwnLoss, lambda own: {"loss": own}),
    "optimizer": (
        lambda: OwnOptimizer(0.1),
        lambda own: {"optimizer": own},
    ),
    "schedule": (
        OwnSchedule,
        lambda own: {"optimizer": keras.optimizers.SGD(own)},
    ),
    "regularizer": (OwnRegularizer, lambda own: {"regularizer": own}),
    "activation": (Plain, lambda own: {"activation": own}),
    "method": (Plain, lambda own: {"loss": own.squared}),
    "closure": (Plain, lambda own: {"loss": penalized_by_closure(own)}),
    "global": (Plain, lambda own: {"loss": penalized_by_global}),
}


@pytest.mark.parametrize("kind", OWN)
def test_next_fit_computes_with_objects_as_they_are(kind, monkeypatch):
    def train(by_keras):
        monkeypatch.setitem(globals(), "PENALTY", 1.0)
        keras.utils.set_random_seed(0)
        make, options_of = OWN[kind]
        own = make()
        options = options_of(own)
        model = keras.Sequential(
            [
                keras.Input([6]),
                layers.Dense(
                    3,
                    activation=options.get("activation"),
                    kernel_regularizer=options.get("regularizer"),
                ),
            ]
        )
        optimizer = options.get("optimizer") or keras.optimizers.SGD(0.1)
        loss = options.get("loss", "mse")
        trains = model
        if by_keras:
            model.compile(optimizer, loss)
        else:
            trains = Trainer(
                model,
                optimizer,
                loss,
                accumulation=Accumulation(micro_batch_size=4),
            )
        trains.fit(X, Y, **HOW)
        before = model.get_weights()
        change = (
            set_global if kind == "global" else lambda own, _: set_factor(own)
        )
        change(own, monkeypatch)
        logs = trains.fit(X, Y, **HOW).history["loss"]
        return logs, before, model.get_weights()

    expected, found = train(True), train(False)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for one, other in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert not np.allclose(found[1][0], found[2][0])


@pytest.mark.parametrize("is_later", [False, True])
def test_autocast_around_a_fit_is_that_of_keras(is_later):
    def autocast(is_on):
        # PyTorch's own memory of cast weights would outlast an update.
        return torch.autocast(
            "cpu", torch.bfloat16, enabled=is_on, cache_enabled=False
        )

    def train(trains, model):
        logs = []
        for is_on in [not is_later, is_later]:
            with autocast(is_on):
                logs += trains.fit(X, Y, **HOW).history["loss"]
        return logs, model.get_weights()

    def make_model():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input([6]), layers.Dense(5, "tanh"), layers.Dense(3)]
        )

    model = make_model()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    expected = train(model, model)
    model = make_model()
    trainer = Trainer(
        model,
        keras.optimizers.SGD(0.1),
        "mse",
        accumulation=Accumulation(micro_batch_size=4),
    )
    found = train(trainer, model)
    np.testing.assert_allclose(found[0], expected[0], rtol=5e-3)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


class AddingToFound(layers.Layer):
    """Adds to rows that are found."""

    def build(self, shape):
        self.dense = layers.Dense(shape[-1])
        self.dense.build(shape)

    def call(self, x):
        rows = torch.nonzero(x[:, 0] > 0).squeeze(-1)
        return x.index_add(0, rows, self.dense(x[rows]))


# Or else the warning would keep what gives it from being recorded.
@pytest.mark.filterwarnings("ignore:Raw SymInt value")
def test_rows_that_are_found_run_in_every_call():
    model = keras.Sequential(
        [keras.Input([6]), AddingToFound(), layers.Dense(3)]
    )
    trainer = Trainer(model, "sgd", "mse")
    for x in (X, -X):
        expected = keras.ops.convert_to_numpy(model(x))
        found = trainer.predict(x, **HOW)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    loss = trainer.evaluate(X, Y, **HOW)
    np.testing.assert_allclose(
        trainer.fit(X, Y, **HOW).history["loss"], loss, rtol=1e-5
    )


MADE_IN_CALL = {
    "generator": lambda x: keras.random.dropout(
        x, 0.5, seed=keras.random.SeedGenerator(3)
    ),
    "dropout": lambda x: layers.Dropout(0.5, seed=1)(x, training=True),
    "normalization": lambda x: layers.LayerNormalization()(x),
}


@pytest.mark.parametrize("kind", MADE_IN_CALL)
def test_variables_made_in_every_call_do_not_record_for_ever(kind, monkeypatch):
    begun, record = [], programs._Recorder.__call__

    def note(*given):
        begun.append(1)
        assert len(begun) < 20
        return record(*given)

    monkeypatch.setattr(programs._Recorder, "__call__", note)
    layer = layers.Lambda(MADE_IN_CALL[kind])
    model = keras.Sequential([keras.Input([6]), layer, layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    found, expected = (
        one.fit(X, Y, shuffle=False, **HOW).history["loss"]
        for one in (Trainer(model), model)
    )
    assert len(begun) < 20
    assert found == pytest.approx(expected)
