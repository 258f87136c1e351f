"""Claims about the arithmetic of a window, on numbers done by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accumtrainer.keras_api import ops
from accumtrainer.window.losses import WeightedLoss
from accumtrainer.window.weighing import (
    Weighing,
    choose_weighing,
    gradient_divisor,
    gradient_weight,
    loss_factors,
    loss_weight,
    window_means,
)

MEAN = WeightedLoss(0.5, 8.0)
UNIFORM = WeightedLoss(0.5, 8.0, is_uniform=True)
SUM = WeightedLoss(4.0, None, is_uniform=True)


@pytest.mark.parametrize("is_even", [True, False])
def test_one_mean_is_weighed_by_its_denominator(is_even):
    weighing = choose_weighing([MEAN], combine="exact", is_even=is_even)
    assert weighing == Weighing(rule="denominator", needs_totals=False)


@pytest.mark.parametrize("is_even", [True, False])
def test_sums_need_no_totals(is_even):
    weighing = choose_weighing([SUM, SUM], combine="exact", is_even=is_even)
    assert weighing == Weighing(rule="balance", needs_totals=False)


@pytest.mark.parametrize(
    "losses, is_even, needs_totals",
    [
        ([UNIFORM, UNIFORM], True, False),
        ([UNIFORM, UNIFORM], False, True),
        ([UNIFORM, MEAN], True, True),
        ([UNIFORM, SUM], True, False),
        ([UNIFORM, SUM], False, True),
        ([MEAN, SUM], True, True),
    ],
)
def test_several_losses_need_totals_unless_micro_batches_count_alike(
    losses, is_even, needs_totals
):
    weighing = choose_weighing(losses, combine="exact", is_even=is_even)
    assert weighing == Weighing(rule="balance", needs_totals=needs_totals)


@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("losses", [[MEAN], [SUM], [MEAN, SUM]])
def test_plain_combinations_ignore_denominators(losses, combine):
    weighing = choose_weighing(losses, combine=combine, is_even=False)
    assert weighing == Weighing(rule=combine, needs_totals=False)


@pytest.mark.parametrize("rule", ["denominator", "mean", "sum"])
def test_losses_keep_their_size_where_gradients_are_weighed(rule):
    factors = loss_factors(
        [MEAN, SUM], Weighing(rule=rule), micro_batches=4.0, totals=None
    )
    assert factors == [1.0, 1.0]


def test_factor_of_a_mean_is_its_share_of_the_window():
    factors = loss_factors(
        [MEAN],
        Weighing(rule="balance", needs_totals=True),
        micro_batches=ops.convert_to_tensor(4.0),
        totals=ops.convert_to_tensor([32.0]),
    )
    assert float(factors[0]) == pytest.approx(4.0 * 8.0 / 32.0)


def test_factor_of_a_sum_undoes_the_division_by_micro_batches():
    factors = loss_factors(
        [SUM], Weighing(rule="balance"), micro_batches=4.0, totals=None
    )
    assert factors == [4.0]


def test_factor_of_a_mean_is_one_where_all_count_alike():
    factors = loss_factors(
        [UNIFORM], Weighing(rule="balance"), micro_batches=4.0, totals=None
    )
    assert factors == [1.0]


def test_loss_that_counts_nothing_in_the_whole_window_has_factor_zero():
    factors = loss_factors(
        [WeightedLoss(0.0, 0.0)],
        Weighing(rule="balance", needs_totals=True),
        micro_batches=ops.convert_to_tensor(4.0),
        totals=ops.convert_to_tensor([0.0]),
    )
    assert float(factors[0]) == 0.0


@pytest.mark.parametrize(
    "rule, weight, divisor",
    [("denominator", 8, 20), ("balance", 1, 5), ("mean", 1, 5), ("sum", 1, 1)],
)
def test_weight_and_divisor_of_each_rule(rule, weight, divisor):
    weighing = Weighing(rule=rule)
    assert float(gradient_weight([MEAN], weighing)) == weight
    total = ops.convert_to_tensor(20.0)
    count = ops.convert_to_tensor(5.0)
    assert divisor == float(
        gradient_divisor(weighing, total_weight=total, micro_batches=count)
    )


@pytest.mark.parametrize(
    ("losses", "combine", "is_even", "count", "divides"),
    [
        ([UNIFORM], "exact", True, 3, True),
        ([UNIFORM], "exact", False, 3, False),
        ([MEAN], "exact", True, 3, False),
        ([MEAN], "exact", True, 1, True),
        ([MEAN, SUM], "exact", True, 3, True),
        ([MEAN], "mean", True, 3, True),
        ([SUM], "sum", True, 3, True),
    ],
)
def test_losses_are_divided_first_where_the_divisor_is_known(
    losses, combine, is_even, count, divides
):
    weighing = choose_weighing(losses, combine=combine, is_even=is_even)
    divided = weighing.divide_first(count)
    assert divided.divides_losses == divides
    divisor = gradient_divisor(
        divided, total_weight=ops.ones(()), micro_batches=ops.ones(())
    )
    assert (divisor is None) == divides


def test_empty_micro_batch_weighs_too_little_to_count_beside_others():
    weighing = Weighing(rule="denominator")
    empty = gradient_weight([WeightedLoss(0.0, 0.0)], weighing)
    other = gradient_weight([WeightedLoss(0.0, 1e-6)], weighing)
    assert float(empty + other) == float(other)


def test_gradients_of_a_window_of_empty_micro_batches_keep_their_mean():
    weighing = Weighing(rule="denominator")
    weight = gradient_weight([WeightedLoss(0.0, 0.0)], weighing)
    gradients = ops.convert_to_tensor([1e-6, 0.3, 20.0])
    total = gradients * weight + 3 * gradients * weight
    mean = ops.divide_no_nan(total, 2 * weight)
    mean, gradients = map(ops.convert_to_numpy, (mean, gradients))
    np.testing.assert_allclose(mean, 2 * gradients, rtol=1e-6)


def test_means_divide_sums_by_weights():
    means = window_means(
        ops.convert_to_tensor([6.0, 5.0]), ops.convert_to_tensor([3.0, 2.0])
    )
    np.testing.assert_allclose(ops.convert_to_numpy(means), [2.0, 2.5])


def test_mean_over_no_weight_is_zero():
    means = window_means(
        ops.convert_to_tensor([0.0]), ops.convert_to_tensor([0.0])
    )
    np.testing.assert_array_equal(ops.convert_to_numpy(means), [0.0])


micro_batches = st.lists(
    st.tuples(
        st.floats(-2, 2, width=32),
        st.floats(-2, 2, width=32),
        st.floats(0.125, 8, width=32),
        st.floats(0.125, 8, width=32),
    ),
    min_size=1,
    max_size=6,
)


@given(micro_batches)
def test_both_arrangements_are_the_weighted_mean(rows):
    # The gradients of one micro-batch stand in for its losses: both are
    # linear in the factors.
    gradients, _, weights, _ = np.array(rows, "float32").T
    expected = np.average(gradients, weights=weights)
    assert arrange([(gradients, weights)], "denominator") == pytest.approx(
        expected, abs=1e-5
    )
    assert arrange([(gradients, weights)], "balance") == pytest.approx(
        expected, abs=1e-5
    )


@pytest.mark.parametrize("rule", ["denominator", "balance", "mean", "sum"])
@given(rows=micro_batches)
def test_dividing_losses_first_gives_the_same(rule, rows):
    gradients, _, weights, _ = np.array(rows, "float32").T
    if rule == "denominator":
        weights = np.full_like(weights, weights[0])
    received = arrange([(gradients, weights)], rule, is_uniform=True)
    expected = arrange([(gradients, weights)], rule)
    assert received == pytest.approx(expected, abs=1e-5)


@given(micro_batches)
def test_balance_gives_each_loss_its_own_denominator(rows):
    first, second, weights, others = np.array(rows, "float32").T
    expected = np.average(first, weights=weights)
    expected += np.average(second, weights=others)
    outputs = [(first, weights), (second, others)]
    assert arrange(outputs, "balance") == pytest.approx(expected, abs=1e-5)


def arrange(outputs, rule, *, is_uniform=False):
    """Run the window's sum as the step does, over columns of micro-batches."""
    weighing = Weighing(rule=rule, needs_totals=rule == "balance")
    count = ops.convert_to_tensor(float(len(outputs[0][0])))
    if is_uniform:
        weighing = replace(weighing, is_uniform=True).divide_first(count)
    totals = ops.convert_to_tensor([np.sum(w) for _, w in outputs])
    total = total_weight = 0.0
    for i in range(len(outputs[0][0])):
        losses = [WeightedLoss(g[i], w[i]) for g, w in outputs]
        factors = loss_factors(
            losses, weighing, micro_batches=count, totals=totals
        )
        gradient = sum(f * v.mean for f, v in zip(factors, losses, strict=True))
        weight = gradient_weight(losses, weighing)
        total += gradient * loss_weight(
            weighing, weight=weight, micro_batches=count
        )
        total_weight += weight
    divisor = gradient_divisor(
        weighing, total_weight=total_weight, micro_batches=count
    )
    return float(total if divisor is None else total / divisor)
