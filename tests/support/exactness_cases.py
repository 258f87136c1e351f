"""Models and data of the exactness tests, and pairs made of them.

A pair is kept between tests, so that only the first case of a configuration
compiles.
"""

import functools

import numpy as np
import pytest
from oracle import Pair

from accumtrainer.keras_api import BACKEND, keras, ops

layers, losses = keras.layers, keras.losses
optimizers = keras.optimizers

# "mean" is another name of the first.
REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum")
EVEN = ((8,), (2, 2, 2), (1, 1, 1, 1, 1))
UNEVEN = ((4, 1), (1, 5), (1, 1, 6, 2, 5), (2, 2, 2, 2, 1))
SIZES = EVEN + UNEVEN
SOME_SIZES = ((7,), (3, 3), (4, 1), (1, 5, 2), (2, 2, 2, 2, 1))
SLICES = (1, 2, 3, 4, 5, 6, 10, 11, 12)  # of 11 samples
EXAMPLES = 25
if BACKEND == "jax":
    # Every shape is a compilation there, so micro-batches share three of them
    # and big batches two.
    SIZES = ((5,), (4, 4), (1, 1, 1, 1, 1), (4, 1), (1, 1, 4, 1, 1))
    SOME_SIZES = ((5,), (4, 4), (4, 1), (1, 1, 4, 1, 1))
    SLICES = (1, 4, 11, 12)
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
def make_tagger_and_judge(as_dict=False, prepare=layers.Identity):
    """Make a model with an output per token and one per sample."""
    words = keras.Input([TOKENS], dtype="int32", name="words")
    features = keras.Input([FEATURES], name="features")
    embedding = layers.Embedding(WORDS, 4, mask_zero=True)
    embedded = embedding(prepare()(words))
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


# What more than one file needs.


def reduced_by_itself(y_true, y_pred):
    return ops.mean((y_true - y_pred) ** 2)


L2 = keras.regularizers.L2(0.1)


@functools.cache
def regularized_pair(reduction, combine="exact"):
    return Pair(
        functools.partial(make_mlp, kernel_regularizer=L2),
        loss=losses.MeanSquaredError(reduction=reduction),
        combine=combine,
    )


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


def assert_identical(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)
