"""Claims about going on: as if training had never stopped, bit for bit."""

import math
import os

import numpy as np
import pytest
from quickest import JIT_COMPILE, RUN_EAGERLY
from resumable import (
    Batches,
    NoisyTrainer,
    X,
    Y,
    assert_same,
    assert_same_values,
    everything,
    fit_arrays,
    fit_arrays_by_steps,
    fit_dataset,
    fit_generator,
    fit_list,
    list_batches,
    make_trainer,
    plain,
    scaled,
    sliced,
)

from accumtrainer import (
    Accumulation,
    Callback,
    CheckpointError,
    Every,
    Trainer,
)
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import BACKEND, keras
from accumtrainer.saving.checkpoint import read_checkpoint
from accumtrainer.saving.snapshot import PARTS


class OftenShuffled(Batches):
    """Shuffles its own order before every epoch, too."""

    def on_epoch_begin(self):
        self.order = self.rng.permutation(24)


def fit_later_epochs_of_dataset(trainer, **options):
    options = {"epochs": 5, "initial_epoch": 2, "verbose": 0} | options
    return trainer.fit(OftenShuffled(), **options)


def fit_later_epochs_by_steps(trainer, **options):
    options = {"initial_epoch": 1, "epochs": 4} | options
    return fit_arrays(trainer, steps_per_epoch=6, **options)


class Shuffled:
    """Yields batches in another order every time, drawn from a seed."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def __iter__(self):
        batches = list_batches()
        return (batches[i] for i in self.rng.permutation(len(batches)))


def fit_later_epochs(trainer, **options):
    options = {"epochs": 5, "initial_epoch": 2, "verbose": 0} | options
    return trainer.fit(Shuffled(), **options)


def fit_list_by_steps(trainer, **options):
    return fit_list(trainer, steps_per_epoch=4, **options)


def fit_list_by_too_many_steps(trainer, **options):
    return fit_list(trainer, steps_per_epoch=8, **options)


def fit_short_generator(trainer, **options):
    batches = (b for _ in range(2) for b in list_batches())
    options = {"epochs": 9, "verbose": 0, "fast_forward": True} | options
    return trainer.fit(batches, steps_per_epoch=3, **options)


def fit_validating(trainer, **options):
    options |= {"validation_every": Every(2, "updates")}
    return fit_arrays(trainer, validation_data=(X, Y), **options)


def noisy_with_carried_tail():
    schedule = keras.optimizers.schedules.CosineDecay(0.02, 9)
    optimizer = keras.optimizers.AdamW(schedule, use_ema=True)
    return make_trainer(
        NoisyTrainer,
        optimizer=optimizer,
        accumulation=Accumulation(steps=4, tail="carry"),
    )


def with_stock_callbacks():
    return make_trainer(
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", patience=2),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5),
        ]
    )


def with_k_that_grows():
    return make_trainer(
        accumulation=Accumulation(steps=lambda updates: 1 + updates // 4)
    )


def compiled():
    return make_trainer(run_eagerly=False, jit_compile=JIT_COMPILE)


RUNS = {
    "compiled": (compiled, fit_arrays),
    "noisy_carry": (noisy_with_carried_tail, fit_arrays),
    "sliced_by_steps": (sliced, fit_arrays_by_steps),
    "scaled": (scaled, fit_arrays),
    "stock_callbacks": (with_stock_callbacks, fit_validating),
    "growing_k": (with_k_that_grows, fit_arrays),
    "dataset": (plain, fit_dataset),
    "later_epochs_by_steps": (plain, fit_later_epochs_by_steps),
    "list": (plain, fit_list),
    "list_by_steps": (plain, fit_list_by_steps),
    "list_by_too_many_steps": (plain, fit_list_by_too_many_steps),
    "short_generator": (noisy_with_carried_tail, fit_short_generator),
    "generator": (plain, fit_generator),
    "later_epochs": (plain, fit_later_epochs),
    "later_epochs_of_dataset": (plain, fit_later_epochs_of_dataset),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_pieces_equals_one_that_never_stopped(name, tmp_path):
    make, fit = RUNS[name]
    whole = make()
    history = fit(whole)
    total = whole.progress.updates
    assert total >= 3
    for updates in (math.ceil(total / 2), total):
        pieces = make()
        checkpoint = Checkpoint(tmp_path, Every(3, "updates"))
        last = fit(
            pieces,
            callbacks=[checkpoint],
            max_updates=None if updates == total else updates,
            resume_from="auto",
        )
    assert_same(pieces, whole)
    np.testing.assert_equal(last.history, history.history)  # NaNs are equal.
    assert last.epoch == history.epoch


class Scaled(OftenShuffled):
    """Multiplies what it yields by what a callback chooses."""

    scale = 1.0

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * self.scale, y


# A dataset is asked for that batch before callbacks are told of the epoch.
@pytest.mark.filterwarnings("ignore:The last batch before this place")
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
@pytest.mark.parametrize(
    ("k", "end"),
    [(2, {"max_updates": 1}), (2, {"max_updates": 3}), (2, {"epochs": 1})]
    + [(8, {"epochs": 1})],
)
def test_a_run_goes_on_with_data_as_callbacks_change_them(
    kind, k, end, tmp_path
):
    def fit(trainer, callbacks=(), **options):
        x, dataset = X.copy(), Scaled()

        def change(epoch, logs):
            dataset.scale = epoch + 2.0
            x[:] = X * dataset.scale

        change = keras.callbacks.LambdaCallback(on_epoch_begin=change)
        data = (dataset,) if kind == "dataset" else (x, Y, 4)
        options = {"epochs": 3, "verbose": 0} | options
        trainer.fit(*data, callbacks=[change, *callbacks], **options)

    whole, first = (make_trainer(accumulation=k) for _ in range(2))
    fit(whole)
    fit(first, [Checkpoint(tmp_path, Every(1, "updates"))], **end)
    pieces = make_trainer(accumulation=k)
    fit(pieces, resume_from=tmp_path)
    assert_same(pieces, whole)


def test_a_finished_run_goes_on_to_more_epochs(tmp_path):
    whole = noisy_with_carried_tail()
    history = fit_arrays(whole, epochs=4)
    for epochs in (2, 4):
        pieces = noisy_with_carried_tail()
        checkpoints = [Checkpoint(tmp_path, keep=1)]
        last = fit_arrays(
            pieces, epochs=epochs, callbacks=checkpoints, resume_from="auto"
        )
    # A run of two epochs flushes the tail at its end, where that of four
    # carries it on: the updates differ from there, not the place.
    assert pieces.progress.epochs == 4
    assert pieces.progress.samples == whole.progress.samples
    assert last.epoch == history.epoch


@pytest.mark.parametrize("fit", [fit_arrays, fit_dataset])
@pytest.mark.parametrize("updates", [2, 3])
def test_a_second_run_in_pieces_goes_on_in_its_order(fit, updates, tmp_path):
    whole, stopped = plain(), plain()
    for trainer in (whole, stopped):
        fit(trainer, epochs=2)
    fit(whole, epochs=2)
    checkpoint = Checkpoint(tmp_path)
    fit(stopped, epochs=2, max_updates=updates, callbacks=[checkpoint])
    resumed = plain()
    fit(resumed, epochs=2, resume_from=tmp_path)
    assert_same(resumed, whole)


@pytest.mark.skipif(
    BACKEND != "tensorflow",
    reason="JAX has no arrays of text, and no layers that read it",
)
def test_a_run_goes_on_with_a_carried_tail_of_text(tmp_path):
    def make():
        keras.utils.set_random_seed(1)
        layers = [
            keras.layers.StringLookup(vocabulary=["a", "b"]),
            keras.layers.Embedding(3, 2),
            keras.layers.Dense(1),
        ]
        return Trainer(
            keras.Sequential([keras.Input([], dtype="string"), *layers]),
            optimizer="adam",
            loss="mse",
            accumulation=Accumulation(steps=2, tail="carry"),
            run_eagerly=RUN_EAGERLY,
        )

    def fit(trainer, **options):
        batches = [(np.array([text, "é"]), Y[:2, :1]) for text in "abc"]
        trainer.fit(batches, epochs=2, verbose=0, **options)

    whole, checkpoint = make(), Checkpoint(tmp_path, Every(1, "epochs"))
    fit(whole, callbacks=[checkpoint])
    first = tmp_path / checkpoint.checkpoints.names()[0]
    (carried,) = read_checkpoint(first).position["carried"]
    assert carried.x.tolist() == ["c", "é"]
    pieces = make()
    fit(pieces, resume_from=first)
    assert_same(pieces, whole)


def test_a_finished_run_is_left_as_it_is(tmp_path):
    first = make_trainer(optimizer=keras.optimizers.Adam(0.01, use_ema=True))
    fit_arrays(first, callbacks=[Checkpoint(tmp_path)])
    names = sorted(os.listdir(tmp_path))
    again = make_trainer(optimizer=keras.optimizers.Adam(0.01, use_ema=True))
    fit_arrays(again, callbacks=[Checkpoint(tmp_path)], resume_from="auto")
    assert_same(again, first)
    assert sorted(os.listdir(tmp_path)) == names


def test_a_finished_run_can_be_looked_at_with_other_metrics(tmp_path):
    first = make_trainer(metrics=["mae"])
    fit_arrays(first, callbacks=[Checkpoint(tmp_path)])
    again = make_trainer(metrics=["mse", "mae"])
    fit_arrays(again, callbacks=[Checkpoint(tmp_path)], resume_from="auto")
    values, progress = everything(first)
    restored, restored_progress = everything(again)
    assert restored_progress == progress
    assert_same_values({"model": restored["model"]}, values)


def test_snapshot_holds_callbacks_as_they_were_then():
    class Counts(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.array = np.zeros(1)
            self.nest = ([0], {})

        def on_train_batch_end(self, batch, logs=None):
            self.array += 1
            self.nest[0][0] += 1

    class Tells(Callback):
        has_state = True
        array, updates = np.zeros(1), []

        def on_train_batch_end(self, batch, logs=None):
            self.array += 1
            self.updates.append(batch)

        def get_state(self):
            return {"array": self.array, "updates": self.updates}

    snapshots = []

    class Takes(Callback):
        def on_safe_point(self, reason, logs=None):
            snapshots.append(self.trainer.snapshot())

    trainer = make_trainer()
    fit_arrays(trainer, epochs=1, callbacks=[Counts(), Tells(), Takes()])
    for snapshot in snapshots:
        updates = snapshot.progress["updates"]
        states = snapshot.callbacks
        assert states["Counts-0"]["array"] == updates
        assert states["Counts-0"]["nest"][0] == [updates]
        assert states["Tells-0"]["array"] == updates
        assert len(states["Tells-0"]["updates"]) == updates


def test_a_snapshot_holds_all_that_lasts():
    trainer = make_trainer(NoisyTrainer)
    fit_arrays(trainer, epochs=1)
    program = trainer._engine._program
    beside = {"frozen", "losses"}
    assert set(program.variables.parts) == set(PARTS) - beside
    lasting = {id(v) for part in program.variables.parts.values() for v in part}
    passing = {id(v) for v in program.variables.passing}
    assert {id(v) for v in program.variables.all_variables} == lasting | passing
    held = everything(trainer)[0]
    assert {k: len(v) for k, v in held.items()} == {
        k: len(v) for k, v in program.variables.parts.items()
    } | dict.fromkeys(beside, 0)


def test_auto_needs_a_place_to_look():
    with pytest.raises(ValueError, match="Checkpoint among the callbacks"):
        fit_arrays(make_trainer(), resume_from="auto")


def test_a_path_must_hold_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="which has none"):
        fit_arrays(make_trainer(), resume_from=tmp_path)
