"""Claims about bad arguments: refused before training, with the remedy."""

import numpy as np
import pytest

from accumtrainer import (
    Accumulation,
    Batch,
    Callback,
    CheckpointError,
    Every,
    Logger,
    LossScale,
    Trainer,
    WeightedLoss,
    callbacks,
)
from accumtrainer.keras_api import keras, ops

pytestmark = pytest.mark.usefixtures("without_xla")

X = np.linspace(-1, 1, 24, dtype="float32").reshape(12, 2)
Y = X.sum(axis=1, keepdims=True)


def make_model(**arguments):
    """Make a compiled model whose optimizer has state of its own."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    compiling = {"optimizer": keras.optimizers.Adam(0.1), "loss": "mse"}
    model.compile(**(compiling | arguments))
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.variables:
        variable.assign(variable + 1)
    return model


def numbers(variable):
    """Copy a variable's values to the host."""
    return np.asarray(ops.convert_to_tensor(variable)).copy()


def state_of(model):
    """Remember everything about a model that a refusal must leave alone."""
    variables = [*model.variables, *model.optimizer.variables]
    return (
        [v.path for v in variables],
        [numbers(v) for v in variables],
        model.compiled,
        id(model.optimizer),
        id(model._compile_config),
        model.stop_training,
    )


def assert_same_state(before, after):
    assert before[0] == after[0]
    for one, other in zip(before[1], after[1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert before[2:] == after[2:]


def assert_refused(call, error, *words):
    """Check that a call raises, saying what was wrong and what to do."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert word in message, message
    _, received, rest = message.partition("Received: ")
    assert received, message
    remedy = rest.rstrip(".").rpartition(". ")[2]
    assert len(remedy.split()) >= 3, message


def own_step(step):
    """Make a compiled model that overrides one of Keras's steps."""
    functional = make_model()
    cls = type("Own", (keras.Model,), {step: lambda self, *args: None})
    model = cls(functional.inputs, functional.outputs)
    model.compile(optimizer="sgd", loss="mse")
    return model


def scaling_optimizer():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8.0
    )


class HookedLikeATrainer(keras.callbacks.Callback):
    def on_apply(self, gradients, info):
        return gradients


class HookedLikeATrainerToo(Callback):
    def on_accumulate(self, gradients, info):
        return gradients


def row(name, make, error, *words):
    return pytest.param(make, error, words, id=name)


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
        "hand-made-loss-scale-optimizer",
        lambda: {"optimizer": scaling_optimizer()},
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
        "several-optimizers",
        lambda: {"optimizer": several_optimizers()},
        ValueError,
        "optimizer must have a learning rate of its own",
        "MultiOptimizer",
        "one optimizer for all variables",
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


def several_optimizers():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this version of Keras has no MultiOptimizer")
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(), {"dense/bias": keras.optimizers.Adam()}
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
            "model-with-train-step",
            lambda: own_step("train_step"),
            ValueError,
            "model must not override train_step",
            "Trainer.compute_loss",
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


FIT = [
    row(
        "lengths-that-differ",
        lambda: {"y": Y[:5]},
        ValueError,
        "x, y and sample_weight must hold the same number of samples",
        "x: 12, y: 5",
    ),
    row(
        "length-of-sample-weight",
        lambda: {"sample_weight": np.ones(3)},
        ValueError,
        "sample_weight: 3",
    ),
    row(
        "empty-data",
        lambda: {"x": X[:0], "y": Y[:0]},
        ValueError,
        "at least 1",
        "x: 0, y: 0",
    ),
    row("no-data", lambda: {"x": None, "y": None}, TypeError, "x must hold"),
    row(
        "empty-list",
        lambda: {"x": [], "y": None},
        ValueError,
        "x must hold at least one batch",
    ),
    row(
        "function-instead-of-generator",
        lambda: {"x": len, "y": None},
        TypeError,
        "x must be data",
        "Call it first",
    ),
    row(
        "y-beside-a-loader",
        lambda: {"x": iter([(X, Y)])},
        ValueError,
        "y must be left out",
    ),
    row(
        "batch-size-beside-a-loader",
        lambda: {"x": [(X, Y)], "y": None, "batch_size": 3},
        ValueError,
        "batch_size must be left out",
    ),
    *(
        row(
            f"{name}={value!r}",
            lambda name=name, value=value: {name: value},
            (TypeError, ValueError),
            f"{name} must be",
            f"{name}={value!r}",
        )
        for name, values in {
            "batch_size": (0, -4, 2.5, True, "4"),
            "epochs": (0, -1, 1.5, True),
            "initial_epoch": (-1, 0.5, True),
            "steps_per_epoch": (0, 1.5, True),
            "max_updates": (0, -1, 1.5, True),
            "max_seconds": (0, -1.0, True, "10", float("nan")),
            "validation_every": (10, "updates", (100, "updates")),
            "validation_freq": (0, 1.5, "daily"),
            "fast_dev_run": (-1, 1.5, "yes"),
            "overfit_batches": (0, 0.5, True),
            "shuffle": ("rows", 1, None),
            "verbose": (3, -1, "loud", None),
            "resume_from": (5, True, ["runs/a"]),
            "fast_forward": (1, "yes", None),
            "check_inputs": (1, "labels", None),
            "validation_split": (1.0, -0.1, 1.5, True, "0.2"),
        }.items()
        for value in values
    ),
    row(
        "resume-from-auto-without-a-checkpoint-callback",
        lambda: {"resume_from": "auto"},
        ValueError,
        "resume_from='auto' must come with a Checkpoint",
    ),
    row(
        "resume-from-nowhere",
        lambda: {"resume_from": "/nowhere/at/all"},
        CheckpointError,
        "There must be a checkpoint to go on from",
        "/nowhere/at/all",
    ),
    row(
        "data-without-an-end",
        lambda: {"x": Endless(), "y": None},
        ValueError,
        "steps_per_epoch must be given with data that never end",
        "steps_per_epoch=None",
    ),
    row(
        "validation-data-without-an-end",
        lambda: {"validation_data": Endless()},
        ValueError,
        "validation_steps must be given with data that never end",
        "validation_steps=None",
    ),
    row(
        "validation-steps",
        lambda: {"validation_data": (X, Y), "validation_steps": 0},
        ValueError,
        "validation_steps must be",
        "validation_steps=0",
    ),
    row(
        "validation-batch-size",
        lambda: {"validation_data": (X, Y), "validation_batch_size": 0},
        ValueError,
        "validation_batch_size must be",
        "validation_batch_size=0",
    ),
    row(
        "validation-lengths-that-differ",
        lambda: {"validation_data": (X, Y[:4])},
        ValueError,
        "x: 12, y: 4",
    ),
    row(
        "validation-data-of-four-parts",
        lambda: {"validation_data": (X, Y, Y, Y)},
        ValueError,
        "validation_data must be",
    ),
    row(
        "validation-split-of-a-loader",
        lambda: {"x": [(X, Y)], "y": None, "validation_split": 0.5},
        TypeError,
        "validation_split must come with arrays",
    ),
    row(
        "unknown-clock",
        lambda: {"validation_every": Every(3, "batches")},
        ValueError,
        "unit must be one of",
        "unit='batches'",
    ),
    row(
        "class-weight-that-is-no-dict",
        lambda: {"class_weight": [1.0, 2.0]},
        TypeError,
        "class_weight must be a dict",
    ),
    row(
        "class-weight-beside-sample-weight",
        lambda: {"class_weight": {0: 1.0}, "sample_weight": np.ones(12)},
        ValueError,
        "class_weight must not be combined with sample_weight",
    ),
    row(
        "callback-that-is-none",
        lambda: {"callbacks": ["csv"]},
        TypeError,
        "callbacks must hold",
        "'csv'",
    ),
]


class Endless(keras.utils.PyDataset):
    """Yields the same batch for ever."""

    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        return X, Y


@pytest.mark.parametrize(("make", "error", "words"), FIT)
def test_fit_refuses_a_bad_argument(make, error, words):
    model = make_model()
    trainer = Trainer(model)
    before = state_of(model)

    def call():
        trainer.fit(**({"x": X, "y": Y, "verbose": 0} | make()))

    assert_refused(call, error, *words)
    assert_same_state(before, state_of(model))
    assert trainer.progress.samples == 0


class Silent(Logger):
    def write(self, updates, numbers):
        """Write nothing."""


def bad_value(make, name, value):
    """Make a row of a callback that is given one bad value."""
    return row(
        f"{make.__name__}-{name}={value!r}",
        lambda: make(**{name: value}),
        (TypeError, ValueError),
        f"{name} must",
        repr(value),
    )


def checkpoint(directory="runs", **arguments):
    return callbacks.Checkpoint(directory, **arguments)


def run_log(path="log.jsonl", **arguments):
    return callbacks.RunLog(path, **arguments)


def training_plot(path="plot.png", **arguments):
    return callbacks.TrainingPlot(path, **arguments)


def nan_locator(directory="nans", **arguments):
    return callbacks.NaNLocator(directory, **arguments)


def profile(directory="profile", **arguments):
    return callbacks.Profile(directory, **arguments)


def gradient_accumulation(steps=2, **arguments):
    return callbacks.GradientAccumulation(steps, **arguments)


CALLBACKS = [
    *(
        bad_value(make, name, value)
        for make, name, values in [
            (checkpoint, "directory", (None, 5, "auto")),
            (checkpoint, "every", (10, "epochs")),
            (checkpoint, "keep", (0, -1, 1.5, True)),
            (checkpoint, "keep_best", (True, 3)),
            (checkpoint, "mode", ("lowest", None)),
            (checkpoint, "signals", ("SIGTERM", ("TERM",))),
            (run_log, "path", (None, 5)),
            (run_log, "every", (10, "updates")),
            (training_plot, "path", (None, 5, "plot.txt")),
            (training_plot, "every", (10, "updates")),
            (training_plot, "redraw_secs", (-1, "often", True)),
            (callbacks.Throughput, "every", (10, "updates")),
            (callbacks.Throughput, "tokens", (512, "x")),
            (nan_locator, "directory", (None, 5)),
            (nan_locator, "most_reports", (0, -1, 1.5, "all", True)),
            (profile, "first_update", (-1,)),
            (profile, "updates", (0, -1)),
            (callbacks.WandbLogger, "every", (10, "updates")),
            (callbacks.WandbLogger, "watch", ("everything", True)),
            (callbacks.WandbLogger, "watch_every", (10, "updates")),
            (callbacks.WandbLogger, "best", ({"val_loss": "low"},)),
            (gradient_accumulation, "steps", (0, 2.5, True, None)),
            (gradient_accumulation, "combine", ("average",)),
            (Silent, "every", (10, "updates")),
        ]
        for value in values
    ),
    row(
        "gradient-accumulation-in-a-trainer",
        lambda: callbacks.GradientAccumulation(2),
        ValueError,
        "GradientAccumulation must be given to keras.Model.fit",
    ),
    row(
        "run-log-below-a-file",
        lambda: callbacks.RunLog(f"{__file__}/log.jsonl"),
        ValueError,
        "path must name a file that can be written",
    ),
    row(
        "watching-gradients-that-nobody-keeps",
        lambda: callbacks.WandbLogger("a", watch="gradients"),
        ValueError,
        "watch must be 'weights' unless the Trainer keeps its gradients",
        "watch='gradients'",
    ),
    row(
        "wandb-run-and-project",
        lambda: callbacks.WandbLogger("a", run=object()),
        ValueError,
        "run must be given without project",
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), CALLBACKS)
def test_callback_refuses_a_bad_argument(
    make, error, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    model = make_model()
    trainer = Trainer(model)
    before = state_of(model)

    def call():
        trainer.fit(X, Y, verbose=0, callbacks=[make()])

    assert_refused(call, error, *words)
    assert_same_state(before, state_of(model))
    assert trainer.progress.samples == 0
    assert list(tmp_path.iterdir()) == []


SAVING = [
    row(
        "save-onto-something-else",
        lambda trainer, path: trainer.save(path / "notes"),
        CheckpointError,
        "path must be a new directory or a checkpoint to be replaced",
        "notes",
    ),
    row(
        "restore-from-nowhere",
        lambda trainer, path: trainer.restore(path / "none"),
        CheckpointError,
        "There must be a checkpoint to go on from",
        "none",
    ),
    row(
        "restore-from-something-else",
        lambda trainer, path: trainer.restore(path / "notes"),
        CheckpointError,
        "notes",
    ),
    *(
        row(
            f"which={which!r}",
            lambda trainer, path, which=which: trainer.restore(path, which),
            (TypeError, ValueError),
            "which must be one of",
            f"which={which!r}",
        )
        for which in ("newest", None, 3)
    ),
    row(
        "best-of-none",
        lambda trainer, path: trainer.restore(path, which="best"),
        CheckpointError,
        "must",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), SAVING)
def test_saving_refuses_a_bad_argument(call, error, words, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("milk")
    model = make_model()
    trainer = Trainer(model)
    before = state_of(model)
    assert_refused(lambda: call(trainer, tmp_path), error, *words)
    assert_same_state(before, state_of(model))
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    assert (tmp_path / "notes" / "todo.txt").read_text() == "milk"


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        row(
            "batch-size",
            lambda: {"batch_size": 0},
            ValueError,
            "batch_size must be",
            "batch_size=0",
        ),
        row("steps", lambda: {"steps": 0}, ValueError, "steps", "=0"),
        row("no-data", lambda: {"x": None}, TypeError, "x must hold"),
        row("empty-data", lambda: {"x": X[:0]}, ValueError, "x: 0"),
        row(
            "verbose",
            lambda: {"verbose": 5},
            ValueError,
            "verbose must be",
            "verbose=5",
        ),
        row(
            "callbacks",
            lambda: {"callbacks": [print]},
            TypeError,
            "callbacks must hold",
        ),
    ],
)
def test_evaluate_and_predict_refuse_a_bad_argument(method, make, error, words):
    model = make_model()
    trainer = Trainer(model)
    before = state_of(model)

    def call():
        arguments = {"x": X, "verbose": 0} | make()
        getattr(trainer, method)(**arguments)

    assert_refused(call, error, *words)
    assert_same_state(before, state_of(model))


def test_evaluate_refuses_lengths_that_differ():
    trainer = Trainer(make_model())
    assert_refused(
        lambda: trainer.evaluate(X, Y[:4], verbose=0), ValueError, "y: 4"
    )


def test_train_on_batch_refuses_lengths_that_differ():
    model = make_model()
    trainer = Trainer(model)
    before = state_of(model)
    assert_refused(lambda: trainer.train_on_batch(X, Y[:4]), ValueError, "y: 4")
    assert_same_state(before, state_of(model))


HOOKS = [
    ("on_micro_batch", lambda self, batch, info: batch.x, TypeError),
    ("on_micro_batch", lambda self, batch, info: None, TypeError),
    (
        "on_micro_batch",
        lambda self, batch, info: Batch((batch.x, batch.x), batch.y),
        TypeError,
    ),
    ("on_accumulate", lambda self, gradients, info: None, TypeError),
    ("on_accumulate", lambda self, gradients, info: gradients[:1], TypeError),
    ("on_apply", lambda self, gradients, info: gradients[0], TypeError),
    (
        "on_apply",
        lambda self, gradients, info: [ops.sum(g) for g in gradients],
        TypeError,
    ),
    (
        "on_apply",
        lambda self, gradients, info: [None for _ in gradients],
        TypeError,
    ),
    ("compute_loss", lambda self, batch, info: ops.sum(batch.y), TypeError),
    ("compute_loss", lambda self, batch, info: None, TypeError),
    ("compute_loss", lambda self, batch, info: {}, TypeError),
    (
        "compute_loss",
        lambda self, batch, info: WeightedLoss(batch.y, 4.0),
        ValueError,
    ),
]


@pytest.mark.parametrize(
    ("name", "hook", "error"),
    [
        pytest.param(*each, id=f"{each[0]}-{position}")
        for position, each in enumerate(HOOKS)
    ],
)
def test_hook_that_returns_the_wrong_structure_is_refused(name, hook, error):
    model = make_model()
    trainer = type("MyTrainer", (Trainer,), {name: hook})(model)
    before = state_of(model)
    with pytest.raises(error, match=rf"{name} must return .*Received: "):
        trainer.fit(X, Y, verbose=0)
    assert_same_state(before, state_of(model))


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: trainer.fit(X, batch_size=4, verbose=0),
        lambda trainer: trainer.train_on_batch(X),
        lambda trainer: trainer.check_equivalence(X),
        lambda trainer: trainer.evaluate(X, verbose=0),
    ],
    ids=["fit", "train_on_batch", "check_equivalence", "evaluate"],
)
def test_loss_of_targets_without_any_is_refused(call):
    model = make_model()
    trainer = Trainer(model, accumulation=Accumulation(micro_batch_size=2))
    before = state_of(model)
    assert_refused(
        lambda: call(trainer),
        ValueError,
        "y must hold the targets of the loss 'mean_squared_error'",
        "Give fit x and y",
    )
    assert_same_state(before, state_of(model))


def test_bare_scalar_loss_of_several_micro_batches_is_refused():
    model = make_model(loss=lambda y, p: ops.mean(ops.square(y - p)))
    trainer = Trainer(model, accumulation=2)
    before = state_of(model)
    assert_refused(
        lambda: trainer.fit(X, Y, batch_size=4, verbose=0),
        ValueError,
        "Trainer(denominator='samples')",
    )
    assert_same_state(before, state_of(model))


def test_carried_data_of_a_trainer_without_trainable_weights_is_refused():
    model = keras.Sequential([keras.layers.Dense(1, trainable=False)])
    trainer = Trainer(model, optimizer="sgd", loss="mse")
    assert_refused(
        lambda: trainer.fit(X, Y, verbose=0),
        ValueError,
        "model must have trainable weights",
    )
