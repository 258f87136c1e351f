"""Promise 1: a window's update is the one of its big batch.

Every case trains one window, or a few, and compares with plain Keras on the
concatenated window (`oracle.py`), on the models and data of
`exactness_cases.py`: here every reduction, weighted and masked in every way,
the other ways to combine, and however the data splits. Files beside this one
go through losses, outputs, optimizers, and what `fit` and `evaluate` do.
"""

import functools

import numpy as np
import pytest
from exactness_cases import (
    EXAMPLES,
    REDUCTIONS,
    SLICES,
    SOME_SIZES,
    WEIGHTINGS,
    each_size,
    features_and_labels,
    features_and_numbers,
    make_mlp,
    outputs_pair,
    reduced_by_itself,
    regularized_pair,
    tags_and_scores,
    weighted_batches,
    weighted_pair,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    TOLERANCE,
    Pair,
    batch_gradients,
    combined_gradients,
    concatenate,
    cuts_in_many_ways,
    largest_error,
    update,
)
from quickest import RUN_EAGERLY

from accumtrainer import Accumulation
from accumtrainer.keras_api import keras, ops

losses, optimizers = keras.losses, keras.optimizers

pytestmark = cuts_in_many_ways


# Every reduction, weighted and masked in every way.


@each_size()
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_window_equals_its_big_batch(rng, weighting, reduction, sizes):
    pair = weighted_pair(weighting, reduction)
    pair.assert_exact(weighted_batches(rng, weighting, sizes))


@pytest.mark.parametrize("weighting", ["sample weights", "mask"])
def test_reduction_by_its_other_name_is_exact(rng, weighting):
    pair = weighted_pair(weighting, "mean")
    pair.assert_exact(weighted_batches(rng, weighting, (4, 1)))


@each_size(SOME_SIZES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_class_weights_count_as_in_the_big_batch(rng, reduction, sizes):
    batches = features_and_labels(rng, sizes)
    class_weight = {0: 0.2, 1: 3.0}  # the third class counts 1
    x, y, _ = concatenate(batches)
    weights = np.array([0.2, 3.0, 1.0], "float32")[y]
    weighted_pair("unweighted", reduction).assert_exact(
        batches, reference=(x, y, weights), class_weight=class_weight
    )


@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_weights_that_only_later_data_have_count(rng, use_plan, plan):
    use_plan(plan)
    mean = losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    pair = Pair(make_mlp, loss=mean)
    weighted = weighted_batches(rng, "sample weights", (4, 4))
    unweighted = [(x, y) for x, y, _ in weighted]
    for batches in (unweighted, weighted, unweighted):
        pair.assert_exact(batches)


@each_size(((4, 4), (3, 2, 1)))
@pytest.mark.parametrize(
    "weighting", ["sample weights", "mask and token weights"]
)
def test_window_under_xla_equals_its_big_batch(rng, weighting, sizes):
    pair = weighted_pair(weighting, "mean_with_sample_weight", jit_compile=True)
    pair.assert_exact(weighted_batches(rng, weighting, sizes))


@each_size(((2, 2), (1, 3)))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batch_of_zero_weights_counts_nothing(rng, reduction, sizes):
    batches = weighted_batches(rng, "sample weights", sizes)
    batches[0][2][:] = 0
    weighted_pair("sample weights", reduction).assert_exact(batches)


@each_size(((2, 2), (1, 3)))
@pytest.mark.parametrize("scale", [1e-20, 1e-30])
def test_micro_batch_of_zero_weights_counts_nothing_beside_tiny_ones(
    rng, scale, sizes
):
    batches = weighted_batches(rng, "sample weights", sizes)
    batches[0][2][:] = 0
    batches[1][2][:] *= scale
    pair = weighted_pair("sample weights", "mean_with_sample_weight")
    pair.assert_exact(batches)


@each_size(((2, 2), (1, 3)))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batch_of_padding_alone_counts_nothing(rng, reduction, sizes):
    batches = weighted_batches(rng, "mask", sizes)
    batches[-1][0][:] = 0
    weighted_pair("mask", reduction).assert_exact(batches)


@pytest.mark.parametrize("weighting", ["sample weights", "mask"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_order_inside_a_window_is_irrelevant(rng, weighting, reduction):
    pair = weighted_pair(weighting, reduction)
    batches = weighted_batches(rng, weighting, (3, 1, 2))
    pair.train(batches)
    forward = [ops.convert_to_numpy(v) for v in pair.gradients]
    pair.train(batches[::-1])
    assert largest_error(pair.gradients, forward) <= TOLERANCE


@pytest.mark.parametrize("size", SLICES)
@pytest.mark.parametrize("weighting", ["sample weights", "mask"])
def test_sliced_batch_equals_the_whole_batch(rng, weighting, size):
    pair = sliced_pair(weighting, size)
    (batch,) = weighted_batches(rng, weighting, (11,))
    pair.trainer.train_on_batch(*batch)
    _, expected = batch_gradients(pair.twin, batch)
    assert largest_error(pair.gradients, expected) <= TOLERANCE


def sliced_pair(weighting, size):
    make_model, _, _ = WEIGHTINGS[weighting]
    return Pair(
        make_model,
        loss=losses.SparseCategoricalCrossentropy(
            from_logits=make_model is make_mlp,
            reduction="mean_with_sample_weight",
        ),
        accumulation=Accumulation(micro_batch_size=size),
        run_eagerly=RUN_EAGERLY,
    )


# The other ways to combine, by their plain loops.


@each_size(SOME_SIZES)
@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("weighting", ["sample weights", "mask"])
@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", "sum"])
def test_mean_and_sum_are_the_plain_loops(
    rng, combine, weighting, reduction, sizes
):
    pair = weighted_pair(weighting, reduction, combine)
    batches = weighted_batches(rng, weighting, sizes)
    assert_plain_loop(pair, batches, combine)


@each_size(SOME_SIZES)
@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_mean_and_sum_of_several_outputs_are_the_plain_loops(
    rng, combine, sizes
):
    pair = outputs_pair("loss weights", combine)
    assert_plain_loop(pair, tags_and_scores(rng, sizes), combine)


@each_size(((2, 2), (1, 3)))
@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_mean_and_sum_treat_regularizers_as_the_plain_loops(
    rng, combine, sizes
):
    pair = regularized_pair("mean", combine)
    assert_plain_loop(pair, features_and_numbers(rng, sizes), combine)


def assert_plain_loop(pair, batches, combine):
    factor = 1.0 if combine == "sum" else 1.0 / len(batches)
    logs = pair.train(batches)
    expected = combined_gradients(pair.twin, batches, factor)
    assert largest_error(pair.gradients, expected) <= TOLERANCE
    loss, _ = batch_gradients(pair.twin, concatenate(batches))
    assert logs["loss"] == pytest.approx(loss, rel=TOLERANCE)


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_scalar_loss_needs_no_denominator_in_the_plain_loops(rng, combine):
    pair = Pair(make_mlp, loss=reduced_by_itself, combine=combine)
    batches = features_and_numbers(rng, (3, 1))
    pair.train(batches)
    factor = {"sum": 1.0, "mean": 0.5}[combine]
    expected = combined_gradients(pair.twin, batches, factor)
    assert largest_error(pair.gradients, expected) <= TOLERANCE


# However the data splits.

splits = st.lists(st.integers(1, 6), min_size=1, max_size=6)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    "weighting", ["sample weights", "mask", "mask and token weights"]
)
@settings(max_examples=EXAMPLES)
@given(sizes=splits, seed=seeds)
def test_any_split_equals_the_big_batch(weighting, sizes, seed):
    pair = weighted_pair(weighting, "mean_with_sample_weight")
    rng = np.random.default_rng(seed)
    pair.assert_exact(weighted_batches(rng, weighting, sizes))


@settings(max_examples=EXAMPLES)
@given(sizes=splits, seed=seeds)
def test_any_split_of_several_outputs_equals_the_big_batch(sizes, seed):
    rng = np.random.default_rng(seed)
    batches = tags_and_scores(rng, sizes, is_weighted=True)
    outputs_pair("means by weight").assert_exact(batches)


@settings(max_examples=EXAMPLES)
@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    steps=st.integers(1, 5),
    seed=seeds,
)
def test_any_epoch_equals_big_batches_with_a_smaller_last_one(
    samples, batch_size, steps, seed
):
    pair = sgd_pair()
    pair.twin.set_weights(pair.model.get_weights())
    pair.steps = steps
    rng = np.random.default_rng(seed)
    ((x, y),) = features_and_labels(rng, (samples,))
    pair.trainer.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    size = batch_size * steps
    for start in range(0, samples, size):
        rows = slice(start, start + size)
        update(pair.twin, (x[rows], y[rows]))
    error = largest_error(pair.model.weights, pair.twin.weights)
    assert error <= TOLERANCE


@functools.cache
def sgd_pair():
    return Pair(
        make_mlp,
        loss=losses.SparseCategoricalCrossentropy(from_logits=True),
        make_optimizer=lambda: optimizers.SGD(0.05),
    )
