"""Claims about going on with other options, data or backends."""

import numpy as np
import pytest
from resumable import (
    X,
    Y,
    assert_same,
    fit_arrays,
    fit_arrays_by_steps,
    fit_dataset,
    fit_generator,
    fit_list,
    list_batches,
    make_trainer,
    plain,
)

from accumtrainer import (
    CheckpointError,
    DataError,
    Every,
    Trainer,
)
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import BACKEND, keras


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
