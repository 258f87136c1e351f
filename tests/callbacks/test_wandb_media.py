"""Claims about what W&B gets besides points, with the real W&B, offline."""

import numpy as np
import pytest
from faulty import Fail
from PIL import Image as Picture
from wandb_file import media_of, written_runs
from wandb_runs import X, Y, fit, make_logger, make_trainer, positions

from accumtrainer import (
    Accumulation,
    Callback,
    Every,
    Histogram,
    Image,
    Table,
    Text,
    Trainer,
)
from accumtrainer.callbacks import (
    Checkpoint,
    KeepGradientNorms,
    KeepGradients,
    Predictions,
)
from accumtrainer.keras_api import keras

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla", "away_from_wandb"),
]

wandb = pytest.importorskip("wandb", reason="W&B is not installed")

PIXELS = np.array([[[0.0, 0.5, 1.0]], [[1.0, 0.0, 0.25]]], "float32")


class Kept(Trainer):
    """Keeps in a hook what a callback shows."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        zeros = keras.ops.zeros([2, 3])
        self.last = self.track(keras.Variable(zeros, trainable=False))

    def on_micro_batch(self, batch, info):
        self.last.assign(batch.x)
        return batch


class Show(Callback):
    """Logs one of each kind after the third update."""

    def on_train_batch_end(self, batch, logs=None):
        if batch != 2:
            return
        log = self.trainer.log_media
        log("pictures/one", Image(PIXELS, caption="a < b"))
        log("spread", Histogram(self.trainer.last))
        log("words", Text("a < b\nand so on"))
        log("gray", Image(PIXELS[..., :1]))
        rows = [[1, "one"], [np.float32(2), None], [3, 0.5]]
        log("rows", Table(["n", "what"], rows))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Give the run of a training whose callback shows things."""
    folder = tmp_path_factory.mktemp("shown")
    logger = make_logger(
        folder,
        every=Every(2, "updates"),
        watch="weights",
        watch_every=Every(2, "updates"),
    )
    fit(make_trainer(Kept), Show(), logger)
    (run,) = written_runs(folder)
    return run


def test_media_stand_at_the_updates_made_when_they_were_logged(shown):
    for name in ("pictures/one", "spread", "words", "rows"):
        assert [updates for updates, _ in media_of(shown, name)] == [3]
    updates = [row["updates"] for row in shown.history]
    assert updates == sorted(updates)
    assert positions(shown.history, "loss") == [2, 4, 6]


def test_media_and_histograms_keep_the_moments_they_were_made_at(shown):
    assert shown.moments == sorted(shown.moments)


def test_image_is_the_pixels_that_were_logged(shown):
    ((_, image),) = media_of(shown, "pictures/one")
    assert image["caption"] == "a < b"
    with Picture.open(image["content"]) as picture:
        pixels = np.asarray(picture)
    np.testing.assert_array_equal(pixels, np.round(PIXELS * 255))


def test_image_without_a_caption_has_none(shown):
    ((_, image),) = media_of(shown, "gray")
    assert "caption" not in image


def test_image_of_one_channel_is_gray(shown):
    ((_, image),) = media_of(shown, "gray")
    with Picture.open(image["content"]) as picture:
        assert picture.mode == "L"
        assert picture.size == (1, 2)


def test_histogram_is_of_what_a_hook_kept(shown):
    ((_, histogram),) = media_of(shown, "spread")
    assert histogram["_type"] == "histogram"
    assert sum(histogram["values"]) == 6


def test_text_is_shown_as_it_is(shown):
    ((_, text),) = media_of(shown, "words")
    shown_text = "<pre>a &lt; b\nand so on</pre>"
    assert shown_text in text["content"].read_text()


def test_table_has_the_rows_that_were_logged(shown):
    ((_, table),) = media_of(shown, "rows")
    assert table["columns"] == ["n", "what"]
    assert table["content"] == [[1, "one"], [2.0, None], [3, 0.5]]


def test_norms_are_those_of_weights_and_gradients(tmp_path):
    every = Every(1, "updates")
    classes, expected = (KeepGradients, KeepGradientNorms), {}

    class Look(Callback):
        def on_train_batch_end(self, batch, logs=None):
            for variable in self.model.trainable_variables:
                values = keras.ops.convert_to_numpy(variable)
                name = f"weight_norm/{variable.path}"
                expected[name, batch + 1] = np.linalg.norm(values)
            for path, gradient in self.trainer.kept_gradients.items():
                values = keras.ops.convert_to_numpy(gradient)
                name = f"gradient_norm/{path}"
                expected[name, batch + 1] = np.linalg.norm(values)

    for cls, looks in zip(classes, ([Look()], []), strict=True):
        keras.backend.clear_session()  # for the same names
        options = {"watch": "norms", "watch_every": every}
        fit(make_trainer(cls), *looks, make_logger(tmp_path, **options))
    assert len(expected) == 4 * 6
    for run in written_runs(tmp_path):
        rows = [(n, row) for row in run.history for n in row if "_norm/" in n]
        received = {(name, row["updates"]): row[name] for name, row in rows}
        assert received.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(received[key], value, rtol=1e-5)


def test_norms_of_a_trainer_that_keeps_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="callbacks.KeepGradientNorms"):
        fit(make_trainer(), make_logger(tmp_path, watch="norms"))


def test_predictions_are_a_table_of_the_same_examples(tmp_path):
    seen = []

    class Predict(Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.trainer.predict(X[:3], verbose=0)[:, 0])

    predictions = Predictions(X, Y[:, 0], most=3, name="shown")
    fit(make_trainer(), Predict(), predictions, make_logger(tmp_path), epochs=2)
    (run,) = written_runs(tmp_path)
    tables = media_of(run, "shown")
    assert [updates for updates, _ in tables] == [6, 12]
    for (_, table), expected in zip(tables, seen, strict=True):
        assert table["columns"] == ["example", "label", "prediction"]
        index, labels, received = zip(*table["content"], strict=True)
        assert index == (0, 1, 2)
        np.testing.assert_allclose(labels, Y[:3, 0], rtol=1e-6)
        np.testing.assert_allclose(received, expected, rtol=1e-5)


def test_predictions_on_images_show_them_with_their_scores(tmp_path):
    layers = [keras.layers.Flatten(), keras.layers.Dense(4)]
    trainer = Trainer(
        keras.Sequential([keras.Input([2, 1, 3]), *layers]),
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        accumulation=Accumulation(micro_batch_size=2),
    )
    images = np.stack([PIXELS] * 4)
    predictions = Predictions(images, np.arange(4), every=Every(1, "updates"))
    trainer.fit(
        images,
        np.arange(4),
        batch_size=4,
        verbose=0,
        callbacks=[predictions, make_logger(tmp_path)],
    )
    (run,) = written_runs(tmp_path)
    ((updates, table),) = media_of(run, "predictions")
    assert updates == 1
    assert table["columns"][1:3] == ["input", "label"]
    for row in table["content"]:
        assert row[3] == np.argmax(row[4])
    # W&B keeps the pictures of a table in an artifact, equal ones once.
    (artifact,) = run.artifacts
    assert artifact.type == "run_table"
    files = [file.path for file in artifact.manifest.contents]
    assert len([file for file in files if file.endswith(".png")]) == 1


def test_media_sent_before_a_resume_are_not_sent_again(tmp_path):
    class Say(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.trainer.log_media("said", Text("something"))

    def train(*others):
        checkpoint = Checkpoint(tmp_path / "saved", every=Every(5, "updates"))
        logger = make_logger(tmp_path, every=Every(1, "updates"))
        callbacks = [Say(), logger, *others, checkpoint]
        fit(make_trainer(), *callbacks, epochs=2, resume_from="auto")

    with pytest.raises(RuntimeError, match="power failure"):
        train(Fail(RuntimeError("power failure"), update=3, epoch=1))
    train()
    # The checkpoint is of update 5, and the first run had come further.
    first, second = (
        [updates for updates, _ in media_of(run, "said")]
        for run in written_runs(tmp_path)
    )
    assert len(first) > 5
    assert first + second == list(range(1, 13))
