"""Variables beside the model that change: a run goes on with them."""

import math

import numpy as np
import pytest
from keras_core_gaps import keras_3_only
from resumable import DEFAULTS, X, Y

from accumtrainer import Every, Trainer
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras, ops
from accumtrainer.saving.callback_state import CallbackStates
from accumtrainer.saving.checkpoint import read_checkpoint, write_checkpoint
from accumtrainer.saving.snapshot import find_variables


class Weighted(keras.losses.Loss):
    """Multiplies a mean squared error by a variable, or what it holds."""

    def __init__(self, *weights):
        super().__init__()
        self.weights = {"all": weights}

    def call(self, y_true, y_pred):
        loss = ops.mean(ops.square(y_true - y_pred), axis=-1)
        for weight in self.weights["all"]:
            inner = isinstance(weight, keras.losses.Loss)
            loss = loss * (weight.call(y_true, y_pred) if inner else weight)
        return loss


class Grow(keras.callbacks.Callback):
    """Multiplies a variable in every update; may hold it, or know it."""

    def __init__(self, changed, **held):
        super().__init__()
        self.grow = lambda: changed.assign(changed * 1.5)
        vars(self).update(held)

    def on_train_batch_begin(self, batch, logs=None):
        self.grow()


def variable(value=1.0):
    return keras.Variable(value, trainable=False, name="weight")


def in_loss_weights(weight):
    return {"loss": ["mse"], "loss_weights": [weight]}, Grow(weight)


def in_loss_weights_and_callback(weight):
    options, _ = in_loss_weights(weight)
    return options, Grow(weight, weight=weight)


def in_loss(weight):
    return {"loss": Weighted(weight)}, Grow(weight)


def in_loss_of_loss(weight):
    return {"loss": Weighted(variable(), Weighted(weight))}, Grow(weight)


def in_callback(weight):
    # That a function reads it shows nobody who holds it.
    def loss(y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred), axis=-1) * weight

    return {"loss": loss}, Grow(weight, weight=weight)


def in_list_of_callback(weight):
    options, _ = in_callback(weight)
    return options, Grow(weight, weights=[variable(), {"one": weight}])


PLACES = [
    pytest.param(
        place, marks=keras_3_only("takes no variables in loss_weights")
    )
    for place in (in_loss_weights, in_loss_weights_and_callback)
] + [in_loss, in_loss_of_loss, in_callback, in_list_of_callback]


def make_trainer(**options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(1e-3)
    return Trainer(model, optimizer=optimizer, **DEFAULTS | options)


def fit(trainer, *callbacks, **options):
    options = {"batch_size": 4, "epochs": 2, "verbose": 0} | options
    trainer.fit(X, Y, callbacks=list(callbacks), **options)


@pytest.mark.parametrize("place", PLACES)
def test_run_goes_on_with_a_variable_that_a_callback_changes(place, tmp_path):
    ends = []
    for updates in ([math.inf], [2, math.inf]):  # amid the first epoch
        for last in updates:
            weight = variable()
            options, grow = place(weight)
            trainer = make_trainer(**options)
            saves = Checkpoint(
                tmp_path / str(len(updates)), Every(1, "updates")
            )
            # What stops is no error, so that the last checkpoint is its own.
            end = {} if last == math.inf else {"max_updates": last}
            fit(trainer, grow, saves, resume_from="auto", **end)
        ends.append([float(weight.value), *trainer.model.get_weights()])
    assert ends[0][0] == 1.5**6
    for whole, pieces in zip(*ends, strict=True):
        np.testing.assert_array_equal(whole, pieces)


def test_checkpoint_without_losses_or_with_others_leaves_them(tmp_path):
    weight = variable(2.0)
    trainer = make_trainer(loss=Weighted(weight))
    fit(trainer, epochs=1)
    trainer.save(tmp_path / "new")
    snapshot = read_checkpoint(tmp_path / "new")
    (value,) = snapshot.variables["losses"].values()
    assert value == 2.0
    del snapshot.variables["losses"]
    write_checkpoint(tmp_path / "old", snapshot)
    weight.assign(3.0)
    trainer.restore(tmp_path / "old")
    assert float(weight.value) == 3.0
    # Of a loss without variables nothing is to be put back.
    make_trainer(loss="mse").restore(tmp_path / "new")
    other = make_trainer(loss=Weighted(weight, variable()))
    with pytest.warns(UserWarning, match="other variables"):
        other.restore(tmp_path / "new")
    assert float(weight.value) == 3.0


def test_weights_alone_leave_the_losses(tmp_path):
    weight = variable(2.0)
    trainer = make_trainer(loss=Weighted(weight))
    fit(trainer, epochs=1)
    trainer.save(tmp_path / "a")
    weight.assign(3.0)
    trainer.restore(tmp_path / "a", weights_only=True)
    assert float(weight.value) == 3.0
    trainer.restore(tmp_path / "a")
    assert float(weight.value) == 2.0


def test_variable_that_is_saved_anyway_is_none_of_a_callbacks():
    weight, other = variable(), variable()
    callback = Grow(weight, kept=[weight, other])
    states = CallbackStates([callback], saved=lambda: [weight])
    weight.assign(2.0)
    assert states.get() == {}
    other.assign(3.0)
    (state,) = states.get().values()
    assert list(state.values()) == [3.0]
    states.set({})
    assert float(weight.value) == 2.0
    assert float(other.value) == 1.0


def test_variable_that_a_callback_makes_in_training_is_named_once(tmp_path):
    class Makes(keras.callbacks.Callback):
        weight = None

        def on_epoch_end(self, epoch, logs=None):
            self.weight = variable(epoch)

    with pytest.warns(UserWarning, match="was made in training") as warned:
        fit(make_trainer(loss="mse"), Makes(), Checkpoint(tmp_path))
    said = [w for w in warned if "made in training" in str(w.message)]
    assert len(said) == 1
    with pytest.warns(UserWarning, match="Makes.weight .* begins anew"):
        fit(make_trainer(loss="mse"), Makes(), epochs=3, resume_from=tmp_path)


def test_variables_are_found_at_any_depth_and_once():
    one, chain = variable(1.0), []
    for _ in range(5000):
        chain = [one, chain]
    assert [place for place, _ in find_variables(chain)] == ["/0"]


def test_variable_of_a_callback_that_has_another_shape_begins_anew():
    before, now = (
        Grow(variable(), weight=keras.Variable(value))
        for value in ([1.0, 2.0], [1.0])
    )
    states = CallbackStates([before])
    before.weight.assign([3.0, 4.0])
    with pytest.warns(UserWarning, match="Grow.weight .* begins anew"):
        CallbackStates([now]).set(states.get())
    np.testing.assert_array_equal(ops.convert_to_numpy(now.weight), [1.0])
