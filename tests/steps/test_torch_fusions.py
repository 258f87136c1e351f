"""Tests for recorded operations of PyTorch that go through memory once."""

import os

import numpy as np
import pytest

if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("It records with PyTorch.", allow_module_level=True)

import keras
import torch
from recorded import agrees, make, names_of

from accumtrainer import Trainer
from accumtrainer.steps.torch import graphs, source

aten = torch.ops.aten
GRADIENT = "embedding_dense_backward"
IDS = np.random.default_rng(0).integers(30, size=[12, 5])
INDICES = torch.tensor([[3, 0, 3], [7, 3, 8]])


def add_gradient(padding=-1, by_frequency=False):
    """Make a function that adds an embedding's gradient to a total."""

    def add(tensors):
        total, rows, indices = tensors
        total += aten.embedding_dense_backward(
            rows, indices, 9, padding, by_frequency
        )
        return []

    return add


def test_rows_of_an_embedding_are_added_without_the_zeros_between():
    tensors = make(9, 4), make(2, 3, 4), INDICES
    assert names_of(add_gradient(), *tensors)[-1] == "index_add_"
    assert GRADIENT not in names_of(add_gradient(), *tensors)
    agrees(add_gradient(), *tensors)


@pytest.mark.parametrize("padding, by_frequency", [(3, False), (-1, True)])
def test_rows_that_do_not_all_count_alike_are_not(padding, by_frequency):
    add = add_gradient(padding, by_frequency)
    assert GRADIENT in names_of(add, make(9, 4), make(2, 3, 4), INDICES)
    agrees(add, make(9, 4), make(2, 3, 4), INDICES)


def test_rows_are_added_to_a_table_that_is_looked_up_in_another_shape():
    def add(tensors):
        total, rows, indices = tensors
        gradient = aten.embedding_dense_backward(rows, indices, 9, -1, False)
        total += gradient.reshape(3, 3, 4)
        return []

    tensors = make(3, 3, 4), make(2, 3, 4), INDICES
    assert names_of(add, *tensors)[-1] == "index_add_"
    agrees(add, *tensors)


def test_what_a_copy_rounds_is_not_added_in_place():
    def count(tensors):
        (steps,) = tensors
        steps.copy_(steps + 0.7)
        return []

    assert "add_" not in names_of(count, torch.tensor([1, 2]))
    agrees(count, torch.tensor([1, 2]))


def test_rows_that_something_else_reads_or_changes_are_not():
    def read(tensors):
        total, rows, indices = tensors
        gradient = aten.embedding_dense_backward(rows, indices, 9, -1, False)
        total += gradient
        return [gradient.sum()]

    def change(tensors):
        total, rows, indices = tensors
        gradient = aten.embedding_dense_backward(rows, indices, 9, -1, False)
        rows.zero_()
        total += gradient
        return []

    for function in (read, change):
        names = names_of(function, make(9, 4), make(2, 3, 4), INDICES)
        assert GRADIENT in names and "index_add_" not in names
        agrees(function, make(9, 4), make(2, 3, 4), INDICES)


def test_products_of_matrices_are_added_as_they_are_computed():
    def layer(tensors):
        total, bias, x, cotangents = tensors
        gradient = (x.T @ cotangents).reshape(3, 2, 2)
        row = cotangents.sum(dim=0)
        total += gradient
        bias += row
        return [row]

    tensors = make(3, 2, 2), make(4), make(5, 3), make(5, 4)
    names = names_of(layer, *tensors)
    assert "mm" not in names
    assert names.index("addmm_") < names.index("sum")
    agrees(layer, *tensors)


def test_products_are_added_where_totals_are_read_in_between():
    def read(tensors):
        total, x, cotangents = tensors
        gradient = x.T @ cotangents
        before = total.view(-1).sum()
        total += gradient
        return [before]

    tensors = make(3, 4), make(5, 3), make(5, 4)
    assert "addmm_" in names_of(read, *tensors)
    agrees(read, *tensors)


def test_products_of_views_of_what_changes_are_added_apart():
    def square(tensors):
        total, x = tensors
        turned = x.t()
        product = turned @ turned
        x.zero_()
        total += product
        return []

    assert "addmm_" not in names_of(square, make(3, 3), make(3, 3))
    agrees(square, make(3, 3), make(3, 3))


def test_sums_that_need_each_other_are_no_list(monkeypatch):
    def chained(tensors):
        one, other, by = tensors
        one += by
        other += one
        other += by
        return []

    written = []
    write = source._Writer._operation

    def note(writer, group):
        written.append([str(node.target) for node in group])
        return write(writer, group)

    monkeypatch.setattr(source._Writer, "_operation", note)
    agrees(chained, make(3), make(3), make(3))
    assert list(map(len, written)) == [1, 1, 1]


def test_products_that_lie_or_are_read_otherwise_are_added_apart():
    def twice(tensors):
        total, x, cotangents = tensors
        gradient = x.T @ cotangents
        total += gradient
        return [gradient]

    def repeated(tensors):
        total, x, cotangents = tensors
        total += x[:, :1].T @ cotangents
        return []

    def turned(tensors):
        total, x, cotangents = tensors
        turned = total.T.contiguous().T
        turned += x.T @ cotangents
        return [turned]

    tensors = make(3, 4), make(5, 3), make(5, 4)
    for function in (twice, repeated, turned):
        assert "mm" in names_of(function, *tensors)
        agrees(function, *tensors)


def test_products_and_quotients_of_lists_are_added_as_they_are_computed():
    def update(tensors):
        weights, squares, gradients = tensors[:2], tensors[2:4], tensors[4:]
        products = torch._foreach_mul(gradients, gradients)
        torch._foreach_add_(squares, products, alpha=0.1)
        roots = torch._foreach_add(torch._foreach_sqrt(squares), 1e-3)
        quotients = torch._foreach_div(gradients, roots)
        torch._foreach_add_(weights, quotients, alpha=-1)
        return []

    tensors = [make(3), make(2, 2), make(3) ** 2, make(2, 2) ** 2]
    tensors += [make(3), make(2, 2)]
    names = [n for n in names_of(update, *tensors) if n.startswith("_foreach")]
    assert names == [
        "_foreach_addcmul_",
        "_foreach_sqrt",
        "_foreach_add_",
        "_foreach_addcdiv_",
    ]
    agrees(update, *tensors)


def test_products_of_what_changes_before_they_are_added_stay():
    def function(tensors):
        first, second, total = tensors
        products = torch._foreach_mul([first], [second])
        first.view(-1).zero_()
        torch._foreach_add_([total], products)
        return []

    tensors = [make(2, 3), make(2, 3), make(2, 3)]
    assert "_foreach_mul" in names_of(function, *tensors)
    agrees(function, *tensors)


def test_lists_that_are_read_twice_or_in_part_stay():
    def twice(tensors):
        roots = torch._foreach_sqrt(tensors)
        return [*torch._foreach_add(roots, 1.0), roots[0]]

    def in_part(tensors):
        products = torch._foreach_mul(tensors, tensors)
        torch._foreach_add_([tensors[0]], [products[1]])
        return []

    tensors = [make(3) ** 2, make(3) ** 2]
    assert names_of(twice, *tensors)[0] == "_foreach_sqrt"
    assert "_foreach_add" in names_of(twice, *tensors)
    agrees(twice, *tensors)
    assert "_foreach_mul" in names_of(in_part, *tensors)
    agrees(in_part, *tensors)


def test_products_of_another_precision_stay():
    def function(tensors):
        total, factor = tensors
        torch._foreach_add_([total], torch._foreach_mul([factor], [factor]))
        return []

    tensors = make(3), make(3).to(torch.float64)
    assert "_foreach_mul" in names_of(function, *tensors)
    agrees(function, *tensors)


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Lion"]
)
def test_optimizers_of_keras_move_weights_as_before(name):
    def train(run_eagerly):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(30, 4), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        optimizer = getattr(keras.optimizers, name)(0.01)
        Trainer(
            model,
            optimizer=optimizer,
            loss="mse",
            accumulation=3,
            seed=0,
            run_eagerly=run_eagerly,
        ).fit(IDS, IDS.sum(axis=1), batch_size=6, epochs=2, verbose=0)
        return [*model.get_weights(), *map(np.array, optimizer.variables)]

    for recorded, own in zip(train(False), train(True), strict=True):
        np.testing.assert_allclose(recorded, own, rtol=1e-4, atol=1e-6)


def test_products_of_what_they_are_added_to_are_computed_before():
    def swapped(tensors):
        one, other, *factors = tensors
        products = torch._foreach_mul([other, one], factors)
        torch._foreach_add_([one, other], products)
        return []

    def turned(tensors):
        one, *factors = tensors[:2]
        products = torch._foreach_mul([one.t()], factors)
        torch._foreach_add_([one], products)
        return []

    def divided(tensors):
        one, other, *factors = tensors
        quotients = torch._foreach_div(factors, [other, one])
        torch._foreach_add_([one, other], quotients)
        return []

    for function in (swapped, turned, divided):
        agrees(function, *(make(3, 3) + 2 * i + 5 for i in range(4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_rounded_before_they_are_added(dtype):
    def add(tensors):
        total, factor = tensors
        products = torch._foreach_mul([factor], [factor])
        torch._foreach_add_([total], products, alpha=0.001)
        return []

    tensors = torch.ones(2).to(dtype), torch.full((2,), 300.0).to(dtype)
    assert "_foreach_mul" in names_of(add, *tensors)
    with torch.no_grad():
        graph = graphs.Graph(add, list(tensors), compiles=False)
        ours, own = ([t.clone() for t in tensors] for _ in range(2))
        graph(ours)
        add(own)
    assert torch.equal(ours[0], own[0])


@pytest.mark.parametrize("number", [0.5, 1.0, 2])
@pytest.mark.parametrize("name", ["mul", "div"])
def test_numbers_are_added_to_whole_ones(number, name):
    def add(tensors):
        made = getattr(torch, f"_foreach_{name}")(tensors, tensors)
        return list(torch._foreach_add(made, number))

    agrees(add, torch.tensor([1, 2]), torch.tensor([3]))
