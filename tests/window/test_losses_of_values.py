"""Losses of a value per example: their sum is descended, their mean logged.

That is what Keras does with them on TensorFlow; elsewhere it refuses them.
"""

import numpy as np
import pytest
from refusals import assert_refused

from accumtrainer import Accumulation, Trainer, WeightedLoss, WindowLossTrainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

if BACKEND == "tensorflow":
    import tensorflow as tf

layers, losses = keras.layers, keras.losses

# A tape of TensorFlow takes the gradient of a sum where it is given several
# values; JAX and PyTorch raise an error. So half of these tests has nothing
# to compare on the other backends.
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


class OfAll(losses.Loss):
    """Has one value, which is in an axis."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.reshape(ops.mean(ops.square(y_true - y_pred)), [1])


class RanksItself(Ranked):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return self.call(y_true, y_pred)


class OfTokens(losses.Loss):
    """Has the values of all examples in a row."""

    def call(self, y_true, y_pred):
        return ops.reshape(ops.square(y_true - y_pred), [-1])


class ComputesValues(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return ops.square(y - y_pred)


class ComputesMasked(keras.Model):
    """Leaves values out, all of them in some micro-batches."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        errors = ops.mean(ops.square(y - y_pred), axis=-1)
        return tf.boolean_mask(errors, ops.max(y, axis=-1) > 0)


class ComputesOfPoints(keras.Model):
    """Compares what it makes of points that it has itself."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return ops.mean(ops.square(self(X[:7]) - Y[:7]), axis=-1)


class ComputesShares(keras.Model):
    """Divides the value of each example by their number."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        samples = ops.cast(ops.shape(y)[0], "float32")
        return ops.mean(ops.square(y - y_pred), axis=-1) / samples


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
    "tokens in a row": {"loss": lambda: OfTokens(reduction="none")},
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
@pytest.mark.parametrize("how", ["cut up", "steps", "fit"])
def test_values_may_be_left_out(how):
    case = {"model": lambda: make_model(cls=ComputesMasked)}
    found, expected = trained(how, case), trained("keras", case)
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert np.isfinite(found[1]["loss"]).all()


@of_tensorflow
@pytest.mark.parametrize("cls", [ComputesValues, keras.Model])
def test_batches_of_one_example_show_that_values_add_up(cls):
    found = []
    for batch_size, callbacks in ((6, []), (1, [GradientAccumulation(6)])):
        model = make_model(cls=cls)
        model.compile("sgd", OfColumns() if cls is keras.Model else None)
        options = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
        model.fit(X[:6], Y[:6], callbacks=callbacks, **options)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@of_tensorflow
@pytest.mark.parametrize("how", ["cut up", "steps", "fit"])
def test_examples_that_are_alike_show_that_values_add_up(how, monkeypatch):
    for name, values in (("X", X), ("Y", Y)):
        monkeypatch.setitem(globals(), name, np.ones_like(values))
    case = {"model": lambda: make_model(cls=ComputesValues)}
    found, expected = trained(how, case), trained("keras", case)
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


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
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("is_in_fit", [False, True])
@pytest.mark.parametrize(
    ("loss", "cls"),
    [
        (Ranked(reduction="none"), keras.Model),
        (RanksItself(), keras.Model),
        (OfFeatures(), keras.Model),
        (OfAll(), keras.Model),
        (None, ComputesShares),
        (None, ComputesOfPoints),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_values_that_do_not_add_up_are_refused(loss, cls, is_in_fit, size):
    model = make_model(cls=cls)
    model.compile("sgd", loss)
    data = {"x": X, "y": Y, "batch_size": size, "verbose": 0}
    with pytest.raises(ValueError, match="must (say what|add up)"):
        if is_in_fit:
            model.fit(**data, callbacks=[GradientAccumulation(steps=2)])
        else:
            Trainer(model, accumulation=2).fit(**data)


@of_tensorflow
@pytest.mark.parametrize("loss", [OfFeatures, OfAll])
def test_values_of_a_whole_batch_are_those_of_keras(loss):
    case = {"loss": loss}
    for one, other in zip(
        trained("alone", case)[0], trained("keras", case)[0], strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


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
