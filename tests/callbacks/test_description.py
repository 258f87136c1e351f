"""What trackers are told of a training, whatever it is made of."""

import pytest

from accumtrainer import Trainer
from accumtrainer.callbacks.description import describe_training
from accumtrainer.keras_api import keras

pytestmark = pytest.mark.any_backend


class Steady(keras.optimizers.schedules.LearningRateSchedule):
    """Says nothing of itself, as Keras asks for it only to save it."""

    def __call__(self, step):
        return 0.01


class Summed(keras.Sequential):
    """Has a `summary` that takes nothing."""

    def summary(self):
        raise AssertionError("called in the place of Keras's own")


class Unspeakable:
    """Cannot be written as text."""

    def __repr__(self):
        raise RuntimeError("not now")


class Odd(keras.optimizers.SGD):
    """Keeps an argument that cannot be told."""

    def __init__(self, learning_rate=0.1, what=None):
        super().__init__(learning_rate)
        self.what = Unspeakable()


def describe(model=None, optimizer="sgd"):
    layers = [keras.Input([3]), keras.layers.Dense(1)]
    model = Summed(layers) if model is None else model
    trainer = Trainer(model, optimizer=optimizer, loss="mse")
    return describe_training(trainer, {})


def test_a_schedule_without_a_config_is_told_by_its_class():
    told = describe(optimizer=keras.optimizers.Adam(Steady()))
    assert told["schedule"] == {"class_name": "Steady"}
    assert told["optimizer"]["beta_1"] == 0.9


def test_a_model_is_summed_up_by_keras():
    told = describe()["model"]
    assert told["class_name"] == "Summed" and told["parameters"] == 4
    assert "dense" in told["summary"]


def test_an_optimizer_that_does_not_answer_is_told_by_its_class():
    told = describe(optimizer=Odd())
    assert told["optimizer"] == {"class_name": "Odd"}
    assert told["schedule"] is None
