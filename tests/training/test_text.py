"""Claims about text: refused as labels, and read where a model reads it."""

import numpy as np
import pytest
from linear import X, Y, assert_same_weights, fit, make_trainer

from accumtrainer.keras_api import BACKEND, keras

pytestmark = pytest.mark.usefixtures("without_xla")


@pytest.mark.parametrize("kind", ["U", "S", object, list])
@pytest.mark.parametrize("options", [{}, {"check_inputs": True}])
def test_labels_that_are_text_are_refused_with_the_remedy(kind, options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    trainer, _ = make_trainer(model, loss="sparse_categorical_crossentropy")
    texts = np.array(["cat", "dog"] * 12)
    labels = texts.tolist() if kind is list else texts.astype(kind)
    calls = [
        lambda: fit(trainer, y=labels, **options),
        lambda: trainer.fit([(X, labels)], verbose=0, **options),
        lambda: trainer.train_on_batch(X, labels),
        lambda: trainer.evaluate(X, labels, verbose=0),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="^y must hold numbers .*np.unique"):
            call()
    with pytest.raises(TypeError, match="^sample_weight must hold numbers"):
        fit(trainer, y=np.zeros(24, "int32"), sample_weight=texts)
    assert trainer.progress.updates == 0
    fit(trainer, y=np.zeros(24, "int32"))
    for call in calls:
        with pytest.raises(TypeError, match="^y must hold numbers .*np.unique"):
            call()
    assert trainer.progress.updates == 3


TEXT = np.array(["the cat", "a dog sat", "the mat"] * 8)


@pytest.mark.skipif(
    BACKEND != "jax", reason="TensorFlow has tensors of text, and trains on it"
)
def test_text_is_refused_on_jax_with_the_remedy():
    trainer, _ = make_trainer()
    for call in (
        lambda: fit(trainer, x=TEXT),
        lambda: trainer.predict(TEXT, verbose=0),
        lambda: trainer.evaluate(TEXT, Y, verbose=0),
    ):
        with pytest.raises(TypeError, match="^x must hold numbers on jax"):
            call()


def model_of_text():
    """Make a model that reads strings, as only TensorFlow has them."""
    keras.utils.set_random_seed(0)
    vectorize = keras.layers.TextVectorization(20, output_sequence_length=4)
    vectorize.adapt(TEXT)
    inputs = keras.Input([], dtype="string")
    x = keras.layers.Embedding(20, 3)(vectorize(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.ops.mean(x, axis=1)))


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="JAX has no tensors of text"
)
@pytest.mark.parametrize("dtype", ["U", "S", object])
def test_model_that_reads_text_trains_like_the_big_batch(dtype):
    text = TEXT.astype(dtype)
    split, _ = make_trainer(model_of_text(), jit_compile="auto")
    whole, _ = make_trainer(model_of_text(), accumulation=1, jit_compile="auto")
    fit(split, x=text, batch_size=6, shuffle=False)
    whole.fit(text, Y, batch_size=24, shuffle=False, verbose=0)
    assert_same_weights(split.model, whole.model)
    assert len(split.predict(text, verbose=0)) == 24


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="JAX has no tensors of text"
)
def test_text_is_never_given_to_xla():
    trainer, _ = make_trainer(model_of_text(), jit_compile=True)
    for call in (
        lambda: fit(trainer, x=TEXT),
        lambda: trainer.train_on_batch(TEXT, Y),
        lambda: trainer.predict(TEXT, verbose=0),
        lambda: trainer.evaluate(TEXT, Y, verbose=0),
    ):
        with pytest.raises(ValueError, match="^jit_compile must be left out"):
            call()
