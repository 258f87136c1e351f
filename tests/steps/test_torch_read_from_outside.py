"""Claims about what Python code of layers and losses reads from outside.

Keras runs that code in every step on PyTorch, and reads it anew.
"""

import contextlib
import functools
import types
import warnings

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer, WeightedLoss
from accumtrainer.keras_api import BACKEND, keras

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

import torch
from recorded import note_graphs
from samples import HOW, X, Y

from accumtrainer.steps.looks import Looks
from accumtrainer.steps.torch.looks import attributes_of
from accumtrainer.steps.torch.programs import Program

layers = keras.layers


class Settings:
    """Numbers as people write them down for a whole program."""

    factor = 1.0


FACTORS = {"factor": 1.0}
TENSOR = torch.ones(())
FROZEN = torch.nn.Parameter(torch.ones(()), requires_grad=False)


@pytest.fixture(autouse=True)
def factors_of_one():
    """Begin and end with the same numbers."""
    set_factors(1.0)
    yield
    set_factors(1.0)


def set_factors(value):
    Settings.factor = value
    FACTORS["factor"] = value
    TENSOR.fill_(value)
    FROZEN.data.fill_(value)


class Helper:
    """An object that lives as long as a call."""

    def factor(self):
        return Settings.factor


class Scaled(torch.autograd.Function):
    """A function with a derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = Settings.factor
        return x * ctx.factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


class ByProperty(layers.Layer):
    """Multiplies by what a property reads."""

    @property
    def factor(self):
        return Settings.factor

    def call(self, x):
        return x * self.factor


class ByStaticMethod(ByProperty):
    """Multiplies by what a static method reads."""

    @staticmethod
    def read():
        return FACTORS["factor"]

    def call(self, x):
        return x * self.read()


class ByClassMethod(ByStaticMethod):
    """Multiplies by what a class method reads."""

    @classmethod
    def read(cls):
        return Settings.factor


class OfKept(layers.Layer):
    """Multiplies by what is read from what it keeps."""

    def __init__(self, kept, read):
        super().__init__()
        self.kept, self.read = kept, read

    def call(self, x):
        return x * self.read(self.kept)


@torch.no_grad()
def factor_without_gradient():
    return Settings.factor


@contextlib.contextmanager
def factor_within():
    yield Settings.factor


@functools.lru_cache(maxsize=0)
def factor_cached():
    return Settings.factor


def scaled_within(x):
    with factor_within() as factor:
        return x * factor


READERS = {
    "decorated by torch": lambda: layers.Lambda(
        lambda x: x * factor_without_gradient()
    ),
    "context manager": lambda: layers.Lambda(scaled_within),
    "cached": lambda: layers.Lambda(lambda x: x * factor_cached()),
    "for each row": lambda: layers.Lambda(
        torch.vmap(lambda x: x * Settings.factor)
    ),
    "class": lambda: layers.Lambda(lambda x: x * Settings.factor),
    "helper": lambda: layers.Lambda(lambda x: x * Helper().factor()),
    "function with a derivative": lambda: layers.Lambda(Scaled.apply),
    "property": ByProperty,
    "static method": ByStaticMethod,
    "class method": ByClassMethod,
    "method of a dict": lambda: OfKept(FACTORS.get, lambda get: get("factor")),
    "proxy of a dict": lambda: OfKept(
        types.MappingProxyType(FACTORS), lambda kept: kept["factor"]
    ),
    "number in a tensor": lambda: OfKept(TENSOR, float),
    "number in a parameter": lambda: OfKept(FROZEN, float),
    "number in a tensor that decides": lambda: OfKept(
        TENSOR, lambda kept: 2.0 if kept > 1.5 else 1.0
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_next_call_computes_with_what_is_read_now(kind):
    check_next_call(READERS[kind](), lambda: set_factors(2.0))


def check_next_call(layer, change):
    model = keras.Sequential([keras.Input([6]), layer, layers.Dense(3)])
    trainer = Trainer(model, keras.optimizers.SGD(0.0), "mse")
    before = trainer.predict(X, **HOW)
    trainer.fit(X, Y, **HOW)
    change()
    with torch.no_grad():
        expected = keras.ops.convert_to_numpy(model(X))
    found = trainer.predict(X, **HOW)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(found, before)
    np.testing.assert_allclose(
        trainer.fit(X, Y, **HOW).history["loss"],
        np.mean((expected - Y) ** 2),
        rtol=1e-5,
    )


OTHER_NUMBERS = {
    "in place": lambda kept: kept.fill_(2.0),
    "through a view": lambda kept: kept.view(1).mul_(2.0),
    "through data": lambda kept: kept.data.fill_(2.0),
    "other memory": lambda kept: setattr(kept, "data", torch.tensor(2.0)),
    "swapped": lambda kept: torch.utils.swap_tensors(kept, torch.tensor(2.0)),
}


@pytest.mark.parametrize("how", OTHER_NUMBERS)
def test_number_in_a_tensor_is_read_by_what_was_recorded(how, monkeypatch):
    layer = OfKept(torch.ones(()), lambda kept: 2 * kept)
    check_next_call(layer, lambda: OTHER_NUMBERS[how](layer.kept))
    model = keras.Sequential([layer])
    trainer = Trainer(model, "sgd", "mse")
    trainer.predict(X, **HOW)
    graphs = note_graphs(monkeypatch)
    monkeypatch.setattr(Program, "_run_operations", None)
    layer.kept.fill_(3.0)
    np.testing.assert_allclose(trainer.predict(X, **HOW), 6 * X, rtol=1e-5)
    assert graphs == []


def squared_by_factor(y, y_pred):
    return Settings.factor * keras.ops.mean((y - y_pred) ** 2, -1)


@functools.wraps(keras.losses.mean_squared_error)
def named_as_of_keras(y, y_pred):
    return squared_by_factor(y, y_pred)


class OnlySometimes(keras.losses.Loss):
    """A loss with an attribute of a name that layers have too."""

    training = True

    def call(self, y, y_pred):
        factor = Settings.factor if self.training else 3.0
        return factor * keras.ops.mean((y - y_pred) ** 2, -1)


def set_factors_of(loss):
    set_factors(2.0)


def end_training(loss):
    loss.training = False


LOSSES = {
    "function": (lambda: squared_by_factor, set_factors_of, 2.0),
    "wraps": (lambda: named_as_of_keras, set_factors_of, 2.0),
    "class": (OnlySometimes, set_factors_of, 2.0),
    "attribute": (OnlySometimes, end_training, 3.0),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_next_fit_has_the_loss_as_it_is_now(kind):
    make, change, factor = LOSSES[kind]
    loss = make()
    model = keras.Sequential([keras.Input([6]), layers.Dense(3)])
    trainer = Trainer(
        model,
        keras.optimizers.SGD(0.0),
        loss,
        accumulation=Accumulation(micro_batch_size=4),
    )
    one = trainer.fit(X, Y, **HOW).history["loss"][0]
    change(loss)
    other = trainer.fit(X, Y, **HOW).history["loss"][0]
    assert other == pytest.approx(factor * one, rel=1e-5)


class NoneOrFalse(layers.Layer):
    """Doubles what is None."""

    kept = None

    def call(self, x):
        return 2 * x if self.kept is None else x


def test_false_is_told_from_none():
    layer = NoneOrFalse()
    layer.kept = None
    model = keras.Sequential([keras.Input([6]), layer])
    trainer = Trainer(model, "sgd", "mse")
    np.testing.assert_allclose(trainer.predict(X, **HOW), 2 * X)
    layer.kept = False
    np.testing.assert_allclose(trainer.predict(X, **HOW), X)


class Factored(keras.losses.Loss):
    """A loss with a factor, which it keeps twice over."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0
        self.factors = {f"factor {number}": 1.0 for number in range(1000)}

    def call(self, y, y_pred):
        factor = self.factor * self.factors["factor 7"]
        return factor * keras.ops.mean((y - y_pred) ** 2, -1)


CHANGES = {
    "attribute": lambda loss: setattr(loss, "factor", 2.0),
    "item": lambda loss: loss.factors.update({"factor 7": 2.0}),
}


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_epoch_end"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_callback_changes_is_that_of_the_next_call(change, moment):
    loss = Factored()
    model = keras.Sequential([keras.Input([6]), layers.Dense(3)])
    trainer = Trainer(model, keras.optimizers.SGD(0.0), loss)
    before = trainer.evaluate(X, Y, **HOW)
    callback = keras.callbacks.Callback()
    setattr(callback, moment, lambda *_, **__: CHANGES[change](loss))
    trainer.fit(
        X,
        Y,
        **HOW,
        epochs=2,
        validation_data=(X[:5], Y[:5]),
        callbacks=[callback],
    )
    after = [trainer.evaluate(X, Y, **HOW) for _ in range(2)]
    after += trainer.fit(X, Y, **HOW).history["loss"]
    assert after == pytest.approx([2 * before] * 3, rel=1e-5)


def test_numbers_of_which_python_makes_the_same_hash_are_told_apart():
    many = [0] * 200
    assert attributes_of([[*many, -1]]) != attributes_of([[*many, -2]])
    assert attributes_of([[*many, 0.0]]) != attributes_of([[*many, -0.0]])


def test_what_is_more_by_nothing_but_none_is_a_change():
    assert Looks([1, None]).change_since(Looks([1])) is not None
    assert Looks([1, None]).change_since(Looks([1, None])) is None


losses: list[float] = []


def own_mean(y, y_pred):
    return keras.losses.mean_squared_error(y, y_pred)


def keep_an_equal_number(loss):
    loss.factor = np.float32(1)


def keep_an_equal_array(loss):
    loss.mask = np.arange(3)


HABITS = {
    # The name is that of an attribute in `own_mean`, too.
    "logs in a list": (lambda: own_mean, lambda loss: losses.append(1.0)),
    "equal number": (Factored, keep_an_equal_number),
    "equal array": (Factored, keep_an_equal_array),
}


@pytest.mark.parametrize("habit", HABITS)
def test_what_makes_no_difference_is_not_recorded_anew(habit, monkeypatch):
    make, do = HABITS[habit]
    loss = make()
    model = keras.Sequential([keras.Input([6]), layers.Dense(3)])
    trainer = Trainer(model, "sgd", loss)
    do(loss)
    trainer.train_on_batch(X, Y)
    graphs = note_graphs(monkeypatch)
    for _ in range(3):
        do(loss)
        trainer.train_on_batch(X, Y)
    assert graphs == []


class Playing(Trainer):
    """Trains a model on what another one, which it sees, says of it."""

    def __init__(self, model, judge, **options):
        super().__init__(model, "adam", **options)
        self.judge = self.track(judge)

    def compute_loss(self, batch, info):
        judged = self.judge(self.model(batch.x, training=info.training))
        losses = keras.losses.mean_squared_error(batch.y, judged)
        return WeightedLoss(keras.ops.mean(losses), len(losses))


def test_trainers_that_see_each_others_models_do_not_record_on_and_on(
    monkeypatch,
):
    models = [
        keras.Sequential([keras.Input([3]), layers.Dense(3)]) for _ in range(2)
    ]
    pair = [Playing(*models), Playing(*reversed(models))]
    y = np.random.default_rng(0).normal(size=[len(X), 3]).astype("float32")

    def play():
        for trainer in pair:
            trainer.train_on_batch(y, y)

    # The other one's optimizer has its variables only after a first update.
    play()
    play()
    graphs = note_graphs(monkeypatch)
    play()
    assert graphs == []


class Experiment:
    """Holds a Trainer and its loss, and what people note beside."""

    steps: list[int] = []

    def __init__(self, **options):
        model = keras.Sequential([keras.Input([6]), layers.Dense(3)])
        self.factor, self.step, self.history = 1.0, 0, []
        self.trainer = Trainer(model, "sgd", self.loss, **options)

    def loss(self, y, y_pred):
        return self.factor * keras.ops.mean((y - y_pred) ** 2, -1)

    def update(self, do):
        do(self)
        self.trainer.train_on_batch(X, Y)


NOTES = {
    "Experiment.step": lambda e: setattr(e, "step", e.step + 1),
    "Experiment.history": lambda e: e.history.append(1.0),
    "Experiment.steps": lambda e: e.steps.append(1),
}


@pytest.mark.parametrize("what", NOTES)
def test_what_changes_all_the_time_is_named_and_not_recorded(what, monkeypatch):
    experiment = Experiment()
    for _ in range(4):
        experiment.update(NOTES[what])
    with pytest.warns(
        UserWarning, match=f"operation by operation.*Received: {what},"
    ):
        experiment.update(NOTES[what])
    graphs = note_graphs(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        experiment.update(NOTES[what])
        assert graphs == []
        for _ in range(6):
            experiment.update(lambda experiment: None)
    assert len(graphs) == 1  # as it stays again


def test_changes_all_the_time_are_not_spoken_of_where_nothing_is_recorded():
    experiment = Experiment(run_eagerly=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            experiment.update(NOTES["Experiment.step"])


def test_each_update_has_what_changes_all_the_time():
    experiment, other = Experiment(), Experiment()
    other.trainer.model.set_weights(experiment.trainer.model.get_weights())
    other.trainer = Trainer(
        other.trainer.model, "sgd", other.loss, run_eagerly=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for update in range(16):
            for one in (experiment, other):
                # Once it stays as it is, which has it recorded.
                one.factor = 1.0 + 0.5 * min(update, 8)
                one.trainer.train_on_batch(X, Y)
    for one, expected in zip(
        experiment.trainer.model.get_weights(),
        other.trainer.model.get_weights(),
        strict=True,
    ):
        np.testing.assert_allclose(one, expected, atol=1e-5)


def test_epochs_of_many_updates_are_recorded_though_each_changes(monkeypatch):
    experiment = Experiment()
    graphs = note_graphs(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(6):
            experiment.factor = float(epoch)
            experiment.trainer.fit(
                np.tile(X, (30, 1)), np.tile(Y, (30, 1)), **HOW
            )
    assert len(graphs) == 6


def test_changes_now_and_then_are_not_warned_of():
    experiment = Experiment()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for update in range(8):
            experiment.update(
                NOTES["Experiment.step"] if update % 3 else lambda e: None
            )
