"""How many of our frames stand between `fit` and what runs or fails."""

import importlib
import traceback
from pathlib import Path

import numpy as np
import pytest
from accumulating import executions

import accumtrainer
from accumtrainer import Accumulation, Trainer, WindowLossTrainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

PACKAGE = Path(accumtrainer.__file__).parent
MOST_TO_A_PROGRAM = 8
MOST_TO_AN_ERROR = 11

X = np.random.default_rng(0).normal(size=[24, 4]).astype("float32")
Y = X[:, :1]

FUSED = Accumulation(micro_batch_size=4), 12
UNEVEN = Accumulation(micro_batch_size=5), 12
STREAMED = Accumulation(steps=3), 4
ALONE = Accumulation(steps=1), 4
AUTO = Accumulation(micro_batch_size="auto", memory_limit_bytes=2**40), 12
ways = pytest.mark.parametrize(
    "way",
    [FUSED, UNEVEN, STREAMED, ALONE, AUTO],
    ids=["fused", "uneven", "streamed", "alone", "auto"],
)


class UserError(Exception):
    """What nothing of ours raises."""


class Fragile(keras.layers.Layer):
    """Fails once it is armed, in training or always."""

    armed = ""

    def call(self, x, training=None):
        if self.armed == "always" or (self.armed and training):
            raise UserError
        return x


class Bare(keras.Model):
    """A model that has no variables before it is called, when it fails."""

    def __init__(self):
        super().__init__()
        self.fragile, self.head = Fragile(), keras.layers.Dense(1)
        self.fragile.armed = "always"

    def call(self, x, training=None):
        return self.head(self.fragile(x, training=training))


def make_model(*, armed=""):
    fragile = Fragile()
    model = keras.Sequential([keras.Input([4]), fragile, keras.layers.Dense(1)])
    fragile.armed = armed
    return model


def ours(stack):
    """Pick the frames of the package, but for the callbacks beside it."""
    return [
        f"{Path(frame.filename).name}:{frame.name}"
        for frame in stack
        if PACKAGE in Path(frame.filename).parents
    ]


def frames_of(error):
    return ours(traceback.extract_tb(error.value.__traceback__))


@pytest.fixture
def stacks(monkeypatch):
    """List our frames of each call of a program, that call itself included."""
    programs = importlib.import_module(f"accumtrainer.steps.{BACKEND}.programs")
    compiled = programs.Program if BACKEND == "torch" else programs.Compiled
    found = []

    def note(name):
        function = getattr(compiled, name)

        def call(self, *arguments):
            found.append([*ours(traceback.extract_stack()), name])
            return function(self, *arguments)

        monkeypatch.setattr(compiled, name, call)

    note("__call__")
    if BACKEND == "torch":
        note("run_if_recorded")
    return found


def longest(stacks):
    return max(stacks, key=len)


@ways
def test_few_frames_stand_between_fit_and_a_program(way, stacks):
    accumulation, batch_size = way
    trainer = Trainer(
        make_model(), "sgd", loss="mse", accumulation=accumulation
    )
    if "auto" == accumulation.micro_batch_size:
        trainer.fit(X, Y, batch_size=batch_size, verbose=0)
        stacks.clear()  # of what was tried for the choice
    trainer.fit(X, Y, batch_size=batch_size, verbose=0)
    assert stacks
    assert len(longest(stacks)) <= MOST_TO_A_PROGRAM, longest(stacks)


def test_one_frame_more_measures_what_a_window_must_know_first(stacks):
    inputs = keras.Input([4])
    outputs = {name: keras.layers.Dense(1)(inputs) for name in "ab"}
    model = keras.Model(inputs, outputs)
    losses = {"a": "mse", "b": "mae"}
    trainer = Trainer(model, "sgd", loss=losses, accumulation=UNEVEN[0])
    weights = {"a": 1 + Y[:, 0] ** 2, "b": 2 + Y[:, 0] ** 2}
    trainer.fit(X, {"a": Y, "b": Y}, 12, sample_weight=weights, verbose=0)
    assert len(longest(stacks)) == MOST_TO_A_PROGRAM + 1, longest(stacks)


@pytest.mark.parametrize("steps_per_execution", executions(1, 3))
def test_few_frames_stand_between_the_fit_of_keras_and_a_program(
    steps_per_execution, stacks
):
    model = make_model()
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    callbacks = [GradientAccumulation(steps=3)]
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=callbacks)
    assert stacks
    assert len(longest(stacks)) <= MOST_TO_A_PROGRAM, longest(stacks)


@ways
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_few_frames_stand_between_fit_and_an_error_in_a_layer(way, run_eagerly):
    accumulation, batch_size = way
    if run_eagerly and accumulation.micro_batch_size == "auto":
        return  # refused: eagerly, nothing is known of memory
    trainer = Trainer(
        make_model(armed="training"),
        "sgd",
        loss="mse",
        accumulation=accumulation,
        run_eagerly=run_eagerly,
    )
    with pytest.raises(UserError) as error:
        trainer.fit(X, Y, batch_size=batch_size, verbose=0)
    assert len(frames_of(error)) <= MOST_TO_AN_ERROR, frames_of(error)


def test_few_frames_stand_between_fit_and_an_error_while_a_model_is_built():
    trainer = Trainer(Bare(), "sgd", loss="mse", accumulation=3)
    with pytest.raises(UserError) as error:
        trainer.fit(X, Y, batch_size=4, verbose=0)
    assert len(frames_of(error)) <= MOST_TO_AN_ERROR, frames_of(error)


@pytest.mark.parametrize(
    "hook",
    ["on_micro_batch", "compute_loss", "on_accumulate", "on_apply"],
)
@ways
def test_few_frames_stand_between_fit_and_an_error_in_a_hook(hook, way):
    def fail(self, *arguments):
        raise UserError

    accumulation, batch_size = way
    trainer_type = type("Failing", (Trainer,), {hook: fail})
    loss = None if hook == "compute_loss" else "mse"
    trainer = trainer_type(
        make_model(), "sgd", loss=loss, accumulation=accumulation
    )
    with pytest.raises(UserError) as error:
        trainer.fit(X, Y, batch_size=batch_size, verbose=0)
    assert len(frames_of(error)) <= MOST_TO_AN_ERROR, frames_of(error)


def test_few_frames_stand_between_fit_and_an_error_in_what_embeds_a_window():
    class Coupling(WindowLossTrainer):
        def window_loss(self, embeddings, batch, info):
            return ops.mean(embeddings**2)

    trainer = Coupling(make_model(armed="training"), "sgd", accumulation=3)
    with pytest.raises(UserError) as error:
        trainer.fit(X, Y, batch_size=4, verbose=0)
    assert len(frames_of(error)) <= MOST_TO_AN_ERROR, frames_of(error)


def test_few_frames_stand_between_the_fit_of_keras_and_an_error():
    model = make_model(armed="training")
    model.compile("sgd", "mse")
    callbacks = [GradientAccumulation(steps=3)]
    with pytest.raises(UserError) as error:
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=callbacks)
    assert len(frames_of(error)) <= MOST_TO_AN_ERROR, frames_of(error)


class RefusesOneLength(keras.layers.Layer):
    """A mean over steps that fails at one number of them."""

    def call(self, x):
        if x.shape[1] == 5:
            raise UserError
        return ops.mean(x, axis=1)


def make_model_of_lengths():
    inputs = keras.Input([None, 2])
    outputs = keras.layers.Dense(1)(RefusesOneLength()(inputs))
    return keras.Model(inputs, outputs)


LENGTHS = [4, 4, 4, 5, 5, 5]


@ways
def test_few_frames_stand_between_fit_and_an_error_of_a_later_shape(way):
    accumulation, batch_size = way
    trainer = Trainer(
        make_model_of_lengths(), "sgd", loss="mse", accumulation=accumulation
    )
    data = [
        (np.ones([batch_size, length, 2], "float32"), Y[:batch_size])
        for length in LENGTHS
    ]
    with pytest.raises(UserError) as error:
        trainer.fit(data, verbose=0)
    assert trainer.progress.updates
    assert len(frames_of(error)) <= MOST_TO_AN_ERROR, frames_of(error)


@pytest.mark.skipif(
    BACKEND != "jax",
    reason="on TensorFlow, Keras traces lengths that change as unknown, which "
    "no layer can refuse",
)
def test_few_frames_stand_between_the_fit_of_keras_and_an_error_of_a_shape():
    model = make_model_of_lengths()
    model.compile("sgd", "mse")

    def batches():
        for length in LENGTHS:
            yield np.ones([4, length, 2], "float32"), Y[:4]

    with pytest.raises(UserError) as error:
        callbacks = [GradientAccumulation(steps=3)]
        model.fit(batches(), shuffle=False, verbose=0, callbacks=callbacks)
    assert len(frames_of(error)) <= MOST_TO_AN_ERROR, frames_of(error)
