"""Promise 1 for every optimizer: a few updates end in the same weights."""

import functools

import numpy as np
import pytest
from exactness_cases import (
    CLASSES,
    FEATURES,
    OPTIMIZERS,
    assert_identical,
    features_and_numbers,
    leaves_variables_unused,
    make_bag_of_words,
    make_mlp,
    seeded,
    words_and_labels,
)
from keras_core_gaps import keras_3_only
from oracle import (
    TOLERANCE,
    KeepGradients,
    Pair,
    concatenate,
    cuts_in_many_ways,
    largest_error,
    update,
)

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras

layers = keras.layers
losses = keras.losses
optimizers = keras.optimizers

pytestmark = cuts_in_many_ways


# Optimizers: a few updates end in the same weights.

WINDOWS = ((3, 1), (1, 2, 3), (1, 3))


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


class WithTwoHeads(keras.Model):
    """Uses a head of its own for each structure of its inputs."""

    def __init__(self):
        super().__init__()
        self.body = layers.Dense(4)
        self.heads = [layers.Dense(1), layers.Dense(1)]
        self.body.build([None, FEATURES])
        for head in self.heads:
            head.build([None, 4])
        self.built = True

    def call(self, inputs):
        head = self.heads[len(inputs) - 1]
        return head(self.body(inputs[0]))


def train_two_heads(train, name):
    """Return the weights after windows that use one head or the other."""
    rng = np.random.default_rng(0)
    model = WithTwoHeads()
    for variable in model.trainable_variables:
        variable.assign(0.3 * rng.normal(size=variable.shape))
    run = train(model, OPTIMIZERS[name]())
    for inputs in (1, 2, 1, 1, 2, 1):
        x = rng.normal(size=[8, FEATURES]).astype("float32")
        run((x,) * inputs, rng.normal(size=[8, 1]).astype("float32"))
    return model.get_weights()


def by_keras(model, optimizer):
    model.compile(optimizer, "mse")
    return model.train_on_batch


def by_trainer(model, optimizer, *, micro_batch_size):
    return Trainer(
        model,
        optimizer=optimizer,
        loss="mse",
        accumulation=Accumulation(micro_batch_size=micro_batch_size),
    ).train_on_batch


def inside_fit(model, optimizer):
    model.compile(optimizer, "mse")
    callback = GradientAccumulation(4)
    return functools.partial(
        model.fit, batch_size=2, shuffle=False, verbose=0, callbacks=[callback]
    )


@leaves_variables_unused
@pytest.mark.parametrize(
    "train",
    [
        pytest.param(
            functools.partial(by_trainer, micro_batch_size=2), id="fused"
        ),
        pytest.param(
            functools.partial(by_trainer, micro_batch_size=3), id="streamed"
        ),
        pytest.param(
            inside_fit,
            id="inside fit",
            marks=keras_3_only("has a fit of its own kind, which is refused"),
        ),
    ],
)
@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_variables_used_by_some_windows_fare_as_in_keras(name, train):
    ours, keras_own = (train_two_heads(one, name) for one in (train, by_keras))
    for one, other in zip(ours, keras_own, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


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


# What this shows of plain Keras comes of TensorFlow's gradients by rows.
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


def test_the_keeper_of_gradients_changes_no_weights(rng):
    pair = Pair(make_mlp, loss="mse", make_optimizer=KeepGradients)
    before = pair.model.get_weights()
    pair.train(features_and_numbers(rng, (2, 2)))
    assert_identical(pair.model.get_weights(), before)
