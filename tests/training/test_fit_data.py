"""Claims about what `fit` takes as data, and in which order."""

import numpy as np
import pytest
from linear import (
    LABELS,
    Batches,
    Subclassed,
    X,
    Y,
    as_tf_data,
    assert_same_weights,
    fit,
    generate,
    make_trainer,
    weights_of,
)

from accumtrainer import Accumulation, DataError, Trainer
from accumtrainer.keras_api import keras

pytestmark = pytest.mark.usefixtures("without_xla")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Batches, id="pydataset"),
        pytest.param(generate, id="generator"),
        pytest.param(lambda: list(generate()), id="list"),
        pytest.param(as_tf_data, id="tf.data"),
    ],
)
@pytest.mark.parametrize("beside", [{}, {"batch_size": 2}])
def test_every_source_gives_what_arrays_give(make, beside):
    arrays, _ = make_trainer()
    fit(arrays, shuffle=False)
    other, _ = make_trainer()
    other.fit(make(), shuffle=False, verbose=0, **beside)
    assert other.progress.updates == 3
    assert_same_weights(arrays.model, other.model)
    for one, another in (
        (arrays.evaluate(X, Y, verbose=0), other.evaluate),
        (arrays.predict(X, verbose=0), other.predict),
    ):
        answer = another(make(), verbose=0, **beside)
        np.testing.assert_allclose(answer, one, rtol=1e-5)


def test_generator_serves_several_epochs_by_steps():
    arrays, _ = make_trainer()
    fit(arrays, shuffle=False, epochs=2)
    other, _ = make_trainer()
    other.fit(generate(2), epochs=2, steps_per_epoch=12, verbose=0)
    assert_same_weights(arrays.model, other.model)


@pytest.mark.parametrize("steps", [None, 12, 8])
def test_generator_used_up_before_the_last_epoch_ends_training(steps):
    """Of 24 batches, `steps` an epoch, or all of them."""
    trainer, applied = make_trainer()
    with pytest.warns(UserWarning, match="nothing for epoch"):
        history = trainer.fit(
            generate(2), epochs=9, steps_per_epoch=steps, verbose=0
        )
    epochs = 24 // (steps or 24)
    assert history.epoch == list(range(epochs))
    assert len(history.history["loss"]) == trainer.progress.epochs == epochs
    assert trainer.progress.samples == 48
    arrays, _ = make_trainer()
    fit(arrays, shuffle=False, epochs=2)
    assert_same_weights(arrays.model, trainer.model)


def test_last_epoch_of_a_generator_may_be_shorter():
    trainer, _ = make_trainer()
    with pytest.warns(UserWarning, match="2 loader batches where 10 steps"):
        history = trainer.fit(
            generate(), epochs=2, steps_per_epoch=10, verbose=0
        )
    assert history.epoch == [0, 1]
    assert trainer.progress.samples == 24


def test_iterable_that_has_nothing_for_a_second_epoch_ends_training():
    class Once:
        batches = generate()

        def __iter__(self):
            return iter(self.batches)

        def __len__(self):
            return 12

    trainer, _ = make_trainer()
    with pytest.warns(UserWarning, match="nothing for epoch 1"):
        history = trainer.fit(Once(), epochs=3, verbose=0)
    assert history.epoch == [0]


def test_data_that_have_nothing_at_all_are_reported():
    trainer, _ = make_trainer()
    with pytest.raises(DataError, match="none in epoch 0"):
        trainer.fit(generate(0), epochs=2, verbose=0)


@pytest.mark.parametrize("steps", [5, 12, 30])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: (X, Y), id="arrays"),
        pytest.param(lambda: (Batches(),), id="pydataset"),
        pytest.param(lambda: (as_tf_data(),), id="tf.data"),
    ],
)
@pytest.mark.filterwarnings("ignore:Your input ran out")
def test_epochs_of_some_steps_have_as_many_batches_as_in_keras(make, steps):
    """Of 12 batches a pass."""
    counts = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            counts[-1] += 1

        def on_epoch_begin(self, epoch, logs=None):
            counts.append(0)

    def run(fit):
        counts.clear()
        fit(
            *make(),
            batch_size=2 if len(make()) == 2 else None,
            steps_per_epoch=steps,
            epochs=4,
            verbose=0,
            shuffle=False,
            callbacks=[Count()],
        )
        return list(counts)

    trainer, _ = make_trainer(accumulation=1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert run(trainer.fit) == run(model.fit)


def test_dropping_everything_is_reported():
    trainer, _ = make_trainer(accumulation=Accumulation(steps=99, tail="drop"))
    with pytest.raises(DataError, match="tail='drop' must leave something"):
        fit(trainer)


def test_inputs_may_be_a_dict():
    def model_of_dict():
        keras.utils.set_random_seed(0)
        a, b = keras.Input([1], name="a"), keras.Input([2], name="b")
        joined = keras.layers.Concatenate()([a, b])
        return keras.Model({"a": a, "b": b}, keras.layers.Dense(1)(joined))

    def model_of_array():
        keras.utils.set_random_seed(0)
        inputs = keras.Input([3])
        return keras.Model(inputs, keras.layers.Dense(1)(inputs))

    one, _ = make_trainer(model_of_array())
    other, _ = make_trainer(model_of_dict())
    other.model.set_weights(weights_of(one.model))
    fit(one)
    fit(other, x={"a": X[:, :1], "b": X[:, 1:]})
    assert_same_weights(one.model, other.model)
    np.testing.assert_allclose(
        other.predict({"a": X[:, :1], "b": X[:, 1:]}, verbose=0),
        one.predict(X, verbose=0),
        rtol=1e-5,
    )


def test_inputs_may_be_a_tuple():
    a, b = keras.Input([1]), keras.Input([2])
    joined = keras.layers.Concatenate()([a, b])
    model = keras.Model((a, b), keras.layers.Dense(1)(joined))
    trainer, _ = make_trainer(model)
    fit(trainer, x=(X[:, :1], X[:, 1:]))
    assert trainer.progress.updates == 3


def test_subclassed_model_is_built_by_its_data():
    keras.utils.set_random_seed(0)
    trainer, _ = make_trainer(Subclassed())
    assert not trainer.model.built
    history = fit(trainer, epochs=30, validation_data=(X, Y)).history
    assert history["val_loss"][-1] < 0.1 * history["val_loss"][0]


def test_subclassed_model_is_built_by_evaluate_and_predict():
    for method, data in (("evaluate", (X, Y)), ("predict", (X,))):
        trainer, _ = make_trainer(Subclassed())
        getattr(trainer, method)(*data, verbose=0)
        assert trainer.model.built


def test_class_weight_weighs_the_samples_of_a_class():
    def model_of_labels():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weighted, _ = make_trainer(model_of_labels(), loss=loss)
    fit(weighted, y=LABELS, class_weight={0: 0.5, 1: 3.0})
    by_hand, _ = make_trainer(model_of_labels(), loss=loss)
    fit(by_hand, y=LABELS, sample_weight=np.where(LABELS == 1, 3.0, 0.5))
    assert_same_weights(weighted.model, by_hand.model, rtol=0, atol=0)


def test_order_of_a_trainer_without_a_seed_is_settled_as_in_keras():
    results = []
    for seed in (1, 1, 2):
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        keras.utils.set_random_seed(seed)
        trainer = Trainer(model, optimizer="sgd", loss="mse")
        results.append(trainer.seed)
    assert results[0] == results[1] != results[2]


def test_shuffling_depends_on_the_seed_alone():
    ends = []
    for seed in (1, 1, 2):
        trainer, _ = make_trainer(seed=seed)
        fit(trainer, epochs=2)
        ends.append(weights_of(trainer.model)[0])
    np.testing.assert_array_equal(ends[0], ends[1])
    assert np.any(ends[0] != ends[2])


@pytest.mark.parametrize("seed", [2**32 - 1, 2**32, 2**40 + 1, 2**70])
def test_seeds_may_be_of_any_size(seed):
    ends = []
    for own in (seed, seed, seed + 1):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input([3]), keras.layers.GaussianNoise(1.0)]
        )
        model.add(keras.layers.Dense(1))
        trainer, _ = make_trainer(model, seed=own)
        fit(trainer)
        ends.append(weights_of(trainer.model)[0])
    np.testing.assert_array_equal(ends[0], ends[1])
    assert np.any(ends[0] != ends[2])


@pytest.mark.parametrize("kind", [np.int64, np.uint32])
def test_seeds_may_be_of_numpy_s_kinds(kind):
    trainer, _ = make_trainer(seed=kind(5))
    assert (trainer.seed, type(trainer.seed)) == (5, int)
