"""The models of the benchmark, in PyTorch, with the data they are trained on.

Each function under `@model` returns a module, and a function from a number of
samples to their x and y. `cells.py` has the same models in Keras.
"""

import torch
from torch import nn
from torch.nn import functional

MODELS = {}


def model(function):
    """Add a model, under its function's name."""
    MODELS[function.__name__] = function
    return function


@model
def mlp():
    """Make a small perceptron, where nearly everything is overhead."""
    module = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    return module, make_images_of(784)


@model
def conv():
    """Make three convolutions on small colour images."""
    module = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        *pool_and_classify(64),
    )
    return module, make_images_of(3, 32, 32)


@model
def resnet():
    """Make a residual network of three stages of two blocks."""
    layers = [*convolve(3, 16, 3), nn.ReLU()]
    channels = 16
    for width, stride in [(16, 1), (32, 2), (64, 2)]:
        layers += [
            ResidualBlock(channels, width, stride),
            ResidualBlock(width, width, 1),
        ]
        channels = width
    module = nn.Sequential(*layers, *pool_and_classify(channels))
    return module, make_images_of(3, 32, 32)


@model
def gpt():
    """Make a language model of four transformer layers."""
    module = LanguageModel(width=128, depth=4, length=64, vocabulary=256)
    return module, make_text_of(length=64, vocabulary=256)


@model
def gpt_medium():
    """Make a language model of six wider transformer layers."""
    module = LanguageModel(width=256, depth=6, length=128, vocabulary=256)
    return module, make_text_of(length=128, vocabulary=256)


@model
def vgg16():
    """Make VGG-16, without dropout."""
    layers = []
    channels = 3
    for width, repeats in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(repeats):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    module = nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(512, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 10),
    )
    return module, make_images_of(3, 32, 32)


@model
def text():
    """Make a bag of words, nearly all of whose weights are an embedding."""
    module = nn.Sequential(
        nn.Embedding(50_000, 64),
        Mean(dim=1),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )

    def make_data(samples):
        x = torch.randint(50_000, [samples, 64])
        return x, torch.randint(10, [samples])

    return module, make_data


@model
def tiny():
    """Make a model of ten weights, to see what the loops around it cost."""
    return nn.Linear(1, 10, bias=False), make_images_of(1)


def pool_and_classify(channels):
    """Return the layers from an image to ten logits."""
    return Mean(dim=(2, 3)), nn.Linear(channels, 10)


def convolve(channels, width, size, stride=1):
    """Return the layers of a convolution that is normalized."""
    return (
        nn.Conv2d(
            channels,
            width,
            size,
            stride=stride,
            padding=size // 2,
            bias=False,
        ),
        nn.BatchNorm2d(width),
    )


class Mean(nn.Module):
    """Averages over one or more axes.

    Args:
        dim: int or tuple of int.
    """

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return x.mean(self.dim)


class ResidualBlock(nn.Module):
    """Adds two convolutions to what comes in.

    Args:
        channels: int, channels that come in.
        width: int, channels that go out.
        stride: int, of the first convolution.
    """

    def __init__(self, channels, width, stride):
        super().__init__()
        self.residual = nn.Sequential(
            *convolve(channels, width, 3, stride),
            nn.ReLU(),
            *convolve(width, width, 3),
        )
        self.shortcut = nn.Identity()
        if (channels, stride) != (width, 1):
            self.shortcut = nn.Sequential(*convolve(channels, width, 1, stride))

    def forward(self, x):
        return functional.relu(self.shortcut(x) + self.residual(x))


class LanguageModel(nn.Module):
    """Predicts the next token of a text.

    Args:
        width: int, of the vectors.
        depth: int, number of blocks.
        length: int, tokens in a text.
        vocabulary: int, number of different tokens.
    """

    def __init__(self, *, width, depth, length, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads=4) for _ in range(depth))
        )
        self.head = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, vocabulary)
        )

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x) + self.positions))


class TransformerBlock(nn.Module):
    """Adds causal attention, and then a perceptron, to what comes in.

    Args:
        width: int, of the vectors.
        heads: int, which divides `width`.
    """

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        x = x + self.attend(self.attention_norm(x))
        return x + self.perceptron(x)

    def attend(self, x):
        """Let every position look at itself and at those before it."""
        queries, keys, values = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.inputs(x).chunk(3, dim=2)
        )
        y = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True
        )
        return self.outputs(y.transpose(1, 2).flatten(2))


def make_images_of(*shape):
    """Make a function that makes images without meaning."""

    def make_data(samples):
        x = torch.randn(samples, *shape)
        return x, torch.randint(10, [samples])

    return make_data


def make_text_of(*, length, vocabulary):
    """Make a function that makes texts without meaning."""

    def make_data(samples):
        tokens = torch.randint(vocabulary, [samples, length + 1])
        return tokens[:, :-1], tokens[:, 1:]

    return make_data
