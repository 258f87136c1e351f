"""Claims about what saves memory beside accumulation: each trains as in Keras.

LoRA, quantized layers, rematerialization, and precision that differs from
layer to layer.
"""

import contextlib
import functools

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

pytestmark = pytest.mark.usefixtures("keras_may_promote")

layers = keras.layers

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 20, size=[32, 6])
Y = RNG.integers(0, 3, size=32)

# Layers that a test makes ready for fine-tuning, and which know LoRA.
ADAPTED = ("embedding", "einsum", "wide", "narrow")


def make_model(*, scope=None, dtype=None):
    """Make a small classifier of token ids, each kind of layer once."""
    keras.utils.set_random_seed(0)
    with scope or contextlib.nullcontext():
        ids = keras.Input([6], dtype="int32")
        x = layers.Embedding(20, 8, name="embedding")(ids)
        x = layers.EinsumDense(
            "btd,de->bte", [None, 8], activation="gelu", name="einsum"
        )(x)
        x = layers.GlobalAveragePooling1D()(x)
        x = layers.Dense(16, "tanh", dtype=dtype, name="wide")(x)
        x = layers.Dense(8, dtype=dtype, name="narrow")(x)
        outputs = layers.Dense(3, name="head")(x)
    return keras.Model(ids, outputs)


def adapted(quantization=None):
    """Make a model of which small matrices are trained beside frozen ones.

    Args:
        quantization: of the frozen ones, `None` for float32.
    """
    model = make_model()
    rng = np.random.default_rng(1)
    for name in ADAPTED:
        layer = model.get_layer(name)
        if quantization:
            layer.quantize(quantization)
        layer.enable_lora(2)
        for variable in layer.trainable_variables:
            # One of the two begins as zeros, and the other has no gradient.
            if "lora" in variable.name:
                variable.assign(0.1 * rng.normal(size=variable.shape))
    return model


def frozen_in_int8():
    """Make a model of which a float32 head is trained on an int8 base."""
    model = make_model()
    for name in ("einsum", "wide", "narrow"):
        model.get_layer(name).quantize("int8")
    model.get_layer("embedding").trainable = False
    return model


MODELS = {
    "LoRA": adapted,
    "LoRA on int8": lambda: adapted("int8"),
    "LoRA on int4": lambda: adapted("int4"),
    "head on int8": frozen_in_int8,
    "activations computed again": lambda: make_model(
        scope=keras.RematScope("activations")
    ),
}

# How much their rounding moves weights, which move by about 0.01.
POLICIES = {"mixed_bfloat16": 2e-3, "mixed_float16": 1e-4}


def sgd():
    return keras.optimizers.SGD(0.1)


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_trainer(model, size, **options):
    return Trainer(
        model,
        optimizer=sgd(),
        loss=loss(),
        accumulation=Accumulation(micro_batch_size=size),
        jit_compile=JIT_COMPILE,
        seed=0,
        **options,
    )


def fit(trainer, epochs=2):
    options = {"shuffle": False, "verbose": 0}
    return trainer.fit(IDS, Y, batch_size=16, epochs=epochs, **options)


def values(variables):
    return [np.array(ops.convert_to_numpy(each)) for each in variables]


def assert_close(model, other, tolerance):
    pairs = zip(values(model.weights), values(other.weights), strict=True)
    for weight, (one, two) in zip(model.weights, pairs, strict=True):
        np.testing.assert_allclose(
            one.astype("float32"),
            two.astype("float32"),
            rtol=0,
            atol=tolerance,
            err_msg=weight.path,
        )


@functools.cache
def expected_of(name):
    """Train a model of `MODELS` by Keras, whole batches at a time."""
    return trained_by_keras(MODELS[name]())


def trained_by_keras(model):
    model.compile(sgd(), loss(), jit_compile=BACKEND == "jax")
    fit(model)
    return model


@pytest.mark.parametrize("size", [4, 3])
@pytest.mark.parametrize("name", MODELS)
def test_pieces_make_the_updates_of_the_big_batch(name, size):
    expected = expected_of(name)
    trainer = make_trainer(MODELS[name](), size)
    before = values(trainer.model.trainable_variables)
    fit(trainer)
    assert_close(trainer.model, expected, 1e-5)
    after = values(trainer.model.trainable_variables)
    moved = [np.abs(a - b).max() for a, b in zip(after, before, strict=True)]
    assert len(moved) < len(trainer.model.weights) or "again" in name
    assert max(moved) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_so_do_they_inside_fit(name):
    expected = expected_of(name)
    model = MODELS[name]()
    model.compile(sgd(), loss(), jit_compile=BACKEND == "jax")
    model.fit(
        IDS,
        Y,
        batch_size=4,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[GradientAccumulation(steps=4)],
    )
    assert_close(model, expected, 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_saved_run_goes_on_bit_for_bit(name, tmp_path):
    trainer = make_trainer(MODELS[name](), 4)
    fit(trainer, epochs=1)
    trainer.save(tmp_path / "saved")
    fit(trainer, epochs=1)
    other = make_trainer(MODELS[name](), 4)
    other.restore(tmp_path / "saved")
    fit(other, epochs=1)
    for one, two in zip(
        values(trainer.model.weights), values(other.model.weights), strict=True
    ):
        np.testing.assert_array_equal(one, two)


class PoisonedTrainer(Trainer):
    """Makes the gradients of the second update infinite."""

    def on_apply(self, gradients, info):
        factor = ops.where(ops.equal(info.update, 1), np.inf, 1.0)
        return [gradient * factor for gradient in gradients]


@pytest.mark.parametrize("name", MODELS)
def test_skipped_window_leaves_no_trace(name):
    model = MODELS[name]()
    trainer = PoisonedTrainer(
        model,
        optimizer=keras.optimizers.Adam(0.01),
        loss=loss(),
        accumulation=Accumulation(micro_batch_size=4),
        jit_compile=JIT_COMPILE,
        seed=0,
    )
    trainer.train_on_batch(IDS[:16], Y[:16])
    before = values([*model.weights, *trainer.optimizer.variables])
    trainer.train_on_batch(IDS[16:], Y[16:])
    assert trainer.progress.skipped_updates == 1
    after = values([*model.weights, *trainer.optimizer.variables])
    for one, two in zip(after, before, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("name", POLICIES)
def test_precision_may_differ_from_layer_to_layer(name):
    expected = trained_by_keras(make_model(dtype=name))
    trainer = make_trainer(make_model(dtype=name), 4)
    fit(trainer)
    assert_close(trainer.model, expected, POLICIES[name])
    # One layer in float16 is enough for gradients that vanish there.
    scales = trainer.loss_scale is not None
    assert scales == (name == "mixed_float16")


@pytest.mark.parametrize("mode", ["int8", "float8"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_was_quantized_since_is_used(mode, is_frozen):
    model = make_model()
    for layer in model.layers[1:]:  # so that rounding shows
        layer.set_weights([30 * weight for weight in layer.get_weights()])
    if is_frozen:  # then what is trained stays the same
        model.get_layer("wide").trainable = False
    trainer = Trainer(
        model,
        keras.optimizers.SGD(0.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=JIT_COMPILE,
    )
    how = {"batch_size": 16, "verbose": 0}
    before = trainer.evaluate(IDS, Y, **how)
    trainer.predict(IDS, **how)
    trainer.fit(IDS, Y, **how)
    model.get_layer("wide").quantize(mode)
    assert abs(trainer.evaluate(IDS, Y, **how) - before) > 1e-4
    expected = ops.convert_to_numpy(model(IDS))
    np.testing.assert_allclose(
        trainer.predict(IDS, **how), expected, rtol=1e-5, atol=1e-6
    )
    loss = trainer.evaluate(IDS, Y, **how)
    trained = trainer.fit(IDS, Y, **how).history["loss"][0]
    # A quantization of float8 learns its scales.
    np.testing.assert_allclose(
        trained, loss, rtol=1e-5 if mode == "int8" else 0.05
    )


@pytest.mark.parametrize("when", ["epoch", "train"])
def test_what_a_callback_has_quantized_is_used(when):
    model = make_model()
    model.get_layer("wide").trainable = False
    for layer in model.layers[1:]:  # so that rounding shows
        layer.set_weights([30 * weight for weight in layer.get_weights()])
    trainer = Trainer(
        model, keras.optimizers.SGD(0.0), loss(), jit_compile=JIT_COMPILE
    )
    how = {"batch_size": 16, "verbose": 0}
    before = trainer.evaluate(IDS, Y, **how)

    def quantize(*_):
        if not model.get_layer("wide").quantization_mode:
            model.get_layer("wide").quantize("int8")

    act = keras.callbacks.LambdaCallback(**{f"on_{when}_end": quantize})
    logs = trainer.fit(
        *(IDS, Y),
        **how,
        epochs=2,
        callbacks=[act],
        validation_data=(IDS, Y),
    ).history
    after = trainer.evaluate(IDS, Y, **how)
    assert abs(after - before) > 1e-4
    expected = [before, after if when == "epoch" else before]
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(logs["val_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(
        trainer.predict(IDS, **how),
        ops.convert_to_numpy(model(IDS)),
        rtol=1e-5,
        atol=1e-6,
    )
