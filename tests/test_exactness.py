"""Promise 1: a window's update is the one of its big batch.

Every case trains one window, or a few, and compares with plain Keras on the
concatenated window (`oracle.py`). The Trainers are kept between cases, so
that only the first case of a configuration compiles.
"""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras_core_gaps import keras_3_only
from oracle import (
    TOLERANCE,
    KeepGradients,
    Pair,
    batch_gradients,
    combined_gradients,
    concatenate,
    cuts_in_many_ways,
    largest_error,
    update,
)

from accumtrainer import Accumulation, Trainer, WeightedLoss
from accumtrainer.keras_api import BACKEND, KERAS_NAME, keras, ops

layers, losses = keras.layers, keras.losses

pytestmark = cuts_in_many_ways

# "mean" is another name of the first.
REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")
EVEN = ((8,), (4, 4), (2, 2, 2), (1, 1, 1, 1, 1))
UNEVEN = ((4, 1), (1, 5), (3, 2, 1), (1, 1, 6, 2, 5), (2, 2, 2, 2, 1))
SIZES = EVEN + UNEVEN
SOME_SIZES = ((7,), (3, 3), (4, 1), (1, 5, 2), (2, 2, 2, 2, 1))
EXAMPLES = 25
if BACKEND == "jax":
    # Every shape is a compilation there, so the windows share two shapes.
    SIZES = ((1,), (4, 4), (1, 1, 1), (4, 1), (1, 4, 4, 1))
    SOME_SIZES = ((4,), (4, 4), (4, 1), (1, 4, 1))
    EXAMPLES = 5

FEATURES, CLASSES, TOKENS, WORDS = 4, 3, 5, 7


# Keras warns of variables without a gradient where the backend can tell.
leaves_variables_unused = pytest.mark.filterwarnings(
    "ignore:Gradients do not exist:UserWarning"
)


def shown(sizes):
    return "+".join(map(str, sizes))


def each_size(sizes=SIZES):
    """Run a test on windows cut in these ways.

    It stands above other decorators, so that it varies fastest and the cases
    of one Trainer follow each other.
    """
    return pytest.mark.parametrize("sizes", sizes, ids=shown)


def seeded(make_model):
    """Make the same model whenever asked, whatever was made before."""

    @functools.wraps(make_model)
    def make(*args, **kwargs):
        keras.utils.set_random_seed(7)
        return make_model(*args, **kwargs)

    return make


# Models, each the smallest that has what its tests are about.


@seeded
def make_mlp(outputs=CLASSES, activation=None, **options):
    return keras.Sequential(
        [
            keras.Input([FEATURES]),
            layers.Dense(6, activation="tanh", **options),
            layers.Dense(outputs, activation=activation),
        ]
    )


@seeded
def make_tagger(is_masked=True):
    """Make a model with one loss per token."""
    return keras.Sequential(
        [
            keras.Input([TOKENS], dtype="int32"),
            layers.Embedding(WORDS, 4, mask_zero=is_masked),
            layers.TimeDistributed(layers.Dense(6, activation="tanh")),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


@seeded
def make_masking_regressor():
    """Make a model masked by a layer, with a number per time step."""
    return keras.Sequential(
        [
            keras.Input([TOKENS, 2]),
            layers.Masking(),
            layers.Dense(6, activation="tanh"),
            layers.Dense(1),
        ]
    )


@seeded
def make_bag_of_words():
    """Make a model whose embedding meets the same words again and again."""
    return keras.Sequential(
        [
            keras.Input([TOKENS], dtype="int32"),
            layers.Embedding(WORDS, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(CLASSES),
        ]
    )


@seeded
def make_tagger_and_judge(as_dict=False):
    """Make a model with an output per token and one per sample."""
    words = keras.Input([TOKENS], dtype="int32", name="words")
    features = keras.Input([FEATURES], name="features")
    embedded = layers.Embedding(WORDS, 4, mask_zero=True)(words)
    pooled = layers.GlobalAveragePooling1D()(embedded)
    both = layers.Concatenate()([pooled, features])
    tags = layers.Dense(CLASSES, activation="softmax", name="tags")(embedded)
    score = layers.Dense(2, name="score")(both)
    if as_dict:
        inputs = {"words": words, "features": features}
        return keras.Model(inputs, {"tags": tags, "score": score})
    return keras.Model([words, features], [tags, score])


# Data.


def features_and_labels(rng, sizes):
    return [
        (
            rng.normal(size=[size, FEATURES]).astype("float32"),
            rng.integers(0, CLASSES, [size]),
        )
        for size in sizes
    ]


def features_and_numbers(rng, sizes, outputs=CLASSES):
    return [
        (
            rng.normal(size=[size, FEATURES]).astype("float32"),
            rng.normal(size=[size, outputs]).astype("float32"),
        )
        for size in sizes
    ]


def padded_words(rng, size):
    """Draw sentences of different lengths, padded by zeros."""
    words = rng.integers(1, WORDS, [size, TOKENS])
    lengths = rng.integers(1, TOKENS + 1, [size])
    return np.where(np.arange(TOKENS) < lengths[:, None], words, 0)


def words_and_tags(rng, sizes):
    return [
        (padded_words(rng, size), rng.integers(0, CLASSES, [size, TOKENS]))
        for size in sizes
    ]


def words_and_labels(rng, sizes):
    return [
        (
            rng.integers(0, WORDS, [size, TOKENS]),
            rng.integers(0, CLASSES, [size]),
        )
        for size in sizes
    ]


def with_weights(rng, batches, shape=()):
    """Add sample weights between 0.1 and 3 to `(x, y)` batches."""
    return [
        (x, y, rng.uniform(0.1, 3.0, [len(x), *shape]).astype("float32"))
        for x, y in batches
    ]


# Every reduction, weighted and masked in every way.

WEIGHTINGS = {
    "unweighted": (make_mlp, features_and_labels, None),
    "sample weights": (make_mlp, features_and_labels, ()),
    "unmasked tokens": (
        functools.partial(make_tagger, is_masked=False),
        words_and_tags,
        None,
    ),
    "mask": (make_tagger, words_and_tags, None),
    "mask and sample weights": (make_tagger, words_and_tags, (1,)),
    "mask and token weights": (make_tagger, words_and_tags, (TOKENS,)),
}


def weighted_batches(rng, weighting, sizes):
    _, draw, shape = WEIGHTINGS[weighting]
    batches = draw(rng, sizes)
    return batches if shape is None else with_weights(rng, batches, shape)


@functools.cache
def weighted_pair(weighting, reduction, combine="exact", jit_compile=None):
    make_model, _, _ = WEIGHTINGS[weighting]
    return Pair(
        make_model,
        loss=losses.SparseCategoricalCrossentropy(
            from_logits=make_model is make_mlp, reduction=reduction
        ),
        combine=combine,
        jit_compile=jit_compile,
    )


@each_size()
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_window_equals_its_big_batch(rng, weighting, reduction, sizes):
    pair = weighted_pair(weighting, reduction)
    pair.assert_exact(weighted_batches(rng, weighting, sizes))


@pytest.mark.parametrize("weighting", ["sample weights", "mask"])
def test_reduction_by_its_other_name_is_exact(rng, weighting):
    pair = weighted_pair(weighting, "mean")
    pair.assert_exact(weighted_batches(rng, weighting, (4, 1)))


@each_size(SOME_SIZES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weights_count_as_in_the_big_batch(rng, reduction, sizes):
    batches = features_and_labels(rng, sizes)
    class_weight = {0: 0.2, 1: 3.0}  # the third class counts 1
    x, y, _ = concatenate(batches)
    weights = np.array([0.2, 3.0, 1.0], "float32")[y]
    weighted_pair("unweighted", reduction).assert_exact(
        batches, reference=(x, y, weights), class_weight=class_weight
    )


@each_size(((4, 4), (3, 2, 1)))
@pytest.mark.parametrize(
    "weighting", ["sample weights", "mask and token weights"]
)
def test_window_under_xla_equals_its_big_batch(rng, weighting, sizes):
    pair = weighted_pair(weighting, "mean_with_sample_weight", jit_compile=True)
    pair.assert_exact(weighted_batches(rng, weighting, sizes))


@each_size(((2, 2), (1, 3)))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batch_of_zero_weights_counts_nothing(rng, reduction, sizes):
    batches = weighted_batches(rng, "sample weights", sizes)
    batches[0][2][:] = 0
    weighted_pair("sample weights", reduction).assert_exact(batches)


@each_size(((2, 2), (1, 3)))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batch_of_padding_alone_counts_nothing(rng, reduction, sizes):
    batches = weighted_batches(rng, "mask", sizes)
    batches[-1][0][:] = 0
    weighted_pair("mask", reduction).assert_exact(batches)


@pytest.mark.parametrize("weighting", ["sample weights", "mask"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_order_inside_a_window_is_irrelevant(rng, weighting, reduction):
    pair = weighted_pair(weighting, reduction)
    batches = weighted_batches(rng, weighting, (3, 1, 2))
    pair.train(batches)
    forward = [ops.convert_to_numpy(v) for v in pair.gradients]
    pair.train(batches[::-1])
    assert largest_error(pair.gradients, forward) <= TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 10, 11, 12])
@pytest.mark.parametrize("weighting", ["sample weights", "mask"])
def test_sliced_batch_equals_the_whole_batch(rng, weighting, size):
    pair = sliced_pair(weighting, size)
    (batch,) = weighted_batches(rng, weighting, (11,))
    pair.trainer.train_on_batch(*batch)
    _, expected = batch_gradients(pair.twin, batch)
    assert largest_error(pair.gradients, expected) <= TOLERANCE


def sliced_pair(weighting, size):
    make_model, _, _ = WEIGHTINGS[weighting]
    return Pair(
        make_model,
        loss=losses.SparseCategoricalCrossentropy(
            from_logits=make_model is make_mlp,
            reduction="mean_with_sample_weight",
        ),
        accumulation=Accumulation(micro_batch_size=size),
        run_eagerly=True,
    )


# Every kind of loss.


class Quartic(losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean((y_true - y_pred) ** 4, axis=-1)


def per_sample(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred) ** 3, axis=-1)


def per_element(y_true, y_pred):
    return (y_true - y_pred) ** 2


def reduced_by_itself(y_true, y_pred):
    return ops.mean((y_true - y_pred) ** 2)


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


def test_loss_without_reduction_is_refused(rng):
    trainer = Trainer(
        make_mlp(),
        optimizer="sgd",
        loss=losses.MeanSquaredError(reduction="none"),
    )
    with pytest.raises(ValueError, match="must have a reduction"):
        trainer.fit(features_and_numbers(rng, (2,)), verbose=0)


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


# Several outputs.

SPARSE = "sparse_categorical_crossentropy"

OUTPUTS = {
    "loss weights": {"loss": [SPARSE, "mse"], "loss_weights": [0.3, 2.0]},
    "dict and loss weights": {
        "loss": {"score": "mse", "tags": SPARSE},
        "loss_weights": {"tags": 0.3, "score": 2.0},
        "as_dict": True,
    },
    "dict of losses for a list": {
        "loss": {"score": "mse", "tags": SPARSE},
        "loss_weights": {"score": 2.0, "tags": 0.3},
    },
    "one loss only": {"loss": [None, "mse"]},
    "mean and sum": {
        "loss": [
            losses.SparseCategoricalCrossentropy(),
            losses.MeanSquaredError(reduction="sum"),
        ],
    },
    "two sums": {
        "loss": [
            losses.SparseCategoricalCrossentropy(reduction="sum"),
            losses.MeanSquaredError(reduction="sum"),
        ],
        "loss_weights": [0.1, 1.5],
    },
    "means by weight": {
        "loss": lambda: [
            losses.SparseCategoricalCrossentropy(
                reduction="mean_with_sample_weight"
            ),
            losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        ],
    },
}


@functools.cache
def outputs_pair(name, combine="exact", jit_compile=None):
    options = dict(OUTPUTS[name])
    as_dict = options.pop("as_dict", False)
    if callable(options["loss"]):  # Keras Core has no such reduction to make.
        options["loss"] = options["loss"]()
    return Pair(
        functools.partial(make_tagger_and_judge, as_dict=as_dict),
        combine=combine,
        jit_compile=jit_compile,
        **options,
    )


def tags_and_scores(rng, sizes, *, as_dict=False, is_weighted=False):
    batches = []
    for size in sizes:
        x = {
            "words": padded_words(rng, size),
            "features": rng.normal(size=[size, FEATURES]).astype("float32"),
        }
        y = {
            "tags": rng.integers(0, CLASSES, [size, TOKENS]),
            "score": rng.normal(size=[size, 2]).astype("float32"),
        }
        weights = {
            "tags": rng.uniform(0.1, 2, [size, TOKENS]).astype("float32"),
            "score": rng.uniform(0.1, 2, [size]).astype("float32"),
        }
        batch = (x, y, weights) if is_weighted else (x, y)
        if not as_dict:
            batch = tuple(tuple(part.values()) for part in batch)
        batches.append(batch)
    return batches


@each_size()
@leaves_variables_unused
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_different_denominators_are_exact(rng, name, sizes):
    as_dict = "as_dict" in OUTPUTS[name]
    batches = tags_and_scores(rng, sizes, as_dict=as_dict)
    outputs_pair(name).assert_exact(batches)


@each_size(SOME_SIZES)
@pytest.mark.parametrize(
    "name",
    [
        "loss weights",
        "dict and loss weights",
        "means by weight",
        "mean and sum",
    ],
)
def test_outputs_with_weights_of_their_own_are_exact(rng, name, sizes):
    as_dict = "as_dict" in OUTPUTS[name]
    batches = tags_and_scores(rng, sizes, as_dict=as_dict, is_weighted=True)
    outputs_pair(name).assert_exact(batches)


@each_size(((2, 2), (3, 1)))
def test_outputs_under_xla_are_exact(rng, sizes):
    pair = outputs_pair("loss weights", jit_compile=True)
    pair.assert_exact(tags_and_scores(rng, sizes))


def test_output_of_zero_weight_in_one_micro_batch_is_exact(rng):
    batches = tags_and_scores(rng, (2, 3, 2), is_weighted=True)
    _, _, (tag_weights, _) = batches[1]
    tag_weights[:] = 0
    outputs_pair("means by weight").assert_exact(batches)


def test_output_of_zero_weight_in_the_whole_window_is_exact(rng):
    batches = tags_and_scores(rng, (2, 3), is_weighted=True)
    for _, _, (tag_weights, _) in batches:
        tag_weights[:] = 0
    outputs_pair("means by weight").assert_exact(batches)


def test_one_loss_serves_every_output(rng):
    def make_twins():
        keras.utils.set_random_seed(7)
        x = keras.Input([FEATURES])
        return keras.Model(x, [layers.Dense(2)(x), layers.Dense(2)(x)])

    pair = Pair(make_twins, loss="mse")
    batches = [
        (x, (y, 2 * y)) for x, y in features_and_numbers(rng, (3, 1), outputs=2)
    ]
    pair.assert_exact(batches)


@keras_3_only("logs only the sum, where we log each as Keras 3 does")
def test_logs_name_the_losses_of_several_outputs(rng):
    pair = outputs_pair("loss weights")
    batches = tags_and_scores(rng, (4, 1, 2))
    logs = pair.train(batches)
    batch = concatenate(batches)
    expected = pair.twin.test_on_batch(*batch[:2], return_dict=True)
    for name in ("loss", "tags_loss", "score_loss"):
        assert logs[name] == pytest.approx(expected[name], rel=TOLERANCE)


# What layers add to the loss.

L2 = keras.regularizers.L2(0.1)


@functools.cache
def regularized_pair(reduction, combine="exact"):
    return Pair(
        functools.partial(make_mlp, kernel_regularizer=L2),
        loss=losses.MeanSquaredError(reduction=reduction),
        combine=combine,
    )


@each_size()
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weight_regularizers_count_once_per_window(rng, reduction, sizes):
    pair = regularized_pair(reduction)
    pair.assert_exact(features_and_numbers(rng, sizes))


@each_size(((3,), (2, 2), (1, 3)))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_window_of_zero_weights_is_still_regularized(rng, reduction, sizes):
    batches = with_weights(rng, features_and_numbers(rng, sizes))
    for _, _, weights in batches:
        weights[:] = 0
    regularized_pair(reduction).assert_exact(batches)


@functools.cache
def activity_pair(reduction):
    return Pair(
        functools.partial(
            make_mlp, activity_regularizer=L2, kernel_regularizer=L2
        ),
        loss=losses.MeanSquaredError(reduction=reduction),
    )


@each_size(SOME_SIZES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_activity_regularizers_are_means_over_samples(rng, reduction, sizes):
    batches = with_weights(rng, features_and_numbers(rng, sizes))
    activity_pair(reduction).assert_exact(batches)


class AddsLoss(layers.Layer):
    def __init__(self, reduce=None):
        super().__init__()
        self._reduce = reduce

    def call(self, inputs):
        added = ops.mean(inputs**4, axis=-1)
        self.add_loss(added if self._reduce is None else self._reduce(added))
        return inputs


@seeded
def make_adding(reduce=None):
    return keras.Sequential(
        [
            keras.Input([FEATURES]),
            layers.Dense(6, activation="tanh"),
            AddsLoss(reduce),
            layers.Dense(CLASSES, kernel_regularizer=L2),
        ]
    )


@functools.cache
def adding_pair(reduce=None, **options):
    return Pair(functools.partial(make_adding, reduce), **options)


@each_size()
@keras_3_only("cannot add a vector to the loss")
def test_vector_given_to_add_loss_is_summed(rng, sizes):
    pair = adding_pair(loss="mse")
    pair.assert_exact(features_and_numbers(rng, sizes))


@each_size()
def test_scalar_given_to_add_loss_is_weighed_as_stated(rng, sizes):
    pair = adding_pair(ops.mean, loss="mse", denominator="samples")
    pair.assert_exact(features_and_numbers(rng, sizes))


@each_size(SOME_SIZES)
@leaves_variables_unused
def test_model_may_have_added_losses_only(rng, sizes):
    pair = adding_pair(ops.mean, denominator="samples")
    batches = [(x,) for x, _ in features_and_numbers(rng, sizes)]
    pair.assert_exact(batches)


def test_scalar_given_to_add_loss_is_refused_without_denominator(rng):
    pair = Pair(functools.partial(make_adding, ops.mean), loss="mse")
    with pytest.raises(ValueError, match="denominator"):
        pair.train(features_and_numbers(rng, (2, 2)))


# Optimizers: a few updates end in the same weights.

WINDOWS = ((3, 1), (1, 2, 3), (1, 3))
optimizers = keras.optimizers

OPTIMIZERS = {
    "SGD": lambda **o: optimizers.SGD(0.1, **o),
    "momentum": lambda **o: optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, **o
    ),
    "Adam": lambda **o: optimizers.Adam(0.01, **o),
    "AMSGrad": lambda **o: optimizers.Adam(0.01, amsgrad=True, **o),
    "AdamW": lambda **o: optimizers.AdamW(0.01, weight_decay=0.1, **o),
    "RMSprop": lambda **o: optimizers.RMSprop(0.01, centered=True, **o),
    "Adagrad": lambda **o: optimizers.Adagrad(0.1, **o),
    "Adadelta": lambda **o: optimizers.Adadelta(0.5, **o),
    "Adamax": lambda **o: optimizers.Adamax(0.01, **o),
    "Nadam": lambda **o: optimizers.Nadam(0.01, **o),
    "Ftrl": lambda **o: optimizers.Ftrl(0.1, **o),
    "Lion": lambda **o: optimizers.Lion(0.01, **o),
    "Lamb": lambda **o: optimizers.Lamb(0.01, **o),
    "Adafactor": lambda **o: optimizers.Adafactor(0.01, **o),
}

SETTINGS = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.02},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "weight decay": {"weight_decay": 0.05},
}


def several_windows(rng, draw, windows=WINDOWS):
    return [draw(rng, sizes) for sizes in windows]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_every_optimizer_are_exact(rng, name):
    pair = Pair(make_mlp, loss="mse", make_optimizer=OPTIMIZERS[name])
    pair.assert_same_weights(several_windows(rng, features_and_numbers))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["momentum", "Adam"])
def test_optimizer_settings_act_once_per_window(rng, name, setting):
    pair = Pair(
        make_mlp,
        loss="mse",
        make_optimizer=functools.partial(OPTIMIZERS[name], **SETTINGS[setting]),
    )
    pair.assert_same_weights(several_windows(rng, features_and_numbers))


@pytest.mark.parametrize("frequency", [None, 2])
def test_average_of_weights_moves_once_per_window(rng, frequency, request):
    if frequency is not None:
        request.getfixturevalue("keras_may_promote")

    def make_optimizer():
        return optimizers.SGD(
            0.3,
            use_ema=True,
            ema_momentum=0.8,
            ema_overwrite_frequency=frequency,
        )

    pair = Pair(
        make_mlp, loss="mse", make_optimizer=make_optimizer, accumulation=2
    )
    batches = features_and_numbers(rng, (2, 2, 3, 3, 1, 1))
    pair.trainer.fit(batches, verbose=0)
    for start in (0, 2, 4):
        update(pair.twin, concatenate(batches[start : start + 2]))
    # The end of fit leaves the average in the weights, as in Keras.
    pair.twin.optimizer.finalize_variable_values(pair.twin.trainable_variables)
    assert largest_error(pair.model.weights, pair.twin.weights) <= TOLERANCE


def test_schedule_moves_once_per_window(rng):
    def make_optimizer():
        return optimizers.SGD(
            optimizers.schedules.InverseTimeDecay(0.3, 1, 0.5)
        )

    pair = Pair(make_mlp, loss="mse", make_optimizer=make_optimizer)
    pair.assert_same_weights(several_windows(rng, features_and_numbers))


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_constraints_hold_after_every_update(rng, name):
    pair = Pair(
        functools.partial(
            make_mlp, kernel_constraint=keras.constraints.UnitNorm()
        ),
        loss="mse",
        make_optimizer=OPTIMIZERS[name],
    )
    pair.assert_same_weights(several_windows(rng, features_and_numbers))
    norms = np.linalg.norm(pair.model.weights[0], axis=0)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-5)


def test_frozen_layer_keeps_its_weights_bit_for_bit(rng):
    def make_frozen():
        model = make_mlp()
        model.layers[0].trainable = False
        return model

    pair = Pair(make_frozen, loss="mse", make_optimizer=OPTIMIZERS["AdamW"])
    before = pair.model.layers[0].get_weights()
    pair.assert_same_weights(several_windows(rng, features_and_numbers))
    assert_identical(pair.model.layers[0].get_weights(), before)


def assert_identical(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


class WithUnusedLayer(keras.Model):
    def __init__(self):
        super().__init__()
        self.used = layers.Dense(CLASSES)
        self.unused = layers.Dense(2)

    def build(self, shape):
        self.used.build(shape)
        self.unused.build(shape)

    def call(self, inputs):
        return self.used(inputs)


@seeded
def make_with_unused_layer():
    model = WithUnusedLayer()
    model.build([None, FEATURES])
    return model


@leaves_variables_unused
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_unused_variables_fare_as_in_keras(rng, name):
    pair = Pair(
        make_with_unused_layer, loss="mse", make_optimizer=OPTIMIZERS[name]
    )
    pair.assert_same_weights(several_windows(rng, features_and_numbers))


# Embeddings: the same words in every micro-batch.

CLIPPED = [
    (name, clipping)
    for name in ("SGD", "Adam")
    for clipping in ("clipnorm", "clipvalue", "global_clipnorm")
]
UNCLIPPED = [
    (name, "plain")
    for name in ("SGD", "momentum", "Adam", "RMSprop", "Adagrad", "Ftrl")
]


@pytest.mark.parametrize("name, clipping", UNCLIPPED + CLIPPED)
def test_repeated_words_are_updated_as_by_dense_gradients(rng, name, clipping):
    pair = embedding_pair(name, clipping)
    pair.assert_same_weights(several_windows(rng, words_and_labels))


def embedding_pair(name, clipping):
    return Pair(
        make_bag_of_words,
        loss=losses.SparseCategoricalCrossentropy(from_logits=True),
        make_optimizer=functools.partial(
            OPTIMIZERS[name], **SETTINGS[clipping]
        ),
    )


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="other backends have dense gradients only"
)
@keras_3_only("makes gradients dense before the optimizer sees them")
@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Adagrad"])
def test_plain_keras_on_tensorflow_updates_repeated_words_wrongly(rng, name):
    # This is why the oracle merges repeated rows. Should it fail with a newer
    # Keras, the README's table of traps has a line too many.
    pair = embedding_pair(name, "plain")
    windows = several_windows(rng, words_and_labels, ((8,), (8,)))
    plain = make_bag_of_words()
    plain.compile(OPTIMIZERS[name](), pair.twin.loss, jit_compile=False)
    for ((x, y),) in windows:
        plain.train_on_batch(x, y)
    pair.assert_same_weights(windows)
    error = largest_error(plain.weights, pair.twin.weights)
    assert error > 10 * TOLERANCE


# Without accumulation: Keras's own fit.


@seeded
def make_normalized():
    return keras.Sequential(
        [
            keras.Input([FEATURES]),
            layers.Dense(6, use_bias=False),  # its gradient is rounding
            layers.BatchNormalization(),
            layers.Dense(CLASSES),
        ]
    )


@seeded
def make_convolutional():
    return keras.Sequential(
        [
            keras.Input([FEATURES]),
            layers.Reshape([2, 2, 1]),
            layers.Conv2D(4, 2, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(CLASSES),
        ]
    )


FIT_MODELS = {
    "mlp": make_mlp,
    "regularized": functools.partial(
        make_mlp, kernel_regularizer=L2, activity_regularizer=L2
    ),
    "batch normalization": make_normalized,
    "convolution": make_convolutional,
    "added loss": functools.partial(make_adding, ops.mean),
}


@pytest.mark.parametrize("name", FIT_MODELS)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_without_accumulation_weights_are_those_of_keras_fit(
    rng, name, optimizer
):
    forgets = KERAS_NAME != "keras" and BACKEND == "jax"
    if forgets and name in ("regularized", "added loss"):
        pytest.skip("Keras Core: its own fit on JAX forgets added losses")
    x = rng.normal(size=[22, FEATURES]).astype("float32")
    y = rng.normal(size=[22, CLASSES]).astype("float32")
    model, plain = FIT_MODELS[name](), FIT_MODELS[name]()
    plain.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=False)
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = plain.fit(x, y, **options).history["loss"]
    trainer = Trainer(
        model,
        optimizer=OPTIMIZERS[optimizer](),
        loss="mse",
        jit_compile=False,
        seed=0,
    )
    actual = trainer.fit(x, y, **options).history["loss"]
    assert largest_error(model.weights, plain.weights) <= TOLERANCE
    if name != "regularized" and KERAS_NAME == "keras":
        # Keras averages the penalties over batches, not over samples, and
        # Keras Core all of the loss.
        assert actual == pytest.approx(expected, rel=TOLERANCE)


@functools.cache
def evaluated_pair(name):
    return Pair(FIT_MODELS[name], loss="mse", denominator="samples")


@keras_3_only("averages losses over batches, not over samples")
@pytest.mark.parametrize("size", [1, 5, 8, 22])
@pytest.mark.parametrize("name", FIT_MODELS)
def test_evaluate_equals_that_of_keras_where_nothing_is_masked(rng, name, size):
    pair = evaluated_pair(name)
    x = rng.normal(size=[22, FEATURES]).astype("float32")
    y = rng.normal(size=[22, CLASSES]).astype("float32")
    actual = pair.trainer.evaluate(x, y, batch_size=size, verbose=0)
    expected = pair.twin.evaluate(x, y, batch_size=size, verbose=0)
    assert actual == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("size", [1, 4, 11])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_evaluation_does_not_depend_on_the_batch_size(rng, weighting, size):
    pair = weighted_pair(weighting, "mean_with_sample_weight")
    (batch,) = weighted_batches(rng, weighting, (11,))
    x, y, weights = (*batch, None)[:3]
    actual = pair.trainer.evaluate(
        x, y, batch_size=size, sample_weight=weights, verbose=0
    )
    expected, _ = batch_gradients(pair.twin, (x, y, weights))
    assert actual == pytest.approx(expected, rel=TOLERANCE)


# The other ways to combine, by their plain loops.


@each_size(SOME_SIZES)
@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("weighting", ["sample weights", "mask"])
@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", "sum"])
def test_mean_and_sum_are_the_plain_loops(
    rng, combine, weighting, reduction, sizes
):
    pair = weighted_pair(weighting, reduction, combine)
    batches = weighted_batches(rng, weighting, sizes)
    assert_plain_loop(pair, batches, combine)


@each_size(SOME_SIZES)
@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_mean_and_sum_of_several_outputs_are_the_plain_loops(
    rng, combine, sizes
):
    pair = outputs_pair("loss weights", combine)
    assert_plain_loop(pair, tags_and_scores(rng, sizes), combine)


@each_size(((2, 2), (1, 3)))
@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_mean_and_sum_treat_regularizers_as_the_plain_loops(
    rng, combine, sizes
):
    pair = regularized_pair("mean", combine)
    assert_plain_loop(pair, features_and_numbers(rng, sizes), combine)


def assert_plain_loop(pair, batches, combine):
    factor = 1.0 if combine == "sum" else 1.0 / len(batches)
    logs = pair.train(batches)
    expected = combined_gradients(pair.twin, batches, factor)
    assert largest_error(pair.gradients, expected) <= TOLERANCE
    loss, _ = batch_gradients(pair.twin, concatenate(batches))
    assert logs["loss"] == pytest.approx(loss, rel=TOLERANCE)


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_scalar_loss_needs_no_denominator_in_the_plain_loops(rng, combine):
    pair = Pair(make_mlp, loss=reduced_by_itself, combine=combine)
    batches = features_and_numbers(rng, (3, 1))
    pair.train(batches)
    factor = {"sum": 1.0, "mean": 0.5}[combine]
    expected = combined_gradients(pair.twin, batches, factor)
    assert largest_error(pair.gradients, expected) <= TOLERANCE


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
    outputs = pair.twin(x)
    assert logs["positives"] == pytest.approx(
        float(mean_over_positives(ops.convert_to_tensor(y), outputs)),
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


# However the data splits.

splits = st.lists(st.integers(1, 6), min_size=1, max_size=6)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    "weighting", ["sample weights", "mask", "mask and token weights"]
)
@settings(max_examples=EXAMPLES)
@given(sizes=splits, seed=seeds)
def test_any_split_equals_the_big_batch(weighting, sizes, seed):
    pair = weighted_pair(weighting, "mean_with_sample_weight")
    rng = np.random.default_rng(seed)
    pair.assert_exact(weighted_batches(rng, weighting, sizes))


@settings(max_examples=EXAMPLES)
@given(sizes=splits, seed=seeds)
def test_any_split_of_several_outputs_equals_the_big_batch(sizes, seed):
    rng = np.random.default_rng(seed)
    batches = tags_and_scores(rng, sizes, is_weighted=True)
    outputs_pair("means by weight").assert_exact(batches)


@settings(max_examples=EXAMPLES)
@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    steps=st.integers(1, 5),
    seed=seeds,
)
def test_any_epoch_equals_big_batches_with_a_smaller_last_one(
    samples, batch_size, steps, seed
):
    pair = sgd_pair()
    pair.twin.set_weights(pair.model.get_weights())
    pair.steps = steps
    rng = np.random.default_rng(seed)
    ((x, y),) = features_and_labels(rng, (samples,))
    pair.trainer.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    size = batch_size * steps
    for start in range(0, samples, size):
        rows = slice(start, start + size)
        update(pair.twin, (x[rows], y[rows]))
    error = largest_error(pair.model.weights, pair.twin.weights)
    assert error <= TOLERANCE


@functools.cache
def sgd_pair():
    return Pair(
        make_mlp,
        loss=losses.SparseCategoricalCrossentropy(from_logits=True),
        make_optimizer=lambda: optimizers.SGD(0.05),
    )


def test_the_keeper_of_gradients_changes_no_weights(rng):
    pair = Pair(make_mlp, loss="mse", make_optimizer=KeepGradients)
    before = pair.model.get_weights()
    pair.train(features_and_numbers(rng, (2, 2)))
    assert_identical(pair.model.get_weights(), before)
