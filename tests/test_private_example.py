"""Claims about what examples/dp_sgd.py promises: its privacy, its batches."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hooked import numbers

from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras

FILE = Path(__file__).parent.parent / "examples" / "dp_sgd.py"
X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = np.arange(40) % 2


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("dp_sgd", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_epsilon_is_the_published_one_of_opacus(example):
    # https://opacus.ai/api/compute_dp_sgd_privacy.html has 2.39, of order 5,
    # which is rounded up here.
    orders = [2, 5, 10, 20, 100]
    assert example.find_epsilon(0.01, 1.0, 300, 1e-5, orders) == 2.40
    assert example.find_epsilon(0.01, 1.0, 300, 1e-5, [5]) == 2.40
    assert example.find_epsilon(0.01, 1.0, 300, 1e-5) <= 2.40


def test_divergence_gives_the_published_epsilons_of_older_formulas(example):
    # The documentation of Opacus (orders 10, 20 and 100): 2.95.
    # What an epsilon followed from before 2020.
    def find(rate, noise, updates, orders):
        return min(
            updates * example.find_divergence(rate, noise, order)
            + np.log(1e5) / (order - 1)
            for order in orders
        )

    assert find(256 / 60000, 1.12, 60 * 235, [10, 20, 100]) == pytest.approx(
        2.95, abs=0.005
    )


def test_divergence_of_everything_drawn_is_that_of_the_gaussian(example):
    found = example.find_divergence(1 - 1e-12, 2.0, 8)
    assert found == pytest.approx(8 / (2 * 2.0**2), rel=1e-6)


def batches_of(example, rate, updates=6, multiple=4):
    return example.PoissonBatches(
        X, Y, rate=rate, updates=updates, multiple=multiple
    )


def test_every_example_is_drawn_by_a_coin_of_its_own(example):
    batches = batches_of(example, 0.25, updates=2000)
    sizes = [batches[index][2].sum() for index in range(len(batches))]
    # Binomial: 10 of 40, variance 7.5.
    assert np.mean(sizes) == pytest.approx(10, abs=0.3)
    assert np.var(sizes) == pytest.approx(7.5, abs=0.8)


def test_batches_have_one_shape_and_depend_on_their_index_alone(example):
    one, other = (batches_of(example, 0.2) for _ in range(2))
    first = [one[index] for index in range(6)]
    again = [other[index] for index in reversed(range(6))][::-1]
    assert len({batch[0].shape for batch in first}) == 1
    for batch, same in zip(first, again, strict=True):
        for part, same_part in zip(batch, same, strict=True):
            np.testing.assert_array_equal(part, same_part)


def private_trainer(example, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    return example.PrivateTrainer(
        model,
        optimizer=keras.optimizers.SGD(1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        **{"clip": 0.5, "noise_multiplier": 1.0, "expected_size": 8, "seed": 0}
        | options,
    )


def weights_of(trainer):
    return [numbers(variable) for variable in trainer.model.weights]


def test_update_is_the_sum_of_clipped_gradients_over_the_expected_size(example):
    trainer = private_trainer(example, noise_multiplier=0.0, clip=1e-3)
    before = weights_of(trainer)
    x, y, weights = batches_of(example, 0.2)[0]
    trainer.train_on_batch(x, y, sample_weight=weights)
    drawn = x[weights > 0], y[weights > 0]
    kernel, bias = (w.astype("float64") for w in before)
    logits = drawn[0] @ kernel + bias
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    sums = [np.zeros_like(kernel), np.zeros_like(bias)]
    for row, error in zip(drawn[0], softmax - np.eye(2)[drawn[1]], strict=True):
        gradients = [np.outer(row, error), error]
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        sums = [
            s + g * min(1, 1e-3 / norm)
            for s, g in zip(sums, gradients, strict=True)
        ]
    for old, new, total in zip(before, weights_of(trainer), sums, strict=True):
        np.testing.assert_allclose(old - new, total / 8, rtol=2e-3, atol=2e-7)


def test_update_of_no_examples_is_noise_alone(example):
    trainer = private_trainer(example)
    before = weights_of(trainer)
    x, y, weights = batches_of(example, 0.0)[0]
    assert not weights.any()
    trainer.train_on_batch(x, y, sample_weight=weights)
    assert trainer.progress.updates == 1
    assert trainer.window_logs["gradient_norm"] == 0
    moved = [
        old - new for old, new in zip(before, weights_of(trainer), strict=True)
    ]
    assert all((change != 0).all() for change in moved)
    # Noise of 0.5 in the sum, of 0.5 / 8 in the update.
    assert 0.01 < np.std(np.concatenate([m.ravel() for m in moved])) < 0.2


def test_resumed_private_run_is_the_one_that_never_stopped(example, tmp_path):
    def run(folder, **options):
        trainer = private_trainer(example, callbacks=[Checkpoint(folder)])
        trainer.fit(
            batches_of(example, 0.2),
            epochs=2,
            steps_per_epoch=3,
            verbose=0,
            **options,
        )
        return trainer

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", max_updates=4)
    resumed = run(tmp_path / "parts", resume_from="auto")
    assert resumed.progress.updates == 6
    for one, other in zip(weights_of(whole), weights_of(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
