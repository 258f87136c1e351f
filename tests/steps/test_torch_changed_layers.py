"""Claims about layers that are changed between one call and the next."""

import dataclasses
import types

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

import torch
from recorded import note_graphs
from samples import HOW, X, Y

from accumtrainer.steps.torch.backend import TorchBackend

layers = keras.layers


class Settings:
    """What a layer is configured by."""

    def __init__(self):
        self.factors = [{"factor": [1.0]}]


class Noting(layers.Layer):
    """Notes once which shapes it is given, as nobody asked it to."""

    factor = 1.0

    def build(self, shape):
        self.seen = []
        self.settings = Settings()
        self.table = np.ones([6, 6], "float32")

    def call(self, x):
        if tuple(x.shape) not in self.seen:
            self.seen.append(tuple(x.shape))
        by = self.settings.factors[0]["factor"][0] * self.factor
        return by * float(self.table[0, 0]) * x


class Scaled(keras.losses.Loss):
    """A loss with a factor."""

    factor = 1.0

    def call(self, y, y_pred):
        return self.factor * keras.ops.mean((y - y_pred) ** 2, -1)


def make_model():
    """Make a model of a module, a layer with a rate, and one that counts."""
    keras.utils.set_random_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh())
    model = keras.Sequential(
        [
            keras.Input([6]),
            layers.TorchModuleWrapper(module),
            layers.Rescaling(1.0),
            Noting(),
            layers.Dense(
                3, kernel_regularizer=keras.regularizers.L2(0.0), name="head"
            ),
        ]
    )
    model(X[:1])
    return model, module


def make_trainer(model, micro_batch_size=4, **options):
    return Trainer(
        model,
        optimizer=keras.optimizers.SGD(0.1, momentum=0.5),
        loss=Scaled(),
        accumulation=Accumulation(micro_batch_size=micro_batch_size),
        **options,
    )


def patch_forward(model, module):
    forward = module.forward
    module.forward = lambda x: 3 * forward(x)


def hook_call(model, module):
    module[0].register_forward_hook(lambda module, given, result: 3 * result)


def hook_gradient(model, module):
    module[1].register_full_backward_hook(
        lambda module, by_input, by_output: tuple(3 * g for g in by_input)
    )


def exchange_submodule(model, module):
    module[1] = torch.nn.ReLU()


def append_submodule(model, module):
    module.append(torch.nn.BatchNorm1d(4))


def exchange_activation(model, module):
    model.get_layer("head").activation = keras.activations.softplus


def exchange_number(model, module):
    model.layers[1].scale = 2.0


def regularize(model, module):
    model.get_layer("head").kernel.regularizer = keras.regularizers.L2(0.5)


def constrain(model, module):
    model.get_layer("head").kernel.constraint = keras.constraints.NonNeg()


def strengthen(model, module):
    model.get_layer("head").kernel_regularizer.l2 = 0.5


def clip(model, module):
    model.optimizer.clipnorm = 0.01


def slow_down(model, module):
    model.optimizer.momentum = 0.1


def scale_loss(model, module):
    model.loss.factor = 3.0


def exchange_setting(model, module):
    model.layers[2].settings.factors[0]["factor"][0] = 2.0


def write_to_table(model, module):
    model.layers[2].table[0, 0] = 2.0


def exchange_class_attribute(model, module):
    model.layers[2].__class__ = type("Other", (Noting,), {"factor": 2.0})


CHANGES = [
    patch_forward,
    hook_call,
    hook_gradient,
    exchange_submodule,
    append_submodule,
    exchange_activation,
    exchange_number,
    regularize,
    constrain,
    strengthen,
    clip,
    slow_down,
    scale_loss,
    exchange_setting,
    write_to_table,
    exchange_class_attribute,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_next_fit_runs_layers_as_they_are_by_then(change, run_eagerly):
    def losses(fit, model, module):
        before = fit().history["loss"]
        change(model, module)
        after = [loss for _ in range(2) for loss in fit().history["loss"]]
        return before + after, model.get_weights()

    model, module = make_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), Scaled())
    expected = losses(lambda: model.fit(X, Y, **HOW), model, module)
    model, module = make_model()
    trainer = make_trainer(model, run_eagerly=run_eagerly)
    if change is append_submodule:  # normalizes what it is given at once
        trainer = Trainer(
            model, trainer.optimizer, Scaled(), run_eagerly=run_eagerly
        )
    found = losses(lambda: trainer.fit(X, Y, **HOW), model, module)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


class Changing(keras.callbacks.Callback):
    """Changes a model once, as a hook is called for the second time."""

    def __init__(self, hook, change):
        super().__init__()
        setattr(self, hook, self.count)
        self.calls, self.change = 0, change or (lambda: None)

    def count(self, index, logs=None):
        self.calls += 1
        if self.calls == 2:
            self.change()


HOOKS = [
    *("on_train_batch_begin", "on_train_batch_end"),
    *("on_epoch_begin", "on_epoch_end"),
]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("change", CHANGES)
def test_fit_goes_on_with_what_a_callback_makes_of_layers(change, hook):
    def train(fit, model, module):
        changing = Changing(hook, lambda: change(model, module))
        how = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
        logs = fit(X[:8], Y[:8], callbacks=[changing], **how).history["loss"]
        return logs, model.get_weights()

    model, module = make_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), Scaled())
    expected = train(model.fit, model, module)
    model, module = make_model()
    is_coupled = change is append_submodule  # normalizes what it is given
    trainer = make_trainer(model, 4 if is_coupled else 2)
    found = train(trainer.fit, model, module)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end"])
@pytest.mark.parametrize("change", [exchange_number, scale_loss, clip])
def test_keras_s_fit_goes_on_in_the_next_epoch_with_what_changed(change, hook):
    def train(size, *callbacks):
        model, module = make_model()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), Scaled())
        changing = Changing(hook, lambda: change(model, module))
        model.fit(
            *(X[:8], Y[:8], size),
            **{"epochs": 3, "shuffle": False, "verbose": 0},
            callbacks=[*callbacks, changing],
        )
        return model.get_weights()

    for one, other in zip(
        train(2, GradientAccumulation(2)), train(4), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_fit_looks_for_changes_only_after_code_that_could_make_some():
    model, _ = make_model()
    trainer = make_trainer(model)
    with pytest.MonkeyPatch.context() as patch:
        looked = []
        look = TorchBackend.looks_of
        patch.setattr(
            TorchBackend,
            "looks_of",
            lambda *args: looked.append(args) or look(*args),
        )

        def looks(*callbacks):
            how = {"batch_size": 4, "verbose": 0, "callbacks": callbacks}
            trainer.fit(X[:8], Y[:8], **how)
            looked.clear()
            trainer.fit(X[:8], Y[:8], **how)
            return len(looked)

        alone = looks()
        assert looks(keras.callbacks.TerminateOnNaN()) == alone
        assert looks(Changing("on_train_batch_end", None)) > alone


@pytest.mark.parametrize("change", [patch_forward, exchange_number])
def test_other_calls_run_layers_as_they_are_by_then(change):
    model, module = make_model()
    trainer = make_trainer(model)
    trainer.evaluate(X, Y, **HOW)
    trainer.predict(X, **HOW)
    change(model, module)
    expected = keras.ops.convert_to_numpy(model(X))
    np.testing.assert_allclose(trainer.predict(X, **HOW), expected, rtol=1e-5)
    loss = np.mean(np.square(expected - Y))
    np.testing.assert_allclose(trainer.evaluate(X, Y, **HOW), loss, rtol=1e-5)
    np.testing.assert_allclose(trainer.train_on_batch(X, Y), loss, rtol=1e-5)


def test_what_layers_change_themselves_records_nothing_anew(monkeypatch):
    model, module = make_model()
    trainer = make_trainer(model)

    def run():
        trainer.fit(X, Y, **HOW, validation_data=(X, Y))
        trainer.train_on_batch(X, Y)
        trainer.predict(X, **HOW)
        model.stop_training = False
        trainer.evaluate(X, Y, **HOW)

    run()
    graphs = note_graphs(monkeypatch)
    run()
    assert graphs == []
    hook_call(model, module)
    run()
    assert graphs != []


def test_what_is_built_in_training_is_listed_as_parameters():
    module = torch.nn.Linear(6, 4)
    model = keras.Sequential(
        [keras.Input([6]), layers.TorchModuleWrapper(module), layers.Dense(3)]
    )
    make_trainer(model).fit(X, Y, **HOW)
    listed = {id(parameter) for parameter in model.parameters()}
    assert {id(v.value) for v in model.variables} <= listed
    assert len(model.state_dict()) == 4


class Weighing(Trainer):
    """Weighs a loss by a number of its own."""

    factor = 1.0

    def compute_loss(self, batch, info):
        loss = super().compute_loss(batch, info)
        return dataclasses.replace(loss, mean=self.factor * loss.mean)


@pytest.mark.parametrize("whose", [lambda trainer: trainer, type])
def test_next_call_weighs_as_a_trainer_says_by_then(whose):
    model, _ = make_model()
    kind = type("Mine", (Weighing,), {})
    trainer = kind(model, keras.optimizers.SGD(0.0), "mse")
    (before,) = trainer.fit(X, Y, **HOW).history["loss"]
    whose(trainer).factor = 3.0
    (after,) = trainer.fit(X, Y, **HOW).history["loss"]
    np.testing.assert_allclose(after, 3 * before, rtol=1e-5)
    whose(trainer).factor = 2.0
    after = trainer.train_on_batch(X, Y)
    np.testing.assert_allclose(after, 2 * before, rtol=1e-5)


def test_one_of_several_things_is_chosen_anew():
    head = layers.Dense(3)
    model = keras.Sequential([keras.Input([6]), head])
    head.choice = [keras.activations.relu, keras.activations.softplus]
    head.activation = head.choice[0]
    trainer = make_trainer(model)
    trainer.fit(X, Y, **HOW)
    for activation in [head.choice[1], head.choice[0]]:
        head.activation = activation
        expected = keras.ops.convert_to_numpy(model(X))
        found = trainer.predict(X, **HOW)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def go_on_logging(model, path):
    model.run.steps.append(1)
    model.tools.steps = [1]


def load_weights(model, path):
    model.save_weights(path)
    model.load_weights(path)


def run_by_keras(model, path):
    model.evaluate(X, Y, **HOW)
    model.predict(X, **HOW)
    model(X)


@pytest.mark.parametrize("act", [go_on_logging, load_weights, run_by_keras])
def test_what_changes_no_window_records_nothing_anew(
    act, tmp_path, monkeypatch
):
    model = keras.Sequential([keras.Input([6]), layers.Dense(3)])
    model.run = type("Run", (), {"__module__": "wandb.sdk"})()
    model.run.steps = []
    model.tools = types.ModuleType("tools")
    trainer = Trainer(model, "sgd", "mse")
    model.evaluate(X, Y, **HOW)
    trainer.fit(X, Y, **HOW)
    graphs = note_graphs(monkeypatch)
    act(model, tmp_path / "of.weights.h5")
    trainer.fit(X, Y, **HOW)
    assert graphs == []
