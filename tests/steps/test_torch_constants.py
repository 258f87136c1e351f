"""Claims about recorded operations whose outcome is known beforehand."""

import os

import pytest

if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("It records with PyTorch.", allow_module_level=True)

import keras
import numpy as np
import torch
from recorded import agrees, make, names_of

from accumtrainer import Trainer
from accumtrainer.steps.torch import graphs


def check(function, *tensors, without, still=()):
    """Check that operations are left out, others not, and nothing changes."""
    names = names_of(function, *tensors)
    assert not set(names) & {*without}
    assert set(names) >= {*still}
    agrees(function, *tensors)


def test_what_is_multiplied_or_divided_by_ones_is_left_as_it_is():
    def weigh(tensors):
        exponential = tensors[0].exp()
        weighted = torch.ones(()) * exponential * torch.ones(3) * 1.0
        return [(weighted / torch.ones(3)).sin()]

    check(weigh, make(2, 3), without=["mul", "div"], still=["exp", "sin"])


def test_one_that_is_divided_stays():
    def invert(tensors):
        return [(torch.ones(3) / tensors[0].exp()).sin()]

    check(invert, make(3), without=[], still=["div"])


def test_ones_that_make_something_larger_or_of_another_dtype_stay():
    def larger(tensors):
        return [(tensors[0].exp() * torch.ones(2, 3)).sin()]

    def other(tensors):
        return [(tensors[0].exp() * torch.ones(3, dtype=torch.float64)).sin()]

    def larger_from_the_left(tensors):
        return [(torch.ones(2, 3) * tensors[0].exp()).sin()]

    for function in (larger, other, larger_from_the_left):
        check(function, make(3), without=[], still=["mul"])


LARGE = 5000  # too large to be kept as a constant


@pytest.mark.parametrize(
    "zeros", [torch.zeros_like, lambda like: torch.full_like(like, 0.0)]
)
@pytest.mark.parametrize("size", [3, LARGE])
def test_what_is_added_to_zeros_is_left_as_it_is(zeros, size):
    def add(tensors):
        exponential = tensors[0].exp()
        return [(zeros(exponential) + exponential + zeros(exponential)).sin()]

    check(add, make(size), without=["add", "zeros_like"], still=["exp", "sin"])


def test_zeros_that_are_filled_or_scaled_or_make_something_larger_stay():
    def filled(tensors):
        zeros = torch.zeros_like(tensors[0])
        zeros.sub_(tensors[0])
        return [(zeros + tensors[0].exp()).sin()]

    def scaled(tensors):
        zeros = torch.zeros_like(tensors[0])
        return [torch.add(zeros, tensors[0].exp(), alpha=2).sin()]

    def larger(tensors):
        return [(torch.zeros(2, LARGE) + tensors[0].exp()).sin()]

    def transposed(tensors):
        zeros = torch.zeros(LARGE, 2).t()
        return [(zeros + torch.stack([tensors[0]] * 2).exp()).sin()]

    for function in (filled, scaled, larger, transposed):
        check(function, make(LARGE), without=[], still=["add"])


@pytest.mark.parametrize("chosen", [True, False])
def test_choice_that_is_always_the_same_is_made_beforehand(chosen):
    def choose(tensors):
        one, other = tensors[0].exp(), tensors[0].cos()
        return [torch.where(torch.tensor(chosen), one, other).sin()]

    left_out = "cos" if chosen else "exp"
    check(choose, make(3), without=["where", left_out], still=["sin"])


def test_choice_that_differs_by_element_or_by_input_stays():
    def by_element(tensors):
        condition = torch.tensor([True, False, True])
        return [torch.where(condition, tensors[0].exp(), tensors[0].cos()) + 1]

    def by_input(tensors):
        (x,) = tensors
        return [torch.where(x > 0, x.exp(), x.cos()) + 1]

    for function in (by_element, by_input):
        check(function, make(3), without=[], still=["where", "exp", "cos"])


def test_what_is_stacked_and_taken_apart_is_left_as_it_is():
    def stack(tensors):
        first, second = torch.stack(
            [tensors[0].exp(), tensors[0].cos()]
        ).unbind()
        return [first.sin() + second]

    check(stack, make(3), without=["stack", "unbind"], still=["exp", "cos"])


def test_what_is_taken_apart_and_stacked_again_is_left_as_it_is():
    def stack(tensors):
        exponential, cosine = tensors[0].exp(), tensors[0].cos()
        joined = torch.cat([exponential, torch.ones(1), cosine]).unbind()
        whole = torch.stack(joined[:3])
        again = torch.stack(joined[4:])
        return [(whole * joined[3]).sin() + again]

    check(
        stack,
        make(3),
        without=["stack", "unbind", "cat", "mul"],
        still=["exp", "cos", "sin"],
    )


def test_what_is_stacked_of_other_parts_or_in_another_order_stays():
    def part(parts):
        return torch.stack(parts[:2]).sin()

    def swapped(parts):
        return torch.stack(parts[2::-1]).sin()

    def across(parts):
        return torch.stack(parts[1:4]).sin()

    def other_axis(parts):
        return torch.stack([p.view(1) for p in parts[:3]], 1).sin()

    def stack_of(choose):
        def stack(tensors):
            parts = [tensors[0].exp(), tensors[0].cos()]
            return [choose(torch.cat(parts).unbind())]

        return stack

    for choose in (part, swapped, across, other_axis):
        check(stack_of(choose), make(3), without=[], still=["stack", "sin"])


def test_scalar_that_is_summed_up_is_left_as_it_is():
    def add(tensors):
        scalar = tensors[0].exp()[1]
        return [(scalar.sum() + tensors[0].cos().sum()).sin()]

    names = names_of(add, make(3))
    assert names.count("sum") == 1
    agrees(add, make(3))


def test_sum_of_another_dtype_stays():
    def add(tensors):
        return [tensors[0].exp()[1].sum(dtype=torch.float64).sin()]

    check(add, make(3), without=[], still=["sum"])


def test_parts_that_change_later_are_stacked():
    def change(tensors):
        exponential = tensors[0].exp()
        again = torch.stack(exponential.unbind())
        exponential.add_(1)
        return [again.sin(), exponential]

    check(change, make(3), without=[], still=["stack"])


def test_what_is_stacked_and_taken_apart_along_other_axes_stays():
    def stack(tensors):
        parts = torch.stack([tensors[0].exp(), tensors[0].cos()], dim=1)
        return [parts.unbind()[2].sin()]

    check(stack, make(3), without=[], still=["stack", "unbind"])


def test_value_that_is_changed_later_is_not_read_in_its_place():
    def change(tensors):
        total, x = tensors
        before = torch.where(torch.tensor(True), total, x)
        total += x
        return [before.sin()]

    check(change, make(3), make(3), without=[], still=["where"])


def test_value_in_memory_that_is_changed_later_is_not_read_in_its_place():
    def change(tensors):
        (x,) = tensors
        total = x * 2
        before = [
            total.view(2, 2) * 1.0,
            torch.where(torch.tensor(True), total.view(2, 2), 0.0),
            torch.stack([total[0], total[1]]).unbind()[0],
        ]
        total.add_(1)
        return [b.sin() for b in before]

    check(change, make(4), without=[], still=["where", "stack"])


def test_stack_that_is_changed_before_it_is_taken_apart_is_read():
    def double(tensors):
        stacked = torch.stack([tensors[0].exp(), tensors[0].cos()])
        stacked *= 2
        return list(stacked.unbind())

    def empty(tensors):
        stacked = torch.stack([tensors[0].exp(), tensors[0].cos()])
        parts = stacked.unbind()
        stacked.view(-1)[:3] = 0
        return [parts[0].sin(), parts[1].sin()]

    for function in (double, empty):
        check(function, make(3), without=[], still=["stack", "unbind"])


def test_copy_of_a_given_value_that_is_changed_later_stays():
    def change(tensors):
        (x,) = tensors
        before = x[0].clone()
        x.add_(1)
        return [before * 2]

    check(change, make(3), without=[], still=["clone"])


def test_zeros_that_have_been_filled_are_not_zero():
    def fill(tensors):
        (x,) = tensors
        filled = torch.zeros(3)
        filled[1] = 3.0
        x.copy_(filled)
        return []

    check(fill, make(3), without=["zero_"])


def test_constants_that_are_changed_without_a_word_are_made_anew():
    def normalize(tensors):
        (x,) = tensors
        mean, variance = torch.zeros(3), torch.ones(3)
        normalized = torch.nn.functional.batch_norm(
            x, mean, variance, training=True
        )
        return [normalized + mean]

    check(normalize, make(4, 3), without=[], still=["zeros"])


def test_results_that_are_given_their_memory_are_not_one_another():
    def reduce(tensors):
        (x,) = tensors
        mean, most = torch.empty(3), torch.empty(3)
        torch.mean(x, 0, out=mean)
        torch.amax(x, 0, out=most)
        return [x - mean + most]

    check(reduce, make(4, 3), without=[], still=["mean", "amax"])


def test_result_has_memory_of_its_own():
    def choose(tensors):
        (x,) = tensors
        return [torch.where(torch.tensor(True), x, -x), x[0] * torch.ones(())]

    check(choose, make(3), without=[], still=["where", "mul"])


class Constant(keras.layers.Layer):
    """Returns what a function makes of the shape of its inputs alone."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


@pytest.mark.parametrize(
    "make_constant",
    [
        torch.ones_like,
        lambda x: torch.ones_like(x) * 2,
        lambda x: torch.tensor([[1.0, 2.0, 3.0]]).expand(len(x), 3),
        lambda x: torch.ones(len(x), LARGE)[:, :1],
        lambda x: torch.ones(len(x), 1).expand(-1, LARGE),
    ],
    ids=["like", "computed", "numbers", "part", "repeated"],
)
def test_constants_that_are_returned_are_made_anew(make_constant):
    inputs = keras.Input([3])
    model = keras.Model(inputs, Constant(make_constant)(inputs))
    trainer = Trainer(model, optimizer="sgd", loss=None)
    x = np.ones([2, 3], "float32")
    first = trainer.predict(x, verbose=0)
    expected = first.copy()
    first[...] = 7.0
    np.testing.assert_array_equal(trainer.predict(x, verbose=0), expected)


def test_numbers_stand_before_tensors_too():
    def function(tensors):
        zeros = torch.zeros_like(tensors[0])
        return [
            torch.add(2.0, zeros) * tensors[0],
            torch.add(0.0, tensors[0].exp()),
            torch.mul(2.0, tensors[0].exp()),
            torch.div(1.0, tensors[0].exp()),
        ]

    agrees(function, make(3))


@pytest.mark.parametrize("multiply", [torch.mul, torch.matmul])
def test_constants_are_as_precise_as_where_they_were_recorded(multiply):
    def function(tensors):
        with torch.autocast("cpu", enabled=False):
            constant = torch.full((2, 2), 1.001)
            return [multiply(constant @ constant, tensors[0])]

    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            own = function([torch.ones(2, 2)])
            graph = graphs.Graph(function, [make(2, 2)], compiles=False)
        ours = graph([torch.ones(2, 2)])
    np.testing.assert_array_equal(ours[0], own[0])


def test_parts_that_joining_has_cast_are_cast():
    def product(tensors):
        bytes_ = torch.tensor([[100, 3]], dtype=torch.int8)
        rows = torch.cat([bytes_, tensors[0]]).unbind()
        return [rows[0] * rows[0]]

    def matrix(tensors):
        rows = torch.cat([torch.tensor([[2, 3]]), tensors[0]]).unbind()
        return [torch.mv(tensors[0], rows[0])]

    def stacked(tensors):
        rows = torch.stack([torch.tensor([2, 3]), tensors[0][0]]).unbind()
        return [torch.mv(tensors[0], rows[0])]

    def again(tensors):
        whole = torch.cat([tensors[0].exp().double(), tensors[0]])
        return [torch.stack(whole.unbind()[2:]).sin()]

    for function in (product, matrix, stacked, again):
        agrees(function, make(2, 2))


NORMALIZED = make(8, 3), torch.zeros(3), torch.ones(3)


@pytest.mark.parametrize(
    "normalize",
    [
        lambda *x: torch.nn.functional.batch_norm(*x, training=True),
        lambda *x: torch.nn.functional.instance_norm(
            x[0].reshape(2, 3, 4), *x[1:]
        ),
        lambda *x: torch.batch_norm_update_stats(*x, 0.1),
        lambda x, *running: torch.native_batch_norm(
            x, None, None, *running, True, 0.1, 1e-3
        ),
    ],
    ids=["batch", "instance", "statistics", "native"],
)
def test_statistics_that_move_without_a_word_do_where_nobody_reads_results(
    normalize,
):
    def unused(tensors):
        normalize(*tensors)
        return [tensors[0] * 2]

    def read_before_and_after(tensors):
        before = tensors[1] * 1.5
        result = normalize(*tensors)
        result = result if isinstance(result, torch.Tensor) else result[0]
        return [before, tensors[1] * 1.5, result]

    for function in (unused, read_before_and_after):
        agrees(function, *NORMALIZED)


def test_statistics_stay_where_nothing_is_trained():
    def function(tensors):
        torch.nn.functional.batch_norm(*tensors)
        return [tensors[0] * 2]

    assert names_of(function, *NORMALIZED) == ["mul"]
    agrees(function, *NORMALIZED)
