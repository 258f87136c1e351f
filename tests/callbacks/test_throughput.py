"""Claims about Throughput: what the logs say about speed is true."""

import time

import environments
import forked
import numpy as np
import pytest

from accumtrainer import Accumulation, Callback, Every, Logger, Trainer
from accumtrainer.callbacks import Throughput
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]

X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")

SPEEDS = ("samples_per_second", "micro_batches_per_second")
TIMES = ("data_seconds_per_update", "compute_seconds_per_update")
ALWAYS = {*SPEEDS, *TIMES, "peak_memory_bytes"}
PAUSE = 0.02


def make_trainer(**options):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    options = {"accumulation": 4} | options
    return Trainer(model, optimizer="sgd", loss="mse", seed=0, **options)


class Batches(keras.utils.PyDataset):
    """Twelve batches of 2 that take their time."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(PAUSE)
        return X[2 * index : 2 * index + 2], Y[2 * index : 2 * index + 2]


class Keep(Callback):
    """Keeps the logs of every update and of every epoch."""

    looks_at_model = False
    is_logger = True

    def on_train_begin(self, logs=None):
        self.updates, self.epochs = [], []
        self.times = []

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.monotonic())
        self.updates.append(dict(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


def fit(throughput, *others, x=X, y=Y, trainer=None, **options):
    """Train, three updates an epoch of 4 micro-batches of 2."""
    trainer = trainer or make_trainer()
    keep = Keep()
    options = {"epochs": 2, "verbose": 0} | options
    batch_size = 2 if isinstance(x, np.ndarray) else None
    history = trainer.fit(
        x,
        y,
        batch_size=batch_size,
        callbacks=[throughput, *others, keep],
        **options,
    )
    return keep, history


def test_speed_is_in_the_logs_from_the_first_interval_on():
    keep, _ = fit(Throughput(every=Every(2, "updates")))
    has_speed = [ALWAYS <= set(logs) for logs in keep.updates]
    assert has_speed == [False, True, True, True, True, True]
    taken = [logs.get("samples_per_second") for logs in keep.updates]
    assert taken[1] == taken[2] != taken[3] == taken[4] != taken[5]
    assert "tokens_per_second" not in keep.updates[-1]


def test_loggers_and_the_history_see_the_speed():
    points = []

    class Points(Logger):
        def write(self, updates, numbers):
            points.append(numbers)

    _, history = fit(
        Throughput(every=Every(2, "updates")), Points(every=Every(2, "updates"))
    )
    assert ALWAYS <= set(points[0])
    for name in ALWAYS:
        assert len(history.history[name]) == 2
        assert np.all(np.array(history.history[name]) >= 0)


def test_waiting_for_data_is_told_from_computing():
    fast, _ = fit(Throughput(every=Every(1, "updates")))
    slow, _ = fit(Throughput(every=Every(1, "updates")), x=Batches(), y=None)
    for name, logs in (("fast", fast.epochs[1]), ("slow", slow.epochs[1])):
        waited = logs["data_seconds_per_update"]
        assert (waited >= 4 * PAUSE) == (name == "slow")
        seconds = waited + logs["compute_seconds_per_update"]
        # The same time, once divided by updates and once by samples.
        assert logs["samples_per_second"] == pytest.approx(8 / seconds)
        assert logs["micro_batches_per_second"] == pytest.approx(4 / seconds)
    assert slow.epochs[1]["samples_per_second"] <= 2 / PAUSE


def test_slow_callbacks_do_not_count_as_waiting_for_data():
    class Slow(Callback):
        looks_at_model = False

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(10 * PAUSE)

    keep, _ = fit(Throughput(every=Every(1, "updates")), Slow(), epochs=1)
    logs = keep.epochs[0]
    assert logs["data_seconds_per_update"] < 5 * PAUSE
    assert logs["compute_seconds_per_update"] > 5 * PAUSE


def test_validation_is_left_out():
    class SlowTest(Callback):
        def on_test_batch_end(self, batch, logs=None):
            time.sleep(1.0)

    keep, _ = fit(
        Throughput(every=Every(3, "updates")),
        SlowTest(),
        validation_data=(X, Y),
        validation_steps=1,
        validation_every=Every(2, "updates"),
    )
    for logs in (keep.updates[-1], *keep.epochs):
        seconds = sum(logs[name] for name in TIMES)
        assert seconds < 0.3


def test_speed_adds_up_to_the_time_that_has_passed():
    keep, _ = fit(
        Throughput(every=Every(1, "updates")), x=Batches(), y=None, epochs=3
    )
    seconds = [
        sum(logs[name] for name in TIMES)
        for logs in keep.updates
        if TIMES[0] in logs
    ]
    passed = keep.times[-1] - keep.times[0]
    # Between the epochs lies what belongs to no update's own logs.
    assert sum(seconds) == pytest.approx(passed, rel=0.2)


def test_tokens_are_counted_by_the_users_function():
    x = np.random.default_rng(0).integers(0, 2, size=(24, 5))
    counted = []

    def tokens(batch):
        assert batch.x.shape == (2, 5)
        counted.append((batch.x != 0).sum())
        return counted[-1]

    model = keras.Sequential(
        [keras.Input([5]), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    trainer = Trainer(
        model,
        optimizer="sgd",
        loss="mse",
        accumulation=Accumulation(micro_batch_size=2),
    )
    keep = Keep()
    trainer.fit(
        x.astype("float32"),
        Y,
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[Throughput(tokens=tokens), keep],
    )
    assert sum(counted) == 2 * (x != 0).sum()
    logs = keep.epochs[1]
    per_sample = logs["tokens_per_second"] / logs["samples_per_second"]
    assert per_sample == pytest.approx((x != 0).sum() / 24)


def test_first_update_is_left_out_where_there_is_another():
    keep, _ = fit(Throughput(), epochs=1, max_updates=1)
    alone = keep.epochs[0]
    keep, _ = fit(Throughput(), epochs=1)
    among_others = keep.epochs[0]
    # The first update compiles, which takes many times as long.
    name = "compute_seconds_per_update"
    assert alone[name] > 3 * among_others[name]


BALLAST = """
import numpy as np
from test_throughput import fit
from accumtrainer import peak_memory_bytes
from accumtrainer.callbacks import Throughput
before = peak_memory_bytes()
ballast = np.ones(before // 2, dtype="int8")
after = peak_memory_bytes()
assert after > 1.2 * before, (before, after)
del ballast
keep, _ = fit(Throughput(), epochs=1)
assert keep.epochs[0]["peak_memory_bytes"] > 0.99 * after
"""


def test_peak_memory_grows_with_what_is_in_use():
    # In a process of its own, since this one may have been larger before.
    done = forked.run(["-c", BALLAST], environments.beside(__file__))
    assert done.returncode == 0, done.stderr


def test_evaluation_alone_is_left_alone():
    trainer = make_trainer()
    throughput = Throughput()
    fit(throughput, trainer=trainer, epochs=1)
    trainer.evaluate(X, Y, verbose=0, callbacks=[throughput])


@pytest.mark.parametrize(
    "options", [{"every": 10}, {"tokens": 100}], ids=["every", "tokens"]
)
def test_wrong_arguments_are_refused(options):
    with pytest.raises(TypeError, match="must be"):
        Throughput(**options)
