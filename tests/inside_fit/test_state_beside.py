"""Claims about variables that only windows use, not `Model.fit` around them.

`fit` hands over those of model, optimizer and metrics. A random state outside
of the model, a variable that layers only read, and the states of a recurrent
layer are none of them.
"""

import numpy as np
import pytest
from accumulating import executions, leaves_data_unended, read
from keras_core_gaps import keras_3_only
from quickest import JIT_COMPILE

from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import keras, ops

pytestmark = keras_3_only("has a fit of its own kind, which is refused")

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
MANY = executions(3)[0]
ORDER = {"batch_size": 4, "shuffle": False, "verbose": 0}


def make_model(change, **options):
    """Make a compiled model that gives its input to a function first."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False)

        def call(self, x):
            return self.dense(change(x))

    keras.utils.set_random_seed(0)
    model = Model()
    model.compile("sgd", "mse", **{"jit_compile": JIT_COMPILE} | options)
    return model


def make_noisy(generator, **options):
    """Make a compiled model that draws, in evaluation too."""
    return make_model(
        lambda x: x + keras.random.normal(ops.shape(x), seed=generator),
        **options,
    )


class After(keras.callbacks.Callback):
    """Calls a function after a window of two batches, once."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and self.act:
            act, self.act = self.act, None
            act()


def fit(model, *callbacks, **options):
    accumulate = GradientAccumulation(2)
    model.fit(X, Y, callbacks=[accumulate, *callbacks], **ORDER | options)


@pytest.mark.parametrize(
    "options", [{}, {"steps_per_execution": MANY}, {"jit_compile": False}]
)
def test_generator_outside_is_drawn_from_by_validations(options):
    generator = keras.random.SeedGenerator(7)
    model = make_noisy(generator, **options)
    for _ in range(2):
        fit(model, epochs=2, validation_data=(X, Y))
    assert model.predict(X, verbose=0).shape == (16, 1)
    assert read(generator.state)[1] >= 16  # one for each micro-batch


@leaves_data_unended
@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow",
    reason="Keras's fit takes batches of one kind from a generator there",
)
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": True, "jit_compile": False}]
)
def test_what_a_callback_assigns_holds_where_batches_of_another_kind_follow(
    options, looks
):
    generator = keras.random.SeedGenerator(7)
    model = make_noisy(generator, **options)

    def batches():
        for number in range(4):
            weights = (np.ones([4], "float32"),) if number >= 2 else ()
            yield X[:4], Y[:4], *weights

    def assign():
        generator.state.assign([7, 100])
        if looks:  # so that `fit` hands its state over once more
            after.model.get_weights()

    after = After(assign)
    model.fit(
        batches(),
        steps_per_epoch=4,
        callbacks=[GradientAccumulation(2), after],
        shuffle=False,
        verbose=0,
    )
    assert 100 < read(generator.state)[1] < 110


def test_states_of_a_recurrent_layer_are_there_for_validations():
    inputs = keras.Input(batch_shape=(4, 3, 1))
    layer = keras.layers.SimpleRNN(1, stateful=True)
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", "mse", jit_compile=JIT_COMPILE)
    data = X[..., None], Y
    fit_options = {"callbacks": [GradientAccumulation(2)], **ORDER}
    model.fit(*data, epochs=2, validation_data=data, **fit_options)
    assert np.all(read(layer.states[0]) != 0.0)


def test_callback_reads_and_draws_from_a_generator_outside():
    generator = keras.random.SeedGenerator(7)
    kept, drawn = [], []

    def look():
        kept.append(generator.state.value)
        drawn.append(read(generator.state)[1])
        keras.random.normal([1], seed=generator)

    fit(make_noisy(generator), After(look))
    assert drawn == [2]
    assert read(kept[0]).shape == (2,)  # still there, on JAX too
    assert read(generator.state)[1] == 5


@leaves_data_unended
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_generator_outside_goes_on_after_a_callback_has_raised(error):
    def fail():
        raise error("on purpose")

    generator = keras.random.SeedGenerator(7)
    model = make_noisy(generator)
    with pytest.raises(error, match="on purpose"):
        fit(model, After(fail))
    assert read(generator.state)[1] == 2
    assert model.predict(X, verbose=0).shape == (16, 1)
    before = read(generator.state)[1]
    fit(model)
    assert read(generator.state)[1] == before + 4


def test_windows_go_on_from_what_a_callback_makes_of_a_variable_outside():
    factor = keras.Variable(1.0, trainable=False)
    model = make_model(lambda x: x * factor)
    fit(model, After(lambda: factor.assign(0.0)))
    assert read(factor) == 0.0
    factor.assign(1.0)
    twin = make_model(lambda x: x * factor)
    twin.fit(X[:8], Y[:8], **ORDER | {"batch_size": 8})
    np.testing.assert_allclose(
        model.get_weights()[0], twin.get_weights()[0], rtol=1e-5
    )


@pytest.mark.parametrize("is_the_models", [False, True])
def test_variable_that_a_loss_writes_has_to_be_the_models(is_the_models):
    count = keras.Variable(0.0, trainable=False, name="count")

    def loss(y, p):
        count.assign(count + 1.0)
        return ops.mean(ops.square(y - p), axis=-1)

    model = make_model(lambda x: x)
    model.compile("sgd", loss, jit_compile=JIT_COMPILE)
    if is_the_models:
        model.count = count
        fit(model)
        assert read(count) == 4.0
    else:
        with pytest.raises(ValueError, match="an attribute of the model"):
            fit(model)
