"""Claims about what a skipped window leaves behind: nothing.

What a window writes may depend on what its data are like, and may be more than
statistics. See also `test_bad_windows.py`.
"""

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Trainer, WindowLossTrainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras, ops

K = 4

X = 0.1 * np.random.default_rng(1).normal(size=(8, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
BAD = np.where(np.arange(8)[:, None] == 5, np.nan, X).astype("float32")
ONES = np.ones(8, "float32")


def numbers(variables):
    """Copy the values of variables to the host."""
    return [np.array(ops.convert_to_numpy(v)) for v in variables]


def assert_equal(variables, before):
    for variable, old in zip(variables, before, strict=True):
        now = ops.convert_to_numpy(variable)
        np.testing.assert_array_equal(now, old, variable.path)


class Weighted(keras.Model):
    """Notes the mean of a second input, where there is one."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.mean = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="mean"
        )

    def call(self, inputs):
        x = inputs["x"]
        if "more" in inputs:
            self.mean.assign(0.5 * self.mean + ops.mean(inputs["more"]))
        return self.dense(x)


class WritesItsKernel(keras.layers.Layer):
    """Bounds its kernel before it uses it."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 1), name="kernel")

    def call(self, inputs, training=False):
        if training:
            self.kernel.assign(0.5 * self.kernel + ops.sum(inputs))
        return ops.matmul(inputs, self.kernel)


def make_trainer(model, **options):
    options = {
        "optimizer": keras.optimizers.SGD(0.01, momentum=0.9),
        "loss": "mse",
        "accumulation": K,
        "seed": 0,
        "jit_compile": JIT_COMPILE,
    } | options
    return Trainer(model, **options)


def fit(trainer, x, y=Y, **options):
    return trainer.fit(x, y, batch_size=2, shuffle=False, verbose=0, **options)


# What is written under a later structure only.


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_statistics_of_a_later_structure_are_put_back(use_plan, plan):
    use_plan(plan)
    model = Weighted()
    trainer = make_trainer(model, metrics=["mae"])
    fit(trainer, {"x": X})
    before = numbers(model.variables)
    fit(trainer, {"x": BAD, "more": BAD})
    assert trainer.progress.skipped_updates == 1
    assert_equal(model.variables, before)
    fit(trainer, {"x": X})
    fit(trainer, {"x": X, "more": X})
    assert trainer.progress.updates == 3
    assert np.isfinite(numbers(model.variables)[-1])
    before = numbers(model.variables)
    fit(trainer, {"x": BAD, "more": BAD})
    assert_equal(model.variables, before)


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_hook_that_writes_a_model_by_the_weights_is_undone(use_plan, plan):
    class Noting(Trainer):
        def on_micro_batch(self, batch, info):
            if batch.sample_weight is not None:
                model.mean.assign(model.mean + ops.sum(batch.x["x"]))
            return batch

    use_plan(plan)
    model = Weighted()
    trainer = Noting(
        model,
        optimizer="sgd",
        loss="mse",
        accumulation=K,
        jit_compile=JIT_COMPILE,
    )
    fit(trainer, {"x": X})
    before = numbers(model.variables)
    fit(trainer, {"x": BAD}, sample_weight=ONES)
    assert trainer.progress.skipped_updates == 1
    assert_equal(model.variables, before)


def test_statistics_of_a_later_structure_are_put_back_inside_fit():
    model = Weighted()
    model.compile("sgd", "mse", jit_compile=JIT_COMPILE)
    callback = GradientAccumulation(K)
    options = {
        "batch_size": 2,
        "shuffle": False,
        "verbose": 0,
        "callbacks": [callback],
    }
    model.fit({"x": X}, Y, **options)
    before = numbers(model.variables)
    model.fit({"x": BAD, "more": BAD}, Y, **options)
    assert callback.progress.skipped_updates == 1
    assert_equal(model.variables, before)


# Trainable variables that a forward pass writes.


@pytest.mark.parametrize("plan", ["fused", "streamed"])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize("kind", ["spectral", "own"])
# PyTorch's compiler cannot take a layer that branches, which is said.
@pytest.mark.filterwarnings("ignore:torch.compile cannot compile")
def test_kernel_that_a_layer_writes_is_put_back(
    use_plan, plan, jit_compile, kind
):
    use_plan(plan, jit_compile=jit_compile)
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input([3]),
            layers.SpectralNormalization(layers.Dense(1))
            if kind == "spectral"
            else WritesItsKernel(),
        ]
    )
    trainer = make_trainer(model)
    fit(trainer, X)
    before = numbers([*model.variables, *trainer.optimizer.variables])
    fit(trainer, BAD)
    assert trainer.plan.name == plan
    assert trainer.progress.skipped_updates == 1
    after = [*model.variables, *trainer.optimizer.variables]
    assert_equal(after, before)


def test_kernel_that_a_layer_writes_is_put_back_inside_fit():
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input([3]), layers.SpectralNormalization(layers.Dense(1))]
    )
    model.compile("sgd", "mse", jit_compile=JIT_COMPILE)
    before = numbers(model.variables)
    callback = GradientAccumulation(K)
    model.fit(
        BAD, Y, batch_size=2, shuffle=False, verbose=0, callbacks=[callback]
    )
    assert callback.progress.skipped_updates == 1
    assert_equal(model.variables, before)


def test_optimizer_that_a_hook_writes_is_put_back():
    class Annealing(Trainer):
        def on_apply(self, gradients, info):
            self.optimizer.learning_rate.assign(
                self.optimizer.learning_rate * 0.5
            )
            return gradients

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = Annealing(
        model,
        optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
        accumulation=K,
        jit_compile=JIT_COMPILE,
    )
    fit(trainer, BAD)
    rate = float(ops.convert_to_numpy(trainer.optimizer.learning_rate))
    assert rate == pytest.approx(0.1)
    fit(trainer, X)
    rate = float(ops.convert_to_numpy(trainer.optimizer.learning_rate))
    assert rate == pytest.approx(0.05)


# What is large, and is not skipped.


HUGE = np.where(np.arange(8)[:, None] < 4, 1e20, 1e19).astype("float32") * (
    np.array([1.0, 0.5, 2.0], "float32")
)


class Passing(Trainer):
    """Has an `on_apply` that leaves gradients as they are."""

    def on_apply(self, gradients, info):
        return [1.0 * gradient for gradient in gradients]


def make_linear():
    dense = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="zeros", name="linear"
    )
    return keras.Sequential([keras.Input([3]), dense])


@pytest.mark.parametrize("plan", ["fused", "streamed"])
@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "xla"])
@pytest.mark.parametrize("cls", [Trainer, Passing])
@pytest.mark.parametrize(
    ("clip", "is_largest"),
    [
        ({}, False),
        ({"global_clipnorm": 2.0}, False),
        ({"global_clipnorm": 2.0}, True),
    ],
    ids=str,
)
def test_finite_gradient_of_infinite_square_is_applied(
    use_plan, plan, jit_compile, cls, clip, is_largest
):
    use_plan(plan, jit_compile=jit_compile)
    model = make_linear()
    rate = 1.0 if clip else 1e-20
    # The inverse of what is summed is then no number of float32. Streamed, it
    # is the gradients of 8 samples, fused their mean.
    factor = {"fused": 1e18, "streamed": 2e17}[plan] if is_largest else 1.0
    trainer = cls(
        model,
        optimizer=keras.optimizers.SGD(rate, **clip),
        loss="mae",
        accumulation=K,
    )
    fit(trainer, factor * HUGE, Y - 1.0)
    assert trainer.progress.updates == 1
    gradient = factor * HUGE.astype("float64").mean(axis=0)
    norm = np.linalg.norm(gradient)
    logs = trainer.window_logs
    assert logs["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    step = gradient * (2.0 / norm if clip else rate)
    if clip:
        assert logs["clipped_gradient_norm"] == pytest.approx(2.0, rel=1e-5)
    np.testing.assert_allclose(
        numbers(model.variables)[0][:, 0], -step, rtol=1e-5
    )


def test_finite_gradient_of_infinite_square_is_applied_inside_fit():
    model = make_linear()
    model.compile(keras.optimizers.SGD(1e-20), "mae", jit_compile=JIT_COMPILE)
    callback = GradientAccumulation(K)
    model.fit(
        HUGE,
        Y - 1.0,
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[callback],
    )
    assert callback.progress.updates == 1
    gradient = HUGE.astype("float64").mean(axis=0)
    np.testing.assert_allclose(
        numbers(model.variables)[0][:, 0], -1e-20 * gradient, rtol=1e-5
    )


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_infinite_gradient_among_large_ones_is_skipped(value):
    model = make_linear()
    trainer = make_trainer(model, loss="mae")
    fit(trainer, np.where(np.isnan(BAD), value, HUGE), Y - 1.0)
    assert trainer.progress.skipped_updates == 1
    assert not np.isfinite(trainer.window_logs["gradient_norm"])


class NormalizedHead(keras.Model):
    """Has a part that the loss of a window applies."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.head = keras.layers.BatchNormalization(momentum=0.5)
        self.head.build([None, 1])

    def call(self, x):
        return self.dense(x)


class OfHead(WindowLossTrainer):
    def window_loss(self, embeddings, batch, info):
        outputs = self.model.head(embeddings, training=info.training)
        return ops.mean(ops.square(outputs - batch.y))


@pytest.mark.parametrize("rows", [8, 7], ids=["even", "uneven"])
@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_what_a_window_loss_moves_is_forgotten(use_plan, plan, rows):
    use_plan(plan)
    trainer = OfHead(NormalizedHead(), optimizer="sgd", accumulation=4)
    trainer.train_on_batch(X[:rows], Y[:rows])
    before = numbers(trainer.model.variables)
    trainer.train_on_batch(BAD[:rows], Y[:rows])
    assert trainer.progress.skipped_updates == 1
    assert_equal(trainer.model.variables, before)
