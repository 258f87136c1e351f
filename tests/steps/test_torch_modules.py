"""Claims about modules of PyTorch within a model of Keras."""

import copy

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras, ops

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

import torch
from recorded import note_graphs

layers = keras.layers
X = np.random.default_rng(0).normal(size=(24, 5)).astype("float32")
Y = np.random.default_rng(1).integers(3, size=24)


class Mean(torch.nn.Module):
    """Moves a mean of what it is given, to another tensor each time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("share", torch.full([8], 0.25))

    def forward(self, x):
        if self.training:
            self.mean = self.mean + self.share * (
                x.detach().mean(0) - self.mean
            )
        return x - self.mean


def make_model(*modules):
    """Make a model with modules of 8 units, and weights that are the same."""
    keras.utils.set_random_seed(3)
    module = torch.nn.Sequential(*modules)
    model = keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(8, activation="relu"),
            layers.TorchModuleWrapper(module),
            layers.Dense(3),
        ]
    )
    model(X[:2], training=False)  # builds what comes after the modules
    return model, module


def with_buffers():
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 8)
    return make_model(linear, torch.nn.BatchNorm1d(8), Mean())


def options():
    return {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }


def make_trainer(model, trainer_type=Trainer, **further):
    further = {"accumulation": Accumulation(micro_batch_size=4)} | further
    return trainer_type(model, **options(), seed=0, **further)


def fit(trainer, x=X, epochs=1, **further):
    how = {"batch_size": 12, "shuffle": False, "verbose": 0} | further
    trainer.fit(x, Y, epochs=epochs, **how)
    return trainer


def state_of(model, module):
    weights = map(ops.convert_to_numpy, model.weights)
    buffers = (b.detach().clone().numpy() for b in module.buffers())
    return [*weights, *buffers]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_near(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("size", [12, 4])
def test_modules_are_trained_as_by_keras(size, run_eagerly):
    torch.manual_seed(0)
    model, module = make_model(torch.nn.Linear(8, 8), torch.nn.Tanh())
    plain, plain_module = make_model(torch.nn.Linear(8, 8), torch.nn.Tanh())
    plain.set_weights(model.get_weights())
    cut = Accumulation(micro_batch_size=size)
    fit(make_trainer(model, accumulation=cut, run_eagerly=run_eagerly))
    plain.compile(**options())
    fit(plain)
    assert_near(state_of(model, module), state_of(plain, plain_module))


def test_buffers_move_as_by_keras():
    model, module = with_buffers()
    plain, plain_module = with_buffers()
    plain_module.load_state_dict(module.state_dict())
    fit(make_trainer(model, accumulation=1), epochs=2)
    plain.compile(**options())
    fit(plain, epochs=2)
    assert_near(state_of(model, module), state_of(plain, plain_module))


def test_buffers_move_once_per_micro_batch_and_not_in_evaluation():
    model, module = with_buffers()
    before = int(module[1].num_batches_tracked)  # Keras has looked at it
    trainer = fit(make_trainer(model))
    trainer.evaluate(X, Y, verbose=0)
    trainer.predict(X, verbose=0)
    assert int(module[1].num_batches_tracked) == before + 6


def fit_by_callback(model, x):
    model.compile(**options())
    accumulation = GradientAccumulation(steps=3)
    fit(model, x, batch_size=4, callbacks=[accumulation])


@pytest.mark.parametrize(
    "train",
    [
        lambda model, x: fit(make_trainer(model), x),
        lambda model, x: fit(make_trainer(model, run_eagerly=True), x),
        fit_by_callback,
    ],
    ids=["trainer", "eager", "callback"],
)
def test_a_skipped_update_leaves_buffers_as_they_were(train):
    model, module = with_buffers()
    before = state_of(model, module)
    x = X.copy()
    x[[0, 20]] = np.nan
    train(model, x)
    assert_same(state_of(model, module), before)


def test_a_run_with_buffers_goes_on_bit_for_bit(tmp_path):
    model, module = with_buffers()
    whole = fit(make_trainer(model), epochs=2)
    expected = state_of(model, module)
    first, _ = with_buffers()
    fit(make_trainer(first)).save(tmp_path / "a")
    second, module = with_buffers()
    fit(make_trainer(second), epochs=2, resume_from=tmp_path / "a")
    assert_same(state_of(second, module), expected)
    assert whole.progress.updates == 4


def test_buffers_that_others_replace_are_saved_and_put_back(tmp_path):
    model, module = with_buffers()
    trainer = fit(make_trainer(model))
    other = {k: t + 1 for k, t in module.state_dict().items() if "mean" in k}
    module.load_state_dict(other, assign=True, strict=False)
    trainer.save(tmp_path / "a")
    saved = state_of(model, module)
    fit(trainer)
    trainer.restore(tmp_path / "a")
    assert_same(state_of(model, module), saved)


@pytest.mark.parametrize("size", [12, 4])  # of the first in one call
def test_modules_compute_where_perturb_has_moved_their_weights(size):
    class Sharp(Trainer):
        def perturb(self, gradients, info):
            return [0.5 * gradient for gradient in gradients]

    model, module = make_model(torch.nn.Linear(8, 8))
    keras.utils.set_random_seed(3)
    other = keras.Sequential(
        [
            keras.Input([5]),
            layers.Dense(8, activation="relu"),
            layers.Dense(8),
            layers.Dense(3),
        ]
    )
    weights = model.get_weights()
    weights[2] = weights[2].T
    other.set_weights(weights)
    cut = Accumulation(micro_batch_size=size)
    fit(make_trainer(model, Sharp, accumulation=cut))
    fit(make_trainer(other, Sharp, accumulation=cut))
    weights = model.get_weights()
    weights[2] = weights[2].T
    assert_near(weights, other.get_weights())


def test_modules_without_buffers_are_recorded(monkeypatch):
    recorded = note_graphs(monkeypatch)
    model, module = make_model(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    fit(make_trainer(model))
    assert len(recorded) == 1


def test_modules_are_theirs_again_after_training():
    model, module = with_buffers()
    buffers = list(module.buffers())
    fit(make_trainer(model))
    assert "forward" not in vars(module)
    assert list(map(id, module.buffers())) == list(map(id, buffers))
    copy.deepcopy(module)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Lion", "Muon"])
@pytest.mark.parametrize("per_example", [False, True])
def test_module_in_two_layers_is_trained_as_in_keras(name, per_example):
    # Each of the two has a variable of its own for the one parameter.
    class Product(keras.Model):
        def __init__(self, module):
            super().__init__()
            self.one = layers.TorchModuleWrapper(module)
            sequence = torch.nn.Sequential(module)
            self.other = layers.TorchModuleWrapper(sequence)
            self.head = layers.Dense(3)

        def call(self, x):
            return self.head(self.one(x) * self.other(2 * x))

    def make(module):
        keras.utils.set_random_seed(0)
        model = Product(module)
        model(X[:1])
        return model

    module = torch.nn.Linear(5, 4)
    modules = [copy.deepcopy(module) for _ in range(3)]
    how = {"batch_size": 12, "shuffle": False, "verbose": 0, "epochs": 3}
    plain = make(modules[0])
    optimizer = getattr(keras.optimizers, name)
    plain.compile(optimizer(0.01), options()["loss"])
    expected = plain.fit(X, Y, **how).history["loss"]
    for module, run_eagerly in zip(modules[1:], (False, True), strict=True):
        model = make(module)
        trainer = Trainer(
            model,
            optimizer(0.01),
            options()["loss"],
            accumulation=Accumulation(
                micro_batch_size=4, per_example=per_example
            ),
            run_eagerly=run_eagerly,
        )
        found = trainer.fit(X, Y, **how).history["loss"]
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        for ours, own in zip(model.weights, plain.weights, strict=True):
            np.testing.assert_allclose(
                ops.convert_to_numpy(ours), ops.convert_to_numpy(own), atol=1e-4
            )


class Functional(layers.Layer):
    """Calls a module of its own with other tensors in it."""

    def __init__(self, others_of, norm):
        super().__init__()
        torch.manual_seed(0)
        self.own = torch.nn.Sequential(torch.nn.Linear(5, 4), norm)
        self.others_of = others_of

    def call(self, x):
        module = self.own.module
        others = self.others_of(module, x)
        return torch.func.functional_call(module, others, (x,))


def doubled(module, x):
    return {name: 2 * p for name, p in module.named_parameters()}


def moved(module, x):
    """Go a step of gradient descent within the layer."""
    with torch.enable_grad():
        own = dict(module.named_parameters())
        loss = torch.func.functional_call(module, own, (x,))[:, 0].sum()
        gradients = torch.autograd.grad(
            loss + sum(p.pow(2).sum() for p in own.values()),
            list(own.values()),
            create_graph=True,
        )
    pairs = zip(own.items(), gradients, strict=True)
    return {name: p - 0.25 * gradient for (name, p), gradient in pairs}


def with_other_buffers(module, x):
    buffers = {name: b + 1 for name, b in module.named_buffers()}
    return doubled(module, x), buffers


NORMS = {
    "without buffers": lambda: torch.nn.LayerNorm(4),
    # Keras runs it once more as it begins: this one forgets that.
    "with buffers": lambda: torch.nn.BatchNorm1d(4, momentum=1.0),
}


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("others", [doubled, moved, with_other_buffers])
def test_modules_compute_with_the_tensors_of_a_functional_call(
    others, norm, run_eagerly
):
    def train(trainer_of):
        keras.utils.set_random_seed(0)
        layer = Functional(others, NORMS[norm]())
        model = keras.Sequential([layer, layers.Dense(3)])
        model(X[:4])
        loss = fit(trainer_of(model), epochs=2).evaluate(X, Y, verbose=0)
        means = [b for b in layer.own.module.buffers() if b.ndim]
        return [np.array(loss), *model.get_weights(), *means]

    def compiled(model):
        model.compile(**options())
        return model

    def trainer_of(model):
        return make_trainer(model, accumulation=1, run_eagerly=run_eagerly)

    assert_near(train(trainer_of), train(compiled))
