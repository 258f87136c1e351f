"""Claims about arguments of other trainers: refused, with their replacement."""

import inspect
import re

import numpy as np
import pytest

import accumtrainer.callbacks
from accumtrainer import Accumulation, Trainer, WindowLossTrainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras
from accumtrainer.training.other_trainers import ARGUMENTS, WITHIN_FIT


def make_model():
    return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])


def make_trainer(trainer_type=Trainer, **options):
    return trainer_type(
        make_model(), **({"optimizer": "sgd", "loss": "mse"} | options)
    )


def message_of(call):
    with pytest.raises(TypeError, match="only arguments that it has") as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value", "replacement"),
    [
        ("precision", "16-mixed", "set_dtype_policy"),
        ("devices", 2, "keras.distribution.set_distribution"),
        ("strategy", "ddp", "tf.distribute"),
        ("max_epochs", 3, "fit(epochs=)"),
        ("logger", True, "WandbLogger"),
        ("gradient_clip_val", 1.0, "global_clipnorm="),
        ("accumulate_grad_batches", 4, "Trainer(accumulation=)"),
        ("ckpt_path", "last", "fit(resume_from=)"),
        ("gradient_accumulation_steps", 4, "Trainer(accumulation=)"),
        ("num_train_epochs", 3, "fit(epochs=)"),
        ("output_dir", "runs", "Checkpoint"),
        ("learning_rate", 0.1, "Trainer(optimizer=)"),
        ("epochs", 3, "fit(epochs=)"),
        ("batch_size", 8, "fit(batch_size=)"),
        ("validation_data", None, "fit(validation_data=)"),
        ("steps_per_execution", 8, "nothing"),
        ("acumulation", 8, "Did you mean accumulation?"),
        ("g_optimizer", "adam", "a Trainer for each optimizer"),
        ("anything", 8, "Leave anything out"),
    ],
)
def test_foreign_argument_of_a_trainer_names_what_replaces_it(
    argument, value, replacement
):
    message = message_of(lambda: make_trainer(**{argument: value}))
    assert f"Received: {argument}={value!r}" in message
    assert replacement in message.partition("Received: ")[2]


class OwnCompile(keras.Model):
    def compile(self, optimizer, own_loss, alpha=1.0):
        super().compile(optimizer)


@pytest.mark.parametrize("argument", ["own_loss", "alpha"])
def test_argument_of_the_compile_of_a_model_is_given_to_that(argument):
    options = {argument: 0.5}
    message = message_of(lambda: Trainer(OwnCompile(), "sgd", **options))
    assert f"Say model.compile({argument}=), with all that it" in message


def test_refused_argument_leaves_the_model_alone():
    model = make_model()
    message_of(lambda: Trainer(model, optimizer="sgd", loss="mse", devices=2))
    assert not model.compiled


def test_each_of_several_foreign_arguments_is_answered():
    message = message_of(lambda: make_trainer(max_epochs=3, precision="16"))
    assert "max_epochs=3, precision='16'" in message
    assert "Instead of max_epochs use fit(epochs=)" in message
    assert "Instead of precision use" in message


@pytest.mark.parametrize(
    ("argument", "replacement"),
    [
        ("ckpt_path", "fit(resume_from=)"),
        ("train_dataloaders", "fit(x=)"),
        ("workers", "PyDataset(workers=)"),
        ("optimizer", "Trainer(optimizer=)"),
        ("accumulation", "Trainer(accumulation=)"),
        ("denominator", "Trainer(denominator=)"),
        ("max_epochs", "fit(epochs=)"),
        ("validation_dat", "Did you mean validation_data?"),
    ],
)
def test_foreign_argument_of_fit_names_what_replaces_it(argument, replacement):
    x = np.ones([4, 2], "float32")
    trainer = make_trainer()
    message = message_of(
        lambda: trainer.fit(x, x[:, :1], verbose=0, **{argument: "given"})
    )
    assert message.startswith("fit must be given")
    assert replacement in message
    assert trainer.progress.updates == 0


@pytest.mark.parametrize(
    ("method", "argument", "replacement"),
    [
        ("evaluate", "ckpt_path", "restore(path) beforehand"),
        ("evaluate", "return_dic", "Did you mean return_dict?"),
        ("predict", "ckpt_path", "restore(path) beforehand"),
        ("predict", "accumulation", "Trainer(accumulation=)"),
        ("predict", "y", "Say evaluate(y=)"),
        ("predict", "sample_weight", "Say evaluate(sample_weight=)"),
        ("train_on_batch", "batch_size", "fit(batch_size=)"),
        ("find_learning_rate", "epochs", "fit(epochs=)"),
    ],
)
def test_foreign_argument_of_other_methods_names_what_replaces_it(
    method, argument, replacement
):
    trainer = make_trainer()
    call = getattr(trainer, method)
    message = message_of(lambda: call(np.ones([4, 2]), **{argument: 1}))
    assert message.startswith(f"{method} must be given")
    assert replacement in message
    assert trainer.progress.updates == 0


@pytest.mark.parametrize(
    ("argument", "replacement"),
    [
        ("accumulate_grad_batches", "steps="),
        ("micro_batch_size", "batch_size= of fit"),
        ("epochs", "model.fit(epochs=)"),
        ("optimizer", "model.compile(optimizer=)"),
        ("gradient_clip_val", "clipnorm=, global_clipnorm= or clipvalue="),
        ("lr_scheduler", "keras.optimizers.schedules"),
        ("combin", "Did you mean combine?"),
    ],
)
def test_foreign_argument_of_the_callback_names_what_replaces_it(
    argument, replacement
):
    message = message_of(lambda: GradientAccumulation(**{argument: 4}))
    assert message.startswith("GradientAccumulation must be given")
    assert replacement in message


def test_subclasses_refuse_under_their_own_name():
    class Mine(Trainer):
        pass

    class Window(WindowLossTrainer):
        def window_loss(self, embeddings, batch, info):
            return 0.0

    for trainer_type in (Mine, Window):
        message = message_of(
            lambda trainer_type=trainer_type: trainer_type(
                make_model(), optimizer="sgd", max_epochs=3
            )
        )
        assert message.startswith(f"{trainer_type.__name__} must be given")


def test_huge_values_are_not_printed_whole():
    message = message_of(lambda: make_trainer(train_dataset=list(range(10**5))))
    assert len(message) < 400


OWNERS = {
    "Trainer": Trainer,
    "fit": Trainer.fit,
    "evaluate": Trainer.evaluate,
    "predict": Trainer.predict,
    "Accumulation": Accumulation,
    "Checkpoint": accumtrainer.callbacks.Checkpoint,
}


@pytest.mark.parametrize("argument", sorted(ARGUMENTS))
def test_replacement_exists(argument):
    text = ARGUMENTS[argument]
    calls = re.findall(r"(?<!\.)\b(\w+)\((\w+)=", text)
    for owner, name in calls:
        if owner in OWNERS:
            assert name in inspect.signature(OWNERS[owner]).parameters
    for name in re.findall(r"\b(?:keras|accumtrainer)(?:\.\w+)+", text):
        package, *path = name.split(".")
        thing = {"keras": keras, "accumtrainer": accumtrainer}[package]
        for part in path:
            thing = getattr(thing, part)
    for name in re.findall(r"callback (?:such as )?(\w+)", text):
        assert hasattr(accumtrainer.callbacks, name)


def test_no_replacement_is_for_an_argument_that_there_is():
    for function, table in (
        (Trainer, ARGUMENTS),
        (Trainer.fit, ARGUMENTS),
        (GradientAccumulation, WITHIN_FIT),
    ):
        assert not set(inspect.signature(function).parameters) & set(table)
