"""What is trained: a model with the batch of its updates.

A further cell is a function under `@cell`; nothing else needs to know it.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from keras import layers

CELLS = {}


def cell(function):
    """Add a cell to the benchmark, under its function's name."""
    CELLS[function.__name__] = function
    return function


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A model and the data of a round at its longest.

    Args:
        name: of the function that made it.
        title: what it is.
        make_model: function that returns a fresh model, not compiled.
        micro_batch_size: samples in a micro-batch.
        micro_batches: micro-batches in an update.
        x: array `[n, ...]`, n samples for as many updates as a round may have.
        y: array `[n, ...]` of class labels.
    """

    name: str
    title: str
    make_model: Callable
    micro_batch_size: int
    micro_batches: int
    x: np.ndarray
    y: np.ndarray

    @property
    def key(self):
        """How the cell is called where results are kept, a str."""
        return f"{self.name} {self.micro_batch_size}x{self.micro_batches}"

    @property
    def samples_per_update(self):
        """Samples in an update."""
        return self.micro_batch_size * self.micro_batches

    @property
    def most_updates(self):
        """Updates in the longest round."""
        return len(self.x) // self.samples_per_update

    def head(self, updates):
        """Return x and y of the first few updates."""
        samples = updates * self.samples_per_update
        return self.x[:samples], self.y[:samples]

    def without_accumulation(self):
        """Return the cell whose update is one micro-batch."""
        return self.with_micro_batches(1)

    def with_micro_batches(self, count):
        """Return the cell whose update is some number of micro-batches."""
        return dataclasses.replace(self, micro_batches=count)


def random_data(shape, *, classes, samples):
    """Make data without meaning, dict of `x` and `y`."""
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal([samples, *shape], dtype="float32"),
        "y": rng.integers(classes, size=samples, dtype="int32"),
    }


@cell
def mlp():
    """Make a small perceptron, where nearly everything is overhead."""
    return Cell(
        name="mlp",
        title="MLP 784-64-10",
        make_model=make_mlp,
        micro_batch_size=32,
        micro_batches=8,
        **random_data([784], classes=10, samples=100 * 256),
    )


@cell
def mlp_small_batches():
    """Make the same perceptron, with many small micro-batches."""
    return Cell(
        name="mlp",
        title="MLP 784-64-10",
        make_model=make_mlp,
        micro_batch_size=4,
        micro_batches=32,
        **random_data([784], classes=10, samples=100 * 128),
    )


def make_mlp():
    """Make the model of both."""
    return keras.Sequential(
        [
            keras.Input([784]),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


@cell
def conv():
    """Make three convolutions on small colour images."""

    def make_model():
        return keras.Sequential(
            [
                keras.Input([32, 32, 3]),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10),
            ]
        )

    return Cell(
        name="conv",
        title="conv net, 3 layers, 32x32x3",
        make_model=make_model,
        micro_batch_size=8,
        micro_batches=8,
        **random_data([32, 32, 3], classes=10, samples=40 * 64),
    )


@cell
def resnet():
    """Make a small residual network with BatchNormalization."""

    def convolve(x, width, stride=1, size=3):
        x = layers.Conv2D(
            width, size, strides=stride, padding="same", use_bias=False
        )(x)
        return layers.BatchNormalization()(x)

    def add_block(x, width, stride):
        y = layers.ReLU()(convolve(x, width, stride))
        y = convolve(y, width)
        if x.shape != y.shape:
            x = convolve(x, width, stride, size=1)
        return layers.ReLU()(layers.add([x, y]))

    def make_model():
        images = keras.Input([32, 32, 3])
        x = layers.ReLU()(convolve(images, 16))
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            x = add_block(x, width, stride)
            x = add_block(x, width, 1)
        x = layers.GlobalAveragePooling2D()(x)
        return keras.Model(images, layers.Dense(10)(x))

    return Cell(
        name="resnet",
        title="ResNet-14 with BatchNormalization, 32x32x3",
        make_model=make_model,
        micro_batch_size=8,
        micro_batches=8,
        **random_data([32, 32, 3], classes=10, samples=20 * 64),
    )


@cell
def gpt():
    """Make a language model of four transformer layers."""
    return make_gpt("gpt", width=128, depth=4, length=64, shape=(4, 8))


@cell
def gpt_medium():
    """Make a language model of six wider layers."""
    return make_gpt("gpt_medium", width=256, depth=6, length=128, shape=(2, 16))


def make_gpt(name, *, width, depth, length, shape, vocabulary=256, heads=4):
    """Make a cell of a small GPT.

    Args:
        name: of the cell.
        width: int, size of the vectors.
        depth: int, number of layers.
        length: int, tokens in a sample.
        shape: pair, size and number of micro-batches.
        vocabulary: int, number of tokens there are.
        heads: int, of each attention.

    Returns:
        `Cell`.
    """

    def add_block(x):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, key_dim=width // heads)
        x = layers.add([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        return layers.add([x, layers.Dense(width)(y)])

    def make_model():
        tokens = keras.Input([length], dtype="int32")
        x = layers.Embedding(vocabulary, width)(tokens)
        x = AddPositions()(x)
        for _ in range(depth):
            x = add_block(x)
        x = layers.LayerNormalization()(x)
        return keras.Model(tokens, layers.Dense(vocabulary)(x))

    text = np.random.default_rng(0).integers(
        vocabulary, size=[40 * 32, length + 1], dtype="int32"
    )
    size, count = shape
    return Cell(
        name=name,
        title=f"GPT, {depth} layers, d={width}, T={length}, V={vocabulary}",
        make_model=make_model,
        micro_batch_size=size,
        micro_batches=count,
        x=text[:, :-1],
        y=text[:, 1:],
    )


class AddPositions(layers.Layer):
    """Adds a learned vector for each position of a sequence."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=input_shape[1:], name="table")

    def call(self, x):
        return x + self.table


@cell
def vgg16():
    """Make VGG-16, one example at a time."""

    def make_model():
        return keras.applications.VGG16(
            weights=None,
            input_shape=(32, 32, 3),
            classes=10,
            classifier_activation=None,
        )

    return Cell(
        name="vgg16",
        title="VGG-16 at 32x32",
        make_model=make_model,
        micro_batch_size=1,
        micro_batches=16,
        **random_data([32, 32, 3], classes=10, samples=256),
    )


@cell
def vgg16_many():
    """Make VGG-16 with 128 examples, one at a time."""
    return vgg16().with_micro_batches(128)


@cell
def text():
    """Make a classifier of texts that is nearly all embedding."""
    vocabulary, length = 50_000, 64

    def make_model():
        return keras.Sequential(
            [
                keras.Input([length], dtype="int32"),
                layers.Embedding(vocabulary, 64),
                layers.GlobalAveragePooling1D(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )

    rng = np.random.default_rng(0)
    samples = 40 * 128
    return Cell(
        name="text",
        title=f"text classifier, embedding of {vocabulary:,} x 64",
        make_model=make_model,
        micro_batch_size=16,
        micro_batches=8,
        x=rng.integers(vocabulary, size=[samples, length], dtype="int32"),
        y=rng.integers(10, size=samples, dtype="int32"),
    )


@cell
def tiny():
    """Make a model of ten weights, to see what the loops around it cost."""

    def make_model():
        return keras.Sequential(
            [keras.Input([1]), layers.Dense(10, use_bias=False)]
        )

    return Cell(
        name="tiny",
        title="one layer of ten weights",
        make_model=make_model,
        micro_batch_size=1,
        micro_batches=8,
        **random_data([1], classes=10, samples=8_000 * 8),
    )


@cell
def deep():
    """Make a model of 2,000 variables, most of which hardly compute.

    Without residual connections: XLA on a CPU fuses a long chain of them again
    and again, and takes four to five times as long for twice as many layers,
    whoever asks it to compile.
    """

    def make_model():
        return keras.Sequential(
            [
                keras.Input([8]),
                *(SmallLayers(8) for _ in range(200)),
                layers.Dense(10),
            ]
        )

    return Cell(
        name="deep",
        title="200 layers of ten variables",
        make_model=make_model,
        micro_batch_size=4,
        micro_batches=4,
        **random_data([8], classes=10, samples=40 * 16),
    )


class SmallLayers(layers.Layer):
    """Five layers of two variables each, which hardly compute."""

    def __init__(self, width):
        super().__init__()
        self.layers = [
            layers.Dense(width, activation="tanh"),
            layers.LayerNormalization(),
            layers.Dense(width, activation="tanh"),
            layers.LayerNormalization(),
            layers.Dense(width, activation="tanh"),
        ]

    def build(self, input_shape):
        for layer in self.layers:
            layer.build(input_shape)

    def call(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
