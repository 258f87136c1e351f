"""Callbacks on the host: validation, dispatch, opening, closing."""

import csv

import numpy as np
import pytest
from watching import Fetch

from accumtrainer.keras_api import keras
from accumtrainer.observers.callback import HOOKS, Callback
from accumtrainer.observers.dispatcher import Dispatcher
from accumtrainer.observers.logs import Logs
from accumtrainer.saving.callback_state import CallbackStates

pytestmark = pytest.mark.any_backend

# TensorFlow's variables do not know the newest protocol of NumPy, which says
# so when a stock callback saves or reads one.
ignore_old_protocol = pytest.mark.filterwarnings("ignore:__array__ impl")

PARAMS = {"verbose": 0, "epochs": 2, "steps": 3, "samples": None}


class Recorder(Callback):
    """Writes down every hook it is called at."""

    def __init__(self, name="ours", record=None):
        super().__init__()
        self.name = name
        self.record = [] if record is None else record


def _recording_hook(hook):
    def recorded(self, *args, logs=None):
        self.record.append((self.name, hook))

    return recorded


for _hook in HOOKS:
    setattr(Recorder, _hook, _recording_hook(_hook))


def make_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def make_dispatcher(callbacks, **options):
    options = {"model": make_model(), "trainer": None, **options}
    return Dispatcher(callbacks, params=PARAMS, **options)


# --- Logs ---


def test_hook_names_are_the_methods_of_callback():
    methods = {name for name in dir(Callback) if name.startswith("on_")}
    assert methods - {"on_batch_begin", "on_batch_end"} == set(HOOKS)
    assert len(HOOKS) == len(set(HOOKS))


@pytest.mark.parametrize("nothing", [None, [], [None]])
def test_no_callbacks_listen_to_nothing(nothing):
    dispatcher = make_dispatcher(nothing)
    assert dispatcher.callbacks == ()
    assert dispatcher.history is None
    for name in HOOKS:
        assert not dispatcher.listens(name)
        dispatcher.call(name, 0, {})


def test_nested_callbacks_are_called_in_the_order_given():
    a, b, c = Callback(), Callback(), Callback()
    assert make_dispatcher(a).callbacks == (a,)
    assert make_dispatcher([a, (b, [c])]).callbacks == (a, b, c)
    bundle = keras.callbacks.CallbackList([a, b])
    assert make_dispatcher([bundle, c]).callbacks == (a, b, c)


def test_loggers_are_opened_before_the_others_and_called_and_closed_after():
    record = []
    logger, other = Recorder("logger", record), Recorder("other", record)
    logger.is_logger = True
    with make_dispatcher([logger, other]).training() as dispatcher:
        dispatcher.call("on_epoch_begin", 0, {})
    assert [name for name, _ in record] == [
        *("logger", "other"),
        *("other", "logger"),
        *("other", "logger"),
    ]


def test_class_instead_of_object_is_refused():
    with pytest.raises(TypeError, match=r"the class EarlyStopping.*Early.*\("):
        make_dispatcher([keras.callbacks.EarlyStopping])


@pytest.mark.parametrize("stranger", [print, "csv", {"a": 1}, 3])
def test_what_is_not_a_callback_is_refused(stranger):
    with pytest.raises(TypeError, match=r"callbacks must hold .*Received: "):
        make_dispatcher([Callback(), stranger])


class OfNobody:
    """Has all hooks, though no class of Keras's."""

    __slots__ = ("_called",)

    def __init__(self, called):
        self._called = called

    def __getattr__(self, name):
        if not name.startswith(("on_", "set_")):
            raise AttributeError(name)
        return lambda *args, **options: self._called.append(name)


def test_callback_may_have_all_hooks_without_a_class_of_keras():
    called = []
    callback = OfNobody(called)
    with make_dispatcher([callback]).training() as dispatcher:
        dispatcher.call("on_epoch_end", 0, {"loss": 1.0})
        assert CallbackStates([callback]).get() is not None
    hooks = ["on_train_begin", "on_epoch_end", "on_train_end"]
    assert called == ["set_model", "set_params", *hooks]


class ClipsGradients(Callback):
    def on_apply(self, gradients, info):
        return gradients


class Augments(Callback):
    def on_micro_batch(self, batch, info):
        return batch


class LooksAtInfo(keras.callbacks.Callback):
    def on_accumulate(self, info):
        return None


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (ClipsGradients(), r"ClipsGradients\.on_apply takes \(gradients, info"),
        (Augments(), r"Augments\.on_micro_batch takes \(batch, info\)"),
        (LooksAtInfo(), r"LooksAtInfo\.on_accumulate takes \(info\)"),
        (
            keras.callbacks.LambdaCallback(on_apply=lambda gradients, info: 0),
            r"LambdaCallback\.on_apply .*subclass of Trainer.*\(update, logs\)",
        ),
    ],
)
def test_hook_written_like_a_trainers_is_refused(callback, message):
    with pytest.raises(ValueError, match=message):
        make_dispatcher([callback])


def test_hook_without_a_signature_is_accepted():
    callback = keras.callbacks.LambdaCallback(on_apply=max)
    assert make_dispatcher(callback).listens("on_apply")


def test_refusal_comes_before_the_model_is_touched():
    model = make_model()
    with pytest.raises(TypeError):
        make_dispatcher(["no callback"], model=model, add_history=True)
    assert getattr(model, "history", None) is None


def test_callbacks_are_told_model_params_and_trainer():
    ours, stock = Callback(), keras.callbacks.TerminateOnNaN()
    model, trainer = make_model(), object()
    make_dispatcher([ours, stock], model=model, trainer=trainer)
    assert ours.trainer is trainer
    assert ours.model is stock.model is model
    assert ours.params is stock.params is PARAMS


def test_callback_has_no_trainer_before_one_is_set():
    assert Callback().trainer is None


# --- Who listens ---


def test_only_overriding_callbacks_are_called():
    class Watcher(Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_apply(self, update, logs=None):
            self.seen.append((update, logs))

    watcher = Watcher()
    dispatcher = make_dispatcher([watcher, Callback()])
    assert [n for n in HOOKS if dispatcher.listens(n)] == ["on_apply"]
    dispatcher.call("on_micro_batch", 0, {"loss": 1.0})
    dispatcher.call("on_apply", 4, {"loss": 2.0})
    dispatcher.call("on_apply", 5)
    assert watcher.seen == [(4, {"loss": 2.0}), (5, {})]


def test_every_hook_reaches_a_callback_that_overrides_it():
    recorder = Recorder()
    dispatcher = make_dispatcher(recorder)
    for name in HOOKS:
        assert dispatcher.listens(name)
        dispatcher.call(name, 0, {})
    assert recorder.record == [("ours", name) for name in HOOKS]


def test_older_name_of_a_batch_hook_is_called():
    dispatcher = make_dispatcher(keras.callbacks.TerminateOnNaN())
    model = dispatcher.callbacks[0].model
    model.stop_training = False
    assert dispatcher.listens("on_train_batch_end")
    assert not dispatcher.listens("on_train_batch_begin")
    dispatcher.call("on_train_batch_end", 0, Logs(Fetch({"loss": 1.0})))
    assert not model.stop_training
    dispatcher.call("on_train_batch_end", 1, Logs(Fetch({"loss": np.nan})))
    assert model.stop_training


def test_hooks_set_on_the_object_are_called():
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append((epoch, logs)),
        on_train_batch_end=lambda batch, *, logs: seen.append((batch, logs)),
        on_apply=lambda update, logs: seen.append((update, logs)),
        on_train_begin=lambda logs: seen.append(logs),
    )
    dispatcher = make_dispatcher(callback)
    dispatcher.call("on_train_begin")
    dispatcher.call("on_epoch_begin", 0)
    dispatcher.call("on_train_batch_end", 1, {"loss": 0.5})
    dispatcher.call("on_apply", 2, {"loss": 0.25})
    assert seen == [{}, (0, {}), (1, {"loss": 0.5}), (2, {"loss": 0.25})]


def test_stock_callback_does_not_listen_to_our_hooks():
    dispatcher = make_dispatcher(keras.callbacks.EarlyStopping())
    assert not dispatcher.listens("on_apply")
    assert not dispatcher.listens("on_validation_end")


# --- History and progress bar ---


def test_history_sees_what_callbacks_wrote():
    class WritesRate(Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["lr"] = 0.1

    class Bar(Callback):
        pass

    bar, writer, model = Bar(), WritesRate(), make_model()
    dispatcher = make_dispatcher(
        writer, model=model, add_history=True, progress_bar=bar
    )
    assert dispatcher.callbacks == (writer, dispatcher.history, bar)
    assert model.history is dispatcher.history
    with dispatcher.training():
        for epoch in range(2):
            logs = Logs(Fetch({"loss": 0.5 / (epoch + 1)}))
            dispatcher.call("on_epoch_end", epoch, logs)
    assert dispatcher.history.history == {"loss": [0.5, 0.25], "lr": [0.1] * 2}
    assert dispatcher.history.epoch == [0, 1]


def test_history_of_the_user_is_the_history():
    own = keras.callbacks.History()
    dispatcher = make_dispatcher([own, Callback()], add_history=True)
    assert dispatcher.history is own
    assert len(dispatcher.callbacks) == 2


# --- Opening and closing ---

BLOCKS = {
    "training": ("on_train_begin", "on_train_end"),
    "testing": ("on_test_begin", "on_test_end"),
    "predicting": ("on_predict_begin", "on_predict_end"),
}


class Stock(keras.callbacks.Callback):
    """A callback that knows nothing of this library."""

    def __init__(self, record):
        super().__init__()
        self.record = record

    def on_train_end(self, logs=None):
        self.record.append(("stock", "on_train_end"))

    on_test_end = on_predict_end = on_train_end


class FailsToClose(Callback):
    def on_train_end(self, logs=None):
        raise OSError("disk full")

    on_test_end = on_predict_end = on_train_end


@pytest.mark.parametrize("block", BLOCKS)
def test_block_opens_and_closes_with_the_last_logs(block):
    seen = []
    begin, end = BLOCKS[block]
    hooks = {
        begin: lambda logs: seen.append((begin, logs)),
        end: lambda logs: seen.append((end, logs)),
    }
    dispatcher = make_dispatcher(keras.callbacks.LambdaCallback(**hooks))
    with getattr(dispatcher, block)():
        dispatcher.last_logs = {"loss": 0.5}
    assert seen == [(begin, {}), (end, {"loss": 0.5})]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("block", BLOCKS)
def test_error_closes_ours_but_not_stock_callbacks(block, error):
    record = []
    dispatcher = make_dispatcher([Stock(record), Recorder(record=record)])
    with pytest.raises(error, match="boom"), getattr(dispatcher, block)():
        raise error("boom")
    assert record == [("ours", hook) for hook in BLOCKS[block]]


@pytest.mark.parametrize("block", BLOCKS)
def test_failing_close_neither_hides_the_error_nor_stops_others(block):
    recorder = Recorder()
    dispatcher = make_dispatcher([FailsToClose(), recorder])
    with (
        pytest.raises(ValueError, match="boom") as caught,
        getattr(dispatcher, block)(),
    ):
        raise ValueError("boom")
    assert recorder.record[-1] == ("ours", BLOCKS[block][1])
    assert "disk full" in caught.value.__notes__[0]


def test_failing_close_after_success_is_raised_when_all_are_closed():
    record = []
    callbacks = [FailsToClose(), FailsToClose(), Stock(record)]
    dispatcher = make_dispatcher(callbacks)
    with (
        pytest.raises(OSError, match="disk full") as caught,
        dispatcher.training(),
    ):
        pass
    assert record == [("stock", "on_train_end")]
    assert "FailsToClose.on_train_end" in caught.value.__notes__[0]
    assert "disk full" in caught.value.__notes__[1]


def test_only_what_was_opened_is_closed():
    class FailsToOpen(Callback):
        def on_train_begin(self, logs=None):
            raise OSError("no network")

    record = []
    first, last = Recorder("first", record), Recorder("last", record)
    dispatcher = make_dispatcher([first, FailsToOpen(), last])
    with pytest.raises(OSError, match="no network"), dispatcher.training():
        raise AssertionError("the block must not be entered")
    assert record == [("first", "on_train_begin"), ("first", "on_train_end")]


def test_logs_of_a_nested_block_are_its_own():
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: seen.append(("train", logs)),
        on_test_end=lambda logs: seen.append(("test", logs)),
    )
    dispatcher = make_dispatcher(callback)
    with dispatcher.training():
        dispatcher.last_logs = {"loss": 0.5}
        with dispatcher.testing():
            dispatcher.last_logs = {"loss": 0.75}
    assert seen == [("test", {"loss": 0.75}), ("train", {"loss": 0.5})]


def test_dispatcher_serves_a_second_run():
    recorder = Recorder()
    dispatcher = make_dispatcher(recorder)
    for _ in range(2):
        with dispatcher.training():
            pass
    hooks = [("ours", "on_train_begin"), ("ours", "on_train_end")]
    assert recorder.record == hooks * 2


# --- Stock callbacks, driven by hand ---


def run_epochs(dispatcher, losses):
    """Play one epoch per loss; return the number of epochs played."""
    model = dispatcher.callbacks[0].model
    model.stop_training = False
    with dispatcher.training():
        for epoch, loss in enumerate(losses):
            dispatcher.call("on_epoch_begin", epoch)
            dispatcher.call("on_train_batch_begin", 0)
            dispatcher.call(
                "on_train_batch_end", 0, Logs(Fetch({"loss": loss}))
            )
            logs = Logs(Fetch({"loss": loss, "val_loss": loss}))
            dispatcher.call("on_epoch_end", epoch, logs)
            dispatcher.last_logs = logs
            if model.stop_training:
                return epoch + 1
    return len(losses)


def test_early_stopping_stops():
    stopper = keras.callbacks.EarlyStopping(patience=2)
    dispatcher = make_dispatcher(stopper, add_history=True)
    assert run_epochs(dispatcher, [3.0, 2.0, 2.5, 2.6, 2.7]) == 4
    assert dispatcher.history.history["loss"] == [3.0, 2.0, 2.5, 2.6]


def test_csv_logger_writes_fetched_numbers(tmp_path):
    path = tmp_path / "log.csv"
    run_epochs(make_dispatcher(keras.callbacks.CSVLogger(path)), [3.0, 2.0])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [3.0, 2.0]


@ignore_old_protocol
def test_reduce_lr_on_plateau_adds_the_rate_to_the_history():
    reducer = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)
    dispatcher = make_dispatcher(reducer, add_history=True)
    run_epochs(dispatcher, [1.0, 1.0, 1.0])
    rates = dispatcher.history.history["learning_rate"]
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.005], rtol=1e-6)


@ignore_old_protocol
def test_model_checkpoint_saves_the_best(tmp_path):
    path = tmp_path / "best.weights.h5"
    saver = keras.callbacks.ModelCheckpoint(
        path, save_weights_only=True, save_best_only=True
    )
    run_epochs(make_dispatcher(saver), [1.0, 2.0])
    assert path.exists()
    assert saver.best == 1.0


@ignore_old_protocol
def test_backup_survives_an_error_and_goes_after_success(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(ValueError, match="boom"):
        dispatcher = make_dispatcher(backup)
        with dispatcher.training():
            dispatcher.call("on_epoch_begin", 0)
            dispatcher.call("on_epoch_end", 0, Logs(Fetch({"loss": 1.0})))
            raise ValueError("boom")
    assert any((tmp_path / "backup").iterdir())
    run_epochs(make_dispatcher(backup), [1.0])
    assert not (tmp_path / "backup").exists()
