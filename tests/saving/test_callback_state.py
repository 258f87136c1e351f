"""What is copied of callbacks for a checkpoint, and what is not."""

import threading

import pytest
from pointed import fit, make_trainer

from accumtrainer import Callback, Every
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras
from accumtrainer.saving.callback_state import CallbackStates

pytestmark = pytest.mark.usefixtures("without_xla")


class SharesWithModel(keras.callbacks.Callback):
    """Keeps a list that is the model's too, of which Keras makes its own."""

    def on_train_begin(self, logs=None):
        self.model.seen = []
        self.seen = self.model.seen

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)


class KeepsLock(Callback):
    """Says that something must be kept that cannot be."""

    has_state = True

    def get_state(self):
        return {"lock": threading.Lock()}


def test_list_that_is_also_the_models_is_copied_without_the_model():
    shares = SharesWithModel()
    trainer = make_trainer()
    shares.set_model(trainer.model)
    shares.on_train_begin()
    states = CallbackStates([shares])
    shares.on_train_batch_end(0)
    (state,) = states.get().values()
    shares.on_train_batch_end(1)
    assert type(state["seen"]) is list
    assert state == {"seen": [0]}


def test_state_that_cannot_be_saved_is_named_and_training_goes_on(tmp_path):
    trainer = make_trainer()
    checkpoint = Checkpoint(tmp_path, every=Every(3, "updates"))
    with (
        pytest.warns(UserWarning, match="could not be written"),
        pytest.raises(TypeError, match="KeepsLock-0/lock of type lock"),
    ):
        fit(KeepsLock(), checkpoint, trainer=trainer)
    assert trainer.progress.updates == 6
