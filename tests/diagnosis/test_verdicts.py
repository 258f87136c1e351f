"""Claims about what values of a loss on groups of rows show of it."""

import itertools
from functools import partial

import numpy as np
import pytest

from accumtrainer.diagnosis.verdicts import QUADRUPLES, LossValues, judge_loss

ROWS = 3
ERRORS = np.random.default_rng(0).uniform(0.5, 2.0, size=[2, 4, ROWS])
PLACES = {(0,), (1,), (2,), *itertools.chain(*QUADRUPLES)}


def total(mask, errors):
    return np.sum(mask * errors)


def mean(mask, errors):
    return total(mask, errors) / (np.sum(mask) + 1e-7)


def coupled(mask, errors):
    return total(mask, errors) * np.sum(mask * errors**2)


def by_size(mask, errors):
    return total(mask, errors) / errors.size**2


def values(loss, counts, errors):
    """Compute it of groups of which so many rows are in the mask."""
    masks = np.arange(ROWS) < np.array(counts)[:, None]
    means = {
        place: float(loss(masks[list(place)], errors[list(place)]))
        for place in PLACES
    }
    rows = {place: float(ROWS * len(place)) for place in PLACES}
    totals = {place: means[place] * rows[place] for place in PLACES}
    return LossValues(means=means, totals=totals, counts=rows)


def verdict(loss, counts, with_other_weights=None):
    """Judge a loss, or one that another is with other weights."""
    here, elsewhere = (
        values(one, counts, errors)
        for one, errors in zip(
            [loss, with_other_weights or loss], ERRORS, strict=True
        )
    )
    return judge_loss(here, elsewhere, False, "float32").verdict


def verdicts(loss, labelled):
    """Judge it by all groups that differ, and of which as many have labels."""
    return {
        verdict(loss, counts)
        for counts in itertools.product(range(ROWS), repeat=4)
        if np.count_nonzero(counts) == labelled and len(set(counts)) > 1
    }


@pytest.mark.parametrize("labelled", range(1, 5))
def test_mean_of_which_a_mask_leaves_groups_out_is_nothing_else(labelled):
    assert verdicts(mean, labelled) <= {"other", "mixes", "unknown"}


@pytest.mark.parametrize("labelled", range(1, 5))
def test_what_couples_examples_is_no_mean_whatever_a_mask_leaves_out(labelled):
    assert verdicts(coupled, labelled) <= {"couples", "mixes", "unknown"}


def test_sum_is_told_by_two_groups_that_have_a_value():
    tell = partial(verdict, total)
    assert tell([2, 1, 0, 0]) == tell([0, 2, 1, 1]) == "sum"
    assert tell([2, 0, 0, 0]) == tell([0, 0, 0, 1]) == "unknown"


def test_what_adds_up_by_chance_of_weights_is_judged_with_others_too():
    assert verdict(by_size, [ROWS] * 4) == "size"
    assert verdict(by_size, [ROWS] * 4, coupled) == "couples"


def test_mean_over_rows_is_right_where_groups_differ():
    assert verdict(mean, [ROWS] * 4) == "right"
