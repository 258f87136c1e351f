"""Claims about variables that an optimizer assigns what their gradient is.

The scales of float8 layers are such variables. Of the micro-batches of a window
the largest counts, whatever the loss scale, clipping and hooks are.
"""

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import LossScale, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras, ops

K = 4

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = RNG.normal(size=(24, 1)).astype("float32")
WEIGHTS = RNG.uniform(0.1, 2.0, size=24).astype("float32")

pytestmark = pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")


class Observer(keras.layers.Layer):
    """Notes the largest input, and the largest gradient of its output."""

    def build(self, shape):
        del shape
        for name in ("seen", "pulled"):
            variable = self.add_weight(
                shape=(), initializer="zeros", name=name, dtype="float32"
            )
            variable.overwrite_with_gradient = True
            setattr(self, name, variable)

    def call(self, inputs):
        @ops.custom_gradient
        def observe(x, seen, pulled):
            def grad(*args, upstream=None):
                upstream = args[0] if upstream is None else upstream
                return (
                    upstream,
                    # Of negative numbers, so that zero is no least one.
                    ops.max(x) - 10.0,
                    ops.max(ops.abs(upstream)),
                )

            return x + 0.0 * (seen + pulled), grad

        return observe(
            inputs,
            ops.convert_to_tensor(self.seen),
            ops.convert_to_tensor(self.pulled),
        )


class Looking(Trainer):
    """Halves and doubles gradients, and notes what it has been shown."""

    shown = ()

    def on_accumulate(self, gradients, info):
        return [0.5 * gradient for gradient in gradients]

    def on_apply(self, gradients, info):
        assigned = [
            ops.sum(ops.abs(gradient))
            for v, gradient in zip(
                self.model.trainable_variables, gradients, strict=True
            )
            if v.overwrite_with_gradient
        ]
        self.log("assigned", sum(assigned))
        return [2.0 * gradient for gradient in gradients]


def make_model(kind="observer"):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input([4]),
            layers.Dense(8, activation="tanh"),
            *([Observer()] if kind == "observer" else []),
            layers.Dense(1),
        ]
    )
    if kind == "float8":
        model.quantize("float8")
    return model


def make_optimizer():
    return keras.optimizers.SGD(0.1, global_clipnorm=0.5)


def numbers(model):
    return [np.array(ops.convert_to_numpy(v)) for v in model.variables]


def keras_on_big_batches(kind, sample_weight=None, optimizer=None):
    model = make_model(kind)
    model.compile(optimizer or make_optimizer(), "mse", jit_compile=False)
    model.fit(
        X,
        Y,
        sample_weight=sample_weight,
        batch_size=8,
        shuffle=False,
        verbose=0,
    )
    return numbers(model)


def make_trainer(kind="observer", cls=Trainer, **options):
    options = {
        "optimizer": make_optimizer(),
        "loss": "mse",
        "accumulation": K,
        "seed": 0,
        "jit_compile": JIT_COMPILE,
    } | options
    return cls(make_model(kind), **options)


def fit(trainer, sample_weight=None, k=K):
    return trainer.fit(
        X,
        Y,
        sample_weight=sample_weight,
        batch_size=8 // k,
        shuffle=False,
        verbose=0,
    )


def assert_close(model, expected, kind="observer"):
    # Float8 layers round biases to bfloat16, and so their gradients.
    rtol = 0.03 if kind == "float8" else 1e-5
    for variable, value in zip(model.variables, expected, strict=True):
        np.testing.assert_allclose(
            ops.convert_to_numpy(variable),
            value,
            rtol=rtol,
            atol=rtol * np.abs(value).max(),
            err_msg=variable.path,
        )


@pytest.mark.parametrize("plan", ["fused", "streamed"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["even", "weighted"])
@pytest.mark.parametrize("kind", ["observer", "float8"])
def test_assigned_variables_are_those_of_the_big_batch(
    use_plan, plan, weights, kind
):
    use_plan(plan)
    trainer = make_trainer(kind)
    fit(trainer, weights)
    assert trainer.plan.name == plan
    assert_close(trainer.model, keras_on_big_batches(kind, weights), kind)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["even", "weighted"])
def test_assigned_variables_are_those_of_the_big_batch_inside_fit(weights):
    model = make_model()
    model.compile(make_optimizer(), "mse", jit_compile=JIT_COMPILE)
    model.fit(
        X,
        Y,
        sample_weight=weights,
        batch_size=2,
        shuffle=False,
        verbose=0,
        callbacks=[GradientAccumulation(K)],
    )
    assert_close(model, keras_on_big_batches("observer", weights))


def test_window_of_one_micro_batch_assigns_what_keras_does():
    trainer = make_trainer(accumulation=1)
    fit(trainer, WEIGHTS, k=1)
    assert_close(trainer.model, keras_on_big_batches("observer", WEIGHTS))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["even", "weighted"])
@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_hooks_are_shown_zeros_for_what_is_assigned(use_plan, plan, weights):
    use_plan(plan)
    trainer = make_trainer(cls=Looking)
    history = fit(trainer, weights).history
    assert history["assigned"] == [0.0]
    assert_close(trainer.model, keras_on_big_batches("observer", weights))


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_loss_scale_acts_on_what_is_assigned_as_in_keras(use_plan, plan):
    use_plan(plan)
    optimizer = keras.optimizers.LossScaleOptimizer(
        make_optimizer(), initial_scale=256.0
    )
    expected = keras_on_big_batches("observer", optimizer=optimizer)
    trainer = make_trainer(loss_scale=LossScale(initial=256.0))
    fit(trainer)
    assert_close(trainer.model, expected)


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_other_ways_to_combine_assign_the_largest_too(combine):
    from accumtrainer import Accumulation

    trainer = make_trainer(accumulation=Accumulation(steps=K, combine=combine))
    fit(trainer)
    seen = float(ops.convert_to_numpy(trainer.model.layers[1].seen))
    expected = keras_on_big_batches("observer")[2]
    assert seen == pytest.approx(float(expected), rel=0.2)


def test_norms_leave_out_what_is_assigned():
    trainer = make_trainer()
    fit(trainer)
    weights = [v for v in trainer.model.trainable_variables]
    observed = [v for v in weights if v.overwrite_with_gradient]
    assert len(observed) == 2
    assert np.abs(float(ops.convert_to_numpy(observed[0]))) > 5
    assert trainer.window_logs["gradient_norm"] < 5
    assert trainer.window_logs["clipped_gradient_norm"] <= 0.5 + 1e-6


def test_skipped_window_puts_back_what_was_assigned():
    trainer = make_trainer()
    fit(trainer)
    before = numbers(trainer.model)
    trainer.train_on_batch(np.full_like(X[:2], np.nan), Y[:2])
    assert trainer.progress.skipped_updates == 1
    for old, new in zip(before, numbers(trainer.model), strict=True):
        np.testing.assert_array_equal(new, old)


def test_check_of_equivalence_knows_what_is_assigned():
    trainer = make_trainer()
    found = trainer.check_equivalence((X[:8], Y[:8], WEIGHTS[:8]))
    assert found.is_exact, found
