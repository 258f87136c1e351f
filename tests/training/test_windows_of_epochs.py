"""Claims about the windows of an epoch: how many, and what a tail does."""

import numpy as np
import pytest
from linear import (
    X,
    Y,
    assert_same_weights,
    fit,
    generate,
    make_trainer,
    many_shapes,
    weights_of,
)

from accumtrainer import Accumulation, Callback, Every, NonFiniteError
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]


# What comes back.


def test_number_of_micro_batches_may_change_with_the_epoch():
    trainer, applied = make_trainer(
        accumulation=Accumulation(steps={0: 2, 1: 4, 3: 12})
    )
    fit(trainer, epochs=4)
    assert applied.logs[-1]["updates"] == 6 + 3 + 3 + 1
    assert trainer.progress.micro_batches == 48


@many_shapes
def test_number_of_micro_batches_may_follow_the_updates_made():
    asked = []

    def steps(updates):
        asked.append(updates)
        return updates + 1

    trainer, _ = make_trainer(accumulation=Accumulation(steps=steps))
    seen = []

    class Sizes(Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(self.trainer.progress.micro_batches)

    fit(trainer, callbacks=[Sizes()])
    assert seen == [1, 3, 6, 10, 12]
    # The first window is taken again when callbacks have seen the epoch begin.
    assert asked == [0, 0, 1, 2, 3, 4]


@many_shapes
def test_skipped_updates_do_not_move_a_function_of_the_updates():
    x = X.copy()
    x[0] = np.nan
    trainer, applied = make_trainer(
        accumulation=Accumulation(steps=lambda updates: updates + 1)
    )
    fit(trainer, x, shuffle=False)
    assert [logs["applied"] for logs in applied.logs][:2] == [False, True]
    assert trainer.progress.updates == 5
    assert trainer.progress.skipped_updates == 1


@pytest.fixture(
    scope="module",
    params=[
        Accumulation(steps=4, tail="flush"),
        Accumulation(steps=4, tail="carry"),
        Accumulation(steps=2, tail="drop"),
        Accumulation(micro_batch_size=3),
        Accumulation(steps={0: 1, 2: 3}),
    ],
    ids=["flush", "carry", "drop", "slices", "by-epoch"],
)
def trained_often(request):
    """Make a Trainer that several tests train, one after the other."""
    return make_trainer(accumulation=request.param)[0]


@many_shapes
@pytest.mark.parametrize("samples", [24, 22, 17, 5])
@pytest.mark.parametrize("epochs", [1, 3])
def test_updates_made_are_those_foretold(trained_often, samples, epochs):
    before = trained_often.progress.updates
    fit(trained_often, X[:samples], Y[:samples], epochs=epochs)
    made = trained_often.progress.updates - before
    assert made == trained_often.accumulation.updates(
        samples=samples, batch_size=2, epochs=epochs
    )


def test_flushed_tail_is_divided_by_what_it_holds():
    trainer, _ = make_trainer()
    kernel, bias = weights_of(trainer.model)
    fit(trainer, X[:3], Y[:3], shuffle=False)
    error = X[:3] @ kernel + bias - Y[:3]
    np.testing.assert_allclose(
        weights_of(trainer.model)[0],
        kernel - 0.05 * 2 * X[:3].T @ error / 3,
        rtol=1e-5,
    )


def test_carried_tail_is_applied_in_the_next_epoch():
    """Two epochs of 3 batches are one window of 4 and one of 2."""
    carried, _ = make_trainer(accumulation=Accumulation(steps=4, tail="carry"))
    fit(carried, X[:6], Y[:6], epochs=2, shuffle=False)
    twice = np.r_[0:6, 0:6]
    flat, _ = make_trainer()
    fit(flat, X[twice], Y[twice], shuffle=False)
    assert_same_weights(carried.model, flat.model)


class StopAfter(keras.callbacks.Callback):
    """Stops training at the end of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == self.epoch


@pytest.mark.parametrize("last_epoch", [0, 1])
def test_carried_tail_is_applied_where_training_stops_early(last_epoch):
    """Epochs of 5 batches are windows of 4 and, where it stops, the rest."""
    carried, applied = make_trainer(
        accumulation=Accumulation(steps=4, tail="carry")
    )
    history = fit(
        carried,
        X[:10],
        Y[:10],
        epochs=9,
        shuffle=False,
        callbacks=[StopAfter(last_epoch)],
    )
    epochs = last_epoch + 1
    assert carried.progress.samples == 10 * epochs
    assert carried.progress.epochs == len(history.history["loss"]) == epochs
    assert len(applied.logs) == carried.progress.updates == epochs + 1
    often = np.tile(np.arange(10), epochs)
    flat, _ = make_trainer()
    fit(flat, X[often], Y[often], shuffle=False)
    assert_same_weights(carried.model, flat.model)


def test_carried_tail_is_applied_where_the_data_run_out():
    carried, _ = make_trainer(accumulation=Accumulation(steps=4, tail="carry"))
    batches = ((X[i : i + 2], Y[i : i + 2]) for i in range(0, 24, 2))
    with pytest.warns(UserWarning, match="nothing for epoch 2"):
        carried.fit(batches, steps_per_epoch=6, epochs=9, verbose=0)
    assert (carried.progress.samples, carried.progress.updates) == (24, 3)
    carried, _ = make_trainer(accumulation=Accumulation(steps=5, tail="carry"))
    batches = ((X[i : i + 2], Y[i : i + 2]) for i in range(0, 24, 2))
    with pytest.warns(UserWarning, match="nothing for epoch 2"):
        carried.fit(batches, steps_per_epoch=6, epochs=9, verbose=0)
    assert (carried.progress.samples, carried.progress.updates) == (24, 3)


def test_carried_tail_counts_among_bad_windows():
    carried, _ = make_trainer(
        accumulation=Accumulation(steps=4, tail="carry"),
        max_consecutive_skips=1,
    )
    bad = np.full_like(X[:10], np.nan)
    with pytest.raises(NonFiniteError):
        fit(carried, bad, Y[:10], epochs=9, callbacks=[StopAfter(0)])
    assert carried.progress.skipped_updates == 2


def test_best_weights_are_restored_after_a_carried_tail():
    best = []

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                best.extend(weights_of(self.model))

    stopping = keras.callbacks.EarlyStopping(
        "loss", patience=1, min_delta=1e9, restore_best_weights=True
    )
    carried, _ = make_trainer(accumulation=Accumulation(steps=4, tail="carry"))
    fit(carried, X[:10], Y[:10], epochs=9, callbacks=[Keep(), stopping])
    assert carried.progress.samples == 20
    for one, other in zip(best, weights_of(carried.model), strict=True):
        np.testing.assert_array_equal(one, other)


def test_last_allowed_update_leaves_a_tail_alone():
    carried, _ = make_trainer(accumulation=Accumulation(steps=4, tail="carry"))
    fit(carried, X[:10], Y[:10], max_updates=2)
    assert carried.progress.updates == 2


@pytest.mark.parametrize(("limit", "updates"), [(1, 1), (2, 2), (None, 2)])
def test_run_that_goes_on_leaves_a_carried_tail_alone_beyond_its_limit(
    limit, updates, tmp_path
):
    """What was saved is an update of 4 batches, and a batch carried on."""

    def make():
        return make_trainer(accumulation=Accumulation(steps=4, tail="carry"))[0]

    saving = [Checkpoint(tmp_path, Every(1, "epochs")), StopAfter(0)]
    fit(make(), X[:10], Y[:10], epochs=9, callbacks=saving)
    resumed = make()
    fit(
        resumed,
        X[:10],
        Y[:10],
        epochs=9,
        max_updates=limit,
        resume_from=tmp_path,
    )
    assert resumed.progress.updates == updates


def test_epoch_too_short_for_an_update_carries_everything(capsys):
    """Four epochs of 3 batches are one window of 8 and one of 4."""
    carried, applied = make_trainer(
        accumulation=Accumulation(steps=8, tail="carry")
    )
    history = fit(carried, X[:6], Y[:6], epochs=4, shuffle=False, verbose=2)
    line = capsys.readouterr().out.splitlines()[0]
    assert line == (
        f"16 samples per update = 8 micro-batches x 2; {carried.plan}"
    )
    assert carried.progress.updates == 2
    assert carried.progress.epochs == 4
    assert history.history["updates"] == [1, 2]
    flat, _ = make_trainer(accumulation=8)
    often = np.tile(np.arange(6), 4)
    fit(flat, X[often], Y[often], shuffle=False)
    assert_same_weights(carried.model, flat.model)


def test_dropped_tail_changes_nothing():
    dropped, _ = make_trainer(accumulation=Accumulation(steps=4, tail="drop"))
    fit(dropped, X[:14], Y[:14], shuffle=False)
    shorter, _ = make_trainer()
    fit(shorter, X[:8], Y[:8], shuffle=False)
    assert dropped.progress.updates == 1
    assert_same_weights(dropped.model, shorter.model)


@pytest.mark.parametrize(
    ("make", "epochs"),
    [
        pytest.param(lambda: (X, Y), 4, id="arrays"),
        pytest.param(lambda: (generate(),), 2, id="generator"),
    ],
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_later_epoch_too_short_for_an_update_drops_everything(make, epochs):
    """Of 12 batches a pass one epoch has 10, and the next one 2."""
    dropped, _ = make_trainer(accumulation=Accumulation(steps=5, tail="drop"))
    history = dropped.fit(
        *make(),
        batch_size=2 if len(make()) == 2 else None,
        steps_per_epoch=10,
        epochs=4,
        shuffle=False,
        verbose=0,
    )
    assert history.epoch == list(range(epochs))
    assert history.history["updates"] == [2, 4][: epochs // 2]
    plain, _ = make_trainer(accumulation=5)
    fit(plain, X[:20], Y[:20], epochs=epochs // 2, shuffle=False)
    assert_same_weights(dropped.model, plain.model)


def test_loader_batch_is_one_update_when_it_is_sliced():
    sliced, _ = make_trainer(accumulation=Accumulation(micro_batch_size=3))
    fit(sliced, batch_size=8, shuffle=False)
    whole, _ = make_trainer(accumulation=1)
    fit(whole, batch_size=8, shuffle=False)
    assert sliced.progress.updates == 3
    assert sliced.progress.micro_batches == 9
    assert_same_weights(sliced.model, whole.model)


# What is printed.
