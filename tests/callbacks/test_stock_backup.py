"""Claims about Keras's `BackupAndRestore`: it goes on after a stop."""

import numpy as np
import pytest
from stocked import Watch, X, Y, fit, make_model, numbers

from accumtrainer import Accumulation, LossScale, Trainer
from accumtrainer.keras_api import keras

# Keras's callbacks read optimizers and weights through NumPy's old protocol.
pytestmark = [
    pytest.mark.usefixtures("without_xla"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept:DeprecationWarning"
    ),
]


def test_backup_and_restore_counts_updates_in_save_freq(tmp_path):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise RuntimeError("power failure")

    watch = Watch()
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2)
    with pytest.raises(RuntimeError, match="power failure"):
        fit(watch, backup, Fail(), epochs=1)
    restored = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            restored.append([numbers(v) for v in self.model.variables])

    keras.utils.set_random_seed(1)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2)
    fit(backup, Look(), epochs=1)
    for expected, variable in zip(watch.weights[1], restored[0], strict=True):
        np.testing.assert_array_equal(expected, variable)


class FailBeforeThirdEpoch(keras.callbacks.Callback):
    """Fails when two epochs are finished."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError("power failure")


class OwnOrder(keras.utils.PyDataset):
    """The training data in batches of 2."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return X[2 * index : 2 * index + 2], Y[2 * index : 2 * index + 2]


def batches(epochs=1):
    for _ in range(epochs):
        yield from (OwnOrder()[index] for index in range(12))


@pytest.mark.parametrize("accumulation", [4, Accumulation(micro_batch_size=1)])
@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        pytest.param(lambda: (X, Y), lambda: (X, Y), None, id="arrays"),
        pytest.param(
            lambda: (OwnOrder(),), lambda: (OwnOrder(),), None, id="pydataset"
        ),
        pytest.param(
            lambda: (list(batches()),),
            lambda: (list(batches()),),
            None,
            id="list",
        ),
        pytest.param(
            lambda: (batches(4),), lambda: (batches(2),), 12, id="generator"
        ),
        pytest.param(
            lambda: (list(batches()),),
            lambda: (list(batches()),),
            12,
            id="list-by-steps",
        ),
    ],
)
def test_backup_and_restore_goes_on_where_an_error_stopped(
    before, after, steps, accumulation, tmp_path
):
    def train(data, *callbacks):
        trainer = Trainer(
            make_model(),
            optimizer=keras.optimizers.SGD(0.05),
            loss="mse",
            accumulation=accumulation,
            seed=0,
        )
        history = trainer.fit(
            *data,
            batch_size=2 if len(data) == 2 else None,
            steps_per_epoch=steps,
            epochs=4,
            verbose=0,
            callbacks=list(callbacks),
        )
        return trainer, history

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    whole, expected = train(before())
    with pytest.raises(RuntimeError, match="power failure"):
        train(before(), backup(), FailBeforeThirdEpoch())
    resumed, history = train(after(), backup())
    assert history.epoch == [2, 3]
    assert resumed.progress.epochs == 2
    np.testing.assert_allclose(
        history.history["loss"], expected.history["loss"][2:], rtol=1e-5
    )
    for one, other in zip(
        whole.model.variables, resumed.model.variables, strict=True
    ):
        np.testing.assert_allclose(numbers(one), numbers(other), rtol=1e-5)
    # The epoch of the backup is none of a later fit's.
    _, history = fit(trainer=resumed, epochs=2)
    assert history.epoch == [0, 1]


class FailAtThirdUpdate(keras.callbacks.Callback):
    """Fails when three updates are made."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise RuntimeError("power failure")


@pytest.mark.parametrize("more", [0, 1, None])
@pytest.mark.parametrize(
    ("fail", "save_freq", "restored", "epochs_left"),
    [
        pytest.param(FailBeforeThirdEpoch, "epoch", 10, 2, id="epoch"),
        pytest.param(FailAtThirdUpdate, 2, 2, 4, id="amid-first-epoch"),
    ],
)
def test_updates_are_counted_on_from_a_backup(
    fail, save_freq, restored, epochs_left, more, tmp_path
):
    def train(*callbacks, **options):
        trainer = Trainer(
            make_model(),
            optimizer=keras.optimizers.SGD(0.05),
            loss="mse",
            accumulation=Accumulation(steps=lambda made: 4 if made < 2 else 2),
        )
        backup = keras.callbacks.BackupAndRestore(tmp_path, save_freq=save_freq)
        _, history = fit(backup, *callbacks, trainer=trainer, **options)
        return trainer, history.history

    with pytest.raises(RuntimeError, match="power failure"):
        train(fail())
    # A limit is one of the run, which ends where that was reached before.
    limit = None if more is None else restored + more
    trainer, history = train(max_updates=limit)
    made = 6 * epochs_left if more is None else more
    assert trainer.progress.updates == restored + made
    assert trainer.progress.micro_batches == 2 * made
    assert int(trainer.optimizer.iterations) == restored + made
    if made:
        assert history["updates"][-1] == restored + made


@pytest.mark.parametrize("is_other", [False, True])
@pytest.mark.parametrize("limit", ["max_updates", "fast_dev_run"])
def test_limits_go_on_from_where_a_backup_goes_back_to(
    limit, is_other, tmp_path
):
    def make_trainer():
        sgd = keras.optimizers.SGD(0.05)
        return Trainer(make_model(), optimizer=sgd, loss="mse", accumulation=4)

    trainer = make_trainer()
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(RuntimeError, match="power failure"):
        fit(backup, FailBeforeThirdEpoch(), trainer=trainer)
    restored = int(trainer.optimizer.iterations)
    fit(trainer=trainer)
    trainer = make_trainer() if is_other else trainer
    # A run that another process began ends where it was to end.
    more = restored + 2 if is_other and limit == "max_updates" else 2
    fit(backup, trainer=trainer, **{limit: more})
    assert trainer.progress.updates == restored + 2


@pytest.mark.parametrize(
    "scaled",
    [
        lambda sgd: {
            "optimizer": sgd,
            "loss_scale": LossScale(growth_interval=4),
        },
        lambda sgd: {
            "optimizer": keras.optimizers.LossScaleOptimizer(
                sgd, initial_scale=2.0**15, dynamic_growth_steps=4
            )
        },
    ],
    ids=["given", "of-the-optimizer"],
)
def test_loss_scale_goes_on_from_a_backup(scaled, tmp_path):
    def train(*callbacks):
        how = scaled(keras.optimizers.SGD(0.05))
        trainer = Trainer(make_model(), loss="mse", accumulation=4, **how)
        watch = Watch()
        _, history = fit(*callbacks, watch, trainer=trainer)
        return history.history["loss_scale"], watch.weights[-1]

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path)

    scales, expected = train()
    with pytest.raises(RuntimeError, match="power failure"):
        train(backup(), FailBeforeThirdEpoch())
    resumed, weights = train(backup())
    # It has grown by then, and is to grow again after less than 4 updates.
    assert resumed == scales[2:] == [2.0**17, 2.0**17]
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_backup_and_restore_of_a_finished_training_leaves_nothing(tmp_path):
    def backup():
        return keras.callbacks.BackupAndRestore(
            tmp_path, delete_checkpoint=False
        )

    fit(backup(), epochs=2)
    trainer, history = fit(backup(), epochs=2)
    assert history.epoch == []
    assert trainer.progress.micro_batches == 0
    assert trainer.progress.updates == 6


def test_epoch_at_which_a_fit_of_keras_went_on_is_none_of_a_trainer_s(tmp_path):
    model = make_model()
    model.compile("sgd", "mse")
    for epochs in (2, 3):
        backup = keras.callbacks.BackupAndRestore(
            tmp_path, delete_checkpoint=False
        )
        history = model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[backup])
    assert history.epoch == [2]
    _, history = fit(trainer=Trainer(model), epochs=2)
    assert history.epoch == [0, 1]
