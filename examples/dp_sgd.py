"""Train on handwritten digits with differential privacy, by two hooks.

In DP-SGD (Abadi et al. 2016, https://arxiv.org/abs/1607.00133) every example is
in an update or not by a coin of its own, its gradient is clipped, and Gaussian
noise is added to the sum. With `per_example=True`, `on_accumulate` gets the
gradients of one example, and many examples run at once. `combine="sum"` adds
them up, so that `on_apply` gets their sum. The data are scikit-learn's digits.

    python examples/dp_sgd.py
    KERAS_BACKEND=jax python examples/dp_sgd.py
    python examples/dp_sgd.py --noise-multiplier 4

What is printed as privacy is a bound for the weights after every update. Two
data sets are neighbours here if one has an image more. The bound does not cover
what else is published, such as the loss of training or the best of several
trials.
"""

import argparse
import math

import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from accumtrainer import Accumulation, Trainer

BATCH_SIZE = 256
MICRO_BATCH_SIZE = 64
DELTA = 1e-4


class PrivateTrainer(Trainer):
    """Clips the gradient of each example, and adds noise to their sum.

    Args:
        model: `keras.Model` without layers that couple examples.
        clip: float, the largest global norm of one example's gradient.
        noise_multiplier: float, the standard deviation of the noise in the
            sum of the gradients, over `clip`.
        expected_size: float, how many examples an update has on average. To
            divide by how many it really has would tell of each of them.
        **options: what else a `Trainer` takes.
    """

    def __init__(
        self, model, *, clip, noise_multiplier, expected_size, **options
    ):
        by_example = Accumulation(
            micro_batch_size=MICRO_BATCH_SIZE, per_example=True, combine="sum"
        )
        super().__init__(model, accumulation=by_example, **options)
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.expected_size = expected_size

    def on_accumulate(self, gradients, info):
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        # The gradient of padding is zero, and stays so.
        factor = ops.minimum(1.0, self.clip / ops.maximum(norm, 1e-12))
        return [factor * g for g in gradients]

    def on_apply(self, gradients, info):
        stddev = self.noise_multiplier * self.clip
        noisy = [
            g + stddev * keras.random.normal(g.shape, seed=self.rng)
            for g in gradients
        ]
        return [g / self.expected_size for g in noisy]


class PoissonBatches(keras.utils.PyDataset):
    """Draws the batch of each update anew, every example by a coin of its own.

    The number of examples drawn varies, and may be zero. So that batches have
    one shape they are padded, by examples that weigh nothing. A batch depends
    on the seed and on which update it is for, and on nothing else: a run that
    is resumed draws what it would have drawn.

    Args:
        x: array, the examples.
        y: array, their labels.
        rate: float, with what probability an example is in a batch.
        updates: int, how many batches there are. To go through them twice is
            not covered by the bound.
        multiple: int, of which the size of a batch is a multiple.
        seed: int.
    """

    def __init__(self, x, y, *, rate, updates, multiple, seed=0):
        super().__init__()
        self.x, self.y = x, y
        self.rate = rate
        self.updates = updates
        self.multiple = multiple
        self.seed = seed

    def __len__(self):
        return self.updates

    def __getitem__(self, index):
        coins = np.random.default_rng([self.seed, index]).random(len(self.x))
        drawn = np.flatnonzero(coins < self.rate)
        mean = self.rate * len(self.x)
        # Hardly ever are there more; then the batch is larger.
        size = max(mean + 4 * math.sqrt(mean), len(drawn), 1)
        size = self.multiple * math.ceil(size / self.multiple)
        rows = np.pad(drawn, (0, size - len(drawn)))
        weights = (np.arange(size) < len(drawn)).astype("float32")
        return self.x[rows], self.y[rows], weights


def find_divergence(rate, noise_multiplier, order):
    """Bound what one update tells about one image, as a Renyi divergence.

    That of a Gaussian mechanism on a Poisson sample (Mironov et al. 2019,
    https://arxiv.org/abs/1908.10530, section 3.3).

    Args:
        rate: float between 0 and 1, with what probability an image is drawn.
        noise_multiplier: float above 0.
        order: int above 1.
    """
    logs = [
        math.log(math.comb(order, drawn))
        + (order - drawn) * math.log1p(-rate)
        + drawn * math.log(rate)
        + drawn * (drawn - 1) / (2 * noise_multiplier**2)
        for drawn in range(order + 1)
    ]
    largest = max(logs)
    total = sum(math.exp(value - largest) for value in logs)
    return (largest + math.log(total)) / (order - 1)


def find_epsilon(rate, noise_multiplier, updates, delta, orders=range(2, 129)):
    """Bound what all updates together tell about one image.

    Divergences of one order add up. Of each order follows an epsilon (Canonne
    et al. 2020, https://arxiv.org/abs/2004.00010, proposition 12), of which
    the smallest counts.

    Args:
        rate: as for `find_divergence`.
        noise_multiplier: float above 0.
        updates: int.
        delta: float above 0.
        orders: ints above 1, those to choose from.

    Returns:
        Epsilon, rounded up to a hundredth.
    """
    epsilon = min(
        updates * find_divergence(rate, noise_multiplier, order)
        + math.log1p(-1 / order)
        - math.log(delta * order) / (order - 1)
        for order in orders
    )
    return math.ceil(100 * max(epsilon, 0)) / 100


def load_data(seed):
    """Load the digits, split into a training and a test set.

    Returns:
        Two pairs of arrays: images `[n, 64]`, float32, from -1 to 1, and
        labels `[n]`.
    """
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(
        (images / 8 - 1).astype("float32"),
        labels,
        test_size=0.2,
        stratify=labels,
        random_state=seed,
    )
    return (x, y), (x_test, y_test)


def train(cls, source, arguments, **options):
    """Train a new model.

    Args:
        cls: class of the Trainer.
        source: dict of the data, and how they are read.
        arguments: the command line.
        **options: what `cls` takes besides.

    Returns:
        The Trainer.
    """
    keras.utils.set_random_seed(arguments.seed)
    layers = keras.layers
    trainer = cls(
        keras.Sequential(
            [
                keras.Input([64]),
                layers.Dense(32, activation="tanh"),
                layers.Dense(10),
            ]
        ),
        optimizer=keras.optimizers.Adam(0.02),
        loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=["accuracy"],
        seed=arguments.seed,
        **options,
    )
    trainer.fit(**source, epochs=arguments.epochs, verbose=0)
    return trainer


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--noise-multiplier", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    """Train with privacy and without, and print what it costs."""
    arguments = read_arguments()
    (x, y), test = load_data(arguments.seed)
    rate = BATCH_SIZE / len(x)
    updates_per_epoch = math.ceil(1 / rate)
    updates = arguments.epochs * updates_per_epoch
    plain = train(
        Trainer, {"x": x, "y": y, "batch_size": BATCH_SIZE}, arguments
    )
    batches = PoissonBatches(
        x,
        y,
        rate=rate,
        updates=updates,
        multiple=MICRO_BATCH_SIZE,
        seed=arguments.seed,
    )
    private = train(
        PrivateTrainer,
        {"x": batches, "steps_per_epoch": updates_per_epoch},
        arguments,
        clip=arguments.clip,
        noise_multiplier=arguments.noise_multiplier,
        expected_size=BATCH_SIZE,
    )
    epsilon = find_epsilon(rate, arguments.noise_multiplier, updates, DELTA)
    for name, trainer in {"plain": plain, "private": private}.items():
        results = trainer.evaluate(*test, verbose=0, return_dict=True)
        print(f"test accuracy   {results['accuracy']:.1%} {name}")
    print(f"privacy         epsilon {epsilon:.2f} at delta {DELTA:g}")
    logs = private.window_logs
    before = logs["gradient_norm"] / BATCH_SIZE
    after = logs["clipped_gradient_norm"]
    print(f"last gradient   {before:.2f} without noise, {after:.2f} with it")


if __name__ == "__main__":
    main()
