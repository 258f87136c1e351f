"""Claims about models whose classes override what Keras calls."""

import dataclasses

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import (
    Accumulation,
    Trainer,
    WeightedLoss,
    WindowLossTrainer,
)
from accumtrainer.keras_api import BACKEND, keras, ops

X = np.random.default_rng(0).normal(size=[8, 3]).astype("float32")
Y = np.random.default_rng(1).normal(size=[8, 2]).astype("float32")
WINDOW = Accumulation(micro_batch_size=2)
ORDER = {"batch_size": 8, "shuffle": False, "verbose": 0}


def make(cls=keras.Model, seed=0):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input([3])
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    return cls(inputs, keras.layers.Dense(2)(hidden))


def trainer_of(model, *arguments, **options):
    options = {"accumulation": WINDOW, "jit_compile": JIT_COMPILE} | options
    return Trainer(model, *arguments, **options)


def assert_trains_as(trainer, model):
    """Assert that a Trainer's updates are those of a model's own `fit`."""
    ours = trainer.fit(X, Y, epochs=2, **ORDER)
    keras_s = model.fit(X, Y, epochs=2, **ORDER)
    for name, values in keras_s.history.items():
        np.testing.assert_allclose(ours.history[name], values, rtol=1e-5)
    for one, other in zip(
        trainer.model.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)


# --- A compile of their own. ---


class WithDefaults(keras.Model):
    """Compiles with what suits it where nothing else is said."""

    def compile(self, optimizer="auto", loss="auto", **options):
        if optimizer == "auto":
            optimizer = keras.optimizers.SGD(0.5)
        loss = "mae" if loss == "auto" else loss
        super().compile(optimizer=optimizer, loss=loss, **options)


class Distiller(keras.Model):
    """Takes arguments that `Model.compile` does not have."""

    def compile(self, optimizer, metrics, teacher_loss, alpha=0.25):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.teacher_loss = teacher_loss
        self.alpha = alpha

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        loss = keras.losses.get(self.teacher_loss)(y, y_pred)
        return self.alpha * ops.mean(loss)


class WithSuffix(keras.Model):
    """Makes something else of what it is given."""

    def compile(self, optimizer, loss):
        super().compile(keras.optimizers.get(optimizer), loss=f"{loss}_error")


class WithLoss(keras.Model):
    """Settles its loss itself."""

    def compile(self, optimizer, **options):
        super().compile(optimizer=optimizer, loss="mse", **options)


class WithOptimizer(keras.Model):
    """Settles its optimizer itself."""

    def compile(self, **options):
        super().compile("adam", **options)


class Closed(keras.Model):
    """Keeps what it is given to itself."""

    def compile(self, optimizer, loss):
        self.kept = (optimizer, loss)


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (WithDefaults, {"optimizer": "adam"}),
        (WithDefaults, {"loss": "mse"}),
        (WithDefaults, {"optimizer": "sgd", "metrics": ["mse"]}),
        (WithSuffix, {"optimizer": "adam", "loss": "mean_squared"}),
        (WithLoss, {"optimizer": "adam", "metrics": ["mae"]}),
        (WithOptimizer, {"loss": "mse"}),
    ],
    ids=["optimizer", "loss", "metrics", "changed", "no loss", "no optimizer"],
)
def test_model_is_compiled_by_its_own_method(cls, arguments):
    plain = make(cls)
    plain.compile(**arguments)
    assert_trains_as(trainer_of(make(cls), **arguments), plain)


def test_model_that_compiled_itself_needs_nothing_more():
    plain, model = make(Distiller), make(Distiller)
    for each in (plain, model):
        each.compile("adam", ["mae"], teacher_loss="mse", alpha=0.5)
    trainer = trainer_of(model, denominator="samples")
    assert_trains_as(trainer, plain)


def test_what_is_given_replaces_what_the_model_compiled_itself_with():
    plain, model = make(WithDefaults), make(WithDefaults)
    plain.compile(keras.optimizers.SGD(0.1), loss="mae")
    model.compile()
    optimizer = keras.optimizers.SGD(0.1)
    trainer = trainer_of(model, optimizer=optimizer)
    assert model.optimizer is trainer.optimizer is optimizer
    assert_trains_as(trainer, plain)


def test_optimizer_is_replaced_where_compile_would_want_more():
    plain, model = make(Distiller), make(Distiller)
    plain.compile(keras.optimizers.SGD(0.1), ["mae"], "mse")
    model.compile("adam", ["mae"], "mse")
    trainer = trainer_of(model, keras.optimizers.SGD(0.1), denominator=len_of)
    assert_trains_as(trainer, plain)


def len_of(batch):
    return ops.shape(batch.x)[0]


def test_compile_that_keeps_all_to_itself_is_followed_by_keras_s():
    plain, model = make(), make(Closed)
    plain.compile("adam", "mse")
    assert_trains_as(trainer_of(model, "adam", "mse"), plain)
    assert model.kept == ("adam", "mse")


def test_compile_with_other_arguments_is_asked_for_first():
    with pytest.raises(ValueError, match=r"compile\(optimizer, metrics, teach"):
        trainer_of(make(Distiller), optimizer="adam", loss="mse")


@pytest.mark.parametrize(
    ("cls", "name"), [(WithLoss, "loss"), (WithOptimizer, "optimizer")]
)
def test_what_compile_settles_by_itself_is_named_where_it_is_given(cls, name):
    match = rf"compile\(.*\*\*options\), and .* '{name}'\. Leave out"
    with pytest.raises(ValueError, match=match):
        trainer_of(make(cls), optimizer="adam", loss="mse")


# --- Steps of their own. ---


class Doubling:
    """Predicts what the layers say, twice."""

    def predict_step(self, *arguments):
        outputs = super().predict_step(*arguments)
        if isinstance(outputs, tuple):  # on JAX, with the state
            return 2 * outputs[0], outputs[1]
        return 2 * outputs


class Doubled(Doubling, keras.Model):
    """A model of layers that are there already."""


class Judged(keras.Model):
    """Evaluates in its own way."""

    fails = False

    def test_step(self, *arguments):
        if self.fails:
            raise ArithmeticError("of the step")
        logs = super().test_step(*arguments)
        if isinstance(logs, tuple):  # on JAX, with the state
            return doubled(logs[0]), logs[1]
        return doubled(logs)


def doubled(logs):
    return {f"twice_{name}": 2 * value for name, value in logs.items()}


@pytest.mark.parametrize("cls", [Doubled, Judged])
def test_model_with_its_own_other_steps_is_trained(cls):
    plain = make(cls)
    plain.compile("adam", "mse")
    assert_trains_as(trainer_of(make(cls), "adam", "mse"), plain)


@pytest.mark.parametrize("is_trained", [False, True])
def test_predictions_are_those_of_the_model_s_own_step(is_trained):
    trainer = trainer_of(make(Doubled), "adam", "mse")
    if is_trained:
        trainer.fit(X, Y, validation_data=(X, Y), **ORDER)
    predicted = trainer.predict(X, verbose=0)
    expected = 2 * ops.convert_to_numpy(trainer.model(X))
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)


def test_own_step_predicts_for_a_model_that_has_no_variables_yet():
    class Unbuilt(Doubling, keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.normalization = keras.layers.BatchNormalization()

        def call(self, x):
            return self.normalization(self.dense(x))

    trainer = trainer_of(Unbuilt(), "adam", "mse")
    predicted = trainer.predict(X, verbose=0)
    expected = 2 * ops.convert_to_numpy(trainer.model(X))
    np.testing.assert_allclose(predicted, expected, rtol=1e-5)


def test_trainer_s_own_predict_step_decides():
    class Tripled(Trainer):
        def predict_step(self, batch):
            return 3 * self.model(batch.x, training=False)

    model = make(Doubled)
    predicted = Tripled(model, "adam", "mse").predict(X, verbose=0)
    expected = 3 * ops.convert_to_numpy(model(X))
    np.testing.assert_allclose(predicted, expected, rtol=1e-5)


@pytest.mark.parametrize("return_dict", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
def test_evaluation_is_that_of_the_model_s_own_step(is_trained, return_dict):
    trainer = trainer_of(make(Judged), "adam", "mse", metrics=["mae"])
    if is_trained:
        trainer.fit(X, Y, **ORDER)
    # A batch of its own is left over, and weights count in Keras's way.
    options = {
        "batch_size": 5,
        "sample_weight": np.arange(8.0),
        "return_dict": return_dict,
        "verbose": 0,
    }
    received = trainer.evaluate(X, Y, **options)
    expected = trainer.model.evaluate(X, Y, **options)
    if return_dict:
        assert list(received) == list(expected) == ["twice_loss", "twice_mae"]
        received, expected = received.values(), expected.values()
    np.testing.assert_allclose(list(received), list(expected), rtol=1e-6)


def test_trainer_s_own_compute_loss_evaluates_too():
    class Tripled(Trainer):
        def compute_loss(self, batch, info):
            loss = super().compute_loss(batch, info)
            return dataclasses.replace(loss, mean=3 * loss.mean)

    model = make(Judged)
    received = Tripled(model, "adam", "mse").evaluate(X, Y, verbose=0)
    expected = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert received == pytest.approx(1.5 * expected["twice_loss"], rel=1e-5)


def test_validation_is_that_of_the_model_s_own_step():
    plain = make(Judged)
    plain.compile("adam", "mse")
    options = {"epochs": 2, "validation_data": (X[:5], Y[:5]), **ORDER}
    trainer = trainer_of(make(Judged), "adam", "mse")
    received = trainer.fit(X, Y, **options).history
    expected = plain.fit(X, Y, **options).history
    for name in ("loss", "val_twice_loss"):
        np.testing.assert_allclose(received[name], expected[name], rtol=1e-5)


def test_evaluation_by_the_model_s_own_step_is_refused_to_several_processes(
    monkeypatch,
):
    trainer = trainer_of(make(Judged), "adam", "mse")
    monkeypatch.setattr(trainer._engine.replicas, "processes", 2)
    monkeypatch.setattr(trainer._engine.replicas, "any", bool)
    with pytest.raises(ValueError, match="Judged in 2 processes"):
        trainer.evaluate(X, Y, verbose=0)


def test_callbacks_hear_of_the_batches_that_the_model_evaluates():
    trainer, told = trainer_of(make(Judged), "adam", "mse"), []

    class Told(keras.callbacks.Callback):
        def on_test_batch_begin(self, batch, logs=None):
            told.append(("begin", batch))

        def on_test_batch_end(self, batch, logs=None):
            told.append(("end", batch, *logs))
            ops.convert_to_numpy(trainer.model.weights[0])

        def on_test_end(self, logs=None):
            told.append(("all", *logs))

    trainer.evaluate(X, Y, batch_size=5, callbacks=[Told()], verbose=0)
    name = "twice_loss"
    assert told == [
        ("begin", 0),
        ("end", 0, name),
        ("begin", 1),
        ("end", 1, name),
        ("all", name),
    ]


@pytest.mark.parametrize(
    "cause",
    # TensorFlow makes another error of Ctrl-C amid data; it keeps the values.
    ["step", "data", "callback", *["Ctrl-C"] * (BACKEND != "tensorflow")],
)
def test_model_whose_own_evaluation_fails_keeps_its_values(cause):
    class Failing(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            if cause == "callback":
                raise ArithmeticError("of the callback")

    def batches():
        yield from [(X, Y)] * 3  # Keras takes two before it begins
        if cause == "data":
            raise ArithmeticError("of the data")
        if cause == "Ctrl-C":
            raise KeyboardInterrupt("by Ctrl-C")

    model = make(Judged)
    model.fails = cause == "step"
    trainer = trainer_of(model, "adam", "mse")
    trainer.fit(X, Y, **ORDER)
    before = [v.copy() for v in model.get_weights()]
    with pytest.raises((ArithmeticError, KeyboardInterrupt), match=cause):
        trainer.evaluate(batches(), callbacks=[Failing()], verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
    trainer.fit(X, Y, **ORDER)


def test_compute_loss_of_the_trainer_evaluates_in_the_place_of_a_step():
    class Own(Trainer):
        def compute_loss(self, batch, info):
            outputs = self.model(batch.x, training=info.training)
            loss = ops.mean(ops.square(batch.y - outputs))
            return WeightedLoss(loss, ops.shape(batch.x)[0], outputs)

    trainer = Own(make(Judged), "adam", "mse")
    plain = make()
    plain.compile("adam", "mse")
    expected = plain.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(
        trainer.evaluate(X, Y, verbose=0), expected, rtol=1e-5
    )


# --- By position. ---


def test_arguments_of_compile_may_be_given_by_position():
    plain = make()
    arguments = "adam", "mse", 0.5, ["mae"], ["mse"]
    plain.compile(*arguments)
    trainer = trainer_of(make(), *arguments)
    assert_trains_as(trainer, plain)


def test_optimizer_of_a_window_loss_may_be_given_by_position():
    class Spread(WindowLossTrainer):
        def window_loss(self, embeddings, batch, info):
            return -ops.mean(ops.square(embeddings))

    optimizer = keras.optimizers.SGD(0.1)
    assert Spread(make(), optimizer).optimizer is optimizer
