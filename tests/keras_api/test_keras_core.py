"""Claims about standing on Keras Core, and about mixing it with Keras 3.

What both can do is tested by the other files, which run under either.
"""

import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer, errors
from accumtrainer.keras_api import (
    BACKEND,
    KERAS_NAME,
    OTHER_KERAS_NAME,
    keras,
    losses_of_layers,
    noting_activity,
    ops,
    tree,
)
from accumtrainer.layers import AccumulatedBatchNormalization

core_only = pytest.mark.skipif(
    KERAS_NAME != "keras_core",
    reason="is about Keras Core; `make test-keras_core-<backend>` runs it",
)
core_on_jax_only = pytest.mark.skipif(
    KERAS_NAME != "keras_core" or BACKEND != "jax",
    reason="is about Keras Core on JAX",
)

X, Y = np.ones([8, 3], "float32"), np.ones([8, 1], "float32")


def make_model(package=keras, **options):
    return package.Sequential(
        [package.Input([3]), package.layers.Dense(1, **options)]
    )


def refused(match, model=None, **options):
    """Assert that a Trainer of these arguments is refused."""
    arguments = {"optimizer": "sgd", "loss": "mse"} | options
    with pytest.raises(ValueError, match=match):
        Trainer(model or make_model(), **arguments)


# Mixing.


@pytest.fixture(scope="module")
def other():
    """Give the Keras on which the package does not stand here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It is not the one under test.
        return importlib.import_module(OTHER_KERAS_NAME)


switch = f"Set ACCUMTRAINER_KERAS={OTHER_KERAS_NAME} before.*{KERAS_NAME}"


def test_model_of_the_other_keras_is_refused_with_the_switch(other):
    with pytest.raises(TypeError, match=f"model must.*{switch}"):
        Trainer(make_model(other), optimizer="sgd", loss="mse")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("optimizer", lambda other: other.optimizers.SGD(0.1)),
        ("loss", lambda other: other.losses.MeanSquaredError()),
        ("metrics", lambda other: [other.metrics.MeanSquaredError()]),
        ("callbacks", lambda other: [other.callbacks.History()]),
    ],
)
def test_argument_of_the_other_keras_is_refused_with_the_switch(
    other, name, make
):
    options = {"optimizer": "sgd", "loss": "mse"} | {name: make(other)}
    with pytest.raises(TypeError, match=f"{name} must.*{switch}"):
        Trainer(make_model(), **options)


def test_callback_of_the_other_keras_is_refused_by_fit(other):
    trainer = Trainer(make_model(), optimizer="sgd", loss="mse")
    with pytest.raises(TypeError, match=f"callbacks must.*{switch}"):
        trainer.fit(X, Y, callbacks=[other.callbacks.History()], verbose=0)


def test_dataset_of_the_other_keras_is_refused_with_the_switch(other):
    class Data(other.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return X, Y

    trainer = Trainer(make_model(), optimizer="sgd", loss="mse")
    with pytest.raises(TypeError, match=f"x must.*{switch}"):
        trainer.fit(Data(), verbose=0)


# Standing on Keras Core.


def test_only_keras_api_asks_which_keras_it_is():
    package = Path(importlib.import_module("accumtrainer").__file__).parent
    knows = re.compile(r"keras3|keras_core")
    asking = {
        file.relative_to(package).parts[0]
        for file in package.rglob("*.py")
        if knows.search(file.read_text())
    }
    # Messages tell users how to switch.
    assert asking - {"errors"} == {"keras_api"}


TRAIN = """
import sys
import keras_core
before = set(sys.modules)
import numpy as np
from accumtrainer import Trainer
layers = [keras_core.Input([3]), keras_core.layers.Dense(1)]
trainer = Trainer(
    keras_core.Sequential(layers), optimizer="sgd", loss="mse", accumulation=2
)
trainer.fit(np.ones([8, 3]), np.ones([8, 1]), batch_size=2, verbose=0)
print("updates", trainer.progress.updates)
print("keras" in set(sys.modules) - before, "keras" in sys.modules)
"""


def run_on_keras_core(code):
    """Run code in a fresh interpreter, and return what came of it."""
    environment = {"ACCUMTRAINER_KERAS": "keras_core", "KERAS_BACKEND": BACKEND}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(
    BACKEND == "torch", reason="Keras Core is refused on PyTorch"
)
def test_standing_on_keras_core_does_not_import_keras():
    done = run_on_keras_core(TRAIN)
    assert done.returncode == 0, done.stderr
    *_, updates, imported = done.stdout.splitlines()
    assert updates == "updates 2"
    # TensorFlow itself imports Keras 3, before anybody asks for it.
    assert imported == f"False {BACKEND == 'tensorflow'}"


@pytest.mark.skipif(BACKEND != "torch", reason="is about PyTorch")
def test_keras_core_is_refused_on_pytorch():
    done = run_on_keras_core(TRAIN)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {errors.KERAS_CORE_ON_TORCH}"
    )
    assert "updates" not in done.stdout


@core_only
def test_division_by_zero_is_zero_and_so_is_its_gradient():
    quotient = ops.divide_no_nan(ops.ones([2]), np.array([0.0, 2.0], "float32"))
    np.testing.assert_array_equal(ops.convert_to_numpy(quotient), [0.0, 0.5])


@core_only
def test_structures_are_walked_as_in_keras_3():
    nest = {"b": (1, None), "a": [2]}
    assert tree.flatten(nest) == [2, 1, None]
    assert tree.map_structure(str, nest, none_is_leaf=False) == {
        "b": ("1", None),
        "a": ["2"],
    }
    assert tree.pack_sequence_as(nest, [5, 6, 7]) == {"b": (6, 7), "a": [5]}
    assert tree.is_nested(nest) and not tree.is_nested(None)
    with pytest.raises(ValueError):
        tree.assert_same_structure(nest, {"b": (1, 2), "a": 3})


# What Keras Core does wrongly, and what becomes of it here.


@core_only
def test_penalties_that_keras_core_forgets_are_counted():
    model = make_model(kernel_regularizer=keras.regularizers.L2(1.0))
    with keras.StatelessScope([(v, v.value) for v in model.variables]):
        assert not model.losses  # as in every step on JAX
        _, penalties = losses_of_layers(model)
    expected = np.sum(np.square(model.get_weights()[0]))
    assert float(penalties[0]) == pytest.approx(expected, rel=1e-5)


@core_only
def test_losses_of_nested_models_that_keras_core_forgets_are_counted():
    regularizer = keras.layers.ActivityRegularization(l2=1.0)
    block = keras.Sequential([keras.Input([3]), regularizer])
    inner = keras.Sequential([keras.Input([3]), block])
    model = keras.Sequential([keras.Input([3]), inner])
    model(X)
    assert not model.losses
    with noting_activity(model) as of_activity:
        model(X)
    (loss,), _ = losses_of_layers(model)
    assert of_activity() == [loss] and float(loss) == X.size


@core_only
def test_keras_core_averages_weights_wrongly_in_a_compiled_update():
    # Should this fail, `use_ema` need not be refused any longer.
    variables = [keras.Variable(np.ones([2], "float32"))]
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    optimizer.build(variables)
    gradients = [ops.ones([2])]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        step = tf.function(lambda: optimizer.apply(gradients, variables))
        step()
        step()
        wrong = ops.convert_to_numpy(variables[0])
    else:
        optimizer.apply(gradients, variables)
        optimizer.apply(gradients, variables)
        wrong = np.zeros([2])
    optimizer.finalize_variable_values(variables)
    np.testing.assert_array_equal(
        ops.convert_to_numpy(variables[0]), ops.convert_to_numpy(wrong)
    )


@core_only
def test_optimizer_that_averages_weights_is_refused():
    optimizer = keras.optimizers.SGD(0.1, use_ema=True)
    refused("use_ema=True.*use Keras 3", optimizer=optimizer)


class Judged(keras.Model):
    """Evaluates in its own way, which is that of Keras."""

    def test_step(self, *arguments):
        return super().test_step(*arguments)


@core_on_jax_only
def test_keras_core_leaves_out_the_first_batch_of_a_generator_on_jax():
    # Should this fail, `test_step` need not be refused any longer.
    model = make_model()
    model.compile("sgd", "mse", metrics=["mae"])
    batches = (batch for batch in [(X, Y), (X + 1, Y)])
    found = model.evaluate(batches, verbose=0)
    expected = model.evaluate(X + 1, Y, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@core_only
def test_model_with_its_own_test_step_evaluates_itself_but_on_jax():
    inputs = keras.Input([3])
    model = Judged(inputs, keras.layers.Dense(1)(inputs))
    trainer = Trainer(model, "sgd", "mse", metrics=["mae"])
    if BACKEND == "jax":
        with pytest.raises(ValueError, match="Keras Core on JAX"):
            trainer.evaluate(X, Y, verbose=0)
        return
    received = trainer.evaluate(X, Y, verbose=0)
    expected = model.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(received, expected, rtol=1e-5)


@core_only
def test_dense_layer_whose_constraint_would_be_ignored_is_refused():
    model = make_model(kernel_constraint=keras.constraints.NonNeg())
    assert all(weight.constraint is None for weight in model.weights)
    refused("constraint of layer 'dense.*use Keras 3", model)


@core_on_jax_only
def test_keras_core_loses_masks_on_jax():
    # Should this fail, masks need not be refused any longer.
    import jax

    embedding = keras.layers.Embedding(5, 2, mask_zero=True)
    embedding.build()
    found = []

    @jax.jit
    def embed(words):
        with keras.StatelessScope():
            found.append(getattr(embedding(words), "_keras_mask", None))

    embed(np.array([[1, 0]]))
    assert found == [None]


class OwnMask(keras.layers.Layer):
    def compute_mask(self, inputs, previous_mask=None):
        return ops.any(inputs > 0, axis=-1)

    def call(self, inputs):
        return inputs


@core_on_jax_only
@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.Masking(),
        lambda: keras.layers.Lambda(lambda x: x, mask=np.ones([8, 3])),
        OwnMask,
    ],
)
def test_layer_that_makes_masks_is_refused_on_jax(layer):
    model = keras.Sequential(
        [keras.Input([4, 3]), layer(), keras.layers.Dense(1)]
    )
    refused("masks with Keras Core on JAX.*KERAS_BACKEND=tensorflow", model)


@core_on_jax_only
def test_embedding_is_refused_on_jax_only_if_it_makes_masks():
    def make(mask_zero):
        return keras.Sequential(
            [
                keras.Input([4], dtype="int32"),
                keras.layers.Embedding(5, 2, mask_zero=mask_zero),
                keras.layers.Dense(1),
            ]
        )

    refused("masks with Keras Core on JAX.*layer 'embedding", make(True))
    Trainer(make(False), optimizer="sgd", loss="mse")


@core_on_jax_only
def test_loss_that_ignores_a_class_is_refused_on_jax():
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    refused("a loss with ignore_class=0", loss=loss)


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, **kwargs):
        return super().compute_loss(x, y, y_pred)


@core_on_jax_only
def test_penalty_that_a_models_own_loss_would_forget_is_refused():
    def make(**options):
        return OwnLoss([keras.Input([3]), keras.layers.Dense(1, **options)])

    refused(
        "compute_loss of its own.*layer 'dense.*Trainer.compute_loss instead",
        make(kernel_regularizer="l2"),
    )
    activity = make(activity_regularizer="l2")
    Trainer(activity, optimizer="sgd", loss="mse", denominator="samples")


def two_outputs():
    x = keras.Input([3])
    heads = [keras.layers.Dense(1, name=name)(x) for name in "ab"]
    return keras.Model(x, heads)


@core_only
@pytest.mark.parametrize(
    ("loss", "y"),
    [
        ([None, "mse"], (Y, Y)),
        ({"b": "mse"}, {"b": Y}),
        (["mse", "mse"], (Y, Y, Y)),
    ],
)
def test_losses_that_keras_core_would_mispair_are_refused(loss, y):
    trainer = Trainer(two_outputs(), optimizer="sgd", loss=loss)
    with pytest.raises(ValueError, match="pairs them by place.*for every outp"):
        trainer.train_on_batch(X, y)


@core_only
def test_output_without_a_loss_is_left_out_of_a_dict():
    trainer = Trainer(
        two_outputs(),
        optimizer=keras.optimizers.SGD(0.1),
        loss={"b": "mse"},
        accumulation=Accumulation(micro_batch_size=4),
    )
    names = [v.path for v in trainer.model.trainable_variables]
    before = trainer.model.get_weights()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")
        trainer.train_on_batch(X, {"a": Y, "b": Y})
    for name, old, new in zip(
        names, before, trainer.model.get_weights(), strict=True
    ):
        assert np.array_equal(old, new) == name.startswith("a"), name


@core_only
def test_activity_regularizers_are_sums_over_samples():
    def make():
        keras.utils.set_random_seed(1)
        return make_model(activity_regularizer=keras.regularizers.L2(0.1))

    whole, cut = make(), make()
    whole.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    whole.train_on_batch(X, Y)
    trainer = Trainer(
        cut,
        optimizer=keras.optimizers.SGD(0.01),
        loss="mse",
        accumulation=Accumulation(micro_batch_size=3),
    )
    trainer.train_on_batch(X, Y)
    for expected, actual in zip(
        whole.get_weights(), cut.get_weights(), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@core_only
def test_accumulation_inside_fit_is_refused():
    from accumtrainer.callbacks import GradientAccumulation

    model = make_model()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="with Keras 3.*Use a Trainer"):
        model.fit(X, Y, callbacks=[GradientAccumulation(steps=2)], verbose=0)


@core_only
def test_layers_that_pool_batch_statistics_are_refused():
    with pytest.raises(ValueError, match="must be used with Keras 3"):
        AccumulatedBatchNormalization()
