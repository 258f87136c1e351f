"""Claims about models that make what they take of raw data themselves."""

import numpy as np
import pytest
from quickest import RUN_EAGERLY
from raw import (
    LABELS,
    TEXTS,
    Continuing,
    Reader,
    count_letters,
    targets_of,
)

from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import Checkpoint
from accumtrainer.data.preprocessing import Preprocessing, preprocessing_of
from accumtrainer.data.sources import make_source
from accumtrainer.keras_api import BACKEND, keras

COUNTS = count_letters(TEXTS)
WEIGHTS = np.linspace(0.5, 2, len(TEXTS), dtype="float32")


def make_trainer(model=None, accumulation=None, **options):
    return Trainer(
        model or Reader(),
        optimizer=keras.optimizers.Adam(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        accumulation=accumulation or Accumulation(micro_batch_size=3),
        run_eagerly=RUN_EAGERLY,
        seed=0,
        **options,
    )


def make_plain_trainer(**options):
    """Make a Trainer of the same model, which does nothing to its data."""
    return make_trainer(Reader(preprocessor=None), **options)


def fit(trainer, *data, **options):
    options = {"batch_size": 4, "verbose": 0} | options
    return trainer.fit(*data, **options).history


def assert_same_weights(one, other):
    pairs = zip(one.model.weights, other.model.weights, strict=True)
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)


def pairs_of(texts):
    return [t[:1] for t in texts], [t[1:] for t in texts]


def as_tensor(texts):
    import tensorflow as tf

    return tf.constant(texts)


needs_text_tensors = pytest.mark.skipif(
    BACKEND != "tensorflow", reason="JAX has no tensors of text"
)

FORMS = [
    pytest.param(list, id="list"),
    pytest.param(np.array, id="array"),
    pytest.param(lambda texts: np.array(texts, object), id="objects"),
    pytest.param(lambda texts: np.array(texts, "S"), id="bytes"),
    pytest.param(as_tensor, id="tensor", marks=needs_text_tensors),
    pytest.param(lambda texts: {"text": texts}, id="dict of lists"),
    pytest.param(lambda texts: {"text": np.array(texts)}, id="dict of arrays"),
    pytest.param(pairs_of, id="tuple of lists"),
]


@pytest.mark.parametrize("form", FORMS)
def test_raw_data_in_any_form_train_like_preprocessed(form):
    raw, plain = make_trainer(), make_plain_trainer()
    assert fit(raw, form(TEXTS), LABELS) == fit(plain, COUNTS, LABELS)
    assert_same_weights(raw, plain)


@pytest.mark.parametrize("form", FORMS)
def test_raw_data_in_any_form_are_predicted_and_evaluated(form):
    raw, plain = make_trainer(), make_plain_trainer()
    np.testing.assert_array_equal(
        raw.predict(form(TEXTS), batch_size=4, verbose=0),
        plain.predict(COUNTS, batch_size=4, verbose=0),
    )
    results = raw.evaluate(form(TEXTS), LABELS, batch_size=4, verbose=0)
    assert results == plain.evaluate(COUNTS, LABELS, batch_size=4, verbose=0)


def test_model_is_given_texts_as_lists_of_strings():
    raw = make_trainer()
    for form in (list, np.array, lambda texts: np.array(texts, "S")):
        fit(raw, form(TEXTS), LABELS, shuffle=False, batch_size=5)
    assert [x for x, _, _ in raw.model.seen] == 3 * [TEXTS[:5], TEXTS[5:]]


def test_model_is_given_whole_loader_batches():
    raw = make_trainer()
    fit(raw, TEXTS, LABELS, shuffle=False)
    assert [len(x) for x, _, _ in raw.model.seen] == [4, 4, 2]


def test_labels_and_weights_may_be_lists():
    raw, plain = make_trainer(), make_plain_trainer()
    fit(raw, TEXTS, LABELS.tolist(), sample_weight=WEIGHTS.tolist())
    fit(plain, COUNTS, LABELS, sample_weight=WEIGHTS)
    assert_same_weights(raw, plain)


def test_targets_and_weights_may_come_of_x():
    raw, plain = make_trainer(Continuing()), make_plain_trainer()
    fit(raw, TEXTS)
    labels, weights = targets_of(COUNTS)
    fit(plain, COUNTS, labels, sample_weight=weights)
    assert_same_weights(raw, plain)


def test_class_weights_weigh_as_for_preprocessed_data():
    raw, plain = make_trainer(), make_plain_trainer()
    class_weight = {0: 1.0, 1: 3.0, 2: 0.25}
    fit(raw, TEXTS, LABELS, class_weight=class_weight)
    fit(plain, COUNTS, LABELS, class_weight=class_weight)
    assert_same_weights(raw, plain)


def test_class_weights_beside_weights_that_come_of_x_are_refused():
    with pytest.raises(ValueError, match="class_weight must not be combined"):
        fit(make_trainer(Continuing()), TEXTS, class_weight={0: 1.0, 1: 2.0})


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(4 * index, 4 * index + 4)
        return TEXTS[rows], LABELS[rows]


def generate():
    return (Batches()[i] for i in range(3))


def as_tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(4)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Batches, id="pydataset"),
        pytest.param(generate, id="generator"),
        pytest.param(lambda: list(generate()), id="list"),
        pytest.param(as_tf_data, id="tf.data", marks=needs_text_tensors),
    ],
)
@pytest.mark.parametrize("k", [None, 2])
def test_raw_loader_batches_train_like_raw_data(make, k):
    accumulation = Accumulation(steps=k) if k else None
    loaded = make_trainer(accumulation=accumulation)
    whole = make_trainer(accumulation=accumulation)
    loaded.fit(make(), shuffle=False, verbose=0)
    fit(whole, TEXTS, LABELS, shuffle=False)
    assert loaded.progress.updates == (2 if k else 3)
    assert_same_weights(loaded, whole)


def test_loader_batches_make_up_the_big_batch_by_steps():
    by_steps = make_trainer(accumulation=Accumulation(steps=2))
    fit(by_steps, TEXTS, LABELS, shuffle=False, batch_size=5)
    at_once = make_trainer(accumulation=1)
    fit(at_once, TEXTS, LABELS, shuffle=False, batch_size=10)
    for a, b in zip(by_steps.model.weights, at_once.model.weights, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"validation_data": (TEXTS[:5], LABELS[:5])},
        {"validation_data": (TEXTS[:5], LABELS[:5], WEIGHTS[:5])},
        {"validation_data": [(TEXTS[:5], LABELS[:5])]},
        {"validation_data": {"few": (TEXTS[:5], LABELS[:5])}},
        {"validation_split": 0.5},
    ],
    ids=["pair", "weighted", "batches", "named", "split"],
)
def test_validation_data_are_preprocessed(options):
    plain_options = dict(options)
    if "validation_data" in options:
        plain_options["validation_data"] = as_counts(options["validation_data"])
    raw, plain = make_trainer(), make_plain_trainer()
    history = fit(raw, TEXTS, LABELS, **options)
    assert history == fit(plain, COUNTS, LABELS, **plain_options)
    assert any(name.startswith("val_") for name in history)


def as_counts(data):
    if isinstance(data, dict):
        return {name: as_counts(part) for name, part in data.items()}
    if isinstance(data, list):
        return list(map(as_counts, data))
    texts, *others = data
    return count_letters(texts), *others


def test_train_on_batch_and_check_equivalence_take_raw_data():
    raw, plain = make_trainer(), make_plain_trainer()
    logs = raw.train_on_batch(TEXTS, LABELS, sample_weight=WEIGHTS)
    assert logs == plain.train_on_batch(COUNTS, LABELS, sample_weight=WEIGHTS)
    assert_same_weights(raw, plain)
    assert raw.check_equivalence((TEXTS, LABELS))


def test_model_without_preprocessor_is_given_data_as_they_are():
    model = Reader(preprocessor=None)
    assert preprocessing_of(model) is None
    make_trainer(model).predict(COUNTS, verbose=0)
    assert not model.seen


def test_preprocessor_taken_away_between_fits_is_noticed():
    trainer = make_trainer()
    fit(trainer, TEXTS, LABELS)
    calls = len(trainer.model.seen)
    trainer.model.preprocessor = None
    fit(trainer, COUNTS, LABELS)
    assert len(trainer.model.seen) == calls


def test_run_on_raw_data_resumes_bit_for_bit(tmp_path):
    def run(**options):
        trainer = make_trainer(callbacks=[Checkpoint(tmp_path / "run")])
        fit(trainer, TEXTS, LABELS, epochs=3, resume_from="auto", **options)
        return trainer

    straight = make_trainer()
    fit(straight, TEXTS, LABELS, epochs=3)
    run(max_updates=4)
    resumed = run()
    assert resumed.progress.updates == straight.progress.updates == 9
    assert_same_weights(resumed, straight)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ("abc", TypeError, "x must"),
        (5, TypeError, "x must"),
        (["a", None], TypeError, "x must"),
        ([[1.0, 2.0], [1.0]], TypeError, "x must .* rows of several shapes"),
    ],
    ids=["a text", "a number", "a missing text", "rows of several lengths"],
)
def test_raw_data_that_are_no_columns_are_refused(x, error, message):
    with pytest.raises(error, match=message):
        make_trainer().fit(x, LABELS[:2], verbose=0)


def test_preprocessing_of_other_lengths_is_refused():
    def preprocess(x, y=None, sample_weight=None):
        return np.zeros([len(x), 4]), y[:-1]

    source = make_source(TEXTS, LABELS, preprocessing=Preprocessing(preprocess))
    items = list(source.iterate(0))[:1]
    with pytest.raises(ValueError, match="same number"):
        source.window(items, 3)


def test_text_for_a_model_that_takes_none_is_refused():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    with pytest.raises(TypeError):
        fit(make_trainer(model), TEXTS, LABELS)
