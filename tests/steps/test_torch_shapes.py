"""Tests for the recorded operations of PyTorch, once they are simplified."""

import os

import keras
import numpy as np
import pytest
from keras import layers, ops

if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("It records with PyTorch.", allow_module_level=True)

import torch
from recorded import agrees, make, names_of

from accumtrainer import Trainer
from accumtrainer.steps.torch import graphs
from accumtrainer.steps.torch.marks import record_branch

aten = torch.ops.aten


def project(tensors):
    """Multiply as a layer of attention does, and add a bias."""
    x, kernel, bias = tensors
    return [ops.einsum("bti,ihd->bthd", x, kernel) + bias]


def test_einsum_is_a_product_of_matrices():
    tensors = make(2, 5, 8), make(8, 2, 4), make(2, 4)
    left = names_of(project, *tensors)
    assert "addmm" in left
    assert set(left) == {"addmm", "reshape"}
    agrees(project, *tensors)


@pytest.mark.parametrize(
    "equation, first, second",
    [
        ("abc,cde->abde", (2, 3, 4), (4, 5, 6)),
        ("abde,cde->abc", (2, 3, 5, 6), (4, 5, 6)),
        ("abc,cd->abd", (1, 3, 4), (4, 1)),
        ("abcd,aecd->acbe", (2, 3, 4, 5), (2, 6, 4, 5)),
        ("abc,acd->dba", (2, 3, 4), (2, 4, 5)),
        ("ab,cb->ca", (3, 4), (5, 4)),
        ("abc,bc->cab", (1, 4, 3), (4, 3)),
    ],
)
def test_any_einsum_computes_the_same(equation, first, second):
    agrees(
        lambda tensors: [ops.einsum(equation, *tensors)],
        make(*first),
        make(*second),
    )


@pytest.mark.parametrize("is_2d", [True, False], ids=["matrix", "batch"])
def test_bias_that_is_no_row_is_added_apart(is_2d):
    shape = (3, 4) if is_2d else (2, 3, 4)
    column = make(3, 1)
    agrees(lambda t: [t[0] @ t[1] + t[2]], make(*shape), make(4, 4), column)
    agrees(lambda t: [t[2] + t[0] @ t[1]], make(*shape), make(4, 3), make(3))


@pytest.mark.parametrize("wide", ["product", "bias"])
def test_bias_of_another_precision_is_added_apart(wide):
    tensors = make(3, 4), make(4, 5), make(5)
    widened = [
        tensor.double() if (tensor.ndim == 2) is (wide == "product") else tensor
        for tensor in tensors
    ]
    agrees(lambda t: [t[0] @ t[1] + t[2]], *widened)


def test_product_that_is_read_twice_stays():
    def function(tensors):
        product = tensors[0] @ tensors[1]
        return [product + tensors[2], product * 2]

    assert "addmm" not in names_of(function, make(3, 4), make(4, 5), make(5))
    agrees(function, make(3, 4), make(4, 5), make(5))


def test_what_is_computed_twice_is_computed_once():
    def function(tensors):
        return [torch.exp(tensors[0].T) + torch.exp(tensors[0].T)]

    assert names_of(function, make(3, 4)).count("exp") == 1
    agrees(function, make(3, 4))


def test_random_numbers_are_drawn_as_often_as_before():
    def function(tensors):
        return [torch.rand_like(tensors[0]) - torch.rand_like(tensors[0])]

    assert names_of(function, make(3)).count("rand_like") == 2


@pytest.mark.parametrize("axes", [(1, 0), (0, 1)], ids=["moved", "kept"])
def test_what_changes_is_read_when_it_was(axes):
    def function(tensors):
        memory, by = tensors
        view = memory.permute(axes).reshape(-1)
        before = view.clone(memory_format=torch.contiguous_format) * 2
        one = memory.permute(axes).exp()
        memory.add_(by)
        return [before, one, memory.permute(axes).exp(), view + 1]

    agrees(function, make(3, 4), make(3, 4))


def test_product_of_what_changes_later_is_made_before():
    def function(tensors):
        x, kernel, bias = tensors
        product = x @ kernel
        x -= x.mean()
        return [product + bias]

    agrees(function, make(2, 3), make(3, 4), make(4))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.contiguous(),
        lambda x: torch.max_pool2d(x.contiguous(), 2),
        lambda x: torch.nn.functional.avg_pool2d(x.contiguous(), 2),
    ],
    ids=["copy", "maximum", "average"],
)
def test_copy_of_what_changes_later_is_made_before(read):
    def function(tensors):
        x = tensors[0] * 1.5
        lies_otherwise = x.contiguous(memory_format=torch.channels_last)
        x.mul_(2.0)
        return [read(lies_otherwise)]

    agrees(function, make(2, 3, 4, 4))


def test_operations_whose_names_end_like_those_in_place_are_run():
    def function(tensors):
        x = (tensors[0] * 8).long()
        return [(x << 2) + (x >> 1), x]

    agrees(function, make(2, 3))


def test_a_part_that_changes_changes_the_whole():
    def function(tensors):
        (memory,) = tensors
        first, second = memory.unbind()
        flat = second.reshape(2, 2)
        sum_before = (flat * 3).sum()
        first.zero_()
        second.mul_(2.0)
        return [sum_before, (flat * 3).sum(), first + second]

    agrees(function, make(2, 4))


def test_what_is_read_before_it_changes_is_simplified_and_stays():
    def function(tensors):
        x, kernel, bias = tensors
        turned = kernel.T.reshape(4, 3)
        first = x @ turned.clone() + bias
        product = (x * 2.0) @ turned
        again = x @ kernel.T + bias
        kernel.mul_(2.0)
        return [first, again, product + bias, x @ kernel.T + bias]

    tensors = make(5, 4), make(3, 4), make(3)
    agrees(function, *tensors)
    names = names_of(function, *tensors)
    assert names.count("addmm") == 2  # of what is read and added before
    assert names.count("mm") == 2


@pytest.mark.parametrize("split", ["unsafe_chunk", "unsafe_split"])
def test_pieces_that_change_are_those_of_a_value_that_is_made_again(split):
    def function(tensors):
        x, kernel = tensors
        one, two = getattr(x @ kernel, split)(2, 1)
        one.sigmoid_()
        three, four = getattr(x @ kernel, split)(2, 1)
        return [one, two, three.tanh_(), four]

    agrees(function, make(5, 3), make(3, 4))


def test_branches_do_not_use_what_the_other_way_computes():
    def function(tensors):
        is_high, x, into = tensors

        def add(sign):
            into.add_(torch.exp(x.T).T * sign)

        record_branch(is_high, lambda: add(1.0), lambda: add(-1.0))
        return [torch.exp(x.T)]

    x = make(2, 3)
    with torch.no_grad():
        given = [torch.tensor(True), x, torch.zeros(2, 3)]
        graph = graphs.Graph(function, given, compiles=False)
        for is_high, sign in ((True, 1), (False, -1)):
            into = torch.zeros(2, 3)
            (result,) = graph([torch.tensor(is_high), x, into])
            np.testing.assert_allclose(into, sign * torch.exp(x), rtol=1e-6)
            np.testing.assert_allclose(result, torch.exp(x.T), rtol=1e-6)


@pytest.mark.parametrize("pool", ["MaxPooling2D", "AveragePooling2D"])
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_pools_compute_the_same_however_channels_lie(
    pool, padding, data_format
):
    options = {"padding": padding, "data_format": data_format}
    model = keras.Sequential(
        [
            keras.Input([7, 7, 3] if data_format[9:] == "last" else [3, 7, 7]),
            layers.Conv2D(4, 3, activation="relu", **options),
            getattr(layers, pool)(2, **options),
            layers.Conv2D(5, 2, **options),
        ]
    )
    model.build()
    weights = [v.value for v in model.trainable_variables]

    def function(tensors):
        with (
            keras.StatelessScope(
                zip(model.trainable_variables, tensors[1:], strict=True)
            ),
            torch.enable_grad(),
        ):
            leaves = [t.detach().requires_grad_() for t in tensors]
            with keras.StatelessScope(
                zip(model.trainable_variables, leaves[1:], strict=True)
            ):
                out = model(leaves[0], training=True)
            return list(torch.autograd.grad((out**2).sum(), leaves))

    agrees(
        function, make(2, *model.input_shape[1:]), *map(torch.detach, weights)
    )


def test_pool_of_keras_reads_channels_where_they_lie():
    image = make(2, 8, 8, 3)

    def function(tensors):
        return [ops.max_pool(tensors[0], 2, 2, data_format="channels_last")]

    assert "clone" not in names_of(function, image)
    agrees(function, image)


def test_memory_may_lie_otherwise_than_while_it_was_recorded():
    def function(tensors):
        flat = tensors[0].view(-1)
        return [(flat * 1.5).add_(1.0), flat + 1]

    with torch.no_grad():
        graph = graphs.Graph(function, [make(3, 4)], compiles=False)
        moved = make(4, 3).T
        changed, more = graph([moved])
    np.testing.assert_allclose(changed, moved.reshape(-1) * 1.5 + 1, rtol=1e-6)
    np.testing.assert_allclose(more, moved.reshape(-1) + 1, rtol=1e-6)


def test_normalization_scales_before_it_repeats():
    def function(tensors):
        x = tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            mean, variance = x.mean(0), (x**2).mean(0)
            loss = ((x - mean) * torch.rsqrt(variance + 1e-3)).pow(3).sum()
            return list(torch.autograd.grad(loss, [x]))

    left = names_of(function, make(6, 3))
    assert left.index("expand") > left.index("div")
    agrees(function, make(6, 3))


class Returning(layers.Layer):
    """Returns what a function makes of a weight and of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.kernel = self.add_weight(shape=(2, 3), initializer="ones")

    def call(self, inputs):
        return self.function(self.kernel.value, inputs)


def returned_by(function):
    """Make a Trainer of a layer, and the layer."""
    layer = Returning(function)
    inputs = keras.Input([3])
    model = keras.Model(inputs, layer(inputs))
    return Trainer(model, optimizer="sgd", loss=None), layer


@pytest.mark.parametrize(
    "copy",
    [
        lambda w: w**1,
        lambda w: w.t() ** 1,
        lambda w: w.view(6).clone(memory_format=torch.contiguous_format),
    ],
    ids=["power", "turned", "copy"],
)
def test_results_stay_when_weights_that_they_equal_are_assigned(copy):
    trainer, layer = returned_by(lambda kernel, inputs: copy(kernel))
    result = trainer.predict(np.ones([2, 3]), verbose=0)
    layer.kernel.assign(5 * np.ones([2, 3]))
    np.testing.assert_array_equal(result, np.ones_like(result))


@pytest.mark.parametrize(
    "make_two",
    [
        lambda x: [x.exp(), x.exp()],
        lambda x: [x.exp(), x.exp() ** 1],
        lambda x: [x.exp().view(3, 2), x.exp().t()],
        lambda x: [x.t().reshape(6), x.t().reshape(6)],
        lambda x: [x[None] @ x.t()[None], x[None] @ x.t()[None]],
        lambda x: list(aten.mul.Scalar(x[:, :1].expand(2, 3), 2.0).unbind(1)),
    ],
    ids=["twice", "power", "views", "reshaped", "products", "repeated"],
)
def test_results_are_not_in_the_memory_of_one_another(make_two):
    x = make(2, 3)
    with torch.no_grad():
        graph = graphs.Graph(
            lambda tensors: make_two(*tensors), [x], compiles=False
        )
        one, other, *_ = graph([x])
        before = other.clone()
        one.fill_(7.0)
    np.testing.assert_array_equal(other, before)
    agrees(lambda tensors: make_two(*tensors), x)


def test_what_a_result_is_made_of_as_well_is_computed_once():
    def function(tensors):
        return [tensors[0].exp(), tensors[0].exp() + 1]

    assert names_of(function, make(3)).count("exp") == 1
    agrees(function, make(3))


def test_a_number_may_stand_before_what_it_is_added_to():
    def function(tensors):
        product = tensors[0] @ tensors[0]
        return [torch.add(2.0, tensors[0].exp()), torch.add(1.0, product)]

    agrees(function, make(3, 3))


@pytest.mark.parametrize("axes", [(-1, 0), (-1, -2)])
def test_axes_are_moved_from_where_they_were_counted_from_behind(axes):
    def function(tensors):
        x = tensors[0] * 2
        turned = x.permute(axes)
        tripled = turned.permute(0, 1) * 3.0
        x.add_(1)
        return [tripled + turned]

    agrees(function, make(3, 3))


IMAGES = make(2, 2, 4, 4).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("scale", [False, True], ids=["pooled", "scaled"])
@pytest.mark.parametrize(
    "read",
    [
        lambda z: z.view(2, -1),
        lambda z: z.view(2, 1, -1)[:, 0],
        lambda z: z.reshape(4, -1),
        lambda z: z.view(torch.int32),
    ],
)
def test_views_see_what_changes_later_however_memory_lies(read, scale):
    def function(tensors):
        if scale:
            rows = tensors[0][:, :1, :2, :2].relu()
            y = aten.mul.Scalar(rows.expand(2, 2, 2, 2), 2.0)
        else:
            y = torch.max_pool2d(tensors[0].relu().contiguous(), 2)
        z = y.exp()
        view = read(z)
        z.add_(1)
        return [view * 2]

    agrees(function, IMAGES)


def test_what_is_strided_over_lies_as_it_did():
    def pool(tensors):
        y = torch.max_pool2d(tensors[0].relu().contiguous(), 2)
        return [torch.as_strided(y, (2, 4), (8, 1)) + 0]

    def scale(tensors):
        y = aten.mul.Scalar(tensors[0][:, :1].expand(2, 2, 4, 4), 2.0)
        return [torch.as_strided(y, (2, 4), (8, 1)) + 0]

    for function in (pool, scale):
        agrees(function, IMAGES)


def test_pool_of_what_is_flattened_and_changed_is_recorded():
    def function(tensors):
        y = torch.max_pool2d(tensors[0].relu().contiguous(), 2)
        return [torch.relu_(y.sub(0.1).flatten(1))]

    agrees(function, IMAGES)
