"""Claims about what a model holds while it is trained, and after Ctrl-C."""

import numpy as np
import pytest
from sequenced import small_trainer

from accumtrainer import Callback, NonFiniteError, Trainer
from accumtrainer.keras_api import keras
from accumtrainer.observers.callback import HOOKS


def test_callback_reads_the_weights_of_each_update_and_may_write_them():
    seen = []

    class Reset(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(self.model.get_weights()[0])
            self.model.set_weights(
                [np.zeros_like(w) for w in self.model.get_weights()]
            )

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    trainer = Trainer(model, optimizer="sgd", loss="mse", accumulation=2)
    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    trainer.fit(x, y, batch_size=4, epochs=2, callbacks=[Reset()], verbose=0)
    # From zero weights the update of these data is always the same one.
    assert len(seen) == 4
    np.testing.assert_array_equal(seen[1], seen[2])
    assert not np.array_equal(seen[0], seen[1])


@pytest.fixture(scope="module")
def trainer():
    """Give a Trainer whose steps are compiled once."""
    return small_trainer(metrics=["mae"])


@pytest.mark.parametrize("hook", HOOKS)
def test_callback_reads_what_is_current_at_every_hook(trainer, hook):
    seen = []

    class Looks(Callback):
        """Has one hook, as another that looks would do for this one."""

    def look(self, *_, **__):
        iterations = int(self.trainer.optimizer.iterations)
        seen.append(iterations - self.trainer.progress.updates)
        for variable in self.model.variables:
            keras.ops.convert_to_numpy(variable)

    setattr(Looks, hook, look)
    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    options = {"batch_size": 4, "callbacks": [Looks()], "verbose": 0}
    trainer.fit(x, y, epochs=2, validation_data=(x, y), **options)
    trainer.evaluate(x, y, **options)
    trainer.predict(x, **options)
    # Micro-batches are told of when the update has been made.
    late = 1 if hook in ("on_micro_batch", "on_accumulate") else 0
    assert seen and set(seen) == {late}


def test_metrics_are_current_after_an_error_amid_an_evaluation(trainer):
    class Fails(Callback):
        looks_at_model = False

        def on_test_batch_begin(self, batch, logs=None):
            if batch == 1:
                raise RuntimeError("stop here")

    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.evaluate(x, y, batch_size=4, callbacks=[Fails()], verbose=0)
    counts = {
        float(keras.ops.convert_to_numpy(variable))
        for metric in trainer.model.metrics
        for variable in metric.variables
        if variable.path.endswith("count")
    }
    assert 4 in counts


LOOKS = {
    "evaluate": lambda trainer, x, y: trainer.evaluate(x, y, verbose=0),
    "check": lambda trainer, x, y: trainer.check_equivalence((x, y)),
    "plan": lambda trainer, x, y: trainer.memory_plan((x, y), [2]),
    "snapshot": lambda trainer, x, y: trainer.snapshot(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_weights_that_are_set_after_a_look_are_trained(look):
    trainer = small_trainer()
    trainer.optimizer.learning_rate = 0.0
    x, y = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")
    LOOKS[look](trainer, x, y)
    loaded = [np.full(w.shape, 0.5) for w in trainer.model.get_weights()]
    trainer.model.set_weights(loaded)
    trainer.train_on_batch(x, y)
    for variable in trainer.model.trainable_variables:
        assert np.all(keras.ops.convert_to_numpy(variable) == 0.5)


def test_model_is_current_after_too_many_skipped_batches():
    trainer = small_trainer(max_consecutive_skips=1)
    x, y = np.full([4, 3], np.nan, "float32"), np.ones([4, 1], "float32")
    trainer.train_on_batch(x, y)
    with pytest.raises(NonFiniteError):
        trainer.train_on_batch(x, y)
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights())


def test_ctrl_c_while_callbacks_are_closed_is_heeded(trainer):
    import signal

    class Interrupts(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            signal.raise_signal(signal.SIGINT)

    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(x, y, batch_size=4, callbacks=[Interrupts()], verbose=0)


def test_ctrl_c_amid_a_batch_loses_no_weights(monkeypatch):
    import signal

    from accumtrainer.training.engine import Engine

    run_window = Engine.run_window

    def interrupted(self, window):
        signal.raise_signal(signal.SIGINT)
        return run_window(self, window)

    trainer = small_trainer()
    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run_window", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train_on_batch(x, y)
    assert trainer.progress.updates == 1
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights())


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_ctrl_c_after_the_last_batch_of_a_pass_is_heeded(trainer, name):
    import signal

    class Interrupts(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            signal.raise_signal(signal.SIGINT)

        on_predict_end = on_test_end

    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    data = (x, y) if name == "evaluate" else (x,)
    with pytest.raises(KeyboardInterrupt):
        getattr(trainer, name)(*data, callbacks=[Interrupts()], verbose=0)


@pytest.mark.parametrize("is_ignored", [True, False])
def test_ctrl_c_is_handled_as_the_program_says(trainer, is_ignored):
    import signal

    seen = []

    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                signal.raise_signal(signal.SIGINT)
                assert not seen  # amid a window

        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = bool(seen)

    handler = signal.SIG_IGN if is_ignored else lambda *_: seen.append(1)
    made = -trainer.progress.updates
    before = signal.signal(signal.SIGINT, handler)
    try:
        x, y = np.ones([32, 3], "float32"), np.ones([32, 1], "float32")
        trainer.fit(x, y, batch_size=4, callbacks=[Interrupts()], verbose=0)
    finally:
        signal.signal(signal.SIGINT, before)
    made += trainer.progress.updates
    assert (made, seen) == ((4, []) if is_ignored else (3, [1]))


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_ctrl_c_lets_the_running_batch_of_a_pass_finish(trainer, name):
    import signal

    begun, ended = [], []
    passes = {"evaluate": "test", "predict": "predict"}

    class Interrupts(Callback):
        """Presses Ctrl-C when the second batch begins."""

    def begin(self, batch, logs=None):
        begun.append(batch)
        if batch == 1:
            signal.raise_signal(signal.SIGINT)

    hook = f"on_{passes[name]}_batch"
    setattr(Interrupts, f"{hook}_begin", begin)
    setattr(Interrupts, f"{hook}_end", lambda _, n, logs=None: ended.append(n))
    x, y = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
    data = {"evaluate": (x, y), "predict": (x,)}[name]
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        getattr(trainer, name)(
            *data, batch_size=4, callbacks=[Interrupts()], verbose=0
        )
    assert begun == ended == [0, 1]
    assert signal.getsignal(signal.SIGINT) is before


def test_model_is_current_after_an_error_in_a_callback():
    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                raise RuntimeError("stop here")

    trainer = small_trainer()
    x, y = np.ones([32, 3], "float32"), np.ones([32, 1], "float32")
    with pytest.raises(RuntimeError, match="stop here"):
        trainer.fit(x, y, batch_size=4, callbacks=[Fails()], verbose=0)
    assert all(np.isfinite(w).all() for w in trainer.model.get_weights())
    iterations = keras.ops.convert_to_numpy(trainer.optimizer.iterations)
    assert trainer.progress.updates == iterations == 2


def test_ctrl_c_lets_the_running_window_finish():
    import signal

    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    trainer = small_trainer()
    x, y = np.ones([32, 3], "float32"), np.ones([32, 1], "float32")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(x, y, batch_size=4, callbacks=[Interrupts()], verbose=0)
    assert trainer.progress.updates == 2
    assert signal.getsignal(signal.SIGINT) is before
    trainer.fit(x, y, batch_size=4, verbose=0)
    assert trainer.progress.updates == 6
