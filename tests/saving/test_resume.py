"""Claims about going on: as if training had never stopped, bit for bit."""

import math
import os
import signal

import numpy as np
import pytest
from quickest import JIT_COMPILE, RUN_EAGERLY

from accumtrainer import (
    Accumulation,
    Batch,
    Callback,
    CheckpointError,
    DataError,
    Every,
    LossScale,
    Preempted,
    Trainer,
)
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import BACKEND, keras, ops
from accumtrainer.saving.checkpoint import read_checkpoint
from accumtrainer.saving.snapshot import PARTS

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


class OftenShuffled(Batches):
    """Shuffles its own order before every epoch, too."""

    def on_epoch_begin(self):
        self.order = self.rng.permutation(24)


def fit_later_epochs_of_dataset(trainer, **options):
    options = {"epochs": 5, "initial_epoch": 2, "verbose": 0} | options
    return trainer.fit(OftenShuffled(), **options)


def list_batches():
    return [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 24, 4)]


def fit_list(trainer, **options):
    batches = list_batches()
    return trainer.fit(batches, **{"epochs": 3, "verbose": 0} | options)


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


def fit_generator(trainer, **options):
    batches = (b for _ in range(3) for b in list_batches())
    options = {"epochs": 3, "verbose": 0, "fast_forward": True} | options
    return trainer.fit(batches, steps_per_epoch=6, **options)


def fit_arrays_by_steps(trainer, **options):
    return fit_arrays(trainer, steps_per_epoch=4, **options)


def fit_validating(trainer, **options):
    options |= {"validation_every": Every(2, "updates")}
    return fit_arrays(trainer, validation_data=(X, Y), **options)


def plain():
    return make_trainer()


def noisy_with_carried_tail():
    schedule = keras.optimizers.schedules.CosineDecay(0.02, 9)
    optimizer = keras.optimizers.AdamW(schedule, use_ema=True)
    return make_trainer(
        NoisyTrainer,
        optimizer=optimizer,
        accumulation=Accumulation(steps=4, tail="carry"),
    )


def sliced():
    return make_trainer(accumulation=Accumulation(micro_batch_size=2))


def with_long_windows():
    """Make one whose epochs are shorter than its windows."""
    return make_trainer(accumulation=Accumulation(steps=8, tail="carry"))


def scaled():
    """Let a loss scale grow fast, overflow, and fall again."""
    scale = LossScale(initial=2.0**124, growth_interval=1, maximum=2.0**127)
    return make_trainer(loss_scale=scale)


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
    "list": (plain, fit_list),
    "list_by_steps": (plain, fit_list_by_steps),
    "list_by_too_many_steps": (plain, fit_list_by_too_many_steps),
    "short_generator": (noisy_with_carried_tail, fit_short_generator),
    "generator": (plain, fit_generator),
    "later_epochs": (plain, fit_later_epochs),
    "later_epochs_of_dataset": (plain, fit_later_epochs_of_dataset),
}


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


class At(keras.callbacks.Callback):
    """Do something after a number of updates."""

    def __init__(self, updates, action):
        super().__init__()
        self.updates, self.action, self.seen = updates, action, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.updates:
            self.action()


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted)],
)
def test_a_signal_saves_and_the_run_goes_on(number, error, tmp_path):
    whole = plain()
    history = fit_arrays(whole)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    stopped = plain()
    with pytest.raises(error) as raised:
        fit_arrays(
            stopped,
            callbacks=[
                At(4, lambda: signal.raise_signal(number)),
                Checkpoint(tmp_path, Every(100, "updates")),
            ],
        )
    if error is Preempted:
        assert raised.value.code == 143
    assert stopped.progress.updates == 4
    now = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert now == handlers
    pieces = plain()
    last = fit_arrays(
        pieces, callbacks=[Checkpoint(tmp_path)], resume_from="auto"
    )
    assert_same(pieces, whole)
    assert last.history == history.history


def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    def press_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    trainer = plain()
    checkpoint = Checkpoint(tmp_path, Every(100, "updates"))
    with pytest.raises(KeyboardInterrupt):
        fit_arrays(trainer, callbacks=[At(2, press_twice), checkpoint])
    assert checkpoint.checkpoints.names() == []


class Broken(Batches):
    """Raises in the middle of the second epoch."""

    taken = 0

    def __getitem__(self, index):
        self.taken += 1
        if self.taken == 9:
            raise OSError("the disk of the data is gone")
        return super().__getitem__(index)


def test_data_that_fail_lose_no_update(tmp_path):
    whole = plain()
    fit_dataset(whole)
    checkpoint = Checkpoint(tmp_path, Every(100, "updates"))
    broken = Broken()
    broken._workers = 1
    with pytest.raises(OSError, match="is gone"):
        plain().fit(broken, epochs=3, verbose=0, callbacks=[checkpoint])
    assert len(checkpoint.checkpoints.names()) == 1
    pieces = plain()
    fit_dataset(pieces, callbacks=[Checkpoint(tmp_path)], resume_from="auto")
    assert_same(pieces, whole)


def test_a_callback_that_raises_leaves_the_last_checkpoint(tmp_path):
    def fail():
        raise RuntimeError("out of ideas")

    checkpoint = Checkpoint(tmp_path, Every(2, "updates"))
    with pytest.raises(RuntimeError, match="out of ideas"):
        fit_arrays(plain(), callbacks=[checkpoint, At(3, fail)])
    assert checkpoint.checkpoints.newest().progress["updates"] == 2


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
    trainer = make_trainer(optimizer=keras.optimizers.SGD(-0.01))
    checkpoint = Checkpoint(tmp_path, keep_best="loss")
    fit_arrays(trainer, max_updates=5, callbacks=[checkpoint])
    best = make_trainer(optimizer=keras.optimizers.SGD(-0.01))
    best.restore(tmp_path, which="best")
    assert best.progress.updates == 3


def test_another_model_is_refused_and_nothing_changes(tmp_path):
    trainer = make_trainer()
    fit_arrays(trainer, epochs=1)
    trainer.save(tmp_path / "a")
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    before = model.get_weights()
    other = Trainer(model, optimizer="adam", loss="mse")
    with pytest.raises(CheckpointError, match=r"shape \(3, 8\).*\(3, 2\)"):
        other.restore(tmp_path / "a")
    with pytest.raises(CheckpointError, match="same model"):
        fit_arrays(other, resume_from=tmp_path / "a")
    for new, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(new, old)
    assert other.progress.updates == 0


def test_a_changed_k_keeps_updates_and_optimizer(tmp_path):
    first = make_trainer(accumulation=2)
    fit_arrays(first, epochs=2, callbacks=[Checkpoint(tmp_path)], shuffle=False)
    updates = first.progress.updates
    other = make_trainer(accumulation=3)
    fit_arrays(other, epochs=3, resume_from=tmp_path, shuffle=False)
    assert other.progress.updates == updates + 2
    assert int(other.optimizer.iterations.value) == updates + 2


def test_another_batch_size_goes_on_from_the_same_sample(tmp_path):
    checkpoint = Checkpoint(tmp_path, Every(1, "updates"))
    fit_arrays(make_trainer(), callbacks=[checkpoint], max_updates=2)
    other = make_trainer(accumulation=4)
    fit_arrays(other, batch_size=2, epochs=1, resume_from=tmp_path)
    assert other.progress.samples == 24
    with pytest.raises(DataError, match="batch_size must divide"):
        fit_arrays(make_trainer(), batch_size=3, resume_from=tmp_path)
    with pytest.raises(DataError, match="samples=20"):
        make_trainer().fit(
            X[:20], Y[:20], batch_size=4, resume_from=tmp_path, verbose=0
        )


@pytest.mark.parametrize("end", [{"max_updates": 1}, {"epochs": 1}])
@pytest.mark.parametrize("fit", [fit_arrays, fit_dataset])
def test_other_steps_per_epoch_would_go_elsewhere(fit, end, tmp_path):
    fit(plain(), steps_per_epoch=4, callbacks=[Checkpoint(tmp_path)], **end)
    for steps in (6, None):
        with pytest.raises(DataError, match="batches=6, and batches=4"):
            fit(plain(), steps_per_epoch=steps, resume_from=tmp_path)


def test_steps_per_epoch_count_batches_of_one_size(tmp_path):
    fit_arrays_by_steps(plain(), epochs=1, callbacks=[Checkpoint(tmp_path)])
    with pytest.raises(DataError, match="batch_size=2, and batch_size=4"):
        fit_arrays_by_steps(plain(), batch_size=2, resume_from=tmp_path)


def test_steps_per_epoch_of_a_whole_pass_may_be_left_out(tmp_path):
    checkpoint = Checkpoint(tmp_path, Every(1, "updates"))
    options = {"epochs": 2, "steps_per_epoch": 6}
    fit_arrays(plain(), callbacks=[checkpoint], max_updates=4, **options)
    trainer = plain()
    fit_arrays(trainer, epochs=2, resume_from=tmp_path)
    assert trainer.progress.samples == 2 * len(X)


def test_a_generator_is_refused_unless_it_may_be_run_through(tmp_path):
    checkpoint = Checkpoint(tmp_path, Every(1, "updates"))
    fit_generator(make_trainer(), callbacks=[checkpoint], max_updates=2)
    with pytest.raises(DataError, match="fast_forward=True"):
        fit_generator(make_trainer(), resume_from=tmp_path, fast_forward=False)


def test_data_in_another_order_are_refused(tmp_path):
    checkpoint = Checkpoint(tmp_path, Every(1, "updates"))
    fit_list(make_trainer(), callbacks=[checkpoint], max_updates=2)
    with pytest.raises(DataError, match="seed"):
        make_trainer().fit(
            list_batches()[::-1], resume_from=tmp_path, verbose=0
        )


class Resumable:
    """An iterable whose iterators know their place, as Grain's do."""

    def __iter__(self):
        return ResumableIterator()


class ResumableIterator:
    def __init__(self):
        self.batches, self.index = list_batches(), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.index == len(self.batches):
            raise StopIteration
        self.index += 1
        return self.batches[self.index - 1]

    def get_state(self):
        return {"index": self.index, "raw": b"\x00\xff"}

    def set_state(self, state):
        assert state["raw"] == b"\x00\xff"
        self.index = state["index"]


def test_an_iterator_that_knows_its_place_is_asked(tmp_path):
    whole = plain()
    whole.fit(Resumable(), epochs=2, verbose=0)
    for updates in (2, None):
        pieces = plain()
        pieces.fit(
            Resumable(),
            epochs=2,
            verbose=0,
            max_updates=updates,
            callbacks=[Checkpoint(tmp_path)],
            resume_from="auto",
        )
    assert_same(pieces, whole)


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="tf.data belongs to TensorFlow"
)
def test_shuffled_tf_data_goes_on_if_it_has_a_seed(tmp_path):
    import tensorflow as tf

    def make_data(seed):
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        return data.shuffle(24, seed=seed).batch(4)

    whole = plain()
    whole.fit(make_data(3), epochs=3, verbose=0)
    for updates in (1, 5, None):
        pieces = plain()
        pieces.fit(
            make_data(3),
            epochs=3,
            verbose=0,
            max_updates=updates,
            callbacks=[Checkpoint(tmp_path, keep=9)],
            resume_from="auto",
        )
    assert_same(pieces, whole)
    middle = sorted(tmp_path.iterdir())[0]
    with pytest.raises(DataError, match="seed"):
        plain().fit(make_data(4), resume_from=middle, verbose=0)


def test_a_checkpoint_of_another_backend_says_what_differs(tmp_path):
    trainer = make_trainer()
    fit_arrays(trainer, epochs=1)
    snapshot = trainer.snapshot()
    other = "jax" if BACKEND == "tensorflow" else "tensorflow"
    snapshot.about["backend"] = other
    from accumtrainer.saving.checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "a", snapshot)
    again = make_trainer()
    with pytest.warns(UserWarning, match=f"made on {other}.*random"):
        again.restore(tmp_path / "a")
    assert again.progress.updates == trainer.progress.updates


def test_a_snapshot_holds_all_that_lasts():
    trainer = make_trainer(NoisyTrainer)
    fit_arrays(trainer, epochs=1)
    program = trainer._engine._program
    assert set(program.variables.parts) == set(PARTS)
    lasting = {id(v) for part in program.variables.parts.values() for v in part}
    passing = {id(v) for v in program.variables.passing}
    assert {id(v) for v in program.variables.all_variables} == lasting | passing
    held = everything(trainer)[0]
    assert {k: len(v) for k, v in held.items()} == {
        k: len(v) for k, v in program.variables.parts.items()
    }


def test_auto_needs_a_place_to_look():
    with pytest.raises(ValueError, match="Checkpoint among the callbacks"):
        fit_arrays(make_trainer(), resume_from="auto")


def test_a_path_must_hold_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="which has none"):
        fit_arrays(make_trainer(), resume_from=tmp_path)


def test_a_save_that_fails_is_told_and_tried_again(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path, Every(1, "updates"))
    write, attempts = checkpoint.checkpoints.write, []

    def fail_once(snapshot, score=None):
        attempts.append(snapshot)
        if len(attempts) == 2:
            raise OSError(28, "No space left on device")
        return write(snapshot, score)

    monkeypatch.setattr(checkpoint.checkpoints, "write", fail_once)
    with pytest.warns(UserWarning, match="No space left.*tries again"):
        fit_arrays(make_trainer(), callbacks=[checkpoint], max_updates=4)
    assert checkpoint.checkpoints.newest().progress["updates"] == 4


def test_a_last_save_that_fails_is_an_error(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path)

    def fail(snapshot, score=None):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checkpoint.checkpoints, "write", fail)
    trainer = make_trainer()
    with pytest.raises(OSError, match="Read-only"):
        fit_arrays(trainer, epochs=1, callbacks=[checkpoint])
    assert trainer.progress.updates == 3


def test_a_trial_saves_nothing(tmp_path):
    fit_arrays(
        make_trainer(), callbacks=[Checkpoint(tmp_path)], fast_dev_run=True
    )
    assert os.listdir(tmp_path) == []
