"""Claims about what `Predictions` shows, of whatever a model takes."""

import numpy as np
import pytest
from keras_core_gaps import keras_3_only
from pointed import Points, X, Y, fit, make_trainer

from accumtrainer import Every, Image
from accumtrainer.callbacks import Predictions
from accumtrainer.keras_api import keras

pytestmark = pytest.mark.usefixtures("without_xla")


class Tables(Points):
    """Keeps the tables it was given."""

    def __init__(self):
        super().__init__()
        self.tables = []

    def write_media(self, updates, name, value):
        self.tables.append(value)


def shown(predictions, *, trainer=None, x=X, y=Y):
    """Train for an epoch, and return the table that was logged."""
    logger = Tables()
    fit(predictions, logger, trainer=trainer, x=x, y=y)
    (table,) = logger.tables
    return table


def make_two(kind):
    """Make a Trainer of two inputs and two outputs, in dicts or lists."""
    a, b = keras.Input([3], name="a"), keras.Input([2], name="b")
    joined = keras.layers.Concatenate()([a, b])
    p = keras.layers.Dense(1, name="p")(joined)
    q = keras.layers.Dense(3, name="q")(joined)
    if kind is dict:
        return make_trainer(keras.Model({"a": a, "b": b}, {"p": p, "q": q}))
    return make_trainer(keras.Model([a, b], [p, q]))


def test_columns_of_a_dict_have_its_keys():
    x, y = {"a": X, "b": X[:, :2]}, {"p": Y, "q": X}
    predictions = Predictions(x, y, most=2)
    table = shown(predictions, trainer=make_two(dict), x=x, y=y)
    assert table.columns == [
        "example",
        "label_p",
        "label_q",
        "prediction_p",
        "prediction_q",
        "prediction_q_scores",
    ]
    np.testing.assert_allclose([row[2] for row in table.rows], X[:2])


def test_columns_of_a_list_are_numbered():
    x, y = [X, X[:, :2]], [Y, X]
    predictions = Predictions(x, y, most=2)
    table = shown(predictions, trainer=make_two(list), x=x, y=y)
    assert table.columns[:4] == [
        "example",
        "label_0",
        "label_1",
        "prediction_0",
    ]


def test_column_that_some_rows_lack_is_empty_there():
    def to_row(x, y, prediction):
        return {"few": 1} if y < 0 else {"many": 2}

    y = np.array([1.0, -1.0])
    table = shown(Predictions(X[:2], y, to_row=to_row))
    assert table.columns == ["example", "many", "few"]
    assert table.rows == [[0, 2, None], [1, None, 1]]


def test_text_that_a_model_takes_is_shown():
    table = Predictions(np.array(["one", "two"]))._table(np.zeros([2, 1]))
    assert table.rows == [[0, "one", 0.0], [1, "two", 0.0]]


def test_a_model_of_a_fixed_batch_size_is_asked_in_that_size():
    inputs = keras.Input([3], batch_size=2)
    fixed = keras.layers.Dense(1)(inputs) + keras.ops.zeros((2, 1))
    trainer = make_trainer(keras.Model(inputs, fixed))
    assert len(shown(Predictions(X, most=4), trainer=trainer).rows) == 4


@keras_3_only("keeps states otherwise")
def test_a_stateful_layer_goes_on_where_it_was():
    def train(*callbacks):
        lstm = keras.layers.LSTM(2, stateful=True)
        layers = [keras.Input([3, 1], batch_size=2), lstm]
        trainer = make_trainer(
            keras.Sequential([*layers, keras.layers.Dense(1)])
        )
        x = X[..., None]
        fit(*callbacks, trainer=trainer, x=x, epochs=2, shuffle=False)
        return trainer.model.get_weights()

    predictions = Predictions(X[:2, :, None], every=Every(2, "updates"))
    for received, expected in zip(
        train(predictions, Tables()), train(), strict=True
    ):
        np.testing.assert_array_equal(received, expected)


def test_nothing_is_predicted_in_a_trial(monkeypatch):
    def predict(*arguments, **options):
        raise AssertionError("predict was called")

    trainer = make_trainer()
    monkeypatch.setattr(trainer, "predict", predict)
    # Nor does it say that no logger takes tables.
    predictions = Predictions(X, every=Every(1, "updates"))
    fit(predictions, trainer=trainer, fast_dev_run=True)
    assert trainer.progress.updates == 1


@pytest.mark.parametrize(
    ("pixels", "expected"),
    [
        ([0.0, 255.0], [0, 255]),
        ([0.0, 1.0], [0, 255]),
        ([0.0, 1.25], [0, 255]),
        ([-1.0, 1.0], [0, 255]),
        ([-0.25, 0.5], [0, 128]),
        ([3.0, 3.0], [3, 3]),
        ([-3.0, -3.0], [0, 0]),
        ([np.nan, 255.0], [0, 255]),
        ([np.nan, np.nan], [0, 0]),
    ],
)
def test_picture_is_visible_in_whatever_range_a_model_takes(pixels, expected):
    x = np.array(pixels, "float32").reshape([1, 1, 2, 1])
    table = Predictions(x)._table(np.zeros([1, 1]))
    image = table.rows[0][1]
    assert isinstance(image, Image)
    assert image.pixels.ravel().tolist() == expected


def batches():
    yield X, Y


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Predictions(batches()), TypeError, "'generator' in it.*next"),
        (lambda: Predictions(X.tolist()), TypeError, "x with 'float' in it"),
        (lambda: Predictions(X, "labels"), TypeError, "y with 'str' in it"),
        (lambda: Predictions(X[:0]), ValueError, r"Received: \[0\]"),
        (lambda: Predictions(X[:5], Y[:3]), ValueError, r"Received: \[5, 3\]"),
        (lambda: Predictions([]), ValueError, r"Received: \[\]"),
    ],
)
def test_what_holds_no_examples_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_row_that_is_no_dict_is_refused():
    with pytest.raises(TypeError, match="to_row must return a dict.*: 3"):
        shown(Predictions(X, to_row=lambda x, y, prediction: 3))
