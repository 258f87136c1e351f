"""Claims about adaptive gradient clipping, and what it acts on."""

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Accumulation, Trainer, adaptive_clip
from accumtrainer.keras_api import keras, ops
from accumtrainer.window.clipping import global_norm

layers = keras.layers

X = np.random.default_rng(0).normal(size=(16, 6, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 3)).astype("float32")


def numbers(tensor):
    return np.array(ops.convert_to_numpy(tensor))


def clip_in_a_loop(gradient, weights, clipping, eps):
    """Compute equation 3 of arXiv:2102.06171 unit by unit."""
    clipped = np.array(gradient, "float32")
    is_one_unit = np.squeeze(weights).ndim <= 1
    units = 1 if is_one_unit else weights.shape[-1]
    for unit in range(units):
        place = ... if is_one_unit else (..., unit)
        norm = np.sqrt(np.sum(np.square(gradient[place], dtype="float64")))
        size = np.sqrt(np.sum(np.square(weights[place], dtype="float64")))
        most = clipping * max(size, eps)
        if norm > most:
            clipped[place] = gradient[place] * (most / norm)
    return clipped


@pytest.mark.parametrize(
    "shape",
    [(), (4,), (7, 4), (1, 4), (7, 1), (3, 5, 4), (3, 3, 2, 4)],
    ids=str,
)
@pytest.mark.parametrize("clipping, eps", [(0.01, 1e-3), (1.0, 1.5)])
def test_units_are_clipped_as_in_a_loop(rng, shape, clipping, eps):
    weights = rng.normal(size=shape).astype("float32")
    gradient = rng.normal(size=shape).astype("float32")
    gradient = gradient * rng.choice([1e-3, 1.0, 10.0], shape[-1:])
    gradient = np.asarray(gradient, "float32")
    (clipped,) = adaptive_clip(
        [gradient], [keras.Variable(weights)], clipping=clipping, eps=eps
    )
    np.testing.assert_allclose(
        numbers(clipped),
        clip_in_a_loop(gradient, weights, clipping, eps),
        rtol=1e-5,
    )


def test_units_within_their_bound_are_left_as_they_are(rng):
    weights = rng.normal(size=(7, 4)).astype("float32")
    gradient = 1e-4 * weights
    (clipped,) = adaptive_clip([gradient], [weights])
    np.testing.assert_array_equal(numbers(clipped), gradient)


def test_units_of_zeros_have_a_bound_of_their_own():
    zeros = np.zeros([3, 2], "float32")
    (still,) = adaptive_clip([zeros], [zeros])
    np.testing.assert_array_equal(numbers(still), zeros)
    (moved,) = adaptive_clip([zeros + 1], [zeros], clipping=0.1, eps=0.01)
    norms = np.linalg.norm(numbers(moved), axis=0)
    np.testing.assert_allclose(norms, 0.1 * 0.01, rtol=1e-5)


@pytest.mark.parametrize("size", [1e20, 3e38])
def test_finite_gradients_of_infinite_square_are_clipped(size):
    weights = np.array([[3.0, 0.0], [4.0, 0.0]], "float32")
    gradient = np.full([2, 2], size, "float32")
    (clipped,) = adaptive_clip([gradient], [weights], clipping=0.1, eps=0.01)
    each = np.array([0.1 * 5.0, 0.1 * 0.01]) / np.sqrt(2)
    np.testing.assert_allclose(numbers(clipped), [each, each], rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(value):
    gradient = np.array([[value, 1.0], [1.0, 1.0]], "float32")
    (clipped,) = adaptive_clip([gradient], [np.ones([2, 2], "float32")])
    assert not np.isfinite(numbers(clipped)[:, 0]).all()
    assert np.isfinite(numbers(clipped)[:, 1]).all()


def test_variables_of_half_precision_are_measured_in_float32():
    variable = keras.Variable(np.full([4, 2], 300.0), dtype="float16")
    gradient = np.full([4, 2], 1e3, "float32")
    (clipped,) = adaptive_clip([gradient], [variable], clipping=0.5)
    np.testing.assert_allclose(numbers(clipped), 150.0, rtol=1e-5)


@pytest.mark.parametrize("name", ["clipping", "eps"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_bounds_that_are_not_above_zero_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        adaptive_clip([np.ones([2])], [np.ones([2])], **{name: value})


class Adaptive(Trainer):
    def on_apply(self, gradients, info):
        return adaptive_clip(gradients, self.model.trainable_variables)


@pytest.mark.parametrize(
    "shapes",
    [[()], [(3,), (2, 5)], [(64, 65)], [(4097,), (2, 3)], [(64, 64), (), (8,)]],
)
def test_the_global_norm_is_that_of_all_numbers(rng, shapes):
    gradients = [rng.normal(size=s).astype("float32") for s in shapes]
    norm = global_norm(list(map(ops.convert_to_tensor, gradients)))
    together = np.concatenate([g.ravel() for g in gradients])
    np.testing.assert_allclose(
        ops.convert_to_numpy(norm), np.linalg.norm(together), rtol=1e-5
    )


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input([6, 5]),
            layers.Conv1D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def train(cls, size, **options):
    """Make one update of 16 samples, in micro-batches of some size."""
    trainer = cls(
        make_model(),
        optimizer=keras.optimizers.SGD(1.0, **options),
        loss="mse",
        accumulation=Accumulation(micro_batch_size=size),
        jit_compile=JIT_COMPILE,
    )
    before = [numbers(v) for v in trainer.model.trainable_variables]
    logs = trainer.train_on_batch(X, Y, return_dict=True)
    after = [numbers(v) for v in trainer.model.trainable_variables]
    return logs, before, [b - a for b, a in zip(before, after, strict=True)]


@pytest.mark.parametrize("size", [16, 4, 7])
def test_adaptive_clipping_acts_on_the_gradient_of_the_update(size):
    _, weights, gradients = train(Trainer, 16)
    _, _, clipped = train(Adaptive, size)
    expected = [
        clip_in_a_loop(gradient, weight, 0.01, 1e-3)
        for gradient, weight in zip(gradients, weights, strict=True)
    ]
    for actual, wanted, gradient in zip(
        clipped, expected, gradients, strict=True
    ):
        np.testing.assert_allclose(actual, wanted, rtol=1e-3, atol=1e-6)
        assert not np.allclose(actual, gradient, rtol=1e-3)


@pytest.mark.parametrize(
    "limit", [{"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}]
)
def test_clipping_of_the_optimizer_acts_on_the_gradient_of_the_update(limit):
    _, _, gradients = train(Trainer, 16)
    _, _, whole = train(Trainer, 16, **limit)
    _, _, parts = train(Trainer, 4, **limit)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-6)
    assert any(
        not np.allclose(one, gradient, rtol=1e-3)
        for one, gradient in zip(whole, gradients, strict=True)
    )
