"""Claims about bad arguments of a Trainer: refused before training."""

import inspect
import types

import pytest
from refusals import (
    X,
    Y,
    assert_refused,
    assert_same_state,
    make_model,
    row,
    state_of,
)

from accumtrainer import (
    Accumulation,
    Callback,
    LossScale,
    Trainer,
)
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]


def own_step(step):
    """Make a compiled model that overrides one of Keras's steps."""
    functional = make_model()
    cls = type("Own", (keras.Model,), {step: lambda self, *args: None})
    model = cls(functional.inputs, functional.outputs)
    model.compile(optimizer="sgd", loss="mse")
    return model


def scaling_optimizer(inner=None):
    return keras.optimizers.LossScaleOptimizer(
        inner or keras.optimizers.SGD(0.1), initial_scale=8.0
    )


class ScalesByHand(keras.optimizers.SGD):
    def scale_loss(self, loss):
        return 8.0 * loss


class HookedLikeATrainer(keras.callbacks.Callback):
    def on_apply(self, gradients, info):
        return gradients


class HookedLikeATrainerToo(Callback):
    def on_accumulate(self, gradients, info):
        return gradients


CONSTRUCTOR = [
    *(
        row(
            f"accumulation={value!r}",
            lambda value=value: {"accumulation": value},
            error,
            "accumulation must be a whole number of at least 1",
            f"Received: accumulation={value!r}",
        )
        for value, error in [
            (0, ValueError),
            (-2, ValueError),
            (2.5, TypeError),
            (2.0, TypeError),
            (True, TypeError),
            ("4", TypeError),
            (None, TypeError),
            ({0: 2}, TypeError),
        ]
    ),
    *(
        row(
            f"steps={value!r}",
            lambda value=value: {"accumulation": Accumulation(steps=value)},
            error,
            "steps must be a whole number of at least 1",
            f"Received: steps={value!r}",
        )
        for value, error in [
            (0, ValueError),
            (-1, ValueError),
            (1.5, TypeError),
            (True, TypeError),
        ]
    ),
    row(
        "both-steps-and-micro-batch-size",
        lambda: {"accumulation": Accumulation(steps=2, micro_batch_size=4)},
        ValueError,
        "exactly one of steps and micro_batch_size",
        "steps=2, micro_batch_size=4",
    ),
    row(
        "neither-steps-nor-micro-batch-size",
        lambda: {"accumulation": Accumulation()},
        ValueError,
        "exactly one of steps and micro_batch_size",
    ),
    row(
        "unknown-combine",
        lambda: {"accumulation": Accumulation(steps=2, combine="average")},
        ValueError,
        "combine must be one of",
        "combine='average'",
    ),
    row(
        "unknown-tail",
        lambda: {"accumulation": Accumulation(steps=2, tail="keep")},
        ValueError,
        "tail must be one of",
        "tail='keep'",
    ),
    row(
        "optimizer-that-accumulates",
        lambda: {
            "optimizer": keras.optimizers.SGD(gradient_accumulation_steps=4)
        },
        ValueError,
        "optimizer must not accumulate",
        "gradient_accumulation_steps=4",
        "Trainer(accumulation=4)",
    ),
    row(
        "loss-scale-optimizer-around-another",
        lambda: {"optimizer": scaling_optimizer(scaling_optimizer())},
        ValueError,
        "optimizer must not scale the loss itself",
        "LossScaleOptimizer",
        "Trainer(loss_scale=LossScale(initial=",
    ),
    row(
        "optimizer-with-loss-scale-factor",
        lambda: {"optimizer": keras.optimizers.SGD(loss_scale_factor=8.0)},
        ValueError,
        "optimizer must not scale the loss itself",
        "loss_scale_factor=8.0",
    ),
    row(
        "optimizer-that-overrides-scale-loss",
        lambda: {"optimizer": ScalesByHand(0.1)},
        ValueError,
        "optimizer must not scale the loss itself",
        "ScalesByHand, which overrides scale_loss",
        "Trainer(loss_scale=LossScale(initial=",
    ),
    row(
        "one-of-several-optimizers-accumulates",
        lambda: {"optimizer": accumulating_member()},
        ValueError,
        "optimizer must not accumulate gradients itself",
        "gradient_accumulation_steps=4",
    ),
    row(
        "unknown-optimizer",
        lambda: {"optimizer": "sdg"},
        ValueError,
        "optimizer must be",
        "optimizer='sdg'",
    ),
    row(
        "optimizer-that-is-none",
        lambda: {"optimizer": 0.1},
        (TypeError, ValueError),
        "optimizer must be",
        "optimizer=0.1",
    ),
    row(
        "optimizer-of-other-variables",
        lambda: {"optimizer": built_elsewhere()},
        ValueError,
        "optimizer must be new",
        "built for other variables",
    ),
    row(
        "unknown-loss",
        lambda: {"loss": "mean_squared_eror"},
        ValueError,
        "loss must be",
        "loss='mean_squared_eror'",
    ),
    row(
        "loss-that-is-none",
        lambda: {"loss": 3},
        (TypeError, ValueError),
        "loss must be",
        "loss=3",
    ),
    row(
        "loss-weights-without-loss",
        lambda: {
            "loss": {"dense": "mse"},
            "loss_weights": {"densse": 1.0},
        },
        ValueError,
        "loss_weights must name",
        "densse",
    ),
    row(
        "denominator",
        lambda: {"denominator": "tokens"},
        TypeError,
        "denominator must be None, 'samples' or a function",
        "denominator='tokens'",
    ),
    *(
        row(
            f"max_consecutive_skips={value!r}",
            lambda value=value: {"max_consecutive_skips": value},
            (TypeError, ValueError),
            "max_consecutive_skips must be a whole number",
            f"max_consecutive_skips={value!r}",
            "Use None to allow any number of them",
        )
        for value in (0, -1, 1.5, True, "all")
    ),
    *(
        row(
            f"loss_scale={value!r}",
            lambda value=value: {"loss_scale": value},
            TypeError,
            "loss_scale must be 'auto', a LossScale or None",
            f"loss_scale={value!r}",
        )
        for value in (1024, "dynamic", True)
    ),
    row(
        "loss-scale-of-zero",
        lambda: {"loss_scale": LossScale(initial=0)},
        ValueError,
        "initial must be a finite number above 0",
        "initial=0",
    ),
    *(
        row(
            f"jit_compile={value!r}",
            lambda value=value: {"jit_compile": value},
            TypeError,
            "jit_compile must be 'auto', True or False",
            f"jit_compile={value!r}",
        )
        for value in (1, "yes", None)
    ),
    *(
        row(
            f"run_eagerly={value!r}",
            lambda value=value: {"run_eagerly": value},
            TypeError,
            "run_eagerly must be True or False",
            f"run_eagerly={value!r}",
        )
        for value in (1, "yes", None)
    ),
    *(
        row(
            f"seed={value!r}",
            lambda value=value: {"seed": value},
            (TypeError, ValueError),
            "seed must be a whole number",
            f"seed={value!r}",
            "Use None to draw one",
        )
        for value in (-1, 0.5, True, "lucky")
    ),
    row(
        "callback-that-is-none",
        lambda: {"callbacks": [print]},
        TypeError,
        "callbacks must hold",
        "<built-in function print>",
    ),
    row(
        "callback-class",
        lambda: {"callbacks": [keras.callbacks.TerminateOnNaN]},
        TypeError,
        "callbacks must hold",
        "TerminateOnNaN",
    ),
    row(
        "stock-callback-hooked-like-a-trainer",
        lambda: {"callbacks": HookedLikeATrainer()},
        ValueError,
        "HookedLikeATrainer.on_apply takes (gradients, info)",
    ),
    row(
        "our-callback-hooked-like-a-trainer",
        lambda: {"callbacks": HookedLikeATrainerToo()},
        ValueError,
        "HookedLikeATrainerToo.on_accumulate takes (gradients, info)",
    ),
]


def accumulating_member():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this version of Keras has no MultiOptimizer")
    accumulating = keras.optimizers.Adam(gradient_accumulation_steps=4)
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(), {"dense/bias": accumulating}
        )
    )


def built_elsewhere():
    optimizer = keras.optimizers.SGD()
    other = keras.Sequential([keras.Input([7]), keras.layers.Dense(3)])
    optimizer.build(other.trainable_variables)
    return optimizer


@pytest.mark.parametrize(("make", "error", "words"), CONSTRUCTOR)
def test_trainer_refuses_a_bad_argument(make, error, words):
    model = make_model()
    before = state_of(model)

    def call():
        Trainer(model, **make())

    if "takes (gradients, info)" in words[0]:
        with pytest.raises(error) as caught:
            call()
        assert words[0] in str(caught.value)
        assert "as a method of a subclass of Trainer" in str(caught.value)
    else:
        assert_refused(call, error, *words)
    assert_same_state(before, state_of(model))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        row("no-model", lambda: None, TypeError, "model must be", "NoneType"),
        row(
            "layer",
            lambda: keras.layers.Dense(1),
            TypeError,
            "model must be a keras.Model",
            "Dense",
        ),
        row(
            "wrapped-model",
            lambda: types.SimpleNamespace(module=make_model()),
            TypeError,
            "in it",
            "model.module",
        ),
        row(
            "model-with-train-step",
            lambda: own_step("train_step"),
            ValueError,
            "model must not override train_step",
            "def compute_loss(self, batch, info)",
        ),
        row(
            "model-with-train-function",
            lambda: own_step("make_train_function"),
            ValueError,
            "model must not override make_train_function",
            "hooks of a Trainer",
        ),
        row(
            "model-not-compiled",
            lambda: keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]),
            ValueError,
            "optimizer must be given",
            "optimizer=None",
        ),
        row(
            "compiled-optimizer-that-accumulates",
            lambda: make_model(
                optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2)
            ),
            ValueError,
            "optimizer must not accumulate",
            "gradient_accumulation_steps=2",
        ),
    ],
)
def test_trainer_refuses_a_bad_model(make, error, words):
    model = make()
    is_compiled = getattr(model, "compiled", False)
    before = state_of(model) if is_compiled else None
    assert_refused(lambda: Trainer(model), error, *words)
    assert getattr(model, "compiled", False) == is_compiled
    if is_compiled:
        assert_same_state(before, state_of(model))


def test_model_without_any_loss_is_refused_before_it_is_trained():
    model = make_model_without_loss()
    trainer = Trainer(model)
    before = state_of(model)
    assert_refused(
        lambda: trainer.fit(X, Y, verbose=0),
        ValueError,
        "loss must be given",
        "loss=None",
    )
    assert_same_state(before, state_of(model))


def make_model_without_loss():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(optimizer="sgd")
    return model


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("training_step", "compute_loss"),
        ("validation_step", "compute_loss"),
        ("train_step", "compute_loss"),
        ("configure_optimizers", "Trainer(optimizer=)"),
        ("optimizer_step", "on_apply"),
        ("on_before_optimizer_step", "on_apply"),
        ("train_dataloader", "the data given to fit"),
        ("on_aply", "on_apply"),
        ("on_micro_batches", "on_micro_batch"),
        ("on_acumulate", "on_accumulate"),
        ("on_epoch_end", "callback"),
        ("on_train_begin", "callback"),
        ("after_aply", "after_apply"),
    ],
)
def test_subclass_method_nobody_calls_is_refused(name, replacement):
    model = make_model()
    before = state_of(model)
    cls = type("MyTrainer", (Trainer,), {name: lambda self, *args: None})
    with pytest.raises(TypeError) as caught:
        cls(model)
    message = str(caught.value)
    assert f"MyTrainer.{name}" in message
    assert replacement in message.partition("The hooks are")[0]
    assert_same_state(before, state_of(model))


def test_subclass_may_define_methods_of_its_own():
    cls = type("MyTrainer", (Trainer,), {"augment": lambda self, x: x})
    cls(make_model())


@pytest.mark.parametrize(
    "sizes, error", [(Y, TypeError), ([0], ValueError), ([1.5], TypeError)]
)
def test_sizes_of_a_memory_plan_that_are_none_are_refused(sizes, error):
    trainer = Trainer(make_model(), optimizer="sgd", loss="mse")
    with pytest.raises(error, match=r"sizes.*memory_plan\(\(x, y\)\)"):
        trainer.memory_plan(X, sizes)


@pytest.mark.parametrize(
    "name, value",
    [
        ("accumulation", 4),
        ("accumulation", Accumulation(micro_batch_size=1)),
        ("loss_scale", LossScale()),
        ("model", None),
    ],
)
def test_what_windows_are_made_of_cannot_be_set_later(name, value):
    trainer = Trainer(make_model(), optimizer="sgd", loss="mse")
    before = getattr(trainer, name)
    with pytest.raises(AttributeError) as caught:
        setattr(trainer, name, value)
    message = str(caught.value)
    assert f"{name} must be given when a Trainer is made" in message
    assert f"Received: {name} = {value!r}" in message
    assert getattr(trainer, name) is before


def test_what_windows_are_made_of_is_no_attribute_before():
    assert not hasattr(Trainer.__new__(Trainer), "model")
    assert inspect.getmembers(Trainer)


def test_class_may_set_the_model_before_the_trainer_does():
    class Early(Trainer):
        def __init__(self, model, **options):
            self.model = model
            super().__init__(model, **options)

    model = make_model()
    assert Early(model, optimizer="sgd", loss="mse").model is model
