"""PyTorch: evaluation follows what callbacks make of a model amid it."""

import functools

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import BACKEND, keras

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

from recorded import note_graphs

RNG = np.random.default_rng(0)
X = RNG.normal(size=[12, 6]).astype("float32")
Y = RNG.normal(size=[12, 3]).astype("float32")
HOW = {"batch_size": 4, "verbose": 0}


class Scaled(keras.layers.Layer):
    """Multiplies by a number of Python's."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def call(self, x):
        return x * self.scale


def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input([6]), Scaled(), keras.layers.Dense(3)]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def train_by_keras(model, **how):
    return model.fit(X, Y, shuffle=False, **HOW, **how).history


def train_by_ours(model, **how):
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=2))
    return trainer.fit(X, Y, shuffle=False, **HOW, **how).history


def run_calls(trainer, callback):
    """Evaluate and predict, each twice."""
    found = []
    for _ in range(2):
        callbacks = [callback]
        found.append(trainer.evaluate(X, Y, callbacks=callbacks, **HOW))
        found.append(trainer.predict(X, callbacks=callbacks, **HOW).sum())
    return found


class PerValidation(keras.callbacks.Callback):
    """Validates with another number each time, and puts it back or not."""

    def __init__(self, puts_back):
        super().__init__()
        self.validations = 0
        if puts_back:
            self.on_test_end = self.put_back

    def on_test_begin(self, logs=None):
        self.validations += 1
        self.model.layers[0].scale = float(self.validations)

    def put_back(self, logs=None):
        self.model.layers[0].scale = 1.0


@pytest.mark.parametrize("puts_back", [True, False])
def test_validation_is_with_what_a_callback_chooses_for_it(puts_back):
    how = {"epochs": 3, "validation_data": (X, Y)}
    expected = train_by_keras(
        make_model(), callbacks=[PerValidation(puts_back)], **how
    )
    found = train_by_ours(
        make_model(), callbacks=[PerValidation(puts_back)], **how
    )
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


class PerBatch(keras.callbacks.Callback):
    """Changes a model before or after each batch."""

    def __init__(self, when):
        super().__init__()
        for kind in ("test", "predict"):
            setattr(self, f"on_{kind}_batch_{when}", self.change)

    def change(self, batch, logs=None):
        self.model.layers[0].scale = float(batch + 1)


@pytest.mark.filterwarnings("ignore:What layers, losses")
@pytest.mark.parametrize("when", ["begin", "end"])
def test_each_batch_is_run_with_what_a_callback_chose_for_it(when):
    model = make_model()
    expected = run_calls(model, PerBatch(when))
    found = run_calls(Trainer(make_model()), PerBatch(when))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_is_changed_for_validations_alone_records_no_window_anew(
    monkeypatch,
):
    def recorded_by(*callbacks):
        graphs = note_graphs(monkeypatch)
        how = {"epochs": 3, "validation_data": (X, Y)}
        train_by_ours(make_model(), callbacks=[*callbacks], **how)
        return len(graphs)

    # Each validation but the first records its batches anew, and their results.
    assert recorded_by(PerValidation(True)) - recorded_by() == 2 * 2


class Curriculum:
    """A schedule that changes more than the rate."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, epoch, rate):
        self.layer.scale = 1.0 + epoch
        return rate

    def by_method(self, epoch, rate):
        return self(epoch, rate)

    @property
    def by_function(self):
        return lambda epoch, rate: self(epoch, rate)

    @property
    def partly(self):
        return functools.partial(Curriculum.__call__, self)


@pytest.mark.parametrize(
    "form", ["__call__", "by_method", "by_function", "partly"]
)
def test_what_the_user_s_schedule_changes_counts_at_once(form):
    def history(train):
        model = make_model()
        schedule = Curriculum(model.layers[0])
        if form != "__call__":
            schedule = getattr(schedule, form)
        scheduler = keras.callbacks.LearningRateScheduler(schedule)
        return train(model, epochs=3, callbacks=[scheduler])["loss"]

    expected = history(train_by_keras)
    np.testing.assert_allclose(history(train_by_ours), expected, rtol=1e-5)
