"""Promise 1 for every kind of loss, and for losses of the user's own."""

import functools

import numpy as np
import pytest
from exactness_cases import (
    CLASSES,
    FEATURES,
    L2,
    REDUCTIONS,
    SOME_SIZES,
    TOKENS,
    each_size,
    features_and_labels,
    features_and_numbers,
    make_masking_regressor,
    make_mlp,
    make_tagger,
    padded_words,
    reduced_by_itself,
    seeded,
    words_and_tags,
)
from keras_core_gaps import keras_3_only
from oracle import (
    TOLERANCE,
    Pair,
    concatenate,
    cuts_in_many_ways,
    largest_error,
)

from accumtrainer import Accumulation, Trainer, WeightedLoss
from accumtrainer.keras_api import keras, ops

layers, losses = keras.layers, keras.losses

pytestmark = cuts_in_many_ways


# Every kind of loss.


class Quartic(losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean((y_true - y_pred) ** 4, axis=-1)


def per_sample(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred) ** 3, axis=-1)


def per_element(y_true, y_pred):
    return (y_true - y_pred) ** 2


def labels_of(draw):
    """Turn class numbers into the targets some losses want."""
    choices = {
        "numbers": features_and_numbers,
        "column": functools.partial(features_and_numbers, outputs=1),
        "classes": features_and_labels,
        "one-hot": lambda rng, sizes: [
            (x, np.eye(CLASSES, dtype="float32")[y])
            for x, y in features_and_labels(rng, sizes)
        ],
        "binary": lambda rng, sizes: [
            (x, (y[:, None] > 0).astype("float32"))
            for x, y in features_and_labels(rng, sizes)
        ],
        "signs": lambda rng, sizes: [
            (x, np.sign(y)) for x, y in features_and_numbers(rng, sizes)
        ],
    }
    return choices[draw]


LOSSES = {
    "mse": ("mse", "numbers", {}),
    "mean_absolute_error": ("mean_absolute_error", "numbers", {}),
    "flat targets": ("mse", "column", {"outputs": 1}),
    "Huber": (losses.Huber(0.5), "numbers", {}),
    "LogCosh": (losses.LogCosh(), "numbers", {}),
    "CosineSimilarity": (losses.CosineSimilarity(), "numbers", {}),
    "hinge": ("hinge", "signs", {}),
    "sparse_categorical_crossentropy": (
        "sparse_categorical_crossentropy",
        "classes",
        {"activation": "softmax"},
    ),
    "categorical_crossentropy": (
        "categorical_crossentropy",
        "one-hot",
        {"activation": "softmax"},
    ),
    "CategoricalFocalCrossentropy": (
        losses.CategoricalFocalCrossentropy(),
        "one-hot",
        {"activation": "softmax"},
    ),
    "crossentropy of classes": (
        "crossentropy",
        "classes",
        {"activation": "softmax"},
    ),
    "ce of one-hot": ("ce", "one-hot", {"activation": "softmax"}),
    "ce of two classes": (
        "ce",
        "binary",
        {"outputs": 1, "activation": "sigmoid"},
    ),
    "BinaryCrossentropy": (
        losses.BinaryCrossentropy(from_logits=True),
        "binary",
        {"outputs": 1},
    ),
    "ignore_class": (
        losses.SparseCategoricalCrossentropy(ignore_class=0),
        "classes",
        {"activation": "softmax"},
    ),
    "subclass": (Quartic(), "numbers", {}),
    "function per sample": (per_sample, "numbers", {}),
    "function per element": (per_element, "numbers", {}),
    "keras function": (losses.mean_squared_error, "numbers", {}),
}


@functools.cache
def loss_pair(name):
    loss, _, options = LOSSES[name]
    return Pair(functools.partial(make_mlp, **options), loss=loss)


@each_size(SOME_SIZES)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_equals_its_big_batch(rng, name, sizes):
    _, targets, _ = LOSSES[name]
    loss_pair(name).assert_exact(labels_of(targets)(rng, sizes))


def test_flat_targets_fit_predictions_with_a_last_axis_of_one(rng):
    batches = [
        (x, y[:, 0]) for x, y in features_and_numbers(rng, (3, 1), outputs=1)
    ]
    loss_pair("flat targets").assert_exact(batches)


def test_targets_of_one_trainer_may_change_their_rank(rng):
    columns = features_and_numbers(rng, (3, 1), outputs=1)
    pair = Pair(functools.partial(make_mlp, outputs=1), loss="mse")
    pair.assert_exact(columns)
    pair.assert_exact([(x, y[:, 0]) for x, y in columns])


@functools.cache
def masked_regression_pair(reduction):
    return Pair(
        make_masking_regressor,
        loss=losses.MeanSquaredError(reduction=reduction),
    )


@each_size(SOME_SIZES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masking_layer_counts_as_in_the_big_batch(rng, reduction, sizes):
    batches = []
    for size in sizes:
        x = rng.normal(size=[size, TOKENS, 2]).astype("float32")
        x[padded_words(rng, size) == 0] = 0.0
        y = rng.normal(size=[size, TOKENS, 1]).astype("float32")
        batches.append((x, y))
    masked_regression_pair(reduction).assert_exact(batches)


@functools.cache
def ignoring_pair():
    return Pair(
        make_tagger,
        loss=losses.SparseCategoricalCrossentropy(ignore_class=1),
    )


@each_size(SOME_SIZES)
def test_ignored_class_and_mask_count_together(rng, sizes):
    ignoring_pair().assert_exact(words_and_tags(rng, sizes))


# Losses that reduce by themselves.


def test_scalar_loss_is_refused_where_micro_batches_must_be_weighed(rng):
    pair = Pair(make_mlp, loss=reduced_by_itself)
    with pytest.raises(ValueError, match="denominator"):
        pair.train(features_and_numbers(rng, (2, 2)))


def test_refused_scalar_loss_leaves_weights_unchanged(rng):
    pair = Pair(
        make_mlp,
        loss=reduced_by_itself,
        make_optimizer=lambda: keras.optimizers.SGD(1.0),
    )
    with pytest.raises(ValueError, match="denominator"):
        pair.train(features_and_numbers(rng, (2, 2)))
    assert largest_error(pair.model.weights, pair.twin.weights) == 0


def test_dice_is_refused_because_it_couples_examples(rng):
    model = functools.partial(make_mlp, activation="sigmoid")
    pair = Pair(model, loss=losses.Dice())
    with pytest.raises(ValueError, match="denominator"):
        pair.train(features_and_numbers(rng, (2, 2)))


SELF_REDUCED = {
    "samples": "samples",
    "a function": lambda batch: ops.cast(ops.shape(batch.y)[0], "float32"),
}


@functools.cache
def self_reduced_pair(denominator):
    return Pair(
        make_mlp,
        loss=reduced_by_itself,
        denominator=SELF_REDUCED[denominator],
    )


@each_size()
@pytest.mark.parametrize("denominator", SELF_REDUCED)
def test_scalar_loss_with_denominator_is_exact(rng, denominator, sizes):
    pair = self_reduced_pair(denominator)
    pair.assert_exact(features_and_numbers(rng, sizes))


def mean_over_positives(y_true, y_pred):
    is_positive = ops.cast(y_true > 0, "float32")
    error = ops.sum(is_positive * (y_true - y_pred) ** 2)
    return ops.divide_no_nan(error, ops.sum(is_positive))


@functools.cache
def positives_pair():
    return Pair(
        make_mlp,
        loss=mean_over_positives,
        denominator=lambda batch: ops.sum(ops.cast(batch.y > 0, "float32")),
    )


@each_size()
def test_denominator_may_depend_on_the_targets(rng, sizes):
    positives_pair().assert_exact(features_and_numbers(rng, sizes))


class WeighsByPrediction(Trainer):
    def compute_loss(self, batch, info):
        predicted = self.model(batch.x, training=info.training)
        mean = ops.mean((predicted - batch.y) ** 2)
        return WeightedLoss(mean, ops.sum(predicted**2))


class LooksAtGradients(WeighsByPrediction):
    def on_accumulate(self, gradients, info):
        return gradients


@each_size(((4, 4), (4, 1)))
def test_denominator_that_depends_on_the_weights_is_a_constant(rng, sizes):
    batches = features_and_numbers(rng, sizes)
    after = []
    for trainer_class in (WeighsByPrediction, LooksAtGradients):
        trainer = trainer_class(
            make_mlp(),
            optimizer=keras.optimizers.SGD(0.1),
            accumulation=len(sizes),
        )
        trainer.fit(batches, verbose=0)
        after.append(trainer.model.get_weights())
    for one, other in zip(*after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_scalar_loss_without_accumulation_needs_no_denominator(rng):
    pair = Pair(make_mlp, loss=reduced_by_itself, accumulation=1)
    pair.assert_exact(features_and_numbers(rng, (5,)))


# Losses of the user's own.


class OwnLoss(keras.Model):
    """A model that computes its loss itself, and a metric of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(CLASSES, kernel_regularizer=L2)
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return ops.mean((y - y_pred) ** 2) + sum(self.losses)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.error.update_state(y, y_pred)
        return self.get_metrics_result()


@seeded
def make_own_loss():
    model = OwnLoss()
    model.build([None, FEATURES])
    return model


@functools.cache
def own_loss_pair():
    return Pair(make_own_loss, denominator="samples")


@each_size(SOME_SIZES)
def test_model_with_its_own_compute_loss_is_exact(rng, sizes):
    own_loss_pair().assert_exact(features_and_numbers(rng, sizes))


@each_size(SOME_SIZES)
def test_model_with_its_own_compute_metrics_is_asked_for_them(rng, sizes):
    pair = own_loss_pair()
    batches = features_and_numbers(rng, sizes)
    logs = pair.train(batches)
    x, y, _ = concatenate(batches)
    error = np.mean(np.abs(y - ops.convert_to_numpy(pair.twin(x))))
    assert logs["error"] == pytest.approx(error, rel=TOLERANCE)


def test_model_with_its_own_compute_loss_is_refused_without_denominator(rng):
    pair = Pair(make_own_loss)
    with pytest.raises(ValueError, match="denominator"):
        pair.train(features_and_numbers(rng, (2, 2)))


class ComputesAsKeras(keras.Model):
    """Overrides `compute_loss`, to let Keras compute it."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return super().compute_loss(x, y, y_pred, sample_weight)


@keras_3_only("has no metrics of single losses.")
@pytest.mark.parametrize("size", [12, 6, 5])
def test_losses_that_a_model_has_keras_compute_are_weighed_by_samples(size):
    # The rest of 6 is taken by a program for batches of any length, without
    # XLA. Metrics of each loss are Keras's there.
    features = keras.Input([1])
    heads = {
        name: layers.Dense(1, kernel_initializer="ones", name=name)(features)
        for name in ("a", "b")
    }
    model = ComputesAsKeras(features, heads)
    trainer = Trainer(
        model,
        optimizer=keras.optimizers.SGD(0.0),
        loss={"a": "mse", "b": "mae"},
        denominator="samples",
        accumulation=Accumulation(micro_batch_size=size),
        jit_compile=False,
    )
    x = np.arange(30, dtype="float32")[:, None]
    data = {"x": x, "y": {"a": 0 * x, "b": 0 * x}, "batch_size": 12}
    history = trainer.fit(**data, shuffle=False, verbose=0).history
    evaluated = trainer.evaluate(**data, return_dict=True, verbose=0)
    expected = {"a_loss": np.mean(x**2), "b_loss": np.mean(x)}
    for name, value in expected.items():
        assert history[name] == pytest.approx([value], rel=1e-5)
        assert evaluated[name] == pytest.approx(value, rel=1e-5)


class MeanOfPositives(Trainer):
    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        count = ops.sum(ops.cast(batch.y > 0, "float32"))
        mean = mean_over_positives(batch.y, outputs)
        return WeightedLoss(mean, count, outputs)


@functools.cache
def hooked_pair(trainer_class, loss):
    return Pair(make_mlp, loss=loss, trainer_class=trainer_class)


@each_size()
def test_weighted_loss_of_a_hook_is_exact(rng, sizes):
    pair = hooked_pair(MeanOfPositives, mean_over_positives)
    pair.assert_exact(features_and_numbers(rng, sizes))


class TwoLosses(Trainer):
    def compute_loss(self, batch, info):
        outputs = self.model(batch.x, training=info.training)
        count = ops.sum(ops.cast(batch.y > 0, "float32"))
        samples = ops.cast(ops.shape(outputs)[0], "float32")
        return {
            "positives": WeightedLoss(
                mean_over_positives(batch.y, outputs), count, outputs
            ),
            "all": WeightedLoss(reduced_by_itself(batch.y, outputs), samples),
        }


def two_losses(y_true, y_pred):
    return mean_over_positives(y_true, y_pred) + reduced_by_itself(
        y_true, y_pred
    )


@each_size()
def test_dict_of_weighted_losses_of_a_hook_is_exact(rng, sizes):
    pair = hooked_pair(TwoLosses, two_losses)
    pair.assert_exact(features_and_numbers(rng, sizes))


def test_dict_of_weighted_losses_is_logged_by_name(rng):
    pair = hooked_pair(TwoLosses, two_losses)
    batches = features_and_numbers(rng, (2, 3))
    logs = pair.train(batches)
    x, y, _ = concatenate(batches)
    y = ops.convert_to_tensor(y)
    outputs = ops.stop_gradient(pair.twin(x))
    assert logs["positives"] == pytest.approx(
        float(mean_over_positives(y, outputs)),
        rel=TOLERANCE,
    )
    assert logs["all"] == pytest.approx(
        float(reduced_by_itself(y, outputs)), rel=TOLERANCE
    )


def test_bare_scalar_of_a_hook_is_refused(rng):
    class Bare(Trainer):
        def compute_loss(self, batch, info):
            return ops.mean(self.model(batch.x))

    pair = Pair(make_mlp, trainer_class=Bare)
    with pytest.raises(TypeError, match="WeightedLoss"):
        pair.train(features_and_numbers(rng, (2, 2)))
