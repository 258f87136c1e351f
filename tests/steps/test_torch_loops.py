"""Tests for loops of which PyTorch records one turn."""

import os
from dataclasses import dataclass

import numpy as np
import pytest

if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("It records with PyTorch.", allow_module_level=True)

import torch
from recorded import make, note_graphs

from accumtrainer.keras_api import keras, ops
from accumtrainer.steps.torch import graphs
from accumtrainer.steps.torch.backend import TorchBackend
from accumtrainer.steps.torch.scopes import Pending
from accumtrainer.steps.torch.source import emitted


@dataclass
class Holding:
    """Lists variables, as a program does."""

    all_variables: list


@pytest.fixture(params=[False, True], ids=["cpu", "accelerator"])
def agrees(request, monkeypatch):
    """Give what compares a recorded function with its operations, twice.

    It takes what makes the function of a backend and a variable, and tensors.
    """
    is_accelerator = request.param
    monkeypatch.setattr(
        TorchBackend, "has_accelerator", lambda self: is_accelerator
    )

    def compare(make_function, *tensors):
        recorded = note_graphs(monkeypatch)
        seen = []
        for run_eagerly in (True, False):
            backend = TorchBackend(
                None, run_eagerly=run_eagerly, jit_compile="auto"
            )
            variable = keras.Variable([1.0, 2.0, 3.0])
            run = backend.compile(
                make_function(backend, variable),
                Holding([variable]),
                jit_compile=False,
            )
            given = [tensor.clone() for tensor in tensors]
            results = [run(*given) for _ in range(2)]
            flat = keras.tree.flatten([results, variable.value, given])
            flat = [tensor for tensor in flat if tensor is not None]
            seen.append(list(map(ops.convert_to_numpy, flat)))
        assert len(recorded) == 1
        for ours, own in zip(*seen, strict=True):
            np.testing.assert_allclose(ours, own, rtol=1e-5, atol=1e-6)

    return compare


def test_results_come_in_order_and_sums_are_carried_on(agrees):
    def make_function(backend, variable):
        def body(index, item, carry):
            return {"x": item * index, "sum": item.sum()}, [carry[0] + item]

        def function(x, total):
            results, (total,) = backend.scan(body, x, len(x), [total])
            return results, total * 2

        return function

    agrees(make_function, make(4, 3), make(3))


def test_what_is_carried_may_change_places_or_be_a_result(agrees):
    def make_function(backend, variable):
        def body(index, item, carry):
            one, two, three = carry
            return [one, item, three], [two, one, one + item]

        def function(x):
            carry = [torch.zeros(3), torch.ones(3), x[0]]
            return backend.scan(body, x, len(x), carry)

        return function

    agrees(make_function, make(5, 3))


def test_every_turn_reads_what_the_one_before_has_assigned(agrees):
    def make_function(backend, variable):
        def body(index, item, carry):
            before = variable.value
            variable.assign(before * 0.5 + item)
            return [before, variable.value, before.sum()], carry

        def function(x):
            begun = variable.value
            variable.assign(variable.value + 1.0)
            amid = variable.value
            results, _ = backend.scan(body, x, len(x))
            return results, begun * 1.0, amid * 1.0, variable.value * 2.0

        return function

    agrees(make_function, make(4, 3))


def test_value_that_a_scope_gives_stays_what_it_was_before_a_loop(agrees):
    """As what a process begins with, of which changes are told apart."""

    def make_function(backend, variable):
        def body(index, item, carry):
            variable.assign(variable.value + item)
            return variable.value * 1.0, carry

        def function(x):
            with Pending(None, [(variable, variable.value.clone())]):
                before = variable.value
                results, _ = backend.scan(body, x, len(x))
                return results, variable.value - before

        return function

    agrees(make_function, make(4, 3))


def test_turns_branch_each_for_itself(agrees):
    def make_function(backend, variable):
        def body(index, item, carry):
            is_high = item.sum() > 0
            backend.cond(
                is_high,
                lambda: variable.assign(variable.value + item),
                lambda: variable.assign(variable.value * 2.0),
            )
            (other,) = backend.rarely(
                is_high, lambda: [item.exp()], [item * 0.0]
            )
            return other, [carry[0] + other]

        def function(x):
            return backend.scan(body, x, len(x), [torch.zeros(3)])

        return function

    x = make(6, 3)
    assert len({bool(row.sum() > 0) for row in x}) == 2
    agrees(make_function, x)


def test_loops_may_stand_in_loops_and_follow_each_other(agrees):
    def make_function(backend, variable):
        def inner(index, item, carry):
            return item * variable.value, [carry[0] * 0.5 + item]

        def outer(index, item, carry):
            results, carry = backend.scan(inner, item, len(item), carry)
            variable.assign(variable.value + results.sum(0))
            return results, carry

        def function(x):
            results, carry = backend.scan(outer, x, len(x), [torch.zeros(3)])
            last, carry = backend.scan(inner, results[0], 2, carry)
            return results, last, carry

        return function

    agrees(make_function, make(3, 2, 3))


def test_items_that_are_changed_in_place_are_there_for_who_loops_again(agrees):
    def make_function(backend, variable):
        def body(index, item, carry):
            return item.mul_(2.0), [carry[0].add_(item)]

        def function(x):
            first, carry = backend.scan(body, x, len(x), [torch.zeros(3)])
            second, carry = backend.scan(body, x, len(x), carry)
            return first, second, carry

        return function

    agrees(make_function, make(4, 3))


def test_results_may_be_numbers_that_are_known_or_the_same_every_time(agrees):
    def make_function(backend, variable):
        def function(x, same):
            twice = same * 2.0

            def body(index, item, carry):
                known = torch.ones(2) * 3.0
                return [known, index, twice, None, variable.value], carry

            results, _ = backend.scan(body, x, len(x))
            return results, twice + 1.0

        return function

    agrees(make_function, make(4, 3), make(3))


def test_what_is_computed_before_a_loop_is_added_in_every_turn(agrees):
    def make_function(backend, variable):
        def function(x, y):
            product = x @ y

            def body(index, item, carry):
                return None, [carry[0] + product]

            return backend.scan(body, x, len(x), [torch.zeros(4, 2)])

        return function

    agrees(make_function, make(4, 3), make(3, 2))


def test_copy_of_what_is_computed_before_is_a_new_one_in_every_turn(agrees):
    def make_function(backend, variable):
        def function(x, same):
            twice = same * 2.0

            def body(index, item, carry):
                return twice.clone().add_(item), carry

            return backend.scan(body, x, len(x))

        return function

    agrees(make_function, make(4, 3), make(3))


def test_what_changes_in_a_loop_is_read_as_it_is_then(agrees):
    """As weights are that a layer changes, and others have seen before."""

    def make_function(backend, variable):
        def body(index, item, carry):
            seen = variable.value[None].transpose(0, 1) * item
            variable.assign(variable.value + item)
            return [seen, variable.value[None].transpose(0, 1) * item], carry

        def function(x):
            before = variable.value[None].transpose(0, 1) * x[0]
            results, _ = backend.scan(body, x, len(x))
            after = variable.value[None].transpose(0, 1) * x[0]
            return results, before, after

        return function

    agrees(make_function, make(4, 3))


def test_what_is_added_to_a_value_may_be_a_view_of_it(agrees):
    def make_function(backend, variable):
        def body(index, item, carry):
            variable.assign(variable.value + variable.value[:1])
            (total,) = carry
            return [variable.value * 1.0], [total + total.T]

        def function(x, square):
            return backend.scan(body, x, len(x), [square])

        return function

    agrees(make_function, make(4, 3), make(3, 3))


def test_power_of_one_is_a_value_of_its_own(agrees):
    def make_function(backend, variable):
        def body(index, item, carry):
            before = torch.pow(variable.value, 1)
            variable.value.add_(item)
            return [before * 1.0], carry

        def function(x):
            before = torch.pow(variable.value, 1)
            results, _ = backend.scan(body, x, len(x))
            return results, before

        return function

    agrees(make_function, make(4, 3))


def test_gradients_are_added_as_they_are_made(monkeypatch):
    modules = []

    def note(module, *arguments, **options):
        modules.append(module)
        return emitted(module, *arguments, **options)

    monkeypatch.setattr(graphs, "emitted", note)
    backend = TorchBackend(None, run_eagerly=False, jit_compile="auto")

    def function(x, y):
        def body(index, item, carry):
            one, two = item
            return None, [carry[0] + one.T @ two]

        return backend.scan(body, (x, y), len(x), [torch.zeros(80, 80)])

    x, y = make(3, 4, 80), make(3, 4, 80)
    run = backend.compile(function, Holding([]), jit_compile=False)
    _, (total,) = run(x, y)
    torch.testing.assert_close(total, torch.einsum("kmi,kmj->ij", x, y))
    names = [str(node.target) for m in modules for node in m.graph.nodes]
    assert "aten.addmm_.default" in names
    assert not {"aten.mm.default", "aten.clone.default"} & set(names)
