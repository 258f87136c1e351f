"""A model that takes texts, which it turns into numbers itself."""

import numpy as np

from accumtrainer.keras_api import keras

LETTERS = "abcd"
TEXTS = ["a", "ab", "abc", "dd", "cab", "", "bad", "dada", "b", "cc"]
LABELS = np.array([0, 1, 1, 2, 1, 0, 1, 2, 0, 2])


def count_letters(texts):
    """Count how often each letter is in each text, `[n, 4]`, float32."""
    texts = [text.decode() for text in np.asarray(texts, "S").tolist()]
    counts = [[text.count(letter) for letter in LETTERS] for text in texts]
    return np.array(counts, "float32")


class Reader(keras.Sequential):
    """Reads texts, or pairs of them, as how often each letter is in them.

    Attributes:
        preprocessor: nothing is done to the data where it is `None`.
        seen: the parts it was given of every loader batch.
    """

    def __init__(self, preprocessor="letters"):
        keras.utils.set_random_seed(1)
        super().__init__([keras.Input([len(LETTERS)]), keras.layers.Dense(3)])
        self.preprocessor = preprocessor
        self.seen = []

    def preprocess_samples(self, x, y=None, sample_weight=None):
        self.seen.append((x, y, sample_weight))
        texts = x
        if isinstance(x, dict):
            texts = x["text"]
        elif isinstance(x, tuple):
            texts = [one + other for one, other in zip(*x, strict=True)]
        return keras.utils.pack_x_y_sample_weight(
            count_letters(texts), y, sample_weight
        )


def targets_of(counts):
    """Make targets and weights of the counts of letters."""
    return counts[:, :3].argmax(-1), counts.sum(-1)


class Continuing(Reader):
    """Makes the targets and the weights of samples of x, too."""

    def preprocess_samples(self, x, y=None, sample_weight=None):
        counts = count_letters(x)
        return counts, *targets_of(counts)
