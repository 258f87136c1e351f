"""What is left without accumulation is Keras's own `fit` and `evaluate`."""

import functools

import pytest
from exactness_cases import (
    CLASSES,
    FEATURES,
    L2,
    OPTIMIZERS,
    WEIGHTINGS,
    make_adding,
    make_mlp,
    seeded,
    weighted_batches,
    weighted_pair,
)
from keras_core_gaps import keras_3_only
from oracle import (
    TOLERANCE,
    Pair,
    batch_gradients,
    cuts_in_many_ways,
    largest_error,
)
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import BACKEND, KERAS_NAME, keras, ops

layers = keras.layers

pytestmark = cuts_in_many_ways


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
    plain.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=JIT_COMPILE)
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = plain.fit(x, y, **options).history["loss"]
    trainer = Trainer(
        model,
        optimizer=OPTIMIZERS[optimizer](),
        loss="mse",
        jit_compile=JIT_COMPILE,
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


@seeded
def make_two_heads():
    inputs = keras.Input([FEATURES])
    heads = {name: layers.Dense(CLASSES, name=name) for name in "ab"}
    return keras.Model(inputs, {k: head(inputs) for k, head in heads.items()})


SUM_MODELS = {
    "one output": make_mlp,
    "several outputs": make_two_heads,
    "added loss": functools.partial(
        make_adding, functools.partial(ops.mean, axis=-1)
    ),
}


@functools.cache
def sum_pair(name, slices):
    loss = keras.losses.MeanSquaredError(reduction="sum")
    loss = {"a": loss, "b": "mse"} if name == "several outputs" else loss
    accumulation = Accumulation(micro_batch_size=slices)
    return Pair(SUM_MODELS[name], loss=loss, accumulation=accumulation)


@keras_3_only("averages losses over batches, not over samples")
@pytest.mark.parametrize("slices", [3, 8])
@pytest.mark.parametrize("name", SUM_MODELS)
def test_sums_are_evaluated_over_loader_batches_as_by_keras(rng, name, slices):
    pair = sum_pair(name, slices)
    several = name == "several outputs"
    # On TensorFlow Keras averages the losses of outputs over batches.
    samples = 24 if several else 22
    x = rng.normal(size=[samples, FEATURES]).astype("float32")
    y = rng.normal(size=[samples, CLASSES]).astype("float32")
    y = {"a": y, "b": y} if several else y
    options = {"batch_size": 8, "verbose": 0, "return_dict": True}
    actual = pair.trainer.evaluate(x, y, **options)
    expected = pair.twin.evaluate(x, y, **options)
    assert actual == pytest.approx(expected, rel=TOLERANCE)


@keras_3_only("does not return the losses of outputs")
def test_outputs_of_a_model_that_keras_has_trained_are_evaluated(rng):
    model = make_two_heads()
    model.compile("sgd", "mse", jit_compile=JIT_COMPILE)
    x = rng.normal(size=[8, FEATURES]).astype("float32")
    y = dict.fromkeys("ab", rng.normal(size=[8, CLASSES]).astype("float32"))
    model.fit(x, y, verbose=0)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    trainer = Trainer(model, jit_compile=JIT_COMPILE)
    actual = trainer.evaluate(x, y, verbose=0, return_dict=True)
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
