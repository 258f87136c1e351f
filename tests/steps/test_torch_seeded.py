"""Claims about layers that seed PyTorch's draws, and others none can watch."""

import numpy as np
import pytest

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import BACKEND, keras

if BACKEND != "torch":
    pytest.skip("is about PyTorch", allow_module_level=True)

import torch
from recorded import note_graphs
from samples import X, Y

layers = keras.layers
KEPT = torch.Generator()
STATE = torch.Generator().manual_seed(11).get_state()


def seeded(seed=4):
    return torch.Generator().manual_seed(seed)


def permutation(x):
    return x[:, torch.randperm(6, generator=seeded())]


def noise(x):
    return x + torch.empty(6).normal_(generator=seeded())


def projection(x):
    weights = torch.empty(6, 6)
    torch.nn.init.orthogonal_(weights, generator=seeded())
    return x @ weights


def choice(x):
    return x * torch.multinomial(torch.ones(6), 6, generator=seeded()).float()


def seeded_each_time(x):
    KEPT.manual_seed(7)
    return x * torch.rand(6, generator=KEPT)


def own_state_seeded(x):
    torch.manual_seed(4)
    return x * torch.rand(6)


def own_state_forked(x):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return x * torch.rand(6)


def own_state_exchanged(x):
    before = torch.get_rng_state()
    torch.set_rng_state(STATE)
    drawn = torch.rand(6)
    torch.set_rng_state(before)
    return x * drawn


def condition(x):
    return torch.cond(x.abs().sum() > 0, torch.sin, torch.cos, (x,))


def loop(x):
    with torch.no_grad():
        _, found = torch.while_loop(
            lambda count, _: count < 3,
            lambda count, value: (count + 1, value.sin()),
            (torch.tensor(0), x.detach()),
        )
    return x + found


SEEDED = [
    *(permutation, noise, projection, choice, seeded_each_time),
    *(own_state_seeded, own_state_forked, own_state_exchanged),
]
UNWATCHED = [condition, loop]


class Applying(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


def make_model(function, *after):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input([6]), Applying(function), *after, layers.Dense(3)]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def results(model, trainer):
    """Train and ask twice; list what there is to compare."""
    how = {"batch_size": 6, "verbose": 0}
    logs = trainer.fit(X, Y, epochs=2, shuffle=False, **how).history["loss"]
    asked = [trainer.evaluate(X, Y, **how) for _ in range(2)]
    predicted = [trainer.predict(X, **how) for _ in range(2)]
    return [np.array(logs), np.array(asked), *predicted, *model.get_weights()]


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("function", SEEDED + UNWATCHED)
def test_layer_computes_what_it_computes_in_keras(function, size):
    model = make_model(function)
    expected = results(model, model)
    model = make_model(function)
    accumulation = Accumulation(micro_batch_size=size) if size else 1
    trainer = Trainer(model, accumulation=accumulation)
    for one, other in zip(results(model, trainer), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Moving(layers.Layer):
    """Counts the samples it has seen, in place."""

    def build(self, shape):
        self.seen = self.add_weight(
            shape=[], initializer="zeros", trainable=False
        )

    def call(self, x):
        self.seen.value.add_(x.shape[0])
        return x / self.seen.value.clone()


def test_state_beside_what_none_can_watch_moves_as_in_keras():
    def train(run):
        model = make_model(condition, Moving(), layers.BatchNormalization())
        run(model).fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    for one, other in zip(
        train(Trainer), train(lambda model: model), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_recorded_leaves_the_seed_of_pytorch_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = make_model(torch.sin)
    torch.manual_seed(5)
    results(model, Trainer(model))
    assert torch.equal(torch.rand(3), expected)


def test_draws_from_the_state_of_pytorch_are_still_recorded(monkeypatch):
    graphs = note_graphs(monkeypatch)
    model = make_model(lambda x: x * torch.rand(6))
    trainer = Trainer(model)
    trainer.fit(X, Y, batch_size=6, verbose=0)
    assert graphs


def test_trying_a_model_draws_from_no_generator_of_its_own():
    drawn = []

    def draw(x):
        drawn.append(torch.rand(2, generator=KEPT))
        return x * drawn[-1].sum()

    model = make_model(draw)
    KEPT.manual_seed(3)
    expected = [torch.rand(2, generator=KEPT) for _ in range(2)]
    KEPT.manual_seed(3)
    Trainer(model).fit(X, Y, batch_size=6, verbose=0, shuffle=False)
    for one, other in zip(drawn[-2:], expected, strict=True):
        assert torch.equal(one, other)
