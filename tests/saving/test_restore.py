"""Claims about `save` and `restore`, and which checkpoint is the best."""

import os

import numpy as np
import pytest
from resumable import (
    NoisyTrainer,
    X,
    Y,
    assert_same,
    assert_same_values,
    everything,
    fit_arrays,
    fit_list,
    make_trainer,
    plain,
    sliced,
)

from accumtrainer import (
    Accumulation,
    CheckpointError,
    LossScale,
    Trainer,
)
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras


def with_long_windows():
    """Make one whose epochs are shorter than its windows."""
    return make_trainer(accumulation=Accumulation(steps=8, tail="carry"))


def test_save_and_restore_put_everything_back(tmp_path):
    trainer = make_trainer(NoisyTrainer)
    fit_arrays(trainer, epochs=1)
    trainer.save(tmp_path / "a")
    other = make_trainer(NoisyTrainer, seed=9)
    other.restore(tmp_path / "a")
    values, progress = everything(trainer)
    restored, restored_progress = everything(other)
    assert progress == restored_progress
    assert_same_values(restored, {k: values[k] for k in restored})
    assert other.seed == 3


SMALL, LARGE = LossScale(initial=8.0, maximum=64.0), LossScale(minimum=512.0)


@pytest.mark.parametrize(
    ("before", "after", "scale"),
    [
        (None, LARGE, LARGE.initial),
        (SMALL, None, 1.0),
        (LossScale(initial=1.0), SMALL, 1.0),
        (SMALL, LARGE, LARGE.minimum),
        (LARGE, SMALL, SMALL.maximum),
    ],
    ids=["on", "off", "kept", "raised", "lowered"],
)
def test_loss_scale_is_one_of_the_options_now(before, after, scale, tmp_path):
    fit_arrays(
        make_trainer(loss_scale=before),
        epochs=1,
        callbacks=[Checkpoint(tmp_path)],
    )
    restored = make_trainer(loss_scale=after)
    restored.restore(tmp_path)
    resumed = make_trainer(loss_scale=after)
    fit_arrays(resumed, epochs=2, resume_from=tmp_path)
    fit_arrays(restored, epochs=1)
    for trainer in (restored, resumed):
        assert trainer.window_logs["loss_scale"] == scale


def test_scale_of_an_older_checkpoint_is_taken_as_it_is():
    trainer = make_trainer(loss_scale=LARGE)
    trainer.train_on_batch(X, Y)
    snapshot = trainer.snapshot()
    assert snapshot.about.pop("scales_loss") is True
    assert snapshot.scales_loss


def test_hooks_get_true_gradients_when_scaling_was_switched_off(tmp_path):
    class Hooked(Trainer):
        def on_accumulate(self, gradients, info):
            return gradients

    scaled = make_trainer(loss_scale=LARGE)
    scaled.train_on_batch(X, Y)
    scaled.save(tmp_path / "a")
    norms = []
    for cls in (Trainer, Hooked):
        trainer = make_trainer(cls)
        trainer.restore(tmp_path / "a")
        trainer.train_on_batch(X, Y)
        norms.append(trainer.window_logs["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    ("make", "fit", "limit"),
    [
        (plain, fit_arrays, {"epochs": 1}),
        (sliced, fit_list, {"epochs": 1}),
        (with_long_windows, fit_list, {"max_updates": 1}),
    ],
)
def test_a_finished_run_saved_by_hand_is_left_as_it_is(
    make, fit, limit, tmp_path
):
    first = make()
    fit(first, **limit)
    first.save(tmp_path / "a")
    again = make()
    history = fit(again, **limit, resume_from=tmp_path / "a")
    assert_same(again, first)
    assert history.epoch == []


def test_weights_alone_go_to_another_optimizer(tmp_path):
    trainer = make_trainer()
    fit_arrays(trainer, epochs=1)
    trainer.save(tmp_path / "a")
    other = make_trainer(optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(CheckpointError, match="saved with Adam.*has SGD"):
        other.restore(tmp_path / "a")
    assert other.progress.updates == 0
    other.restore(tmp_path / "a", weights_only=True)
    assert other.progress.updates == 0
    for new, old in zip(
        other.model.get_weights(), trainer.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(new, old)


def test_optimizer_that_begins_at_the_weights_begins_at_restored_ones(tmp_path):
    trainer = make_trainer()
    fit_arrays(trainer, epochs=1)
    trainer.save(tmp_path / "a")
    optimizer = keras.optimizers.ScheduleFreeAdamW(0.0)
    other = make_trainer(optimizer=optimizer)
    other.restore(tmp_path / "a", weights_only=True)
    fit_arrays(other, epochs=1)
    slots = [v for v in optimizer.variables if v.name.endswith("momentum")]
    weights = trainer.model.trainable_variables
    for slot, weight in zip(slots, weights, strict=True):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(slot), keras.ops.convert_to_numpy(weight)
        )


def test_the_best_checkpoint_can_be_restored(tmp_path):
    trainer = make_trainer()
    history = fit_arrays(
        trainer,
        epochs=5,
        callbacks=[Checkpoint(tmp_path, keep=1, keep_best="loss")],
    )
    best = int(np.argmin(history.history["loss"]))
    other = make_trainer()
    other.restore(tmp_path, which="best")
    assert other.progress.epochs == best + 1


@pytest.mark.parametrize(
    ("name", "updates"), [("loss", 2), ("val_loss", 2), ("val_loss", 5)]
)
def test_the_state_at_a_stop_can_be_the_best(name, updates, tmp_path):
    def fit(**options):
        trainer = plain()
        checkpoint = Checkpoint(tmp_path, keep=1, keep_best=name)
        fit_arrays(
            trainer,
            epochs=2,
            validation_data=(X, Y),
            callbacks=[checkpoint],
            **options,
        )
        return trainer

    fit(max_updates=updates)
    best = plain()
    best.restore(tmp_path, which="best")
    assert best.progress.updates == updates
    assert len(os.listdir(tmp_path)) == 1
    resumed = fit(resume_from="auto")
    assert_same(resumed, fit())


def test_a_state_at_a_stop_need_not_be_the_best(tmp_path):
    trainer = make_trainer(optimizer=keras.optimizers.SGD(-0.1))
    checkpoint = Checkpoint(tmp_path, keep_best="loss")
    fit_arrays(trainer, max_updates=5, callbacks=[checkpoint])
    best = make_trainer(optimizer=keras.optimizers.SGD(-0.1))
    best.restore(tmp_path, which="best")
    assert best.progress.updates == 3
