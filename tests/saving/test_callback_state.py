"""What is copied of callbacks for a checkpoint, and what is not."""

import collections
import enum
import threading
import tracemalloc

import numpy as np
import pytest
from pointed import fit, make_trainer

from accumtrainer import Callback, CheckpointError, Every, Trainer
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras, ops
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


def train(directory, *callbacks, epochs, **options):
    """Train on what stays as it is: the loss is the same in every epoch."""
    trainer = make_trainer(optimizer=keras.optimizers.SGD(0.0))
    saves = Checkpoint(directory)
    return fit(*callbacks, saves, trainer=trainer, epochs=epochs, **options)


def test_stock_callback_goes_on_with_the_least_change_it_was_given(tmp_path):
    def stops():
        return keras.callbacks.EarlyStopping("loss", patience=2, min_delta=1e-4)

    whole = train(tmp_path / "whole", stops(), epochs=9)
    train(tmp_path / "parts", stops(), epochs=2)
    stopper = stops()
    parts = train(tmp_path / "parts", stopper, epochs=9, resume_from="auto")
    assert stopper.min_delta == -1e-4  # as Keras turns it
    assert parts.progress.epochs == whole.progress.epochs == 3


def test_callback_that_was_told_of_a_refused_resume_begins_anew(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    fit(checkpoint, trainer=make_trainer())
    other = keras.Sequential([keras.Input([3]), keras.layers.Dense(4)])
    trainer = Trainer(other, optimizer="sgd", loss="mse")
    x, y = np.ones([24, 3], "float32"), np.ones([24, 4], "float32")
    with pytest.raises(CheckpointError):
        trainer.fit(x, y, callbacks=[checkpoint], resume_from="auto", verbose=0)
    before = checkpoint.checkpoints.names()
    # It ends after as many micro-batches and epochs as the other run.
    trainer.fit(x, y, batch_size=2, callbacks=[checkpoint], verbose=0)
    assert checkpoint.checkpoints.names() != before


class Phase(enum.StrEnum):
    """How far it is."""

    BEGUN = "begun"
    GOING_ON = "going on"


class Counts(keras.callbacks.Callback):
    """Counts in containers of several kinds, two of them somebody else's."""

    Place = collections.namedtuple("Place", ["epoch", "batch"])

    def __init__(self, seen, losses):
        super().__init__()
        self.seen, self.losses = seen, losses
        self.counts = collections.defaultdict(int)
        self.place = self.Place(0, 0)
        self.latest = collections.deque(maxlen=2)
        self.kinds = set()
        self.phase = Phase.BEGUN

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(epoch)
        self.losses[epoch] = logs["loss"]
        self.counts[f"epoch {epoch}"] += 1
        self.place = self.Place(epoch, self.place.batch)
        self.latest.append(epoch)
        self.kinds.add(epoch % 2)
        self.phase = Phase.GOING_ON


def test_containers_of_a_callback_stay_what_they_are(tmp_path):
    train(tmp_path, Counts([], np.zeros(4)), epochs=2)
    seen, losses = [], np.zeros(4)
    counts = Counts(seen, losses)
    phases = []
    notes = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: phases.append(counts.phase)
    )
    train(tmp_path, counts, notes, epochs=4, resume_from="auto")
    assert seen == counts.seen == [0, 1, 2, 3]
    assert losses is counts.losses and losses.all()
    assert counts.counts["epoch 1"] == counts.counts["epoch 3"] == 1
    assert counts.place.epoch == 3
    assert list(counts.latest) == [2, 3]
    assert counts.kinds == {0, 1}
    assert phases[0] is Phase.GOING_ON


class SharesDicts(keras.callbacks.Callback):
    """Begins two attributes as one dict, and a third with its class's list."""

    rows: list = []

    def __init__(self):
        super().__init__()
        self.best = self.last = {}

    def on_epoch_end(self, epoch, logs=None):
        self.last = {"epoch": epoch}
        self.best = self.best or self.last
        self.rows = [*self.rows, epoch]


def test_attributes_that_begin_as_one_object_do_not_stay_one(tmp_path):
    train(tmp_path, SharesDicts(), epochs=2)
    shares = SharesDicts()
    train(tmp_path, shares, epochs=2, resume_from="auto")
    assert shares.best == {"epoch": 0} and shares.last == {"epoch": 1}
    assert shares.rows == [0, 1] and SharesDicts.rows == []


class HasTwoNames(keras.callbacks.Callback):
    """Has one list by two names."""

    def on_train_begin(self, logs=None):
        self.rows = self.table = []

    def on_epoch_end(self, epoch, logs=None):
        self.rows.append(epoch)


def test_list_that_has_two_names_has_them_afterwards(tmp_path):
    train(tmp_path, HasTwoNames(), epochs=1)
    named = HasTwoNames()
    train(tmp_path, named, epochs=2, resume_from="auto")
    assert named.rows == named.table == [0, 1]


class KeepsPlaces(keras.callbacks.Callback):
    """Keeps a list of what has names."""

    def __init__(self):
        super().__init__()
        self.places = []

    def on_epoch_end(self, epoch, logs=None):
        self.places.append(Counts.Place(epoch, 0))


def test_kind_that_is_read_back_as_a_plainer_one_is_named(tmp_path):
    with pytest.warns(UserWarning, match="KeepsPlaces.places holds a Place"):
        train(tmp_path, KeepsPlaces(), epochs=1)


class LogsTensors(keras.callbacks.Callback):
    """Writes what the backend computes into the logs, and keeps it."""

    def __init__(self):
        super().__init__()
        self.last = ops.zeros([2])

    def on_epoch_end(self, epoch, logs=None):
        self.last = self.last + ops.convert_to_tensor([epoch + 1.0, 0.0])
        logs["f1"] = ops.mean(ops.convert_to_tensor([0.9 - 0.1 * epoch]))


def test_numbers_of_the_backend_are_kept(tmp_path):
    def parts():
        stops = keras.callbacks.EarlyStopping("f1", mode="max", patience=9)
        return LogsTensors(), stops, keras.callbacks.History()

    train(tmp_path, *parts(), epochs=2)
    logs, stops, history = parts()
    train(tmp_path, logs, stops, history, epochs=3, resume_from="auto")
    assert history.epoch == [0, 1, 2]
    scores = list(map(ops.convert_to_numpy, history.history["f1"]))
    np.testing.assert_allclose(scores, [0.9, 0.8, 0.7])
    best = ops.convert_to_numpy(stops.best)
    np.testing.assert_allclose(best, 0.9, rtol=1e-6)
    assert stops.wait == 2
    assert ops.is_tensor(logs.last)
    assert ops.convert_to_numpy(logs.last).tolist() == [6.0, 0.0]


def test_attribute_that_holds_itself_ends_no_training():
    callback = keras.callbacks.Callback()
    callback.tree = {}
    callback.tree["root"] = callback.tree
    assert fit(callback).progress.updates == 6


def test_large_array_of_a_callback_is_not_copied_where_nothing_is_restored():
    callback = keras.callbacks.Callback()
    callback.data = np.zeros([4 * 2**20], "uint8")
    tracemalloc.start()
    try:
        CallbackStates([callback], will_set=False)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


class KeepsTools(keras.callbacks.Callback):
    """Keeps what no checkpoint can, as a list of objects, and a file."""

    def __init__(self):
        super().__init__()
        self.rows = []
        self.lock = None

    def on_epoch_end(self, epoch, logs=None):
        self.rows.append(object())
        self.lock = threading.Lock()


def test_changed_attribute_that_is_not_kept_is_named_once(tmp_path):
    with pytest.warns(UserWarning) as warned:
        train(tmp_path, KeepsTools(), epochs=2)
    said = [str(warning.message).split(",")[0] for warning in warned]
    named = [line for line in said if line.startswith("KeepsTools.")]
    assert named == ["KeepsTools.rows has changed in training"], said


def test_newest_checkpoint_of_several_directories_is_gone_on_from(tmp_path):
    rare = Checkpoint(tmp_path / "rare", every=Every(10, "epochs"))
    fit(Checkpoint(tmp_path / "often"), trainer=make_trainer(), epochs=2)
    trainer = make_trainer()
    often = Checkpoint(tmp_path / "often")
    begun = []
    notes = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begun.append(epoch)
    )
    fit(rare, often, notes, trainer=trainer, epochs=3, resume_from="auto")
    assert begun == [2]


def test_directory_of_which_all_is_damaged_gives_way_to_a_good_one(tmp_path):
    def both():
        return Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b", keep=1)

    fit(*both(), trainer=make_trainer(), epochs=1)
    for damaged in (tmp_path / "b").glob("*/state.json"):
        damaged.write_text("")
    trainer = make_trainer()
    with pytest.warns(UserWarning, match="all 1 are damaged"):
        fit(*both(), trainer=trainer, epochs=2, resume_from="auto")
    assert trainer.progress.updates == 12
