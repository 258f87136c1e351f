"""Claims about the private parts of optimizers that building anew relies on."""

from types import SimpleNamespace

import numpy as np
import pytest

from accumtrainer.keras_api import keras, ops
from accumtrainer.keras_api.rebuild import rebuild, slots_of_frozen


def model_of(*trainable):
    """Make all that building anew asks a model for."""
    return SimpleNamespace(
        trainable_variables=[*trainable], non_trainable_variables=[]
    )


def numbers(variable):
    return np.array(ops.convert_to_numpy(variable))


@pytest.mark.parametrize("name", ["SGD", "Adam", "Nadam", "Adafactor", "Lion"])
def test_what_stays_keeps_its_slots_and_what_goes_leaves_none(name):
    one, two, three = (
        keras.Variable(np.ones([3, 2], "float32"), name=name)
        for name in ("one", "two", "three")
    )
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(keras.optimizers, name)(0.1, **options)
    optimizer.build([one, two])
    gradient = ops.ones([3, 2])
    optimizer.apply([gradient, 2 * gradient], [one, two])
    fresh = getattr(keras.optimizers, name)(0.1, **options)
    fresh.build([two, three])
    before = [numbers(v) for v in optimizer.variables if "two" in v.path]
    rebuild(optimizer, model_of(two, three))
    assert len(optimizer.variables) == len(fresh.variables)
    assert not slots_of_frozen(optimizer, [one, two, three])
    assert int(numbers(optimizer.iterations)) == 1
    after = [numbers(v) for v in optimizer.variables if "two" in v.path]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new, old)
    assert any(old.any() for old in before)
    optimizer.apply([gradient, gradient], [two, three])
    assert int(numbers(optimizer.iterations)) == 2


class SlotsByPath(keras.optimizers.Optimizer):
    """Keeps its slots in a dict, as those of users may."""

    def build(self, variables):
        super().build(variables)
        self.slots = {
            v.path: self.add_variable_from_reference(v, "slot")
            for v in variables
        }


def test_slots_in_a_dict_are_kept_too():
    one, two = (
        keras.Variable(np.ones([2], "float32"), name=name)
        for name in ("one", "two")
    )
    optimizer = SlotsByPath(learning_rate=0.1)
    optimizer.build([two])
    optimizer.slots[two.path].assign(np.ones([2]))
    rebuild(optimizer, model_of(one, two))
    assert numbers(optimizer.slots[two.path]).tolist() == [1.0, 1.0]
    assert numbers(optimizer.slots[one.path]).tolist() == [0.0, 0.0]
