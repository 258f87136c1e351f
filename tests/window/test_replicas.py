"""Claims about replicas: together they make the update of one device."""

import numpy as np
import pytest
from complex_layer import Turn
from keras_core_gaps import keras_3_only
from replicated import (
    assert_close,
    losses_of_tagger,
    make_mlp,
    make_tagger,
    make_trainer,
    sentences,
    targets,
    weights_of,
)

from accumtrainer import (
    Accumulation,
)
from accumtrainer.keras_api import BACKEND, keras, ops
from accumtrainer.layers import AccumulatedBatchNormalization

UPDATES = 20


def assert_same_training(make_model, x, y, *counts, fit=None, **options):
    """Train on one device and on several, and compare everything.

    Returns:
        The last of the Trainers, one for each of these counts of devices.
    """
    histories, trainers = [], []
    for count in (1, *counts):
        trainer = make_trainer(count, make_model, **options)
        history = trainer.fit(x, y, **{"epochs": 2, "verbose": 0} | (fit or {}))
        histories.append(history.history)
        trainers.append(trainer)
    (one, *others), (history, *other_histories) = trainers, histories
    for several, other in zip(others, other_histories, strict=True):
        assert_close(*map(weights_of, (one, several)))
        assert history.keys() == other.keys()
        for name, values in history.items():
            np.testing.assert_allclose(
                other[name], values, rtol=1e-4, err_msg=name
            )
        assert one.progress.updates == several.progress.updates
        assert one.progress.samples == several.progress.samples
    return trainers[-1]


# Rows of a loader batch: all alike, some left over for a smaller micro-batch,
# some left over for nobody, fewer than there are replicas.
BATCH_SIZES = {"even": 24, "smaller": 28, "left over": 17, "few": 3}


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason="this version of Keras has no MultiOptimizer",
)
def test_optimizers_of_groups_step_on_replicas_as_on_one_device(rng):
    def make_optimizer():
        head = keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(0.01, 8),
            name="head",
            global_clipnorm=0.5,
        )
        base = keras.optimizers.SGD(0.05, momentum=0.9, name="base")
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(head, {".*kernel": base})
        )

    trainer = assert_same_training(
        make_mlp,
        *targets(rng, 48),
        2,
        optimizer=make_optimizer,
        fit={"batch_size": 24},
    )
    assert trainer.replicas == 2
    assert {"learning_rate_head", "learning_rate_base"} <= set(
        trainer.window_logs
    )


def test_averages_of_weights_are_those_of_one_device(rng):
    assert_same_training(
        make_mlp,
        *targets(rng, 48),
        2,
        optimizer=lambda: keras.optimizers.SGD(
            0.05, use_ema=True, ema_momentum=0.5
        ),
        fit={"batch_size": 24},
    )


@keras_3_only("has no complex variables")
@pytest.mark.usefixtures("without_xla")
def test_replicas_add_up_both_parts_of_complex_gradients(rng):
    trainer = assert_same_training(
        lambda: keras.Sequential([keras.Input([3]), Turn()]),
        *rng.normal(size=[2, 24, 3]).astype("float32"),
        2,
        optimizer=lambda: keras.optimizers.SGD(0.05),
        fit={"batch_size": 12},
    )
    assert np.abs(weights_of(trainer)[0].imag).max() > 0.01


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_replicas_assign_the_scales_of_float8_as_one_device(rng):
    def make_model():
        dense = keras.layers.Dense
        model = keras.Sequential(
            [
                keras.Input([6]),
                # Biases would be rounded to bfloat16.
                dense(8, activation="tanh", use_bias=False),
                dense(2, use_bias=False),
            ]
        )
        model.quantize("float8")
        for variable in model.trainable_variables:
            if variable.overwrite_with_gradient:
                begin[variable.path] = ops.convert_to_numpy(variable)
        return model

    begin = {}
    x, y = targets(rng, 24)
    trainers = []
    for count in (1, 2):
        trainer = make_trainer(count, make_model)
        for variable in trainer.model.trainable_variables:
            if variable.path in begin:
                variable.assign(begin[variable.path])
        trainer.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        trainers.append(trainer)
    assert_close(*map(weights_of, trainers), 1e-3)


@pytest.mark.parametrize("kind", BATCH_SIZES)
def test_replicas_make_the_updates_of_one_device(rng, kind):
    batch_size = BATCH_SIZES[kind]
    x, y = targets(rng, batch_size * UPDATES // 2)
    trainer = assert_same_training(
        make_mlp,
        x,
        y,
        *(2, 4),
        fit={"batch_size": batch_size},
        metrics=["mae"],
    )
    assert trainer.progress.updates == UPDATES


@pytest.mark.skipif(
    BACKEND != "jax",
    reason="TensorFlow joins arrays of any size by itself: there is no limit",
)
@pytest.mark.parametrize("limit", [0, 20])
def test_arrays_too_large_to_be_joined_are_added_up_too(
    rng, monkeypatch, limit
):
    from accumtrainer.steps.jax import replicas as jax_replicas

    monkeypatch.setattr(jax_replicas, "LARGEST_JOINED", limit)
    x, y = targets(rng, 12 * UPDATES)
    assert_same_training(
        make_mlp, x, y, 2, fit={"batch_size": 24}, metrics=["mae"]
    )


def test_replicas_under_xla_make_the_same_updates(rng):
    x, y = targets(rng, 34)
    options = {"metrics": ["mae"], "jit_compile": True}
    fit = {"batch_size": 17}
    assert_same_training(make_mlp, x, y, 2, fit=fit, **options)


@pytest.mark.parametrize("tail", ["flush", "carry", "drop"])
def test_loader_batches_are_shared_out_too(rng, tail):
    x, y = targets(rng, 47)
    assert_same_training(
        make_mlp,
        x,
        y,
        2,
        accumulation=Accumulation(steps=3, tail=tail),
        fit={"batch_size": 5},
    )


# --- In and out of scopes. ---


def test_sample_weights_count_across_replicas(rng):
    x, y = targets(rng, 60)
    weight = rng.uniform(0.0, 2.0, size=60) * (rng.uniform(size=60) > 0.4)
    assert_same_training(
        make_mlp,
        x,
        y,
        4,
        loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        weighted_metrics=["mae"],
        fit={"batch_size": 20, "sample_weight": weight},
    )


def test_sum_of_losses_stays_a_sum(rng):
    x, y = targets(rng, 40)
    assert_same_training(
        make_mlp,
        x,
        y,
        2,
        loss=keras.losses.MeanSquaredError(reduction="sum"),
        fit={"batch_size": 15},
    )


def test_outputs_have_denominators_of_their_own(rng):
    x, y = sentences(rng, 40)
    fit = {"batch_size": 13}
    assert_same_training(make_tagger, x, y, 2, fit=fit, **losses_of_tagger())


def test_evaluation_and_prediction_are_those_of_one_device(rng):
    x, y = targets(rng, 26)
    results = []
    for count in (1, 2):
        trainer = make_trainer(count, make_mlp, metrics=["mae"])
        logs = trainer.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        outputs = trainer.predict(x, batch_size=8, verbose=0)
        results.append([*logs.values(), outputs])
    assert_close(*results)


# --- What is agreed on. ---


def test_batch_statistics_are_averaged(rng):
    def make_model():
        return keras.Sequential(
            [
                keras.Input([6]),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(2),
            ]
        )

    x, y = targets(rng, 8)
    trainer = make_trainer(
        2, make_model, accumulation=Accumulation(micro_batch_size=4)
    )
    trainer.train_on_batch(x, y)
    normalization = trainer.model.layers[0]
    np.testing.assert_allclose(
        normalization.moving_mean, 0.5 * x.mean(axis=0), atol=1e-6
    )
    variances = [x[:4].var(axis=0), x[4:].var(axis=0)]
    np.testing.assert_allclose(
        normalization.moving_variance,
        0.5 + 0.5 * np.mean(variances, axis=0),
        rtol=1e-5,
    )


class Remembering(keras.layers.Layer):
    """Remembers that it has run, in a weight that is no float."""

    def __init__(self, dtype):
        super().__init__()
        self._has_run = self.add_weight(
            shape=[2], dtype=dtype, initializer="zeros", trainable=False
        )

    def call(self, inputs):
        """Remember it in the second of two numbers."""
        self._has_run.assign(ops.cast([0, 200], self._has_run.dtype))
        return inputs


@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_weights_that_are_no_floats_are_those_of_one_device(rng, dtype):
    def make_model():
        return keras.Sequential(
            [keras.Input([6]), Remembering(dtype), keras.layers.Dense(2)]
        )

    trainer = assert_same_training(make_model, *targets(rng, 6), 2)
    (has_run,) = trainer.model.layers[0].weights
    assert has_run.dtype == dtype
    np.testing.assert_array_equal(ops.cast(has_run, "int32") != 0, [0, 1])


def test_accumulated_statistics_are_those_of_the_whole_window(rng):
    def make_model():
        return keras.Sequential(
            [
                keras.Input([6]),
                AccumulatedBatchNormalization(momentum=0.5),
                keras.layers.Dense(2),
            ]
        )

    x, y = targets(rng, 23)
    trainer = make_trainer(4, make_model)
    trainer.train_on_batch(x, y)
    normalization = trainer.model.layers[0]
    np.testing.assert_allclose(
        normalization.moving_mean, 0.5 * x.mean(axis=0), atol=1e-6
    )
    np.testing.assert_allclose(
        normalization.moving_variance, 0.5 + 0.5 * x.var(axis=0), rtol=1e-5
    )
