"""Claims about callbacks that have Keras train, or compile, amid `fit`."""

import numpy as np
import pytest

from accumtrainer.callbacks import GradientAccumulation
from accumtrainer.keras_api import BACKEND, keras

layers = keras.layers
X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X[:, :1]


def make_again(model):
    model.make_train_function(force=True)


def freeze(model):
    model.layers[0].trainable = False
    model.make_train_function(force=True)


def compile_again(model):
    model.compile(keras.optimizers.SGD(0.05), "mae")
    model.make_train_function()


def exchange_optimizer(model):
    model.optimizer = keras.optimizers.SGD(0.05)


def put_back(model):
    model.train_function = model.make_train_function()


def train_by_keras(model):
    model.train_on_batch(X[:4], Y[:4])


def exchange_activation(model):
    model.layers[0].activation = keras.activations.softplus
    model.make_train_function(force=True)


ACTS = {
    "again": make_again,
    "freeze": freeze,
    "compile": compile_again,
    "optimizer": exchange_optimizer,
    "train on batch": train_by_keras,
    "activation": exchange_activation,
    "assign": put_back,
}
MOMENTS = {
    "first": ("on_train_begin", ()),
    "epoch begins": ("on_epoch_begin", (1,)),
    "epoch ends": ("on_epoch_end", (0,)),
}


def skip_what_keras_cannot(act, moment):
    compiles = act in (freeze, compile_again, exchange_optimizer)
    is_late = compiles and moment != "first"
    is_late = is_late or (act is train_by_keras and moment == "amid")
    if BACKEND == "jax" and (is_late or act is put_back):
        pytest.skip("Keras's own fit on JAX fails then")


def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input([3]), layers.Dense(4, "tanh"), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def fit(act, moment, *, batch_size, callbacks=(), **options):
    """Train, with one act by a callback that comes after the others."""
    model = make_model()
    name, told = moment
    callback = keras.callbacks.Callback()
    updates = []

    def act_once(*arguments, logs=None):
        if arguments[:1] == told:
            act(model)

    setattr(callback, name, act_once)
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: updates.append(int(model.optimizer.iterations))
    )
    history = model.fit(
        X,
        Y,
        batch_size=batch_size,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, callback, note],
        **{"epochs": 3} | options,
    )
    return history.history["loss"], updates, model.get_weights()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("act", ACTS)
def test_fit_accumulates_on_after_keras_has_compiled(act, moment):
    skip_what_keras_cannot(ACTS[act], moment)
    expected = fit(ACTS[act], MOMENTS[moment], batch_size=12)
    accumulation = GradientAccumulation(steps=3)
    found = fit(
        ACTS[act], MOMENTS[moment], batch_size=4, callbacks=[accumulation]
    )
    if ACTS[act] is not train_by_keras:  # whose batch Keras counts in the loss
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert found[1] == expected[1]
    for one, other in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert accumulation.progress.updates == 6


@pytest.mark.parametrize("act", [make_again, train_by_keras])
def test_window_goes_on_after_an_update_of_its_last_batch(act):
    skip_what_keras_cannot(act, "amid")
    expected = fit(act, ("on_train_batch_end", (0,)), batch_size=12)
    found = fit(
        act,
        ("on_train_batch_end", (2,)),
        batch_size=4,
        callbacks=[GradientAccumulation(steps=3)],
    )
    assert found[1] == expected[1]
    for one, other in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_model_compiled_amid_a_window_is_refused():
    with pytest.raises(ValueError, match="after 2 batches of a window"):
        fit(
            make_again,
            ("on_train_batch_end", (1,)),
            batch_size=4,
            callbacks=[GradientAccumulation(steps=3)],
        )


def test_window_stays_open_while_keras_trains():
    skip_what_keras_cannot(train_by_keras, "amid")
    # Its first batch counts at the weights as they were then.
    model = make_model()
    callback = keras.callbacks.Callback()
    callback.on_train_batch_end = lambda batch, logs=None: (
        batch or train_by_keras(model)
    )
    accumulation = GradientAccumulation(steps=2)
    callbacks = [accumulation, callback]
    model.fit(
        X[:8],
        Y[:8],
        batch_size=4,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    assert int(model.optimizer.iterations) == 2
    assert accumulation.progress.updates == 1


def test_callback_of_a_fit_that_ran_no_batch_serves_another_one():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    accumulation = GradientAccumulation(steps=2)
    options = {"batch_size": 6, "verbose": 0, "callbacks": [accumulation]}
    model.fit(X, Y, epochs=1, initial_epoch=1, **options)
    model.fit(X, Y, **options)
    assert int(model.optimizer.iterations) == 2


@pytest.mark.parametrize("act", [train_by_keras, "a fit with the same one"])
def test_batch_that_keras_would_train_by_itself_is_refused(act):
    model, accumulation = make_model(), GradientAccumulation(steps=3)
    order = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}

    class Acts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1 and act is train_by_keras:
                train_by_keras(self.model)

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0 and act is not train_by_keras:
                self.model.fit(X, Y, callbacks=[accumulation], **order)

    with pytest.raises(
        ValueError, match="List GradientAccumulation|one of its own"
    ):
        model.fit(X, Y, callbacks=[accumulation, Acts()], **order)
    if act is not train_by_keras:
        return
    model.fit(X, Y, callbacks=[Acts(), accumulation], **order)
    assert accumulation.progress.updates > 0
