"""Claims about losses whose values are not one or more for each example.

They say as little about what they were averaged over as a scalar does.
"""

import functools
import types

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, KERAS_NAME, keras, ops
from accumtrainer.steps import make_backend
from accumtrainer.window import reducing

if BACKEND == "tensorflow":
    import tensorflow as tf

pytestmark = pytest.mark.usefixtures("without_xla")

rng = np.random.default_rng(0)
X = rng.normal(size=[24, 5]).astype("float32")
Y = X[:, :3] ** 2


def sum_of_columns(y, p):
    return ops.sum(ops.square(y - p), axis=0)


def mean_of_columns(y, p):
    return ops.mean(ops.square(y - p), axis=0)


def mean_in_axes_of_one(y, p):
    return ops.mean(ops.square(y - p), keepdims=True)


def of_pairs(y, p):
    return ops.square(ops.matmul(y - p, ops.transpose(y - p)))


def of_elements_in_a_row(y, p):
    return ops.reshape(ops.square(y - p), [-1])


class SumOfColumns(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return sum_of_columns(y_true, y_pred)


class MeanOfColumns(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return mean_of_columns(y_true, y_pred)


def make_model():
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(3)])
    model.set_weights([np.full(w.shape, 0.1) for w in model.weights])
    return model


def make_trainer(loss, rate=0.1, size=6, **options):
    return Trainer(
        make_model(),
        optimizer=keras.optimizers.SGD(rate),
        loss=loss,
        accumulation=Accumulation(micro_batch_size=size),
        **options,
    )


def assert_exact(loss, **options):
    trainer, expected = make_trainer(loss, **options), make_model()
    trainer.fit(X, Y, batch_size=24, verbose=0)
    expected.compile(keras.optimizers.SGD(0.1), loss)
    expected.train_on_batch(X, Y)
    pairs = zip(trainer.model.weights, expected.weights, strict=True)
    for one, other in pairs:
        one, other = map(ops.convert_to_numpy, (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


REDUCED = {
    "sum": (sum_of_columns, "adds up over samples"),
    "mean": (mean_of_columns, "is a mean over samples"),
    "kept axes": (mean_in_axes_of_one, "is a mean over samples"),
    "pairs": (of_pairs, "couples examples"),
}
if KERAS_NAME == "keras":
    REDUCED["Dice"] = keras.losses.Dice(axis=(0,)), "couples examples"


# Micro-batches of 3 have as many examples as there are columns.
@pytest.mark.parametrize("size", [6, 3])
@pytest.mark.parametrize("name", REDUCED)
def test_values_that_are_not_one_per_example_are_refused(name, size):
    loss, shown = REDUCED[name]
    with pytest.raises(ValueError, match="not one per example") as caught:
        make_trainer(loss, size=size).fit(X, Y, batch_size=24, verbose=0)
    assert f"shows that it {shown}" in str(caught.value)


def test_mean_over_samples_in_columns_is_exact_as_stated():
    assert_exact(mean_of_columns, denominator="samples")


def test_sum_of_columns_that_says_so_is_a_sum():
    assert_exact(SumOfColumns(reduction="sum"))


def test_sum_of_means_over_examples_is_no_sum_over_them():
    with pytest.raises(ValueError, match="is a mean over samples"):
        make_trainer(MeanOfColumns(reduction="sum")).fit(
            X, Y, batch_size=24, verbose=0
        )
    assert_exact(MeanOfColumns(reduction="sum"), size=24)
    assert_exact(MeanOfColumns(reduction="sum"), denominator="samples")


def test_values_of_all_elements_in_a_row_are_believed():
    assert_exact(of_elements_in_a_row, size=9)


def test_evaluation_weighs_samples_before_training_and_after():
    values = []
    for trains_first in (False, True):
        trainer = make_trainer(mean_of_columns, rate=0.0, denominator="samples")
        if trains_first:
            trainer.fit(X, Y, batch_size=24, verbose=0)
        # Batches of 8 and 3.
        values.append(trainer.evaluate(X[:11], Y[:11], batch_size=8, verbose=0))
    errors = Y[:11] - trainer.predict(X[:11], verbose=0)
    np.testing.assert_allclose(values, np.mean(errors**2), rtol=1e-5)


def by_mean_of_mask(y, p):
    """Divide the loss of every example by what all of them come to."""
    mask = ops.cast(y > 0.3, p.dtype)
    return ops.mean(mask * ops.abs(y - p), axis=-1) / ops.mean(mask)


def by_largest(y, p):
    return ops.mean(ops.square(y - p), axis=-1) / ops.max(ops.abs(y))


class ByRank(keras.losses.Loss):
    def call(self, y_true, y_pred):
        ranks = ops.argsort(ops.argsort(ops.sum(y_true, axis=-1)))
        values = ops.mean(ops.square(y_true - y_pred), axis=-1)
        return values * ops.cast(ranks, values.dtype)


class KeepsLast(ByRank):
    """Keeps what cannot be copied, and what leads back to it."""

    def __init__(self):
        super().__init__()
        self.partners = [self]

    def call(self, y_true, y_pred):
        self.last = super().call(y_true, y_pred)
        return self.last


@pytest.mark.parametrize(
    "loss", [by_mean_of_mask, by_largest, ByRank(), KeepsLast()]
)
def test_values_that_depend_on_other_examples_are_refused(loss):
    with pytest.raises(ValueError, match="depends on the others") as caught:
        make_trainer(loss).fit(X, Y, batch_size=24, verbose=0)
    assert "denominator='samples'" not in str(caught.value)
    # With the whole batch at once there is nothing to weigh.
    assert_exact(loss, size=24)


def test_values_divided_by_a_mean_are_exact_as_stated():
    assert_exact(
        by_mean_of_mask,
        denominator=lambda batch: ops.sum(ops.cast(batch.y > 0.3, "float32")),
    )


class Drawing(keras.losses.Loss):
    """Draws, so that an example has another value every time."""

    def __init__(self):
        super().__init__()
        self.rng = keras.random.SeedGenerator(0)

    def call(self, y_true, y_pred):
        noise = keras.random.uniform(ops.shape(y_true), 0.9, 1.1, seed=self.rng)
        return ops.mean(noise * ops.square(y_true - y_pred), axis=-1)


class Focal(keras.losses.Loss):
    """Has values of tokens, which depend on labels alone."""

    def call(self, y_true, y_pred):
        error = ops.abs(ops.cast(y_true > 0.5, y_pred.dtype) - y_pred)
        return error**2 * ops.log(1 + error)


def in_a_stack(y, p):
    """Have the values of examples along another axis than the first."""
    errors = ops.mean(ops.square(y - p), axis=-1), ops.mean(y - p, axis=-1)
    return ops.stack(errors)


def by_time(y, p):
    return ops.transpose(ops.square(y - p))


@pytest.mark.parametrize("loss", [Drawing(), Focal(), in_a_stack, by_time])
def test_values_of_each_example_are_believed(loss):
    make_trainer(loss).fit(X, Y, batch_size=24, verbose=0)


def pairing_model():
    """Make a model that compares every example with all others."""
    inputs = keras.Input([5])
    layer = keras.layers.Dense(3, kernel_initializer="ones")
    hidden = layer(inputs)
    outputs = keras.layers.Lambda(
        lambda h: ops.matmul(h, ops.transpose(h)), output_shape=(None,)
    )(hidden)
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize("is_in_fit", [False, True])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_outputs_that_pair_examples_are_refused(is_in_fit, reduction):
    model = pairing_model()
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    model.compile(keras.optimizers.SGD(0.1), loss)
    accumulation = Accumulation(micro_batch_size=6)
    with pytest.raises(ValueError, match="pair examples") as caught:
        if is_in_fit:
            callback = GradientAccumulation(steps=4)
            model.fit(X, Y[:, :1], 6, verbose=0, callbacks=[callback])
        else:
            trainer = Trainer(model, accumulation=accumulation)
            trainer.fit(X, Y[:, :1], batch_size=24, verbose=0)
    assert "WindowLossTrainer" in str(caught.value)
    assert "denominator='samples'" not in str(caught.value)


def test_outputs_as_wide_as_a_micro_batch_is_long_are_believed():
    assert_exact("mse", size=3)


def weighted_square(y, p, weight):
    return weight * ops.mean(ops.square(y - p), axis=-1)


def test_loss_without_a_module_is_one_of_yours():
    assert_exact(functools.partial(weighted_square, weight=2.0))


def model_of_one_axis():
    """Make a model whose outputs have no axis but that of examples."""
    inputs = keras.Input([5])
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(inputs)
    return keras.Model(inputs, keras.layers.Reshape([])(outputs))


@pytest.mark.parametrize("is_in_fit", [False, True])
@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_outputs_of_one_axis_are_trained_by_losses_of_keras(loss, is_in_fit):
    models = [model_of_one_axis() for _ in range(2)]
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), loss)
    accumulated, expected = models
    if is_in_fit:
        callback = GradientAccumulation(steps=4)
        accumulated.fit(X, Y[:, 0], 6, shuffle=False, callbacks=[callback])
    else:
        trainer = Trainer(
            accumulated, accumulation=Accumulation(micro_batch_size=9)
        )
        trainer.fit(X, Y[:, 0], batch_size=24, verbose=0)
    expected.train_on_batch(X, Y[:, 0])
    for one, other in zip(models[0].weights, models[1].weights, strict=True):
        one, other = map(ops.convert_to_numpy, (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_own_mean_of_one_axis_is_refused():
    model = model_of_one_axis()
    model.compile(
        keras.optimizers.SGD(0.1), lambda y, p: ops.mean((y - p) ** 2)
    )
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=6))
    with pytest.raises(ValueError, match="bare scalar from the loss"):
        trainer.fit(X, Y[:, 0], batch_size=24, verbose=0)


def test_outputs_of_one_axis_with_weights_are_refused():
    model = model_of_one_axis()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=6))
    weights = np.r_[np.ones(12), np.linspace(0, 3, 12)].astype("float32")
    # The first window shows nothing: its weights are all 1.
    with pytest.raises(ValueError, match="bare scalar from the loss"):
        trainer.fit(
            X, Y[:, 0], 12, sample_weight=weights, shuffle=False, verbose=0
        )


class Annealed(keras.losses.Loss):
    """Notes calls: their shapes, and in a variable that is not Keras's."""

    def __init__(self):
        super().__init__()
        self.shapes = []
        if BACKEND == "tensorflow":
            self.step = tf.Variable(0)

    def call(self, y_true, y_pred):
        self.shapes.append(tuple(y_true.shape))
        if BACKEND == "tensorflow":
            self.step.assign_add(1)
        return ops.mean(ops.square(y_true - y_pred), axis=-1)


def test_what_a_loss_keeps_is_not_changed_by_a_trial():
    loss = Annealed()
    make_trainer(loss).fit(X, Y, batch_size=24, verbose=0)
    assert {shape[0] for shape in loss.shapes} <= {6, 12, None}
    if BACKEND == "tensorflow":
        assert int(loss.step) == 4


@pytest.mark.parametrize("is_tried", [True, False])
def test_losses_of_many_numbers_are_not_tried(is_tried, monkeypatch):
    columns = Y.shape[1]
    most = columns if is_tried else columns - 1
    monkeypatch.setattr(reducing, "MOST_NUMBERS", most)
    backend = make_backend(run_eagerly=False)
    found = reducing.fails_to_add_up(ByRank(), Y, Y, backend.on_its_own)
    assert found is is_tried


def of_both(y, p):
    errors = [ops.square(y[key] - p[key]) for key in ("one", "two")]
    return sum(ops.mean(error, axis=-1) for error in errors)


def of_both_by_rank(y, p):
    return of_both(y, p) * ops.max(y["one"])


@pytest.mark.parametrize("loss", [of_both, of_both_by_rank])
def test_loss_of_a_nested_output_is_exact_or_refused(loss):
    def make():
        keras.utils.set_random_seed(0)
        inputs = keras.Input([5])
        one, two = (keras.layers.Dense(3)(inputs) for _ in range(2))
        model = keras.Model(inputs, {"out": {"one": one, "two": two}})
        model.compile(keras.optimizers.SGD(0.1), {"out": loss})
        return model

    targets = {"out": {"one": Y, "two": 2 * Y}}
    model, expected = make(), make()
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=6))
    if loss is of_both_by_rank:
        with pytest.raises(ValueError, match="depends on the others"):
            trainer.fit(X, targets, batch_size=24, verbose=0)
        return
    trainer.fit(X, targets, batch_size=24, verbose=0)
    expected.train_on_batch(X, targets)
    for one, other in zip(model.weights, expected.weights, strict=True):
        one, other = map(ops.convert_to_numpy, (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_first_of_two_outputs_with_one_loss_may_pair_examples():
    inputs = keras.Input([5])
    pairs = pairing_model()(inputs)
    model = keras.Model(inputs, [pairs, keras.layers.Dense(3)(inputs)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=6))
    with pytest.raises(ValueError, match="pair examples"):
        trainer.fit(X, [Y[:, :1], Y], batch_size=24, verbose=0)


def by_size_of_batch(y, p):
    return ops.mean(ops.square(y - p), axis=-1) / ops.shape(y)[0]


def by_place_in_batch(y, p):
    places = ops.arange(ops.shape(y)[0], dtype="float32")
    return ops.mean(ops.square(y - p), axis=-1) * (1.0 + places)


@functools.wraps(keras.losses.mean_squared_error)
def by_largest(y, p):
    errors = ops.mean(ops.square(y - p), axis=-1)
    return errors * errors / ops.max(errors)


def by_largest_as_a_loss():
    loss = keras.losses.MeanSquaredError()
    loss.fn = by_largest
    return loss


def loaded_by_keras():
    """Make a lambda as Keras makes one of a file, in a module of its own."""
    loss = by_size_of_batch
    made = lambda y, p: loss(y, p)  # noqa: E731
    names = keras.losses.mean_squared_error.__globals__
    return types.FunctionType(made.__code__, names, closure=made.__closure__)


MADE_OF_THE_BATCH = {
    "a lambda that Keras has loaded": loaded_by_keras,
    "its size": lambda: by_size_of_batch,
    "places": lambda: by_place_in_batch,
    "a function that wraps Keras's": lambda: by_largest,
    "a loss of Keras's of another function": by_largest_as_a_loss,
}


@pytest.mark.parametrize("name", MADE_OF_THE_BATCH)
def test_values_made_of_the_batch_are_refused(name):
    trainer = make_trainer(MADE_OF_THE_BATCH[name]())
    with pytest.raises(ValueError, match="depends on the others"):
        trainer.fit(X, Y, batch_size=24, verbose=0)


def test_losses_of_no_module_are_trained():
    made = {"ops": ops, "__name__": None}
    exec("def loss(y, p): return ops.square(y - p)", made)
    del made["__name__"]
    assert_exact(made["loss"])


@pytest.mark.parametrize("seed", range(6))
def test_losses_that_draw_now_and_then_are_not_refused(seed):
    drawn = keras.random.SeedGenerator(seed)

    def now_and_then(y, p):
        kept = keras.random.uniform(ops.shape(p), seed=drawn) > 0.03
        return ops.square(y - p) * ops.cast(kept, p.dtype)

    trainer = make_trainer(now_and_then)
    trainer.fit(X, Y, batch_size=24, verbose=0)
    assert trainer.progress.updates == 1
