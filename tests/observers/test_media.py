"""Claims about what loggers get besides numbers."""

import numpy as np
import pytest
from pointed import Points, X, Y, fit, make_trainer

from accumtrainer import Callback, Every, Histogram, Image, Table, Text
from accumtrainer.callbacks import Checkpoint, Predictions
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]


class Shows(Points):
    """Keeps what it was given to show, among its points."""

    def write_media(self, updates, name, value):
        self.points.append((updates, {name: value}))

    @property
    def shown(self):
        """The updates and values of what is no point."""
        return [(u, row["x"]) for u, row in self.points if "x" in row]


class Log(Callback):
    """Logs something after each update."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def on_train_batch_end(self, batch, logs=None):
        self.trainer.log_media("x", self.value)


def test_media_come_after_the_points_before_them():
    logger, text = Shows(Every(2, "updates")), Text("here")
    fit(Log(text), logger)
    assert logger.shown == [(n, text) for n in range(1, 7)]
    updates = [u for u, _ in logger.points]
    assert updates == sorted(updates)


def test_every_logger_that_can_gets_them_and_none_is_a_warning():
    logger, text = Shows(), Text("here")
    fit(Log(text), logger, Points())
    assert len(logger.shown) == 6
    with pytest.warns(RuntimeWarning, match="type Text. Loggers: Points"):
        fit(Log(text), Points())


def test_nothing_is_shown_in_a_trial():
    logger = Shows()
    log = Log(Text("here"))
    fit(log, Predictions(X, Y), logger, fast_dev_run=True)
    assert logger.points == []


def test_media_outside_of_a_training_are_refused():
    trainer, logger = make_trainer(), Shows()
    fit(logger, trainer=trainer)
    for log in (trainer.log_media, logger.log_media, Shows().log_media):
        with pytest.raises(RuntimeError, match="while training runs.*'x'"):
            log("x", Text("here"))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Image(np.zeros([2, 2, 2])), ValueError, r"shape \[2, 2, 2\]"),
        (lambda: Image(np.zeros([2])), ValueError, r"shape \[2\]"),
        (lambda: Image(np.zeros([0, 2])), ValueError, r"shape \[0, 2, 1\]"),
        (lambda: Text(3), TypeError, "text=3"),
        (lambda: Table(["a"], [[1], [1, 2]]), ValueError, r"rows\[1\] with 2"),
        (lambda: fit(Log(3), Shows()), TypeError, "'x' of type int"),
        (
            lambda: Shows().log_media(3, Text("")),
            TypeError,
            "name must be a str. Received: name=3",
        ),
        (lambda: Shows().log_media("", Text("")), TypeError, "name=''"),
        (lambda: Predictions(X, every=3), TypeError, "every=3"),
        (lambda: Predictions(X, most=0), ValueError, "most=0"),
        (lambda: Predictions(X, to_row=3), TypeError, "to_row=3"),
    ],
)
def test_what_cannot_be_shown_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_tensors_are_copied_to_the_host():
    ones = keras.ops.ones([2, 2])
    assert Image(ones).pixels.tolist() == [[[255], [255]]] * 2
    assert Image(np.array([[300, -1]])).pixels.tolist() == [[[255], [0]]]
    holes = [[np.nan, np.inf], [-np.inf, 0.5]]
    assert Image(np.array(holes)).pixels[1].tolist() == [[0], [128]]
    assert Histogram(holes).values.tolist() == [0.5]
    assert Histogram(ones).values.tolist() == [1.0] * 4
    assert Table(["a"], [[ones]]).rows == [[[[1.0, 1.0], [1.0, 1.0]]]]


def test_bytes_in_a_table_are_text():
    table = Table(["word"], [["ü".encode()], [b"\xff"]])
    assert table.rows == [["ü"], ["\ufffd"]]


def test_floats_far_above_one_are_clipped_with_a_warning():
    with pytest.warns(RuntimeWarning, match="up to 255; .*Divide") as caught:
        assert Image(np.array([[0.5, 255.0]])).pixels.max() == 255
    assert caught[0].filename == __file__
    assert Image(np.array([[1.5]])).pixels.max() == 255


class LogsEarly(Callback):
    """Logs as training and epochs begin."""

    def on_train_begin(self, logs=None):
        self.trainer.log_media("x", Text("training"))

    def on_epoch_begin(self, epoch, logs=None):
        self.trainer.log_media("x", Text("epoch"))


def test_media_logged_as_training_begins_stand_where_it_begins():
    logger, trainer = Shows(), make_trainer()
    for _ in range(2):
        fit(LogsEarly(), logger, trainer=trainer)
    assert [(u, value.text) for u, value in logger.shown] == [
        (0, "training"),
        (0, "epoch"),
        (6, "training"),
        (6, "epoch"),
    ]


@pytest.mark.parametrize("saved_at", [4, 6, 12])
def test_media_logged_as_a_resume_begins_stand_where_it_goes_on(
    saved_at, tmp_path
):
    checkpoint = Checkpoint(tmp_path, every=Every(100, "updates"))
    fit(checkpoint, Shows(), epochs=2, max_updates=saved_at)
    logger = Shows()
    fit(LogsEarly(), logger, checkpoint, epochs=2, resume_from="auto")
    begun = [u for u, value in logger.shown if value.text == "training"]
    assert begun == [saved_at]
    epochs = [u for u, value in logger.shown if value.text == "epoch"]
    assert epochs == {4: [4, 6], 6: [6, 6], 12: [12]}[saved_at]


def test_media_are_held_no_longer_than_to_the_first_update():
    logger = Shows()
    logger.set_state(Shows().get_state())  # of a resume that was refused
    fit(LogsEarly(), Log(Text("update")), logger)
    assert [u for u, value in logger.shown if value.text == "update"] == [
        *range(1, 7)
    ]


def test_predicting_changes_nothing_of_the_training():
    def train(*callbacks):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input([3]), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        )
        trainer = make_trainer(model)
        history = trainer.fit(
            X, Y, batch_size=2, epochs=2, verbose=0, callbacks=list(callbacks)
        )
        return history.history, trainer.model.get_weights()

    logger = Shows()
    shows = Predictions(X, Y, every=Every(1, "updates"), name="x")
    history, weights = train(shows, logger)
    alone, alone_weights = train()
    assert [u for u, _ in logger.shown] == list(range(1, 13))
    assert history == alone
    for mine, other in zip(weights, alone_weights, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_rows_of_predictions_are_those_that_are_asked_for():
    logger = Shows()
    predictions = Predictions(
        X, name="x", most=2, to_row=lambda x, y, p: {"sum": x.sum(), "y": y}
    )
    fit(predictions, logger)
    ((_, table),) = logger.shown
    assert table.columns == ["example", "sum", "y"]
    np.testing.assert_allclose(table.rows[1][1], X[1].sum(), rtol=1e-6)
    assert table.rows[1][2] is None
