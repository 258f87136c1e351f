"""Claims about what is left of recorded operations, and how long values are."""

import math
import os

import pytest

if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("It records with PyTorch.", allow_module_level=True)

import torch
from recorded import agrees, make, names_of

from accumtrainer.steps.torch.graphs import Graph
from accumtrainer.steps.torch.marks import (
    COLLECT,
    END,
    ITEM,
    LOOP,
    MARK,
    record_branch,
)
from accumtrainer.steps.torch.memory import TensorPeak

NUMBERS = torch.tensor([0.0, -0.0, -1.0, 3e38, -math.inf, math.inf, math.nan])


def is_finite(tensors):
    return [torch.isfinite(tensors[0])]


def is_root_finite(tensors):
    return [torch.isfinite(tensors[0].sqrt())]


@pytest.mark.parametrize("function", [is_finite, is_root_finite])
def test_what_is_finite_is_found_by_one_comparison(function):
    names = names_of(function, NUMBERS)
    way = ["sqrt"] if function is is_root_finite else ["abs"]
    assert names == [*way, "lt"]
    agrees(function, NUMBERS)


def is_itself_or_finite(tensors):
    one, two = tensors
    return [(one == one) * (two.abs() != math.inf)]


def is_other_bound(tensors):
    return [(tensors[0] == tensors[0]) * (tensors[0].abs() != 1.0)]


def is_finite_before_it_changes(tensors):
    root = tensors[0].abs().sqrt()
    is_number, is_bounded = root == root, root.abs() != math.inf
    root.fill_(math.inf)
    return [is_number * is_bounded]


def is_finite_before_its_size_changes(tensors):
    size = tensors[0].abs()
    is_number, is_bounded = tensors[0] == tensors[0], size != math.inf
    size.fill_(math.inf)
    return [is_number * is_bounded]


def is_finite_or_else(tensors):
    is_bounded = tensors[0].abs() != math.inf
    is_bounded.logical_not_()
    return [(tensors[0] == tensors[0]) * is_bounded]


@pytest.mark.parametrize(
    "function",
    [
        is_itself_or_finite,
        is_other_bound,
        is_finite_before_it_changes,
        is_finite_before_its_size_changes,
        is_finite_or_else,
    ],
)
def test_what_only_looks_like_it_stays(function):
    numbers = [NUMBERS, NUMBERS.flip(0)]
    assert "lt" not in names_of(function, *numbers)
    agrees(function, *numbers)


def test_root_of_a_complex_number_may_be_finite():
    def function(tensors):
        root = torch.complex(tensors[0], tensors[0]).sqrt()
        return [(root == root) * (root.abs() != math.inf)]

    agrees(function, NUMBERS)


def test_value_that_is_over_is_changed_itself():
    def function(tensors):
        root = tensors[0].exp()
        total = root.sum()
        return [root.clone().mul_(2.0), total]

    assert "clone" not in names_of(function, make(2, 3))
    agrees(function, make(2, 3))


def test_value_that_is_over_is_changed_itself_in_a_branch():
    def function(tensors):
        copied, is_large = tensors[0].exp(), tensors[0].sum() > 0
        copied = copied.clone()
        record_branch(is_large, lambda: copied.mul_(2), lambda: copied.add_(1))
        return [copied]

    assert "clone" not in names_of(function, make(2))
    graph = Graph(function, [make(2)], compiles=False)
    for sign, expected in ((1, 2 * math.e), (-1, 1 + 1 / math.e)):
        (result,) = graph([torch.full([2], float(sign))])
        torch.testing.assert_close(result, torch.full([2], expected))


def read_later(tensors):
    root = tensors[0].exp()
    copied = root.clone().mul_(2.0)
    return [copied, root.sum()]


def shown_later(tensors):
    root = tensors[0].exp()
    shown = root.reshape(-1)
    copied = root.clone().mul_(2.0)
    return [copied, shown + 1.0]


def returned(tensors):
    root = tensors[0].exp()
    return [root.clone().mul_(2.0), root]


@pytest.mark.parametrize("function", [read_later, shown_later, returned])
def test_value_that_is_read_later_is_copied(function):
    assert "clone" in names_of(function, make(2, 3))
    agrees(function, make(2, 3))


def test_what_is_put_back_as_it_was_is_left_alone():
    def function(tensors):
        kept = tensors[0].clone()
        result = kept + 1.0
        tensors[0].copy_(kept.clone())
        return [result]

    assert not {"clone", "copy_"} & set(names_of(function, make(3)))
    agrees(function, make(3))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.add_(1.0),
        lambda tensor: tensor.detach().add_(1.0),
        lambda tensor: tensor[1:].add_(1.0),
    ],
    ids=["itself", "detached", "a part"],
)
def test_what_was_changed_meanwhile_is_put_back(change):
    def function(tensors):
        kept = tensors[0].clone()
        change(tensors[0])
        result = tensors[0] * 2.0
        tensors[0].copy_(kept)
        return [result]

    agrees(function, make(3))


def test_copy_that_was_changed_is_put_back_changed():
    def function(tensors):
        kept = tensors[0].clone().add_(1.0)
        tensors[0].copy_(kept.clone())
        return [kept.sum()]

    agrees(function, make(3))


# --- Values are forgotten where they are read last. ---


def chain(tensor):
    for _ in range(8):
        tensor = tensor.sin()
    return tensor


def in_a_row(tensors):
    return [chain(tensors[0])]


def in_a_branch(tensors):
    """Make a value that one way reads, while the other runs."""
    early, total = tensors[0].cos(), torch.zeros(())
    record_branch(
        tensors[0].sum() > tensors[0].numel(),
        lambda: total.add_(chain(early).sum()),
        lambda: total.add_(chain(tensors[0]).sum()),
    )
    return [total]


def in_a_loop(tensors):
    indices = torch.arange(4)
    MARK(indices, LOOP)
    result = COLLECT(chain(ITEM(tensors[0]).cos()).sum(), 4)
    MARK(indices, END)
    return [result, chain(result)]


@pytest.mark.parametrize("function", [in_a_row, in_a_branch, in_a_loop])
def test_no_more_than_two_of_the_values_are_there_at_once(function):
    shape = [4, 1000]
    graph = Graph(function, [make(*shape)], compiles=False)
    with TensorPeak() as peak:
        graph([torch.zeros(shape)])
    given = 4 * math.prod(shape)
    value = given // 4 if function is in_a_loop else given
    assert given + value < peak.bytes < given + 2.1 * value


def test_a_copy_may_be_told_not_to_be_waited_for():
    def function(tensors):
        one, other = tensors
        one.copy_(one + other, non_blocking=True)
        other.copy_(other.clone(), non_blocking=True)
        return [one * other]

    agrees(function, make(3), 2 * make(3))


def test_a_loop_may_have_nothing_to_do():
    def function(tensors):
        indices = torch.arange(4)
        MARK(indices, LOOP)
        ITEM(indices).cos()
        MARK(indices, END)
        return [tensors[0].sin()]

    graph = Graph(function, [make(3)], compiles=False)
    torch.testing.assert_close(*graph([make(3)]), make(3).sin())
