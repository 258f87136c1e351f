"""Claims about what all loggers share: when points come and what they hold."""

import threading

import numpy as np
import pytest
from pointed import Points, X, Y, fit, make_trainer, positions

from accumtrainer import Callback, Every, Trainer
from accumtrainer.callbacks import Checkpoint
from accumtrainer.keras_api import keras
from accumtrainer.steps import Report

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]


class LooksAtOnce(Points):
    """Keeps what every point held when it came."""

    def write(self, updates, numbers):
        super().write(updates, dict(numbers))


class Windows(Callback):
    """Keeps what every window logged."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_apply(self, update, logs=None):
        self.logs.append(dict(logs))


def by_hand(windows, name):
    """Average what windows logged, each by its weight."""
    used = [w for w in windows if w["applied"]]
    weights = [w["weight"] for w in used]
    return np.average([w[name] for w in used], weights=weights)


def test_point_holds_means_since_the_last_one_by_weight():
    logger, windows = Points(Every(4, "updates")), Windows()
    # Nine samples: windows of 4, 4 and 1 in each epoch.
    fit(windows, logger, x=X[:9], y=Y[:9], epochs=4)
    assert positions(logger.points) == [4, 8, 12]
    assert [w["weight"] for w in windows.logs[:3]] == [4, 4, 1]
    for index, (_, numbers) in enumerate(logger.points):
        since = windows.logs[4 * index : 4 * index + 4]
        for name in ("loss", "gradient_norm"):
            expected = by_hand(since, name)
            np.testing.assert_allclose(numbers[name], expected, rtol=1e-6)
        assert numbers["updates"] == 4 * index + 4


def test_rates_and_counters_of_a_point_are_the_latest():
    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 6, 0.0)
    trainer = make_trainer(optimizer=keras.optimizers.SGD(schedule))
    logger = Points(Every(3, "updates"))
    fit(logger, trainer=trainer)
    rates = [numbers["learning_rate"] for _, numbers in logger.points]
    # The rates that updates 2 and 5 were made with, counted from 0.
    np.testing.assert_allclose(rates, [0.1 * 4 / 6, 0.1 / 6], rtol=1e-5)
    assert [numbers["loss_scale"] for _, numbers in logger.points] == [1, 1]


def test_skipped_windows_count_only_among_the_skips():
    y = Y.copy()
    y[9] = np.nan
    logger, windows = Points(Every(2, "updates")), Windows()
    fit(windows, logger, y=y, shuffle=False)
    assert [w["applied"] for w in windows.logs].count(False) == 1
    assert positions(logger.points) == [2, 4, 5]
    skips = [numbers["skipped_updates"] for _, numbers in logger.points]
    assert skips == [0, 1, 1]
    middle = logger.points[1][1]
    expected = by_hand(windows.logs[2:5], "loss")
    np.testing.assert_allclose(middle["loss"], expected, rtol=1e-6)


def test_point_that_a_skip_puts_off_comes_with_the_next_update():
    y = Y.copy()
    y[5] = np.nan  # in the second window, after which a point would be due
    logger = Points(Every(2, "updates"))
    fit(logger, y=y, shuffle=False)
    assert positions(logger.points) == [2, 4, 5]
    assert [n["updates"] for _, n in logger.points] == [2, 4, 5]
    assert logger.points[0][1]["skipped_updates"] == 1


def test_skipped_window_alone_is_shown_as_it_is():
    logger = Points(Every(100, "updates"))
    fit(logger, y=np.full_like(Y, np.nan))
    assert positions(logger.points) == [0]
    numbers = logger.points[0][1]
    assert np.isnan(numbers["loss"])
    assert numbers["skipped_updates"] == 6


def test_metrics_of_a_point_are_the_running_means_of_the_epoch():
    trainer = make_trainer(metrics=["mae"])
    logger, running = Points(Every(2, "updates")), []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            running.append(logs["mae"])

    fit(logger, Watch(), trainer=trainer)
    means = [numbers["mae"] for _, numbers in logger.points]
    assert means == [running[1], running[3], running[5]]


def test_metric_of_several_values_is_a_list_of_numbers():
    trainer = Trainer(
        keras.Sequential([keras.Input([3]), keras.layers.Dense(2)]),
        optimizer="sgd",
        loss="mse",
        metrics=[keras.metrics.FBetaScore(average=None, threshold=0.5)],
        accumulation=2,
    )
    logger = Points()
    y = (Y > 0).astype("float32").reshape(-1, 1)
    fit(logger, trainer=trainer, y=np.concatenate([y, 1 - y], axis=1))
    value = logger.points[0][1]["fbeta_score"]
    assert type(value) is list and type(value[0]) is float


def test_what_hooks_log_is_averaged_too():
    class Largest(Trainer):
        def compute_loss(self, batch, info):
            self.log("largest", keras.ops.max(keras.ops.abs(batch.y)))
            return super().compute_loss(batch, info)

    trainer = Largest(
        keras.Sequential([keras.Input([3]), keras.layers.Dense(1)]),
        optimizer="sgd",
        loss="mse",
        accumulation=2,
    )
    logger, windows = Points(Every(3, "updates")), Windows()
    fit(windows, logger, trainer=trainer)
    expected = [by_hand(windows.logs[i : i + 3], "largest") for i in (0, 3)]
    received = [numbers["largest"] for _, numbers in logger.points]
    np.testing.assert_allclose(received, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, [6, 10, 12]),
        (Every(5, "updates"), [5, 10, 12]),
        (Every(1, "epochs"), [6, 12]),
        (Every(4, "micro_batches"), [2, 4, 6, 8, 10, 12]),
        (Every(16, "samples"), [4, 8, 12]),
        (Every(1e-9, "seconds"), list(range(1, 13))),
        (Every(1e9, "seconds"), [12]),
    ],
)
def test_points_come_when_due_and_a_last_one_always(every, expected):
    logger = Points(every)
    fit(logger, epochs=2)
    assert positions(logger.points) == expected
    assert [numbers["epoch"] for _, numbers in logger.points] == [
        (updates - 1) // 6 for updates in expected
    ]


def test_last_point_is_not_written_twice():
    logger = Points(Every(6, "updates"))
    fit(logger)
    assert positions(logger.points) == [6]


def test_validation_makes_points_of_its_own():
    logger = Points(Every(4, "updates"))
    trainer = fit(
        logger, validation_data=(X, Y), validation_every=Every(3, "updates")
    )
    assert positions(logger.points) == [3, 4, 6, 6]
    assert positions(logger.validation) == [3, 6]
    last = logger.validation[-1][1]
    assert last == {"val_loss": last["val_loss"], "epoch": 0}
    assert last["val_loss"] == pytest.approx(
        trainer.evaluate(X, Y, verbose=0), rel=1e-6
    )


def test_point_of_training_comes_before_the_validation_after_it():
    logger = Points(Every(3, "updates"))
    fit(logger, validation_data=(X, Y), validation_every=Every(3, "updates"))
    names = ["val_loss" in numbers for _, numbers in logger.points]
    assert positions(logger.points) == [3, 3, 6, 6]
    assert names == [False, True, False, True]


def test_every_set_that_is_validated_on_is_in_the_point():
    logger = Points()
    fit(logger, validation_data={"a": (X, Y), "b": (X[:8], Y[:8])})
    (_, numbers) = next(p for p in logger.points if "val_a_loss" in p[1])
    assert {"val_a_loss", "val_b_loss"} <= set(numbers)


def test_what_other_callbacks_write_is_in_the_points():
    class Writer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs["batch"] = np.float32(batch)

        def on_epoch_end(self, epoch, logs=None):
            logs["batch"] = -1
            logs["distance"] = np.asarray([1.5, 2.5])

    logger = Points(Every(3, "updates"))
    # The logger comes first in the list and is called last nevertheless.
    fit(logger, Writer(), validation_data=(X, Y))
    assert [n["batch"] for _, n in logger.training] == [2, 5]
    rest = [p for p in logger.points if "distance" in p[1]]
    assert rest == [(6, {"distance": [1.5, 2.5], "epoch": 0})]


def test_what_other_callbacks_write_about_a_validation_is_in_its_point():
    class Writer(Callback):
        def on_validation_end(self, update, logs=None):
            logs["val_bleu"] = 0.25

    logger = Points()
    fit(logger, Writer(), validation_data=(X, Y), epochs=2)
    assert [n["val_bleu"] for _, n in logger.validation] == [0.25, 0.25]
    # Of validation and of training in each epoch, and of update 10.
    assert len(logger.points) == 5


def test_positions_never_go_back_over_a_second_fit():
    logger = Points(Every(4, "updates"))
    trainer = fit(logger, validation_data=(X, Y))
    fit(logger, trainer=trainer, validation_data=(X, Y), epochs=2)
    assert positions(logger.training) == [4, 6, 8, 12, 16, 18]
    assert positions(logger.points) == sorted(positions(logger.points))
    assert logger.told == ["open", "close", "open", "close"]


@pytest.mark.parametrize("every", [3, 4])
def test_speed_leaves_out_validation_and_the_end(monkeypatch, every):
    now = [0.0]
    monkeypatch.setattr(
        "accumtrainer.observers.logger.time.monotonic", lambda: now[0]
    )

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            now[0] += 2.0

        def on_test_batch_begin(self, batch, logs=None):
            now[0] += 100.0

        def on_train_end(self, logs=None):
            now[0] += 100.0

    # Of 6 updates the last are written at the end, unless they were before.
    logger = Points(Every(every, "updates"))
    fit(
        logger,
        Slow(),
        validation_data=(X, Y),
        validation_every=Every(2, "updates"),
    )
    speeds = [numbers["samples_per_second"] for _, numbers in logger.training]
    assert speeds == [2.0, 2.0]  # 4 samples in 2 seconds


@pytest.mark.parametrize(
    "logger, after_ten",
    [(LooksAtOnce, [10, 10, 11, 11, 11, 11]), (Points, [3, 3, 4, 4, 4, 4])],
)
def test_a_point_is_read_when_the_next_window_is_on_its_way(
    monkeypatch, logger, after_ten
):
    reads, counts = [], []
    unpack = Report.section

    def section(self, name):
        reads.append(self)
        return unpack(self, name)

    monkeypatch.setattr(Report, "section", section)

    class Count(keras.callbacks.Callback):
        looks_at_model = False
        is_logger = True  # is called after the logger

        def on_train_batch_end(self, batch, logs=None):
            counts.append(len(set(map(id, reads))))

    fit(logger(Every(10, "updates")), Count(), epochs=4, x=X[:16], y=Y[:16])
    # Four updates an epoch, whose last is read when the epoch ends; of a point
    # that nobody looks at, only the window it was due with.
    assert counts[:10] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert counts[10:] == after_ten


def test_a_point_holds_the_same_whoever_looks_at_it_and_when():
    class Writes(Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs["mine"] = keras.ops.convert_to_tensor([batch, 2 * batch])

    late, at_once = (
        Points(Every(4, "updates")),
        LooksAtOnce(Every(4, "updates")),
    )
    fit(late, Writes(), at_once, epochs=2, validation_data=(X, Y))
    read = []
    thread = threading.Thread(
        target=lambda: read.extend((u, dict(n)) for u, n in late.points)
    )
    thread.start()
    thread.join()
    assert [u for u, _ in read] == [4, 6, 8, 12, 12]
    assert read[0][1]["mine"] == [3, 6]
    for (_, one), (_, other) in zip(read, at_once.points, strict=True):
        one.pop("samples_per_second", None)
        other.pop("samples_per_second", None)
        assert one == other


def test_windows_do_not_stay_on_the_device_without_end():
    logger, most = Points(Every(10_000, "updates")), []

    class Count(keras.callbacks.Callback):
        is_logger = True

        def on_train_batch_end(self, batch, logs=None):
            most.append(len(logger._unread))

    windows = Windows()
    fit(windows, logger, Count(), epochs=14)
    assert len(windows.logs) == 84
    assert max(most) == 64
    (point,) = logger.points
    expected = by_hand(windows.logs, "loss")
    np.testing.assert_allclose(point[1]["loss"], expected, rtol=1e-6)


def test_every_epoch_has_a_point_unless_told_how_often():
    logger, told = Points(), Points(Every(10, "updates"))
    fit(logger, told, epochs=4)
    assert positions(logger.points) == [6, 10, 18, 20, 24]
    assert positions(told.points) == [10, 20, 24]


def test_point_of_an_epoch_is_remembered_over_a_resume(tmp_path):
    def resume(max_updates):
        logger = Points()
        checkpoint = Checkpoint(tmp_path, every=Every(100, "updates"))
        fit(
            logger,
            checkpoint,
            epochs=2,
            batch_size=1,
            max_updates=max_updates,
            resume_from="auto",
        )
        return positions(logger.points)

    assert resume(11) == [10, 11]
    assert resume(24) == [20, 24]


def test_names_that_loggers_of_the_package_take_are_free_for_others():
    class WarnsOnceInItsLife(Points):
        def __init__(self):
            super().__init__()
            self._has_warned = False

        def write(self, updates, numbers):
            super().write(updates, numbers)
            self._warn_once(updates, numbers)

        def _warn_once(self, updates, numbers):
            self.told += [] if self._has_warned else ["warned"]
            self._has_warned = True

    logger = WarnsOnceInItsLife()
    fit(logger, trainer=fit(logger))
    assert logger.told.count("warned") == 1
