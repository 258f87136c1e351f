"""Claims about validation, and about `evaluate` and `predict`."""

import numpy as np
import pytest
from linear import (
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

from accumtrainer import Accumulation, Every, Trainer, errors
from accumtrainer.keras_api import BACKEND, keras

pytestmark = pytest.mark.usefixtures("without_xla")


# Validation.


def test_validation_loss_is_that_of_evaluate():
    trainer, _ = make_trainer(metrics=["mae"])
    history = fit(trainer, validation_data=(X[:7], Y[:7]))
    loss, mae = trainer.evaluate(X[:7], Y[:7], verbose=0)
    assert history.history["val_loss"] == pytest.approx([loss], rel=1e-5)
    assert history.history["val_mae"] == pytest.approx([mae], rel=1e-5)


def test_validation_may_have_sample_weights():
    trainer, _ = make_trainer()
    weight = np.linspace(0, 1, 24).astype("float32")
    history = fit(trainer, validation_data=(X, Y, weight))
    errors = (trainer.predict(X, verbose=0) - Y)[:, 0] ** 2
    expected = np.mean(errors * weight)
    assert history.history["val_loss"] == pytest.approx([expected], rel=1e-5)


def test_validation_every_so_many_updates():
    trainer, applied = make_trainer()
    history = fit(
        trainer,
        epochs=3,
        validation_data=(X, Y),
        validation_every=Every(2, "updates"),
    )
    assert [update for update, _ in applied.validations] == [2, 4, 6, 8]
    assert len(history.history["val_loss"]) == 3


@pytest.mark.parametrize(
    ("every", "updates"),
    [
        (Every(2, "epochs"), [6, 12]),
        (Every(24, "micro_batches"), [6, 12]),
        (Every(16, "samples"), [2, 4, 6, 8, 10, 12]),
    ],
    ids=str,
)
def test_validation_follows_any_clock(every, updates):
    trainer, applied = make_trainer()
    fit(trainer, epochs=4, validation_data=(X, Y), validation_every=every)
    assert [update for update, _ in applied.validations] == updates


def test_validation_amid_an_epoch_leaves_its_metrics_alone():
    plain, _ = make_trainer(metrics=["mae"])
    validated, _ = make_trainer(metrics=["mae"])
    expected = fit(plain).history
    received = fit(
        validated,
        validation_data=(3 * X, Y),
        validation_every=Every(1, "updates"),
    ).history
    for name in ("loss", "mae"):
        np.testing.assert_allclose(received[name], expected[name], rtol=1e-6)
    assert_same_weights(plain.model, validated.model, rtol=0, atol=0)


def test_callback_that_evaluates_amid_an_epoch_leaves_its_metrics_alone():
    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            trainer.evaluate(X[:7], Y[:7], verbose=0)

    histories = []
    for callbacks in ([], [Evaluate()]):
        trainer, _ = make_trainer(metrics=["mae"])
        history = fit(trainer, epochs=2, callbacks=callbacks).history
        histories.append([history["loss"], history["mae"]])
    np.testing.assert_allclose(*histories, rtol=1e-6)


@pytest.mark.parametrize(
    ("frequency", "epochs"), [(1, [0, 1, 2, 3]), (2, [1, 3]), ([1, 4], [0, 3])]
)
def test_validation_freq_chooses_epochs(frequency, epochs):
    trainer, applied = make_trainer()
    fit(trainer, epochs=4, validation_data=(X, Y), validation_freq=frequency)
    assert [update // 3 - 1 for update, _ in applied.validations] == epochs


def test_named_validation_sets_are_logged_by_name():
    trainer, applied = make_trainer(metrics=["mae"])
    history = fit(
        trainer, validation_data={"near": (X, Y), "far": (X, Y + 10.0)}
    ).history
    for name in ("near", "far"):
        assert f"val_{name}_loss" in history
        assert f"val_{name}_mae" in history
    assert "val_loss" not in history
    assert history["val_far_loss"][0] > history["val_near_loss"][0]
    ((_, logs),) = applied.validations
    assert set(logs) == {
        "val_near_loss",
        "val_near_mae",
        "val_far_loss",
        "val_far_mae",
    }


@pytest.mark.parametrize("names", [["a"], ["a", "b"]], ids="-".join)
def test_inputs_validated_on_may_be_a_dict_without_targets(names):
    inputs = {name: keras.Input([3], name=name) for name in names}

    class Squares(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
            return x

    outputs = keras.layers.Dense(1)(sum(inputs.values(), start=0.0))
    model = keras.Model(inputs, Squares()(outputs))
    trainer = Trainer(model, optimizer="sgd", denominator="samples")
    data = dict.fromkeys(names, X)
    history = trainer.fit(data, validation_data=data, verbose=0).history
    loss = trainer.evaluate(data, verbose=0)
    assert history["val_loss"] == pytest.approx([loss], rel=1e-5)


def test_validation_sets_whose_numbers_have_one_name_are_told_of():
    inputs = keras.Input([3])
    outputs = {n: keras.layers.Dense(1, name=n)(inputs) for n in ("b", "c")}
    trainer, _ = make_trainer(keras.Model(inputs, outputs))
    data = X, {"b": Y, "c": Y}
    other = X, {"b": Y + 1.0, "c": Y}
    with pytest.warns(UserWarning, match="val_a_b_loss is of the set 'a' and"):
        logs = fit(trainer, *data, validation_data={"a": data, "a_b": other})
    loss = trainer.evaluate(*data, verbose=0, return_dict=True)["b_loss"]
    assert logs.history["val_a_b_loss"] == pytest.approx([loss])


def test_validation_split_keeps_the_last_samples():
    split, _ = make_trainer(optimizer=keras.optimizers.SGD(0.0))
    history = fit(split, validation_split=0.25).history
    assert split.progress.samples == 18
    loss = split.evaluate(X[18:], Y[18:], verbose=0)
    assert history["val_loss"] == pytest.approx([loss], rel=1e-5)


def test_validation_steps_counts_loader_batches():
    trainer, _ = make_trainer(optimizer=keras.optimizers.SGD(0.0))
    history = fit(
        trainer,
        validation_data=(X, Y),
        validation_batch_size=4,
        validation_steps=2,
    ).history
    loss = trainer.evaluate(X[:8], Y[:8], verbose=0)
    assert history["val_loss"] == pytest.approx([loss], rel=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: (X, Y), id="arrays"),
        pytest.param(lambda: Batches(), id="pydataset"),
        pytest.param(lambda: list(generate()), id="list"),
        pytest.param(lambda: as_tf_data(), id="tf.data"),
    ],
)
def test_validations_of_some_steps_all_begin_with_the_first_batch(make):
    trainer, _ = make_trainer(optimizer=keras.optimizers.SGD(0.0))
    history = fit(
        trainer, epochs=3, validation_data=make(), validation_steps=5
    ).history
    loss = trainer.evaluate(X[:10], Y[:10], verbose=0)
    assert history["val_loss"] == pytest.approx([loss] * 3, rel=1e-5)


def test_validations_of_some_steps_share_a_generator():
    trainer, _ = make_trainer(optimizer=keras.optimizers.SGD(0.0))
    history = fit(
        trainer, epochs=2, validation_data=generate(), validation_steps=6
    ).history
    losses = [
        trainer.evaluate(X[part], Y[part], verbose=0)
        for part in (slice(12), slice(12, 24))
    ]
    assert history["val_loss"] == pytest.approx(losses, rel=1e-5)


def test_validation_generator_that_is_used_up_leaves_training_alone():
    trainer, _ = make_trainer()
    with pytest.warns(UserWarning, match="Training goes on without validation"):
        history = fit(trainer, epochs=3, validation_data=generate()).history
    assert len(history["loss"]) == 3
    assert len(history["val_loss"]) == 1


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: [X, Y], id="list"),
        pytest.param(lambda: [(X[:12], Y[:12]), (X[12:], Y[12:])], id="loader"),
    ],
)
def test_validation_data_may_be_a_list(make):
    trainer, _ = make_trainer()
    history = fit(trainer, validation_data=make()).history
    loss = trainer.evaluate(X, Y, verbose=0)
    assert history["val_loss"] == pytest.approx([loss], rel=1e-5)


# Evaluation and prediction.


@pytest.mark.parametrize("is_kept", [True, False])
def test_logs_of_a_batch_stay_those_of_that_batch(is_kept):
    rows = []

    class Keeps(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            rows.append(logs if is_kept else logs["loss"])

    trainer, _ = make_trainer()
    model = trainer.model
    trainer.evaluate(X, Y, 8, verbose=0, callbacks=[Keeps()])
    model.compile(loss="mse")
    ours = [row["loss"] if is_kept else row for row in rows]
    expected = [model.evaluate(X[:n], Y[:n], verbose=0) for n in (8, 16, 24)]
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_evaluate_returns_what_keras_returns():
    trainer, _ = make_trainer(metrics=["mae"])
    errors = trainer.predict(X, verbose=0) - Y
    expected = [np.mean(errors**2), np.mean(np.abs(errors))]
    results = trainer.evaluate(X, Y, verbose=0)
    assert results == pytest.approx(expected, rel=1e-5)
    named = trainer.evaluate(X, Y, verbose=0, return_dict=True)
    assert named == pytest.approx(
        dict(zip(("loss", "mae"), expected, strict=True)), rel=1e-5
    )


def test_evaluate_without_metrics_returns_the_loss_alone():
    trainer, _ = make_trainer()
    assert isinstance(trainer.evaluate(X, Y, verbose=0), float)


def test_evaluate_weighs_uneven_batches_by_their_samples():
    trainer, _ = make_trainer()
    whole = trainer.evaluate(X, Y, batch_size=24, verbose=0)
    uneven = trainer.evaluate(X, Y, batch_size=7, verbose=0)
    assert uneven == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("size", [1, 5, 24])
def test_evaluation_and_prediction_are_sliced_with_the_same_results(size):
    rows = []

    class Rows(keras.layers.Layer):
        def call(self, x):
            rows.append(x.shape[0])
            return x

    def model_that_counts():
        keras.utils.set_random_seed(0)
        return keras.Sequential([Rows(), keras.layers.Dense(1)])

    sliced, _ = make_trainer(
        model_that_counts(),
        accumulation=Accumulation(micro_batch_size=size),
        metrics=["mae"],
        run_eagerly=True,
    )
    sliced.predict(X[:1], verbose=0)
    sliced.evaluate(X[:1], Y[:1], verbose=0)  # looks at twice as many rows
    whole, _ = make_trainer(metrics=["mae"])
    whole.model.set_weights(weights_of(sliced.model))
    rows.clear()
    results = sliced.evaluate(X, Y, batch_size=24, verbose=0)
    outputs = sliced.predict(X, batch_size=24, verbose=0)
    assert max(rows) == size
    assert results == pytest.approx(
        whole.evaluate(X, Y, batch_size=24, verbose=0), rel=1e-5
    )
    np.testing.assert_allclose(
        outputs, whole.predict(X, batch_size=24, verbose=0), rtol=1e-5
    )


def test_predict_joins_batches_in_order():
    trainer, _ = make_trainer()
    kernel, bias = weights_of(trainer.model)
    outputs = trainer.predict(X, batch_size=5, verbose=0)
    assert outputs.shape == (24, 1)
    np.testing.assert_allclose(outputs, X @ kernel + bias, rtol=1e-5, atol=1e-6)


def test_predict_ignores_targets_of_a_loader():
    trainer, _ = make_trainer()
    outputs = trainer.predict(generate(), verbose=0)
    np.testing.assert_allclose(
        outputs, trainer.predict(X, verbose=0), rtol=1e-5, atol=1e-6
    )


def test_predict_and_evaluate_take_so_many_steps():
    trainer, _ = make_trainer()
    outputs = trainer.predict(generate(), steps=3, verbose=0)
    assert len(outputs) == 6
    loss = trainer.evaluate(generate(), steps=3, verbose=0)
    expected = trainer.evaluate(X[:6], Y[:6], verbose=0)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_predict_needs_neither_loss_nor_targets():
    trainer, _ = make_trainer(Subclassed())
    assert trainer.predict(X, verbose=0).shape == (24, 1)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: (X, Y), id="arrays"),
        pytest.param(lambda: (Batches(), None), id="pydataset"),
        pytest.param(lambda: (list(generate()), None), id="list"),
        pytest.param(lambda: (generate(), None), id="generator"),
        pytest.param(lambda: (as_tf_data(), None), id="tf.data"),
    ],
)
def test_evaluation_and_prediction_end_with_the_data(make):
    trainer, _ = make_trainer()
    size = 2 if isinstance(make()[0], np.ndarray) else None
    expected = trainer.evaluate(X, Y, batch_size=2, verbose=0)
    with pytest.warns(UserWarning, match="12 loader batches where 17 steps"):
        loss = trainer.evaluate(*make(), batch_size=size, steps=17, verbose=0)
    assert loss == pytest.approx(expected, rel=1e-6)
    with pytest.warns(UserWarning, match="12 loader batches where 17 steps"):
        rows = trainer.predict(make()[0], batch_size=size, steps=17, verbose=0)
    np.testing.assert_allclose(
        rows, trainer.predict(X, verbose=0), rtol=1e-5, atol=1e-6
    )


def test_validations_of_too_many_steps_end_with_the_data():
    trainer, _ = make_trainer(optimizer=keras.optimizers.SGD(0.0))
    loss = trainer.evaluate(X[:9], Y[:9], verbose=0)
    with pytest.warns(UserWarning, match="5 loader batches where 7 steps"):
        history = fit(
            trainer,
            epochs=2,
            validation_data=(X[:9], Y[:9]),
            validation_steps=7,
        ).history
    assert history["val_loss"] == pytest.approx([loss] * 2, rel=1e-5)


class Stop(keras.callbacks.Callback):
    """Stops evaluations and predictions after two batches."""

    def on_test_batch_end(self, batch, logs=None):
        self.model.stop_evaluating |= batch == 1

    def on_predict_batch_end(self, batch, logs=None):
        self.model.stop_predicting |= batch == 1


def test_evaluation_and_prediction_stop_where_a_callback_wants():
    trainer, _ = make_trainer(optimizer=keras.optimizers.SGD(0.0))
    loss = trainer.evaluate(X[:6], Y[:6], verbose=0)
    options = {"batch_size": 3, "verbose": 0, "callbacks": [Stop()]}
    for _ in range(2):  # The second one is not stopped by the first.
        assert trainer.evaluate(X, Y, **options) == pytest.approx(loss)
        assert len(trainer.predict(X, **options)) == 6
    history = trainer.fit(X, Y, epochs=2, validation_data=(X, Y), **options)
    assert history.history["val_loss"] == pytest.approx([loss] * 2, rel=1e-5)


@pytest.fixture
def limits():
    """Give `keras.config`, whose limits hold for this test alone."""
    if not hasattr(keras.config, "set_max_epochs"):
        pytest.skip("this version of Keras has no limits")
    yield keras.config
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


@pytest.mark.filterwarnings("ignore:.* is limited to")
def test_limits_of_keras_hold(limits):
    limits.set_max_epochs(2)
    limits.set_max_steps_per_epoch(3)
    trainer, _ = make_trainer(accumulation=1)
    history = fit(trainer, epochs=5, validation_data=(X, Y))
    assert history.epoch == [0, 1]
    assert trainer.progress.updates == 6
    loss = trainer.evaluate(X[:6], Y[:6], verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(loss, rel=1e-5)
    assert len(trainer.predict(X, batch_size=4, verbose=0)) == 12
    fit(trainer, max_updates=99)
    assert trainer.progress.updates == 12
    fit(trainer)
    assert trainer.progress.updates == 15
    fit(trainer, overfit_batches=5)
    assert trainer.progress.updates == 18


def test_limits_of_keras_are_warned_of(limits):
    trainer, _ = make_trainer()
    limits.set_max_epochs(1)
    with pytest.warns(UserWarning, match="epochs is limited to 1, by keras"):
        fit(trainer, epochs=2)
    limits.set_max_steps_per_epoch(2)
    with pytest.warns(UserWarning, match="^steps is limited to 2"):
        trainer.evaluate(X, Y, batch_size=2, verbose=0)
    trainer.predict(X, batch_size=2, steps=1, verbose=0)


def lengths():
    """Yield sequences of three lengths."""
    for length in (3, 5, 4):
        yield (np.full([2, length, 3], float(length), "float32"),)


def make_sequence_trainer(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([None, 3]), keras.layers.Dense(2)])
    return make_trainer(model, **options)[0]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="needs ragged tensors")
@pytest.mark.parametrize("accumulation", [4, Accumulation(micro_batch_size=1)])
def test_predictions_of_other_lengths_are_joined_as_in_keras(accumulation):
    import tensorflow as tf

    trainer = make_sequence_trainer(accumulation=accumulation)
    received = trainer.predict(lengths(), verbose=0)
    specs = tf.TensorSpec([None, None, 3])
    dataset = tf.data.Dataset.from_generator(lengths, output_signature=(specs,))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(3))
    expected = trainer.model.predict(dataset, verbose=0)
    assert received.shape.as_list() == expected.shape.as_list()
    assert received.ragged_rank == expected.ragged_rank
    for one, other in zip(received, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


# TensorFlow joins them to ragged tensors, as claimed above, and refuses none.
@pytest.mark.skipif(BACKEND == "tensorflow", reason="joins them, as in Keras")
def test_predictions_of_other_lengths_are_refused_with_the_remedy():
    trainer = make_sequence_trainer()
    with pytest.raises(ValueError, match="^x must .* only TensorFlow .* Pad x"):
        trainer.predict(lengths(), verbose=0)


def test_evaluation_that_fails_amid_a_fit_leaves_the_metrics_of_the_epoch():
    def run(*callbacks):
        trainer, _ = make_trainer(metrics=["mae"])
        for callback in callbacks:
            callback.evaluate = trainer.evaluate
        return fit(trainer, callbacks=list(callbacks)).history["mae"]

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            wrong = iter([(X[:4], Y[:4]), (X[:3], Y[:4])])
            with pytest.raises(errors.DataError):
                self.evaluate(wrong, verbose=0)

    assert run(Fails()) == pytest.approx(run(), rel=1e-6)


def test_list_of_several_inputs_and_targets_is_what_to_validate_on():
    inputs = keras.Input([2]), keras.Input([2])
    outputs = keras.layers.Dense(1)(keras.layers.Add()(inputs))
    model = keras.Model(inputs, outputs)
    trainer = Trainer(model, optimizer="sgd", loss="mse")
    x, y = np.ones([4, 2], "float32"), np.ones([4, 1], "float32")
    histories = [
        trainer.fit((x, x), y, verbose=0, validation_data=data).history[
            "val_loss"
        ]
        for data in ([(x, x), y], [(x, x), y, np.ones(4)])
    ]
    assert np.all(np.isfinite(histories))
