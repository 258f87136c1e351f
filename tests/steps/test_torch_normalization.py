"""Tests for batch normalization by PyTorch's own operations."""

import os

import numpy as np
import pytest

if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("It records with PyTorch.", allow_module_level=True)

import keras
import torch
from keras import layers
from recorded import agrees, make, names_of

from accumtrainer import Trainer
from accumtrainer.steps.torch import graphs

aten = torch.ops.aten

OWN = {
    "batch_norm_update_stats",
    "native_batch_norm",
    "native_batch_norm_backward",
}
"""What normalizes in PyTorch, forward and backward."""

SHAPES = [
    ((4, 5, 3, 6), -1),
    ((4, 6, 5, 3), 1),
    ((1, 5, 3, 6), -1),
    ((2, 3, 4, 5, 6), -1),
    ((9, 6), -1),
]


def normalized(axis=-1, frozen=(), after=lambda x, mean, y: y):
    """Make a function that normalizes as Keras does, and differentiates."""

    def function(tensors):
        x, cotangents, *weights, moving = tensors
        leaves = [t.detach().requires_grad_() for t in (x, *weights)]
        rest = [i for i in range(x.dim()) if i != axis % x.dim()]
        with torch.enable_grad():
            mean, variance = keras.ops.moments(leaves[0], rest)
            y = keras.ops.batch_normalization(
                leaves[0], mean, variance, axis, leaves[2], leaves[1]
            )
            total = (after(leaves[0], mean, y) * cotangents).sum()
            wanted = [v for i, v in enumerate(leaves) if i not in frozen]
            gradients = torch.autograd.grad(total, wanted)
        moved = 0.9 * moving + 0.1 * mean.detach()
        return [y.detach(), moved, variance.detach(), *gradients]

    return function


def tensors_of(shape):
    """Make x, cotangents, gamma, beta and a moving mean, to be exact."""
    tensors = [
        make(*shape),
        make(*shape).flip(0),
        make(6) + 2,
        make(6),
        make(6),
    ]
    return [tensor.double() for tensor in tensors]


@pytest.mark.parametrize("shape, axis", SHAPES)
def test_pytorch_normalizes_where_keras_writes_it_out(shape, axis):
    names = names_of(normalized(axis), *tensors_of(shape))
    assert set(names) >= OWN
    assert not {"mean", "pow", "sum", "sub", "clone", "mul_"} & set(names)
    agrees(normalized(axis), *tensors_of(shape))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_derivatives_that_nobody_needs_are_not_missed(frozen):
    tensors = tensors_of((4, 5, 3, 6))
    names = names_of(normalized(frozen=frozen), *tensors)
    assert "native_batch_norm" in names
    assert (set(names) >= OWN) == (frozen != (0, 1))
    agrees(normalized(frozen=frozen), *tensors)


def test_what_comes_in_may_be_read_by_others():
    function = normalized(after=lambda x, mean, y: y * torch.relu(x))
    tensors = tensors_of((4, 5, 3, 6))
    assert set(names_of(function, *tensors)) >= OWN
    agrees(function, *tensors)


@pytest.mark.parametrize(
    "after",
    [
        lambda x, mean, y: y + mean,
        lambda x, mean, y: y * (x - mean),
        lambda x, mean, y: y.mul_(2.0),
    ],
)
def test_other_derivatives_stay_right(after):
    agrees(normalized(after=after), *tensors_of((4, 5, 3, 6)))


def test_what_changes_later_is_left_alone():
    def change_input(tensors):
        results = normalized()(tensors)
        tensors[0].zero_()
        return results

    def change_scale(tensors):
        results = normalized()(tensors)
        tensors[2].zero_()
        return results

    tensors = tensors_of((4, 5, 3, 6))
    assert not OWN & set(names_of(change_input, *tensors))
    assert set(names_of(change_scale, *tensors)) >= OWN
    for function in (change_input, change_scale):
        agrees(function, *tensors)


def test_no_digits_are_lost_far_from_zero():
    tensors = [tensor.float() for tensor in tensors_of((16, 8, 8, 6))]
    tensors[0] += 30.0
    with torch.no_grad():
        graph = graphs.Graph(normalized(), tensors, compiles=False)
        recorded, own = graph(tensors), normalized()(tensors)
        exact = normalized()([tensor.double() for tensor in tensors])

    def error(results):
        return [
            float((result - value).abs().max() / value.abs().max())
            for result, value in zip(results, exact, strict=True)
        ]

    for ours, theirs in zip(error(recorded), error(own), strict=True):
        assert ours < max(1e-6, theirs)


@pytest.mark.parametrize("rows", [2048, 2053, 3069])
def test_many_rows_are_normalized_alike(rows):
    agrees(normalized(), *tensors_of((rows, 6)))


@pytest.mark.parametrize(
    "shape, axis", [((16, 64, 64, 6), -1), ((16, 6, 64, 64), 1)]
)
def test_no_digits_are_lost_where_many_are_added_up(shape, axis):
    tensors = [tensor.float() for tensor in tensors_of(shape)]
    tensors[0] += 1 / 3
    tensors[1] = abs(tensors[1])  # the sum of which grows and grows
    with torch.no_grad():
        graph = graphs.Graph(normalized(axis), tensors, compiles=False)
        recorded, own = graph(tensors), normalized(axis)(tensors)
        exact = normalized(axis)([tensor.double() for tensor in tensors])
    for ours, theirs, value in zip(recorded, own, exact, strict=True):
        error, limit = (abs(one - value).max() for one in (ours, theirs))
        assert error < max(1e-6 * abs(value).max(), 2 * limit)


def make_model(**options):
    images = keras.Input([6, 6, 3])
    x = layers.BatchNormalization(**options)(images)
    for _ in range(2):
        y = layers.Conv2D(3, 3, padding="same", use_bias=False)(x)
        y = layers.BatchNormalization(**options)(y)
        x = layers.ReLU()(layers.add([x, y]))
    x = layers.BatchNormalization(**options)(x)
    return keras.Model(images, layers.Dense(1)(layers.Flatten()(x)))


def train(run_eagerly, make_model):
    keras.utils.set_random_seed(0)
    model = make_model()
    x = np.random.default_rng(0).standard_normal([12, 6, 6, 3], dtype="float32")
    Trainer(
        model,
        optimizer=keras.optimizers.SGD(0.01),
        loss="mse",
        accumulation=2,
        seed=0,
        run_eagerly=run_eagerly,
    ).fit(x, x.sum(axis=(1, 2, 3)), batch_size=3, epochs=2, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": False},
        {"center": False, "epsilon": 1e-5, "momentum": 0.5},
        {"renorm": True},
        {"trainable": False},
        {"dtype": "mixed_bfloat16"},
        {"axis": 1},
    ],
)
def test_models_are_trained_as_before(options):
    def make():
        return make_model(**options)

    rounding = 0.05 if options.get("dtype") == "mixed_bfloat16" else 1e-3
    recorded, own = train(False, make), train(True, make)
    for one, other in zip(recorded, own, strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)


def test_every_layer_of_keras_is_recognized(monkeypatch):
    names = []
    tidy = graphs._tidy

    def note(module):
        tidy(module)
        names.extend(str(node.target) for node in module.graph.nodes)

    monkeypatch.setattr(graphs, "_tidy", note)
    train(False, make_model)
    assert names.count("aten.native_batch_norm.default") == 4
    assert names.count("aten.native_batch_norm_backward.default") == 4


class Steps:
    """The steps of batch normalization and its derivatives, as recorded."""

    def __init__(self, tensors):
        self.x, self.c, self.gamma, self.beta = tensors

    def forward(self, **options):
        x = self.x
        self.mean = x.mean([0], True)
        variance = (x**2).mean([0], True) - self.mean**2
        self.root = variance + 1e-3
        self.root.rsqrt_()
        self.y = x - self.mean
        self.saved = self.y.clone()
        self.factor = self.root * self.gamma
        self.y.mul_(self.factor)
        self.y.add_(self.beta, **options)

    def by_gamma(self, change=lambda steps: None):
        self.total = (self.saved * self.c).sum([0], True)
        change(self)
        return self.total * self.root

    def terms(self):
        """Return what is added to be the derivatives by x."""
        scale, divide = aten.mul.Scalar, aten.div.Scalar
        shape, count = list(self.x.shape), len(self.x)
        scaled = self.c * self.factor
        half = scale(self.total * self.gamma, -0.5)
        by_variance = half * self.root**3
        by_mean = (-scaled).sum([0], True)
        by_mean = by_mean + (-by_variance) * scale(self.mean, 2.0)
        spread, moved = (
            divide(by, count).expand(shape) for by in (by_variance, by_mean)
        )
        return scaled, spread * scale(self.x, 2.0), moved


def rows(count=8):
    return [make(count, 3), make(count, 3) + 1, make(1, 3) + 3, make(1, 3)]


def recorded_steps(after_forward=None, after_total=None, add=None):
    """Make a function of the steps, with changes between them."""

    def function(tensors):
        steps = Steps(tensors)
        steps.forward()
        if after_forward:
            after_forward(steps)
        found = [steps.by_gamma(after_total or (lambda steps: None))]
        if add:
            found.append(add(*steps.terms()))
        return [steps.y, *found, steps.c.sum([0], True), steps.mean]

    return function


def sum_of(scaled, by_square, moved):
    return (scaled + by_square) + moved


def test_steps_are_recognized_as_they_are_written_here():
    assert set(names_of(recorded_steps(), *rows())) >= OWN
    assert set(names_of(recorded_steps(add=sum_of), *rows())) >= OWN


@pytest.mark.parametrize("add", [None, sum_of], ids=["weights", "all"])
@pytest.mark.parametrize("count", [8, 2100], ids=["few", "many"])
@pytest.mark.parametrize("place", ["after_forward", "after_total"])
@pytest.mark.parametrize("name", ["mean", "root", "gamma", "factor", "total"])
def test_what_changes_before_derivatives_are_computed(name, place, count, add):
    if (name, place) == ("total", "after_forward"):
        pytest.skip("is not there yet")

    def change(steps):
        getattr(steps, name).mul_(0.5)

    agrees(recorded_steps(**{place: change}, add=add), *rows(count))


@pytest.mark.parametrize(
    "add",
    [
        lambda scaled, by_square, moved: (
            ((scaled + scaled) + by_square) + moved
        ),
        lambda scaled, by_square, moved: ((by_square + scaled) + moved) + moved,
        lambda scaled, by_square, moved: (
            ((by_square + by_square) + scaled) + moved
        ),
    ],
)
def test_what_is_added_twice_counts_twice(add):
    agrees(recorded_steps(add=add), *rows())


def test_what_else_is_added_is_read_before_it_changes():
    def add(scaled, by_square, moved):
        other = scaled.exp()
        inner = by_square + other
        other.zero_()
        return (inner + scaled) + moved

    agrees(recorded_steps(add=add), *rows())


def test_offsets_are_scaled_as_they_are_added():
    def function(tensors):
        steps = Steps(tensors)
        steps.forward(alpha=2.0)
        return [steps.y]

    agrees(function, *rows())


@pytest.mark.parametrize(
    "scale",
    [
        lambda x, mean, gamma: gamma,
        lambda x, mean, gamma: torch.mul(2.0, gamma),
        lambda x, mean, gamma: mean * gamma,
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_what_looks_like_normalization_is_recorded(scale, given):
    def function(tensors):
        x, _, gamma, beta = tensors
        mean = gamma if given else x.mean([0], True)
        y = x - mean
        y.mul_(scale(x, mean, gamma))
        y.add_(beta)
        z = torch.rsub(x, 1.0)
        z.mul_(gamma)
        z.add_(beta)
        return [y, z]

    agrees(function, *rows())


@pytest.mark.parametrize(
    "make_cotangents",
    [
        lambda steps: 2.0,
        lambda steps: steps.saved,
        lambda steps: steps.c[:1],
        lambda steps: steps.c.double(),
    ],
    ids=["number", "itself", "row", "precise"],
)
def test_cotangents_of_another_kind_are_recorded(make_cotangents):
    def function(tensors):
        steps = Steps(tensors)
        steps.forward()
        steps.c = make_cotangents(steps)
        return [steps.y, steps.by_gamma()]

    agrees(function, *rows())
