"""Losses of a value per example: their sum is descended, their mean logged.

That is what Keras does with them on TensorFlow; elsewhere it refuses them.
"""

import numpy as np
import pytest
from refusals import assert_refused

from accumtrainer import Accumulation, Trainer, WeightedLoss, WindowLossTrainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

layers, losses = keras.layers, keras.losses

of_tensorflow = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="Keras refuses such losses elsewhere"
)
elsewhere = pytest.mark.skipif(
    BACKEND == "tensorflow", reason="Keras descends their sum on TensorFlow"
)

EXAMPLES = 10
X = np.random.default_rng(0).normal(size=[EXAMPLES, 3]).astype("float32")
Y = np.stack([X.sum(axis=1), X.prod(axis=1)], axis=1)
TWO = [Y[:, :1], Y[:, 1:]]
WEIGHTS = np.linspace(0.5, 2.0, EXAMPLES).astype("float32")


class OfColumns(losses.Loss):
    """Has a call of its own, as losses of CTC have that return [batch, 1]."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        squares = ops.square(y_true - y_pred)
        return ops.mean(squares, axis=-1, keepdims=True)


class Ranked(losses.Loss):
    """Has a value per example, each made of all examples."""

    def call(self, y_true, y_pred):
        errors = ops.mean(ops.square(y_true - y_pred), axis=-1)
        return errors * errors / ops.max(errors)


class OfFeatures(losses.Loss):
    """Has values that are none of examples."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(y_true - y_pred), axis=0)


class ComputesValues(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return ops.square(y - y_pred)


def mse():
    return losses.MeanSquaredError(reduction="none")


def make_model(outputs=1, cls=keras.Model):
    keras.utils.set_random_seed(0)
    inputs = keras.Input([3])
    if outputs == 2:
        heads = [layers.Dense(1, name=name)(inputs) for name in "ab"]
        return cls(inputs, heads)
    return cls(inputs, layers.Dense(2)(inputs))


def scaled():
    sgd = keras.optimizers.SGD(0.01)
    return keras.optimizers.LossScaleOptimizer(sgd)


CASES = {
    "one per row": {"loss": mse},
    "weights": {"loss": mse, "weights": WEIGHTS, "loss_weights": [3.0]},
    "a column": {"loss": OfColumns},
    "one per token": {
        "loss": mse,
        "y": Y[:, :, None],
        "model": lambda: keras.Sequential(
            [make_model(), layers.Reshape([2, 1])]
        ),
    },
    "two outputs": {
        "loss": lambda: [mse(), mse()],
        "loss_weights": [2.0, 0.5],
        "y": TWO,
        "model": lambda: make_model(2),
    },
    "of the model": {"model": lambda: make_model(cls=ComputesValues)},
    "scaled": {"loss": mse, "optimizer": scaled},
}


def trained(how, case):
    """Train two epochs; return weights, history and evaluation."""
    y, weights = case.get("y", Y), case.get("weights")
    model = case.get("model", make_model)()
    compiled = {
        "optimizer": case.get(
            "optimizer", lambda: keras.optimizers.SGD(0.01)
        )(),
        "loss": case.get("loss", lambda: None)(),
        "loss_weights": case.get("loss_weights"),
    }
    batch_size = 2 if how in ("fit", "steps") else 6
    options = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
    if how in ("keras", "fit"):
        owner = model
        model.compile(**compiled)
        if how == "fit":
            options["callbacks"] = [GradientAccumulation(steps=3)]
    else:
        accumulation = {
            "cut up": Accumulation(micro_batch_size=4),
            "per example": Accumulation(micro_batch_size=4, per_example=True),
            "steps": 3,
            "alone": 1,
        }[how]
        owner = Trainer(model, **compiled, accumulation=accumulation)
    history = owner.fit(X, y, sample_weight=weights, epochs=2, **options)
    found = owner.evaluate(
        X, y, sample_weight=weights, batch_size=6, verbose=0, return_dict=True
    )
    return model.get_weights(), history.history, found


@of_tensorflow
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "cut up") for name in CASES),
        *(("weights", how) for how in ("per example", "steps", "alone", "fit")),
        *(("two outputs", how) for how in ("steps", "fit")),
    ],
)
def test_sum_is_descended_and_mean_is_logged_as_in_keras(name, how):
    weights, history, found = trained("keras", CASES[name])
    own_weights, own_history, own_found = trained(how, CASES[name])
    for one, other in zip(own_weights, weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    for key, values in history.items():
        np.testing.assert_allclose(own_history[key], values, rtol=1e-5)
    for key, value in found.items():
        np.testing.assert_allclose(own_found[key], value, rtol=1e-5)


@of_tensorflow
def test_trial_finds_values_of_examples_exact():
    trainer = Trainer(make_model(), optimizer="sgd", loss=mse(), accumulation=3)
    found = trainer.check_equivalence((X, Y))
    assert found.is_exact and not found.reasons


@of_tensorflow
@pytest.mark.parametrize(
    "others", [losses.MeanSquaredError, OfColumns, lambda: "mse"]
)
def test_values_beside_losses_of_other_shapes_are_refused(others):
    model = make_model(2)
    trainer = Trainer(model, optimizer="sgd", loss=[mse(), others()])
    assert_refused(
        lambda: trainer.fit(X, TWO, verbose=0),
        ValueError,
        "losses without a reduction must all have as many values",
    )


@of_tensorflow
@pytest.mark.parametrize(
    ("loss", "message"),
    [(Ranked(reduction="none"), "denominator"), (OfFeatures(), "reduction")],
)
def test_values_that_do_not_add_up_are_refused(loss, message):
    model = make_model()
    trainer = Trainer(
        model, optimizer="sgd", loss=loss, accumulation=Accumulation(steps=2)
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(X, Y, batch_size=5, verbose=0)


@elsewhere
@pytest.mark.parametrize("loss", [mse, OfColumns])
def test_values_are_refused_where_keras_refuses_them(loss):
    model = make_model()
    trainer = Trainer(model, optimizer="sgd", loss=loss())
    assert_refused(
        lambda: trainer.fit(X, Y, verbose=0),
        ValueError,
        "loss must have a reduction",
    )


@elsewhere
def test_values_of_a_model_are_refused_where_keras_refuses_them():
    trainer = Trainer(make_model(cls=ComputesValues), optimizer="sgd")
    assert_refused(
        lambda: trainer.fit(X, Y, verbose=0),
        ValueError,
        "compute_loss must return scalar means",
    )


class OfValues(Trainer):
    def compute_loss(self, batch, info):
        found = self.model(batch.x, training=info.training)
        return WeightedLoss(losses.mean_squared_error(batch.y, found), None)


class OfSum(Trainer):
    def compute_loss(self, batch, info):
        found = self.model(batch.x, training=info.training)
        values = losses.mean_squared_error(batch.y, found)
        self.log("mean", ops.mean(values), weight=ops.shape(values)[0])
        return WeightedLoss(ops.sum(values), None)


def test_values_of_a_hook_are_summed_and_logged_as_their_mean():
    logs, weights = [], []
    for cls in (OfValues, OfSum):
        model = make_model()
        trainer = cls(
            model,
            optimizer=keras.optimizers.SGD(0.01),
            accumulation=Accumulation(micro_batch_size=4),
        )
        logs.append(trainer.fit(X, Y, batch_size=6, epochs=2, verbose=0))
        logs.append(trainer.evaluate(X, Y, verbose=0, return_dict=True))
        weights.append(model.get_weights())
    of_fit, found, of_sum_fit, of_sum = logs
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    np.testing.assert_allclose(
        of_fit.history["loss"], of_sum_fit.history["mean"], rtol=1e-5
    )
    np.testing.assert_allclose(found["loss"], of_sum["mean"], rtol=1e-5)


def test_loss_over_a_window_must_be_one_number():
    class OfRows(WindowLossTrainer):
        def window_loss(self, embeddings, batch, info):
            return ops.mean(embeddings, axis=-1)

    trainer = OfRows(make_model(), optimizer="sgd")
    assert_refused(
        lambda: trainer.fit(X, Y, verbose=0),
        ValueError,
        "window_loss must return a scalar",
    )
