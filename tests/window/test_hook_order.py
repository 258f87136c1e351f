"""Claims about when hooks are traced, and callbacks beside them called."""

import itertools
import queue

import numpy as np
import pytest
from hooked import (
    M,
    X,
    Y,
    fit,
    make_trainer,
    numbers,
)

from accumtrainer import Callback, Trainer
from accumtrainer.keras_api import keras

pytestmark = pytest.mark.usefixtures("without_xla")


def told_by_its_hooks(told):
    """Make a Trainer's class that notes when its hooks run."""

    class Traced(Trainer):
        def on_micro_batch(self, batch, info):
            told.put("Trainer.on_micro_batch")
            return batch

        def compute_loss(self, batch, info):
            told.put(f"Trainer.compute_loss training={info.training}")
            return super().compute_loss(batch, info)

        def on_accumulate(self, gradients, info):
            told.put("Trainer.on_accumulate")
            return gradients

        def on_apply(self, gradients, info):
            told.put("Trainer.on_apply")
            return gradients

        def after_apply(self, info):
            told.put("Trainer.after_apply")

    return Traced


def test_hooks_are_traced_and_callbacks_called_in_the_order_written():
    # Where code and callbacks change what PyTorch looks at, it looks at windows
    # anew.
    told = queue.SimpleQueue()
    trainer, _ = make_trainer(
        told_by_its_hooks(told), run_eagerly=True, callbacks=[Told(told)]
    )
    fit(trainer, X[:10], Y[:10], validation_data=(X[:2], Y[:2]))
    survey = [
        "Trainer.on_micro_batch",
        "Trainer.compute_loss training=True",
        "Trainer.on_accumulate",
        "Trainer.on_apply",
        "Trainer.after_apply",
    ]
    micro_batch = [
        "Trainer.on_micro_batch",
        "Trainer.compute_loss training=True",
        "Trainer.on_accumulate",
    ]
    assert [told.get() for _ in range(told.qsize())] == [
        *survey,  # once, without effect, before anything is trained
        "on_train_begin",
        "on_epoch_begin 0",
        "on_train_batch_begin 0",
        *micro_batch * 4,
        "Trainer.on_apply",
        "Trainer.after_apply",
        "on_micro_batch 0",
        "on_accumulate 0",
        "on_micro_batch 1",
        "on_accumulate 1",
        "on_micro_batch 2",
        "on_accumulate 2",
        "on_micro_batch 3",
        "on_accumulate 3",
        "on_apply 1",
        "on_train_batch_end 0",
        "on_train_batch_begin 1",
        *micro_batch,
        "Trainer.on_apply",
        "Trainer.after_apply",
        "on_micro_batch 0",
        "on_accumulate 0",
        "on_apply 2",
        "on_train_batch_end 1",
        "on_test_begin",
        "on_test_batch_begin 0",
        "Trainer.compute_loss training=False",  # the survey of evaluation
        "Trainer.compute_loss training=False",
        "on_test_batch_end 0",
        "on_test_end",
        "on_validation_end 2",
        "on_epoch_end 0",
        "on_train_end",
    ]


class Told(Callback):
    """Notes every hook of training that is called on the host."""

    def __init__(self, told):
        super().__init__()
        self._told = told


def _note(name):
    def hook(self, *args, logs=None):
        position = [arg for arg in args if isinstance(arg, int)]
        self._told.put(" ".join([name, *map(str, position)]))

    return hook


for _name in (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_micro_batch",
    "on_accumulate",
    "on_apply",
    "on_test_begin",
    "on_test_end",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_validation_end",
):
    setattr(Told, _name, _note(_name))


def test_compiled_hooks_are_traced_once_for_equal_windows():
    traced = itertools.count()

    class Traced(Trainer):
        def on_micro_batch(self, batch, info):
            next(traced)
            return batch

    trainer, _ = make_trainer(Traced)
    fit(trainer)
    made = next(traced)
    assert made
    fit(trainer, epochs=3)
    assert next(traced) == made + 1


def test_progress_in_callbacks_is_what_streaming_would_show():
    seen = []

    class Look(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self._note("begin")

        def on_micro_batch(self, index, logs=None):
            self._note(f"micro_batch {index}")

        def on_accumulate(self, index, logs=None):
            self._note(f"accumulate {index}")

        def on_apply(self, update, logs=None):
            assert update == self.trainer.progress.updates
            self._note("apply")

        def on_train_batch_end(self, batch, logs=None):
            self._note("end")

        def _note(self, place):
            progress = self.trainer.progress
            seen.append(
                (
                    place,
                    progress.updates,
                    progress.micro_batches,
                    progress.samples,
                )
            )

    trainer, _ = make_trainer(callbacks=[Look()], accumulation=2)
    fit(trainer, X[:8], Y[:8])
    assert seen == [
        ("begin", 0, 0, 0),
        ("micro_batch 0", 0, 1, 2),
        ("accumulate 0", 0, 1, 2),
        ("micro_batch 1", 0, 2, 4),
        ("accumulate 1", 0, 2, 4),
        ("apply", 1, 2, 4),
        ("end", 1, 2, 4),
        ("begin", 1, 2, 4),
        ("micro_batch 0", 1, 3, 6),
        ("accumulate 0", 1, 3, 6),
        ("micro_batch 1", 1, 4, 8),
        ("accumulate 1", 1, 4, 8),
        ("apply", 2, 4, 8),
        ("end", 2, 4, 8),
    ]


def test_callbacks_see_loss_and_weight_of_each_micro_batch():
    seen = []

    class Look(Callback):
        def on_micro_batch(self, index, logs=None):
            seen.append((index, logs["loss"], logs["weight"]))

    trainer, _ = make_trainer(
        callbacks=[Look()], optimizer=keras.optimizers.SGD(0.0)
    )
    fit(trainer, X[:11], Y[:11])
    kernel, bias = [numbers(v) for v in trainer.model.variables]
    errors = ((X @ kernel + bias - Y) ** 2)[:11, 0]
    parts = [errors[first : first + M] for first in range(0, 11, M)]
    assert [index for index, _, _ in seen] == [0, 1, 2, 3, 0, 1]
    assert [weight for _, _, weight in seen] == [len(part) for part in parts]
    np.testing.assert_allclose(
        [loss for _, loss, _ in seen],
        [part.mean() for part in parts],
        rtol=1e-5,
    )
