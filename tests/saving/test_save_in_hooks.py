"""Claims about `Trainer.save` where a callback calls it, in any hook."""

import pytest
from resumable import X, Y, assert_same, fit_arrays, fit_list, make_trainer

from accumtrainer import Accumulation, Callback

HOOKS = {
    "on_train_begin": [0],
    "on_epoch_begin": [0, 1],
    "on_train_batch_begin": [0, 2, 4],
    "on_micro_batch": [0, 5],
    "on_apply": [0, 3],
    "on_train_batch_end": [0, 2, 3],
    "on_validation_end": [1],
    "on_epoch_end": [0, 1, 2],
    "on_train_end": [0],
}
"""At which of their calls the tests save."""


class Ended(Callback):
    """Keeps which epochs have ended."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


def saving(name, nth, path):
    """Make a callback that saves at some call of one of its hooks."""

    def save(self, *args, logs=None):
        self.calls += 1
        if self.calls == nth + 1:
            self.trainer.save(path)

    cls = type("Saving", (Callback,), {name: save, "needs_trainer": True})
    callback = cls()
    callback.calls = 0
    return callback


def fit(fit_data, *callbacks, **options):
    """Train 3 epochs of 3 updates, and return the Trainer."""
    trainer = make_trainer(accumulation=Accumulation(steps=2))
    callbacks, validation_data = list(callbacks), (X, Y)
    history = fit_data(
        trainer, callbacks=callbacks, validation_data=validation_data, **options
    )
    return trainer, history


@pytest.mark.parametrize("fit_data", [fit_arrays, fit_list])
@pytest.mark.parametrize(
    ("name", "nth"), [(name, nth) for name in HOOKS for nth in HOOKS[name]]
)
def test_run_goes_on_from_where_a_hook_saved(name, nth, fit_data, tmp_path):
    path, before, after = tmp_path / "saved", Ended(), Ended()
    whole, history = fit(fit_data, before, saving(name, nth, path), after)
    assert before.epochs == after.epochs == [0, 1, 2]
    before, after = Ended(), Ended()
    never = saving(name, 10**6, path)
    resumed, resumed_history = fit(
        fit_data, before, never, after, resume_from=path
    )
    assert_same(whole, resumed)
    assert before.epochs == after.epochs == [0, 1, 2]
    assert resumed_history.history == history.history
