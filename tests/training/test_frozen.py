"""Claims about models that are frozen, whole or in part."""

import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import Every, Trainer
from accumtrainer.callbacks import Checkpoint, GradientAccumulation
from accumtrainer.keras_api import keras, ops

X = np.random.default_rng(0).normal(1.0, size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def make_model(normalize=True):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    normalization = layers.BatchNormalization(
        scale=False, center=False, name="statistics"
    )
    return keras.Sequential(
        [
            keras.Input([3]),
            *([normalization] if normalize else []),
            layers.Dense(1, name="dense"),
        ]
    )


def make_trainer(model):
    return Trainer(
        model,
        optimizer="sgd",
        loss="mse",
        metrics=["mae"],
        accumulation=2,
        seed=0,
        jit_compile=JIT_COMPILE,
    )


def fit(trainer):
    return trainer.fit(X, Y, batch_size=4, verbose=0)


def numbers(model):
    return [np.array(ops.convert_to_numpy(v)) for v in model.variables]


# A layer that has nothing to train.


@pytest.mark.parametrize("was_trainable", [True, False])
def test_freezing_a_layer_without_trainable_weights_is_noticed(was_trainable):
    model = make_model()
    layer = model.get_layer("statistics")
    layer.trainable = was_trainable
    trainer = make_trainer(model)
    fit(trainer)
    layer.trainable = not was_trainable
    before = numbers(model)[:2]
    # Micro-batches of the same size, for which there is a program.
    trainer.train_on_batch(X[:8], Y[:8])
    for old, new in zip(before, numbers(model)[:2], strict=True):
        assert np.array_equal(old, new) == was_trainable


def test_freezing_a_nested_layer_is_noticed():
    inner = make_model()
    model = keras.Sequential([keras.Input([3]), inner])
    trainer = make_trainer(model)
    fit(trainer)
    inner.get_layer("statistics").trainable = False
    before = numbers(inner)
    fit(trainer)
    for old, new in zip(before[:2], numbers(inner)[:2], strict=True):
        np.testing.assert_array_equal(new, old)


def test_freezing_a_layer_between_fits_of_keras_leaves_its_statistics():
    model = make_model()
    model.compile("sgd", "mse", jit_compile=JIT_COMPILE)
    callback = GradientAccumulation(2)
    options = {"batch_size": 4, "verbose": 0, "callbacks": [callback]}
    model.fit(X, Y, **options)
    model.get_layer("statistics").trainable = False
    before = numbers(model)
    model.fit(X, Y, **options)
    for old, new in zip(before[:2], numbers(model)[:2], strict=True):
        np.testing.assert_array_equal(new, old)
    assert not np.array_equal(before[2], numbers(model)[2])


# A model that has nothing to train.


def make_frozen():
    model = make_model()
    model.trainable = False
    return model


def make_weightless():
    return keras.Sequential([keras.Input([3]), keras.layers.Rescaling(2.0)])


@pytest.mark.parametrize("make", [make_frozen, make_weightless])
def test_model_without_trainable_weights_evaluates_and_predicts(make):
    model = make()
    y = Y * np.ones([1, model.output_shape[-1]], "float32")
    trainer = make_trainer(model)
    received = trainer.evaluate(X, y, batch_size=4, verbose=0)
    predicted = trainer.predict(X, batch_size=4, verbose=0)
    other = make()
    other.compile("sgd", "mse", metrics=["mae"])
    expected = other.evaluate(X, y, batch_size=4, verbose=0, return_dict=True)
    if not isinstance(received, dict):
        received = dict(zip(("loss", "mae"), received, strict=True))
    for name, value in expected.items():
        assert received[name] == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(
        predicted, other.predict(X, verbose=0), rtol=1e-5, atol=1e-6
    )


def make_statistics():
    layers = keras.layers
    statistics = layers.BatchNormalization(scale=False, center=False)
    return keras.Sequential([keras.Input([3]), statistics])


MAKERS = [make_frozen, make_weightless, make_statistics]
ignoring_nothing_to_train = pytest.mark.filterwarnings(
    "ignore:The model does not have any trainable"
)


def targets_of(model):
    return Y * np.ones([1, model.output_shape[-1]], "float32")


def compiled(model):
    model.compile("sgd", "mse", metrics=["mae"], jit_compile=JIT_COMPILE)
    return model


def trainer_of(model, **options):
    return Trainer(compiled(model), jit_compile=JIT_COMPILE, seed=0, **options)


@pytest.mark.parametrize("make", MAKERS)
def test_training_a_model_without_trainable_weights_warns(make):
    trainer = make_trainer(make())
    with pytest.warns(UserWarning, match="does not have any trainable"):
        trainer.fit(X, targets_of(trainer.model), batch_size=4, verbose=0)


@ignoring_nothing_to_train
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
@pytest.mark.parametrize("accumulation", [1, 3], ids=["k=1", "k=3, tail"])
@pytest.mark.parametrize("make", MAKERS)
def test_fit_of_a_model_without_trainable_weights_does_what_keras_does(
    make, accumulation, options
):
    model, other = make(), compiled(make())
    trainer = trainer_of(model, accumulation=accumulation, **options)
    given = {"batch_size": 4, "epochs": 2, "verbose": 0, "shuffle": False}
    received = trainer.fit(X, targets_of(model), **given).history
    expected = other.fit(X, targets_of(model), **given).history
    for name, values in expected.items():
        np.testing.assert_allclose(received[name], values, rtol=1e-5)
    for new, old in zip(numbers(model), numbers(other), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)
    assert int(model.optimizer.iterations) == int(other.optimizer.iterations)
    per_epoch = 4 if accumulation == 1 else 2
    assert trainer.progress.updates == 2 * per_epoch


@ignoring_nothing_to_train
@pytest.mark.parametrize("make", MAKERS)
def test_train_on_batch_without_trainable_weights_does_what_keras_does(make):
    model, other = make(), compiled(make())
    trainer = trainer_of(model)
    for size in (8, 5):
        batch = X[:size], targets_of(model)[:size]
        received = trainer.train_on_batch(*batch, return_dict=True)
        expected = other.train_on_batch(*batch, return_dict=True)
        for name, value in expected.items():
            assert received[name] == pytest.approx(float(value), rel=1e-5)
    for new, old in zip(numbers(model), numbers(other), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


@ignoring_nothing_to_train
@pytest.mark.parametrize("plan", ["fused", "streamed"])
def test_window_without_trainable_weights_is_forgotten_where_its_loss_is_nan(
    plan,
):
    model, other = make_statistics(), make_statistics()
    x = X.copy()
    x[5] = np.nan
    trainers = [trainer_of(m, accumulation=2) for m in (model, other)]
    sizes = [2, 2, 2, 2] if plan == "fused" else [3, 1, 3, 1]
    ends = np.cumsum(sizes)

    def batches(x):
        parts = [slice(e - n, e) for n, e in zip(sizes, ends, strict=True)]
        return [(x[part], X[part]) for part in parts]

    history = trainers[0].fit(batches(x), verbose=0, shuffle=False).history
    # Its second window holds the NaN.
    expected = trainers[1].fit(batches(X)[:2], verbose=0).history
    assert trainers[0].progress.skipped_updates == 1
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    for new, old in zip(numbers(model), numbers(other), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


@ignoring_nothing_to_train
def test_training_without_trainable_weights_goes_on_from_a_checkpoint(
    tmp_path,
):
    whole, half, rest = make_statistics(), make_statistics(), make_statistics()
    options = {"batch_size": 4, "verbose": 0}
    expected = trainer_of(whole).fit(X, X, epochs=2, **options).history
    saving = [Checkpoint(tmp_path, Every(6, "updates"))]
    trainer_of(half).fit(
        X, X, epochs=2, max_updates=6, callbacks=saving, **options
    )
    received = (
        trainer_of(rest)
        .fit(X, X, epochs=2, resume_from=tmp_path, **options)
        .history
    )
    assert received["loss"][-1] == expected["loss"][-1]
    for new, old in zip(numbers(rest), numbers(whole), strict=True):
        np.testing.assert_array_equal(new, old)


@ignoring_nothing_to_train
def test_nothing_to_train_is_the_same_update_as_of_the_big_batch():
    found = make_trainer(make_frozen()).check_equivalence((X, Y))
    assert found.is_exact
    assert "the same update" in str(found)


def test_accumulating_inside_fit_without_trainable_weights_warns():
    model = make_frozen()
    model.compile("sgd", "mse", jit_compile=JIT_COMPILE)
    with pytest.warns(UserWarning, match="does not have any trainable"):
        model.fit(X, Y, verbose=0, callbacks=[GradientAccumulation(2)])


@ignoring_nothing_to_train
@pytest.mark.parametrize("make", [make_frozen, make_weightless])
def test_accumulation_inside_fit_leaves_a_frozen_model_as_keras_does(make):
    histories, models = [], []
    for callbacks in ([], [GradientAccumulation(2)]):
        model = make()
        y = Y * np.ones([1, model.output_shape[-1]], "float32")
        model.compile("sgd", "mse", metrics=["mae"], jit_compile=JIT_COMPILE)
        before = numbers(model)
        history = model.fit(
            X, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks
        )
        for old, new in zip(before, numbers(model), strict=True):
            np.testing.assert_array_equal(new, old)
        histories.append(history.history)
        models.append(model)
    expected, received = histories
    assert received.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(received[name], values, rtol=1e-5)
