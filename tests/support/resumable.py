"""Trainers and data whose training can be broken off and gone on with."""

import numpy as np
from quickest import RUN_EAGERLY

from accumtrainer import (
    Accumulation,
    Batch,
    LossScale,
    Trainer,
)
from accumtrainer.keras_api import keras, ops

# Most of the claims are about the loop, which need not wait for a compiler.
DEFAULTS = {
    "seed": 3,
    "accumulation": 2,
    "loss_scale": None,
    "run_eagerly": RUN_EAGERLY,
}
RNG = np.random.default_rng(0)
X = RNG.normal(size=[24, 3]).astype("float32")
Y = (X[:, :2] * 2 + 1).astype("float32")


def make_model(**options):
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(8, activation="relu", **options),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=5),
        keras.layers.Dense(2, dtype="float32"),
    ]
    return keras.Sequential([keras.Input([3]), *layers])


class NoisyTrainer(Trainer):
    """Draws, logs and tracks in every hook that may."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.moved = self.track(
            keras.Variable(0.0, trainable=False, name="moved")
        )

    def on_micro_batch(self, batch, info):
        noise = keras.random.normal(ops.shape(batch.x), seed=self.rng)
        self.log("noise", ops.mean(noise))
        return Batch(batch.x + 0.1 * noise, batch.y, batch.sample_weight)

    def after_apply(self, info):
        self.moved.assign_add(info.loss)


def make_trainer(
    cls=Trainer, *, optimizer=None, metrics=("mae",), callbacks=(), **options
):
    return cls(
        make_model(),
        optimizer=optimizer or keras.optimizers.Adam(0.01),
        loss="mse",
        metrics=list(metrics),
        callbacks=list(callbacks),
        **DEFAULTS | options,
    )


def fit_arrays(trainer, **options):
    return trainer.fit(
        X, Y, **{"batch_size": 4, "epochs": 3, "verbose": 0} | options
    )


class Batches(keras.utils.PyDataset):
    """Shuffles its own order after every epoch, as some datasets do."""

    def __init__(self):
        super().__init__(workers=2)
        self.order, self.rng = np.arange(24), np.random.default_rng(5)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = self.order[4 * index : 4 * index + 4]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.order = self.rng.permutation(24)


def fit_dataset(trainer, **options):
    return trainer.fit(Batches(), **{"epochs": 3, "verbose": 0} | options)


def list_batches():
    return [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 24, 4)]


def fit_list(trainer, **options):
    batches = list_batches()
    return trainer.fit(batches, **{"epochs": 3, "verbose": 0} | options)


def fit_generator(trainer, **options):
    batches = (b for _ in range(3) for b in list_batches())
    options = {"epochs": 3, "verbose": 0, "fast_forward": True} | options
    return trainer.fit(batches, steps_per_epoch=6, **options)


def fit_arrays_by_steps(trainer, **options):
    return fit_arrays(trainer, steps_per_epoch=4, **options)


def plain():
    return make_trainer()


def sliced():
    return make_trainer(accumulation=Accumulation(micro_batch_size=2))


def scaled():
    """Let a loss scale grow fast, overflow, and fall again."""
    scale = LossScale(initial=2.0**124, growth_interval=1, maximum=2.0**127)
    return make_trainer(loss_scale=scale)


def everything(trainer):
    """Collect what training has changed, without the seconds."""
    snapshot = trainer.snapshot()
    progress = {k: v for k, v in snapshot.progress.items() if k != "seconds"}
    return snapshot.variables, progress


def assert_same(trainer, other):
    (values, progress), (other_values, other_progress) = map(
        everything, (trainer, other)
    )
    assert progress == other_progress
    assert_same_values(values, other_values)


def assert_same_values(values, others):
    """Compare part by part, in order: Keras numbers layers as it goes."""
    for part, group in values.items():
        pairs = zip(group.items(), others[part].values(), strict=True)
        for (path, value), other in pairs:
            np.testing.assert_array_equal(
                value, other, err_msg=f"{part} {path}"
            )
