"""How tests of refusals see that nothing has changed."""

import numpy as np
import pytest

from accumtrainer.keras_api import keras, ops

X = np.linspace(-1, 1, 24, dtype="float32").reshape(12, 2)
Y = X.sum(axis=1, keepdims=True)


def make_model(**arguments):
    """Make a compiled model whose optimizer has state of its own."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    compiling = {"optimizer": keras.optimizers.Adam(0.1), "loss": "mse"}
    model.compile(**(compiling | arguments))
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.variables:
        variable.assign(variable + 1)
    return model


def numbers(variable):
    """Copy a variable's values to the host."""
    return np.array(ops.convert_to_numpy(variable))


def state_of(model):
    """Remember everything about a model that a refusal must leave alone."""
    variables = [*model.variables, *model.optimizer.variables]
    return (
        [v.path for v in variables],
        [numbers(v) for v in variables],
        model.compiled,
        id(model.optimizer),
        id(model._compile_config),
        model.stop_training,
    )


def assert_same_state(before, after):
    assert before[0] == after[0]
    for one, other in zip(before[1], after[1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert before[2:] == after[2:]


def assert_refused(call, error, *words):
    """Check that a call raises, saying what was wrong and what to do."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert word in message, message
    _, received, rest = message.partition("Received: ")
    assert received, message
    remedy = rest.rstrip(".").rpartition(". ")[2]
    assert len(remedy.split()) >= 3, message


def row(name, make, error, *words):
    return pytest.param(make, error, words, id=name)
