"""Train on handwritten digits with differential privacy, by two hooks.

In DP-SGD (Abadi et al. 2016, https://arxiv.org/abs/1607.00133) the gradient
of every example is clipped, and Gaussian noise is added to their sum. With
micro-batches of one, `on_accumulate` sees the gradient of one example;
`on_apply` sees the average of the batch's, so the noise is divided as they
were. The data are scikit-learn's digits.

    python examples/dp_sgd.py
    KERAS_BACKEND=jax python examples/dp_sgd.py
    python examples/dp_sgd.py --noise-multiplier 8

What is printed as privacy is a bound for the trained weights. It counts that
an image is in one batch of every epoch, and not that nobody knows in which:
the smaller numbers in the literature are for batches that are drawn anew for
each update, every image by a coin of its own, and these batches are shuffled.
It does not cover what else is published, such as the loss of training or the
best of several trials.
"""

import argparse
import math

import keras
from keras import ops
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from accumtrainer import Accumulation, Trainer

BATCH_SIZE = 256
DELTA = 1e-4


class PrivateTrainer(Trainer):
    """Clips the gradient of each example, and adds noise to their sum.

    Args:
        model: `keras.Model` without layers that couple examples.
        clip: float, the largest global norm of one example's gradient.
        noise_multiplier: float, the standard deviation of the noise in the
            sum of the gradients, over `clip`.
        **options: what else a `Trainer` takes.
    """

    def __init__(self, model, *, clip, noise_multiplier, **options):
        one_by_one = Accumulation(micro_batch_size=1)
        super().__init__(model, accumulation=one_by_one, **options)
        self.clip = clip
        self.noise_multiplier = noise_multiplier

    def on_accumulate(self, gradients, info):
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in gradients))
        factor = ops.minimum(1.0, self.clip / norm)
        return [factor * g for g in gradients]

    def on_apply(self, gradients, info):
        stddev = self.noise_multiplier * self.clip / info.total_weight
        return [
            g + stddev * keras.random.normal(g.shape, seed=self.rng)
            for g in gradients
        ]


def find_epsilon(noise_multiplier, epochs, delta):
    """Bound what the trained weights tell about one image.

    Two data sets are neighbours here if an image of the one is replaced in the
    other by one whose gradient is always zero. In an epoch it takes part in
    one update, a Gaussian mechanism of sensitivity `clip`. Many of them make
    one Gaussian mechanism whose noise is smaller by the root of their number
    (Dong et al. 2019, https://arxiv.org/abs/1905.02383), of which epsilon is
    known exactly (Balle and Wang 2018, https://arxiv.org/abs/1805.06530).

    Args:
        noise_multiplier: float above 0.
        epochs: int.
        delta: float above 0.

    Returns:
        Epsilon, rounded up to a hundredth.
    """
    mu = math.sqrt(epochs) / noise_multiplier

    def delta_at(epsilon):
        def tail(x):
            return math.erfc(x / math.sqrt(2)) / 2

        return tail(epsilon / mu - mu / 2) - math.exp(epsilon) * tail(
            epsilon / mu + mu / 2
        )

    hundredths = 0
    while delta_at(hundredths / 100) > delta:
        hundredths += 1
    return hundredths / 100


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


def train(cls, data, arguments, **options):
    """Train a new model.

    Args:
        cls: class of the Trainer.
        data: pair of images and labels.
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
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        seed=arguments.seed,
        **options,
    )
    trainer.fit(
        *data, batch_size=BATCH_SIZE, epochs=arguments.epochs, verbose=0
    )
    return trainer


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--noise-multiplier", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    """Train with privacy and without, and print what it costs."""
    arguments = read_arguments()
    data, test = load_data(arguments.seed)
    plain = train(Trainer, data, arguments)
    private = train(
        PrivateTrainer,
        data,
        arguments,
        clip=arguments.clip,
        noise_multiplier=arguments.noise_multiplier,
    )
    epsilon = find_epsilon(arguments.noise_multiplier, arguments.epochs, DELTA)
    logs = private.window_logs
    before, after = logs["gradient_norm"], logs["clipped_gradient_norm"]
    for name, trainer in {"plain": plain, "private": private}.items():
        results = trainer.evaluate(*test, verbose=0, return_dict=True)
        print(f"test accuracy   {results['accuracy']:.1%} {name}")
    print(f"privacy         epsilon {epsilon:.2f} at delta {DELTA:g}")
    print(f"last gradient   {before:.2f} without noise, {after:.2f} with it")


if __name__ == "__main__":
    main()
