"""Claims about replicas: together they make the update of one device."""

import contextlib
import os
from pathlib import Path

import forked
import numpy as np
import pytest
from quickest import JIT_COMPILE

from accumtrainer import (
    Accumulation,
    Callback,
    LossScale,
    Trainer,
    WeightedLoss,
    WindowLossTrainer,
)
from accumtrainer.callbacks import (
    Checkpoint,
    GradientAccumulation,
    GradientNoiseScale,
)
from accumtrainer.data.batches import Batch, window_of_rows
from accumtrainer.keras_api import BACKEND, keras, ops
from accumtrainer.layers import AccumulatedBatchNormalization
from accumtrainer.steps import Step
from accumtrainer.window.replicas import share_out

UPDATES = 20


def distributed(count):
    """Make a scope in which models have so many replicas."""
    if count == 1:
        return contextlib.nullcontext()
    if BACKEND == "jax":
        devices = [f"cpu:{index}" for index in range(count)]
        return keras.distribution.DataParallel(devices=devices).scope()
    import tensorflow as tf

    devices = [f"CPU:{index}" for index in range(count)]
    # Collectives of TensorFlow know one group of devices in a process.
    return tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
    ).scope()


def make_trainer(replicas, make_model, trainer_type=Trainer, **options):
    """Make a Trainer of replicas, whose model begins as any other."""
    options = {
        "optimizer": lambda: keras.optimizers.Adam(0.01, clipnorm=1.0),
        "loss": "mse",
        "accumulation": Accumulation(micro_batch_size=3),
        "seed": 0,
        "jit_compile": JIT_COMPILE,
    } | options
    keras.utils.set_random_seed(0)
    with distributed(replicas):
        model = make_model()
        rng = np.random.default_rng(0)
        for variable in model.trainable_variables:
            variable.assign(0.3 * rng.normal(size=variable.shape))
        options["optimizer"] = options["optimizer"]()
        return trainer_type(model, **options)


def make_mlp():
    return keras.Sequential(
        [
            keras.Input([6]),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(2),
        ]
    )


def weights_of(trainer):
    return [
        keras.ops.convert_to_numpy(variable)
        for variable in [
            *trainer.model.variables,
            *trainer.optimizer.variables,
        ]
        if "seed" not in variable.path
    ]


def assert_close(ours, theirs, tolerance=1e-5):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


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


def targets(rng, samples):
    return (
        rng.normal(size=[samples, 6]).astype("float32"),
        rng.normal(size=[samples, 2]).astype("float32"),
    )


# --- What is exact. ---

# Rows of a loader batch: all alike, some left over for a smaller micro-batch,
# some left over for nobody, fewer than there are replicas.
BATCH_SIZES = {"even": 24, "smaller": 28, "left over": 17, "few": 3}


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


def scope_of_strategy(kind):
    """Make the scope of a strategy, or of JAX's distribution."""
    if kind == "two devices":
        return distributed(2)
    if BACKEND == "jax":
        return keras.distribution.DataParallel(devices=["cpu:0"]).scope()
    import tensorflow as tf

    if kind == "one device":
        return tf.distribute.OneDeviceStrategy("CPU:0").scope()
    return tf.distribute.MirroredStrategy(["CPU:0"]).scope()


def make_normalized_mlp():
    model = make_mlp()
    model.add(keras.layers.BatchNormalization())
    return model


class Unbuilt(keras.Model):
    """Has no variables before it is called."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.normalization = keras.layers.BatchNormalization()

    def call(self, x, training=False):
        return self.normalization(self.dense(x), training=training)


@pytest.mark.parametrize("first", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("is_inside", [True, False])
def test_unbuilt_model_of_a_scope_gets_its_variables_and_optimizer_there(
    rng, is_inside, first
):
    x, y = rng.normal(size=(16, 3)), rng.normal(size=(16, 2))
    with contextlib.ExitStack() as stack:
        stack.enter_context(scope_of_strategy("two devices"))
        model = Unbuilt()
        if not is_inside and BACKEND == "tensorflow":
            stack.close()
        options = {"loss": "mse", "jit_compile": JIT_COMPILE}
        trainer = Trainer(model, optimizer="adam", **options)
        if first == "evaluate":
            trainer.evaluate(x, y, verbose=0)
        elif first == "predict":
            trainer.predict(x, verbose=0)
        trainer.fit(x, y, batch_size=8, verbose=0)
        assert trainer.snapshot().progress["updates"] == 2


@pytest.mark.parametrize("jit_compile", ["auto", False])
def test_window_on_two_devices_is_compared_inspected_and_captured(
    rng, jit_compile, tmp_path
):
    x, y = targets(rng, 16)
    x[3] = np.nan
    with distributed(2):
        trainer = Trainer(
            make_mlp(),
            optimizer="adam",
            loss="mse",
            metrics=["mae"],
            accumulation=Accumulation(micro_batch_size=2),
            jit_compile=jit_compile,
        )
        assert trainer.check_equivalence((x[4:12], y[4:12])).is_exact
        trainer.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        trainer.save(tmp_path / "saved")
        before = trainer.progress
        trainer.fit(x[:8], y[:8], batch_size=8, verbose=0)
        assert trainer.inspect().first is not None
        trainer.restore(tmp_path / "saved")
        assert trainer.progress == before


@pytest.mark.parametrize("kind", ["one device", "one mirror", "two devices"])
@pytest.mark.parametrize("accumulation", [1, Accumulation(micro_batch_size=4)])
def test_trainer_may_be_used_inside_the_scope(rng, kind, accumulation):
    x, y = targets(rng, 16)
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    results = []
    for is_inside in (True, False):
        keras.utils.set_random_seed(0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(scope_of_strategy(kind))
            trainer = Trainer(
                make_normalized_mlp(),
                optimizer="adam",
                loss="mse",
                metrics=["mae"],
                accumulation=accumulation,
                seed=0,
                jit_compile=JIT_COMPILE,
            )
            if not is_inside:
                stack.close()
            history = trainer.fit(x, y, validation_data=(x, y), **fit).history
            results.append(
                [
                    *(history[name] for name in ("loss", "mae", "val_loss")),
                    trainer.train_on_batch(x, y),
                    trainer.evaluate(x, y, verbose=0),
                    trainer.predict(x, verbose=0),
                    *weights_of(trainer),
                ]
            )
    assert_close(*results)


def test_trainer_that_runs_eagerly_may_be_used_inside_the_scope(rng):
    x, y = targets(rng, 16)
    with scope_of_strategy("one mirror"):
        trainer = Trainer(
            make_mlp(), optimizer="adam", loss="mse", run_eagerly=True
        )
        trainer.fit(x, y, batch_size=8, verbose=0)
    assert trainer.progress.updates == 2


def test_equivalence_is_checked_inside_the_scope_and_outside(rng):
    x, y = targets(rng, 16)
    options = {"loss": "mse", "metrics": ["mae"], "accumulation": 2}
    with scope_of_strategy("one mirror"):
        trainer = Trainer(make_mlp(), optimizer="adam", **options)
        assert trainer.check_equivalence((x, y)).is_exact
    assert trainer.check_equivalence((x, y)).is_exact


def test_scope_of_another_strategy_is_refused(rng):
    if BACKEND != "tensorflow":
        pytest.skip("JAX's distributions are not those of models")
    x, y = targets(rng, 16)
    trainer = Trainer(make_mlp(), optimizer="adam", loss="mse")
    for use in (
        lambda: trainer.fit(x, y, verbose=0),
        lambda: trainer.train_on_batch(x, y),
        lambda: trainer.evaluate(x, y, verbose=0),
    ):
        with (
            scope_of_strategy("one mirror"),
            pytest.raises(ValueError, match="scope of another Mirrored"),
        ):
            use()
    trainer.fit(x, y, verbose=0)


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


def make_tagger():
    tokens = keras.Input([5], dtype="int32")
    embedded = keras.layers.Embedding(7, 4, mask_zero=True)(tokens)
    named = keras.layers.Dense(3, name="tag")(embedded)
    pooled = keras.layers.GlobalAveragePooling1D()(embedded)
    return keras.Model(
        tokens, {"tag": named, "size": keras.layers.Dense(1)(pooled)}
    )


def losses_of_tagger():
    """Make options for two losses with denominators of their own."""
    tag = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    return {
        "loss": {"tag": tag, "size": "mse"},
        "loss_weights": {"tag": 1.0, "size": 0.3},
    }


def sentences(rng, samples):
    x = rng.integers(1, 7, size=[samples, 5])
    x *= np.arange(5) < rng.integers(1, 6, size=[samples, 1])
    y = {
        "tag": rng.integers(3, size=[samples, 5]),
        "size": rng.normal(size=[samples, 1]).astype("float32"),
    }
    return x, y


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


@pytest.mark.parametrize("bad_row", [0, 5, 11])
def test_all_skip_what_overflows_on_one(rng, bad_row):
    x, y = targets(rng, 12)
    x[bad_row] = np.inf
    trainer = make_trainer(
        4, make_mlp, loss_scale=LossScale(initial=8.0), metrics=["mae"]
    )
    trainer.train_on_batch(*targets(rng, 12))
    before = weights_of(trainer)
    trainer.train_on_batch(x, y)
    for one, other in zip(weights_of(trainer), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert trainer.progress.skipped_updates == 1
    trainer.train_on_batch(*targets(rng, 12))
    assert trainer.progress.updates == 2
    assert trainer.window_logs["loss_scale"] == 4.0
    assert all(np.isfinite(value).all() for value in weights_of(trainer))


class Drawing(Trainer):
    """Draws random numbers in several hooks, and logs them."""

    def draw(self, name):
        value = keras.random.uniform([], seed=self.rng)
        for reduce in ("max", "min"):
            self.log(f"{name}_{reduce}", value, reduce=reduce)

    def on_micro_batch(self, batch, info):
        self.draw("pass")
        return batch

    def on_apply(self, gradients, info):
        self.draw("apply")
        return gradients


def test_hooks_draw_apart_in_passes_and_alike_in_updates(rng):
    trainer = make_trainer(4, make_mlp, Drawing)
    trainer.train_on_batch(*targets(rng, 12))
    first = dict(trainer.window_logs)
    assert first["pass_min"] < first["pass_max"]
    assert first["apply_min"] == first["apply_max"]
    trainer.train_on_batch(*targets(rng, 12))
    assert trainer.window_logs["pass_max"] != first["pass_max"]


class Ones(Trainer):
    """Logs how much a layer of dropout leaves of ones."""

    def compute_loss(self, batch, info):
        left = ops.sum(self.model(batch.x, training=info.training))
        for reduce in ("max", "min"):
            self.log(f"left_{reduce}", left, reduce=reduce)
        return WeightedLoss(left, 1.0)


def make_dropout():
    return keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dropout(0.5, seed=3),
            keras.layers.Dense(1),
        ]
    )


def test_layers_draw_apart_on_replicas():
    trainer = make_trainer(2, make_dropout, Ones, accumulation=1, loss=None)
    x = np.ones([2, 64], "float32")
    trainer.train_on_batch(x)
    first = dict(trainer.window_logs)
    assert first["left_min"] != first["left_max"]
    trainer.train_on_batch(x)
    assert trainer.window_logs["left_min"] != first["left_min"]


def test_rows_left_over_draw_alike_and_count_once():
    trainer = make_trainer(4, make_dropout, Ones, accumulation=1, loss=None)
    trainer.train_on_batch(np.ones([3, 64], "float32"))
    assert trainer.window_logs["weight"] == 3.0


class Hooked(Trainer):
    """Logs what hooks are told."""

    def on_accumulate(self, gradients, info):
        self.log("rows", ops.cast(info.weight, "float32"), reduce="max")
        return gradients

    def on_apply(self, gradients, info):
        self.log("total", info.total_weight)
        self.log("norm", ops.sum(ops.square(gradients[-1])))
        return gradients


def test_on_accumulate_sees_one_share_and_on_apply_the_sum(rng):
    x, y = targets(rng, 12)
    logs = []
    for count in (1, 4):
        trainer = make_trainer(count, make_mlp, Hooked)
        trainer.train_on_batch(x, y)
        logs.append(dict(trainer.window_logs))
    assert [log["rows"] for log in logs] == [3.0, 3.0]
    assert [log["total"] for log in logs] == [12.0, 12.0]
    np.testing.assert_allclose(logs[0]["norm"], logs[1]["norm"], rtol=1e-5)
    assert trainer.micro_batch_logs["loss"].shape == (1,)
    np.testing.assert_allclose(
        trainer.micro_batch_logs["loss"], logs[0]["loss"], rtol=1e-5
    )


class Told(Callback):
    """Keeps what it is told of micro-batches."""

    needs_gradient_norms = True

    def __init__(self):
        super().__init__()
        self.rows = []

    def on_micro_batch(self, index, logs=None):
        self.rows.append(logs)


# A model, its data and its losses. Of a mean one replica knows a share, of a
# sum a part, and of several outputs each has a denominator of its own.
TOLD = {
    "mean": (make_mlp, targets, dict),
    "sum": (
        make_mlp,
        targets,
        lambda: {"loss": keras.losses.MeanSquaredError(reduction="sum")},
    ),
    "outputs": (make_tagger, sentences, losses_of_tagger),
}


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("sizes", [(3, 8), (8, 5, 2), (1, 4), (8, 8)])
def test_callbacks_are_told_of_micro_batches_as_on_one_device(rng, sizes, kind):
    make_model, make_data, make_losses = TOLD[kind]
    batches = [make_data(rng, size) for size in sizes]
    told = []
    for count in (1, 4):
        trainer = make_trainer(
            count, make_model, accumulation=len(sizes), **make_losses()
        )
        callback = Told()
        trainer.fit(batches, verbose=0, callbacks=[callback])
        told.append(callback.rows)
        assert len(callback.rows) == len(sizes)
        assert len(trainer.micro_batch_logs["loss"]) == len(sizes)
    for name in ("loss", "weight"):
        one, several = ([row[name] for row in rows] for rows in told)
        np.testing.assert_allclose(several, one, rtol=1e-5, err_msg=name)
    if sizes[0] == 1 and kind == "mean":
        # A row that one replica counts has the gradient it has on one device.
        for name in ("gradient_norm", "gradient_weight"):
            one, several = (rows[0][name] for rows in told)
            assert several == pytest.approx(one, rel=1e-5)


def copies_of(variable):
    """List the values that the devices hold of a variable."""
    if BACKEND == "jax":
        return [shard.data for shard in variable.value.addressable_shards]
    return variable.value.values


def test_every_device_holds_the_same_weights(rng):
    trainer = make_trainer(4, make_mlp)
    x, y = targets(rng, 51)
    trainer.fit(x, y, batch_size=17, verbose=0)
    for variable in trainer.model.trainable_variables:
        copies = [np.asarray(copy) for copy in copies_of(variable)]
        assert len(copies) == 4
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])


def reductions(micro_batches):
    """List the kinds of numbers that an update reduces over its replicas."""
    script = Path(__file__).with_name("reductions_run.py")
    done = forked.run([script, str(micro_batches)], os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_update_reduces_once_whatever_its_micro_batches():
    # Not in this process: TensorFlow's collectives know one group of devices.
    two, eight = map(reductions, (2, 8))
    assert two == eight
    # Everything that is a float; and random states.
    floats = [kind for kind in two if kind in ("f32", "float32")]
    assert len(floats) == 1
    assert len(two) <= 2


def test_weights_may_be_split_over_devices_too(rng):
    if BACKEND != "jax":
        reason = "Keras has no ModelParallel on TensorFlow"
        print(f"Not run: {reason}.")
        pytest.skip(reason)
    mesh = keras.distribution.DeviceMesh(
        (2, 2), ["batch", "model"], [f"cpu:{index}" for index in range(4)]
    )
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*dense.*/kernel"] = (None, "model")
    x, y = targets(rng, 85)
    trainers = [make_trainer(1, make_mlp)]
    distribution = keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch"
    )
    with distribution.scope():
        trainers.append(make_trainer(1, make_mlp))
    for trainer in trainers:
        trainer.fit(x, y, batch_size=17, epochs=2, verbose=0)
    assert_close(*map(weights_of, trainers))
    kernel = trainers[1].model.trainable_variables[0].value
    assert kernel.addressable_shards[0].data.shape == (6, 4)


# --- What goes on elsewhere. ---


@pytest.mark.parametrize("counts", [(2, 4), (4, 1), (1, 2)])
def test_checkpoint_of_some_goes_on_with_others(rng, tmp_path, counts):
    x, y = targets(rng, 48)
    options = {"batch_size": 12, "verbose": 0}
    whole = make_trainer(1, make_mlp, metrics=["mae"])
    whole.fit(x, y, epochs=3, **options)
    for epochs, count in zip((1, 3), counts, strict=True):
        trainer = make_trainer(
            count,
            make_mlp,
            metrics=["mae"],
            callbacks=[Checkpoint(tmp_path)],
        )
        trainer.fit(x, y, epochs=epochs, resume_from="auto", **options)
    assert trainer.progress.updates == whole.progress.updates == 12
    assert_close(*map(weights_of, (trainer, whole)))


def test_checkpoint_is_made_and_read_before_the_first_update(rng, tmp_path):
    saved, trainer = (make_trainer(2, make_mlp) for _ in range(2))
    for variable in saved.model.variables:
        variable.assign(variable + 1.0)
    saved.save(tmp_path)
    trainer.restore(tmp_path, weights_only=True)
    trainer.restore(tmp_path)
    assert_close(*map(weights_of, (trainer, saved)), tolerance=0.0)
    trainer.train_on_batch(*targets(rng, 6))
    assert trainer.progress.updates == 1


def test_size_that_fits_divides_the_rows_of_a_replica(rng, monkeypatch):
    """Of 20 rows each, 4 at a time fit; halves would come to 3."""
    monkeypatch.setattr(Step, "peak_bytes", lambda _, window: window.sizes[0])
    trainer = make_trainer(
        2,
        make_mlp,
        accumulation=Accumulation(
            micro_batch_size="auto", memory_limit_bytes=2 * 4
        ),
    )
    x, y = targets(rng, 40)
    trainer.fit(x, y, batch_size=40, verbose=0)
    assert trainer.plan.micro_batch_size == 4
    assert trainer.last_window.sizes == (8,) * 5


def test_start_line_tells_of_replicas(rng, capsys):
    trainer = make_trainer(2, make_mlp)
    x, y = targets(rng, 24)
    trainer.fit(x, y, batch_size=12, verbose=2)
    line = capsys.readouterr().out.splitlines()[0]
    assert "12 samples per update = 2 micro-batches x 6" in line
    assert "shared out among 2 replicas" in line


class Compared(WindowLossTrainer):
    def window_loss(self, embeddings, batch, info):
        return ops.mean(embeddings)


def test_what_keeps_to_one_device_is_refused(rng):
    with distributed(2):
        model = make_mlp()
        with pytest.raises(ValueError, match="a loss over the whole window"):
            Compared(model, optimizer="sgd")
        with pytest.raises(ValueError, match="2 replicas, with run_eagerly"):
            Trainer(model, optimizer="sgd", loss="mse", run_eagerly=True)
        if BACKEND == "tensorflow":
            layer = keras.layers.BatchNormalization(synchronized=True)
            model.add(layer)
            with pytest.raises(ValueError, match=f"True in {layer.name}"):
                Trainer(model, optimizer="sgd", loss="mse")
            model.pop()
        trainer = Trainer(model, optimizer="sgd", loss="mse")
        with pytest.raises(ValueError, match="must watch a Trainer of one"):
            trainer.fit(
                *targets(rng, 8), verbose=0, callbacks=[GradientNoiseScale()]
            )
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match="GradientAccumulation"):
            model.fit(
                *targets(rng, 8),
                verbose=0,
                callbacks=[GradientAccumulation(steps=2)],
            )


# --- How windows are shared out. ---


@pytest.mark.parametrize(
    ("sizes", "replicas", "split", "copied"),
    [
        ((8, 8, 8), 2, [(3, 8)], []),
        ((8, 8, 3), 2, [(2, 8), (1, 2)], [(1, 1)]),
        ((8, 8, 7), 4, [(2, 8), (1, 4)], [(1, 2), (1, 1)]),
        ((3,), 4, [], [(3, 1)]),
        ((5, 5), 2, [(2, 4)], [(2, 1)]),
    ],
)
def test_rows_are_split_evenly_or_copied(sizes, replicas, split, copied):
    rows = np.arange(sum(sizes))
    shares, indices = share_out(window_of_rows(Batch(rows), sizes), replicas)
    assert [batch.x.shape for batch in shares.split] == split
    assert [batch.x.shape for batch in shares.copied] == copied
    found = [b.x.ravel() for b in (*shares.split, *shares.copied)]
    assert sorted(np.concatenate(found).tolist()) == rows.tolist()
    ends = np.cumsum(sizes)
    run = [row for b in (*shares.split, *shares.copied) for row in b.x]
    for index, row in zip(indices, run, strict=True):
        assert set(np.searchsorted(ends, row, side="right")) == {index}


def test_process_shares_out_its_share_among_its_own_replicas():
    window = window_of_rows(Batch(np.arange(10)), (4, 4, 2)).as_share(3)
    shares, indices = share_out(window, 6)
    assert [batch.x.shape for batch in shares.split] == [(2, 4), (1, 2)]
    assert not shares.copied
    assert indices == [0, 1, 2]
