"""Claims about hooks, random numbers and callbacks on several replicas."""

import numpy as np
import pytest
from replicated import (
    losses_of_tagger,
    make_mlp,
    make_tagger,
    make_trainer,
    sentences,
    targets,
    weights_of,
)

from accumtrainer import (
    Callback,
    LossScale,
    Trainer,
    WeightedLoss,
)
from accumtrainer.keras_api import keras, ops


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


def test_layer_outside_the_model_draws_on_as_on_one_device():
    class Augmented(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x, training=False):
            return self.dense(outside[0](x, training=training))

    states = []
    for replicas in (1, 2):
        outside = (keras.layers.Dropout(0.5, seed=3),)
        trainer = make_trainer(
            replicas, Augmented, Ones, accumulation=2, loss=None
        )
        for _ in range(2):
            trainer.train_on_batch(np.ones([2 * replicas, 64], "float32"))
        state = outside[0].seed_generator.state
        states.append(ops.convert_to_numpy(state).tolist())
    assert states[0] == states[1]


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
