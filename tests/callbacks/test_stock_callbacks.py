"""Claims about Keras's own callbacks: they run unmodified."""

import csv
import http.server
import json
import pathlib
import threading

import numpy as np
import pytest
from stocked import Watch, X, Y, fit, make_model, numbers

from accumtrainer import Accumulation, Trainer
from accumtrainer.keras_api import keras, ops

# Keras's callbacks read optimizers and weights through NumPy's old protocol.
pytestmark = [
    pytest.mark.usefixtures("without_xla"),
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept:DeprecationWarning"
    ),
]


def test_batch_of_a_stock_callback_is_one_update():
    watch = Watch()
    trainer, _ = fit(watch, epochs=2)
    assert watch.batches == [0, 1, 2, 0, 1, 2]
    assert watch.params["steps"] == 3
    assert watch.params["epochs"] == 2
    assert watch.model is trainer.model
    moves = np.diff([weights[0][0, 0] for weights in watch.weights])
    assert np.all(moves != 0)


def test_stock_callback_sees_running_means_as_in_keras():
    watch = Watch()
    _, history = fit(watch, epochs=2)
    last = [watch.logs[2], watch.logs[5]]
    assert [logs["loss"] for logs in last] == history.history["loss"]


def test_lambda_callback_is_called_in_keras_order():
    told = []
    names = ("epoch_begin", "epoch_end", "train_batch_begin", "train_batch_end")

    def note(name):
        return lambda position, logs: told.append((name, position))

    callback = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: told.append(("train_begin", None)),
        on_train_end=lambda logs: told.append(("train_end", None)),
        **{f"on_{name}": note(name) for name in names},
    )
    fit(callback, epochs=1)
    assert told == [
        ("train_begin", None),
        ("epoch_begin", 0),
        ("train_batch_begin", 0),
        ("train_batch_end", 0),
        ("train_batch_begin", 1),
        ("train_batch_end", 1),
        ("train_batch_begin", 2),
        ("train_batch_end", 2),
        ("epoch_end", 0),
        ("train_end", None),
    ]


def test_callbacks_of_the_trainer_and_of_fit_both_run():
    watches = [Watch(), Watch()]
    trainer = Trainer(
        make_model(),
        optimizer="sgd",
        loss="mse",
        accumulation=4,
        callbacks=[watches[0]],
    )
    fit(watches[1], trainer=trainer, epochs=1)
    assert watches[0].batches == watches[1].batches == [0, 1, 2]


def test_early_stopping_stops():
    stopping = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9)
    trainer, history = fit(stopping, epochs=20)
    assert len(history.history["loss"]) == 2
    assert trainer.progress.epochs == 2
    assert trainer.progress.updates == 6


def test_early_stopping_restores_the_best_weights():
    kept = []

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kept.append([numbers(v) for v in self.model.variables])

    class Diverge(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                self.model.optimizer.learning_rate = 10.0

    stopping = keras.callbacks.EarlyStopping(
        "val_loss", patience=2, restore_best_weights=True
    )
    trainer, history = fit(
        Keep(), Diverge(), stopping, epochs=9, validation_data=(X, Y)
    )
    best = int(np.argmin(history.history["val_loss"]))
    assert best == 1
    assert len(kept) == 4
    for expected, variable in zip(
        kept[best], trainer.model.variables, strict=True
    ):
        np.testing.assert_array_equal(expected, numbers(variable))
    assert trainer.evaluate(X, Y, verbose=0) == pytest.approx(
        history.history["val_loss"][best], rel=1e-5
    )


def test_stopping_amid_an_epoch_ends_it():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    trainer, history = fit(Stop())
    assert trainer.progress.updates == 2
    assert len(history.history["loss"]) == 1


def test_model_checkpoint_saves_every_epoch(tmp_path):
    kept = []

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kept.append([numbers(v) for v in self.model.variables])

    checkpoint = keras.callbacks.ModelCheckpoint(
        str(tmp_path / "{epoch}.keras")
    )
    trainer, _ = fit(Keep(), checkpoint, epochs=2)
    for epoch in (1, 2):
        loaded = keras.saving.load_model(tmp_path / f"{epoch}.keras")
        for expected, variable in zip(
            kept[epoch - 1], loaded.variables, strict=True
        ):
            np.testing.assert_array_equal(expected, numbers(variable))
        iterations = ops.convert_to_numpy(loaded.optimizer.iterations)
        assert iterations == 3 * epoch


def test_model_checkpoint_counts_updates_in_save_freq(tmp_path):
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(tmp_path / "{epoch}-{batch}.weights.h5"),
        save_weights_only=True,
        save_freq=2,
    )
    watch = Watch()
    trainer, _ = fit(watch, checkpoint, epochs=2)
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == [
        "1-2.weights.h5",
        "2-1.weights.h5",
        "2-3.weights.h5",
    ]
    trainer.model.load_weights(tmp_path / "2-1.weights.h5")
    for expected, variable in zip(
        watch.weights[3], trainer.model.variables, strict=True
    ):
        np.testing.assert_array_equal(expected, numbers(variable))


def test_model_checkpoint_keeps_the_best(tmp_path):
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(tmp_path / "best-{epoch}.keras"),
        monitor="val_loss",
        save_best_only=True,
    )
    _, history = fit(checkpoint, validation_data=(X, Y), epochs=3)
    losses = history.history["val_loss"]
    expected = [
        f"best-{epoch}.keras"
        for epoch in (1, 2, 3)
        if losses[epoch - 1] == min(losses[:epoch])
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


def test_csv_logger_writes_a_row_per_epoch(tmp_path):
    path = tmp_path / "log.csv"
    _, history = fit(
        keras.callbacks.CSVLogger(path), epochs=3, validation_data=(X, Y)
    )
    with pathlib.Path(path).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    for name in ("loss", "val_loss", "learning_rate", "gradient_norm"):
        written = [float(row[name]) for row in rows]
        np.testing.assert_allclose(
            written, history.history[name], rtol=1e-6, err_msg=name
        )
    assert [row["updates"] for row in rows] == ["3", "6", "9"]


def test_learning_rate_scheduler_moves_the_optimizer():
    scheduler = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: 0.0 if epoch else rate
    )
    watch = Watch()
    fit(scheduler, watch, epochs=2)
    moves = np.diff([weights[0][0, 0] for weights in watch.weights])
    assert np.all(moves[:2] != 0)
    assert np.all(moves[2:] == 0)
    rates = [logs["learning_rate"] for logs in watch.logs]
    assert rates == pytest.approx([0.05] * 3 + [0.0] * 3)


def test_reduce_lr_on_plateau_reduces_the_applied_rate():
    reduce = keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=1, min_delta=1e9
    )
    watch = Watch()
    fit(reduce, watch, epochs=4)
    rates = [logs["learning_rate"] for logs in watch.logs[::3]]
    assert rates == pytest.approx([0.05, 0.05, 0.025, 0.0125])


def test_terminate_on_nan_stops_at_the_first_bad_loss():
    y = Y.copy()
    y[9] = np.nan
    trainer = Trainer(make_model(), optimizer="sgd", loss="mse", accumulation=4)
    trainer.fit(
        X,
        y,
        batch_size=2,
        shuffle=False,
        epochs=3,
        verbose=0,
        callbacks=[keras.callbacks.TerminateOnNaN()],
    )
    assert trainer.progress.updates == 1
    assert trainer.progress.skipped_updates == 1
    assert trainer.progress.micro_batches == 8


def test_swap_ema_weights_validates_with_the_averages():
    optimizer = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)
    kept = []

    class Keep(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            kept.append([numbers(v) for v in self.model.variables])

    watch = Watch()
    fit(
        watch,
        keras.callbacks.SwapEMAWeights(),
        Keep(),
        optimizer=optimizer,
        epochs=1,
        validation_data=(X, Y),
    )
    averages = optimizer._model_variables_moving_average
    for plain, average, received in zip(
        watch.weights[-1], averages, kept[0], strict=True
    ):
        np.testing.assert_allclose(numbers(average), received, rtol=1e-6)
        assert np.any(plain != received)


def test_swap_ema_weights_lets_training_go_on_with_the_weights():
    weights = []
    for callbacks in ([], [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]):
        watch = Watch()
        optimizer = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)
        fit(
            *callbacks,
            watch,
            optimizer=optimizer,
            epochs=3,
            validation_data=(X, Y),
        )
        weights.append(watch.weights[-1])
    for expected, received in zip(*weights, strict=True):
        np.testing.assert_allclose(expected, received, rtol=1e-6)


def test_tensorboard_writes_the_losses(tmp_path):
    # TensorBoard is what reads these files, and TensorFlow what writes them.
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("tensorboard")
    board = keras.callbacks.TensorBoard(
        tmp_path, update_freq="epoch", profile_batch=0
    )
    _, history = fit(board, epochs=2, validation_data=(X, Y))
    written = {"train": [], "validation": []}
    for name, values in written.items():
        for path in sorted((tmp_path / name).iterdir()):
            for record in tf.data.TFRecordDataset(str(path)):
                event = tf.compat.v1.Event.FromString(record.numpy())
                values.extend(
                    float(tf.make_ndarray(value.tensor))
                    for value in event.summary.value
                    if value.tag == "epoch_loss"
                )
    np.testing.assert_allclose(
        written["train"], history.history["loss"], rtol=1e-5
    )
    np.testing.assert_allclose(
        written["validation"], history.history["val_loss"], rtol=1e-5
    )


def test_tensorboard_counts_updates_in_update_freq(tmp_path):
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("tensorboard")
    board = keras.callbacks.TensorBoard(
        tmp_path, update_freq=2, profile_batch=0, write_graph=False
    )
    fit(board, epochs=2)
    (path,) = (tmp_path / "train").iterdir()
    steps = [
        event.step
        for record in tf.data.TFRecordDataset(str(path))
        for event in [tf.compat.v1.Event.FromString(record.numpy())]
        for value in event.summary.value
        if value.tag == "batch_loss"
    ]
    assert steps == [2, 4, 6]


class Requests(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted in a list of the server."""

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        self.server.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_remote_monitor_posts_every_epoch():
    pytest.importorskip("requests")
    with http.server.HTTPServer(("127.0.0.1", 0), Requests) as server:
        server.received = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monitor = keras.callbacks.RemoteMonitor(
            root=f"http://127.0.0.1:{server.server_port}", send_as_json=True
        )
        _, history = fit(monitor, epochs=2, validation_data=(X, Y))
        server.shutdown()
        thread.join()
    assert [path for path, _ in server.received] == ["/publish/epoch/end/"] * 2
    for epoch, (_, body) in enumerate(server.received):
        assert body["epoch"] == epoch
        assert body["updates"] == 3 * (epoch + 1)
        for name in ("loss", "val_loss", "gradient_norm"):
            assert body[name] == history.history[name][epoch]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_orbax_checkpoint_counts_updates_and_saves_the_weights(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    checkpoint = keras.callbacks.OrbaxCheckpoint(
        str(tmp_path), save_freq=2, max_to_keep=None
    )
    # Keras 3.15 loads by the paths of variables, and those of a Sequential
    # are others after loading.
    x = keras.Input([3])
    model = keras.Model(x, keras.layers.Dense(1)(x))
    trainer = Trainer(model, optimizer="sgd", loss="mse", accumulation=4)
    watch = Watch()
    fit(watch, checkpoint, trainer=trainer, epochs=2)
    saved = sorted(int(p.name) for p in tmp_path.iterdir() if p.is_dir())
    assert saved == [2, 4, 6]
    loaded = keras.saving.load_model(tmp_path)
    for expected, variable in zip(
        watch.weights[-1], loaded.variables, strict=True
    ):
        np.testing.assert_array_equal(expected, numbers(variable))


def test_stock_callback_sees_slices_of_a_loader_batch_as_one_update():
    watch = Watch()
    trainer = Trainer(
        make_model(),
        optimizer="sgd",
        loss="mse",
        accumulation=Accumulation(micro_batch_size=2),
    )
    fit(watch, trainer=trainer, batch_size=8, epochs=1)
    assert watch.batches == [0, 1, 2]
    assert watch.params["steps"] == 3


def test_evaluation_and_prediction_call_stock_callbacks():
    told = []

    class Note(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            told.append(("test", batch, "loss" in logs))

        def on_predict_batch_end(self, batch, logs=None):
            told.append(("predict", batch))

    trainer, _ = fit(epochs=1)
    trainer.evaluate(X, Y, batch_size=16, verbose=0, callbacks=[Note()])
    trainer.predict(X, batch_size=16, verbose=0, callbacks=[Note()])
    assert told == [
        ("test", 0, True),
        ("test", 1, True),
        ("predict", 0),
        ("predict", 1),
    ]


def test_history_of_the_model_is_the_one_returned():
    trainer, history = fit(epochs=1)
    assert trainer.model.history is history
