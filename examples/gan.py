"""Train a generator of handwritten digits against a discriminator.

Two Trainers take turns, each with its own model, optimizer and accumulation.
Each tracks the other's model: it sees it, differentiates through it, saves
and restores it with its own, and never trains it. Halfway both are saved;
at the end two new ones are restored from there and trained on, and shall come
to the same weights, bit for bit. The data are scikit-learn's digits.

    python examples/gan.py
    KERAS_BACKEND=jax python examples/gan.py
    python examples/gan.py --updates 500 --seed 1
"""

import argparse
import importlib.util
from pathlib import Path

import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits

from accumtrainer import Accumulation, Trainer, WeightedLoss

BATCH_SIZE = 128
NOISE = 32  # what the generator makes an image of


class GeneratorTrainer(Trainer):
    """Trains a generator to make what a discriminator takes for real."""

    def __init__(self, generator, discriminator, **options):
        super().__init__(generator, **options)
        self.discriminator = self.track(discriminator)

    def compute_loss(self, batch, info):
        images = self.model(batch.x, training=info.training)
        logits = self.discriminator(images, training=False)
        losses = ops.softplus(-logits)
        return WeightedLoss(ops.mean(losses), ops.shape(losses)[0])


class DiscriminatorTrainer(Trainer):
    """Trains a discriminator to tell real images from a generator's."""

    def __init__(self, discriminator, generator, **options):
        super().__init__(discriminator, **options)
        self.generator = self.track(generator)

    def compute_loss(self, batch, info):
        noise = keras.random.normal(
            [ops.shape(batch.x)[0], NOISE], seed=self.rng
        )
        images = self.generator(noise, training=False)
        real = self.model(batch.x, training=info.training)
        false = self.model(images, training=info.training)
        losses = ops.softplus(-real) + ops.softplus(false)
        return WeightedLoss(ops.mean(losses), ops.shape(losses)[0])


class Game:
    """A generator and a discriminator, which learn from each other.

    Args:
        seed: int, of the weights and of what the discriminator's Trainer
            draws.
    """

    def __init__(self, seed):
        keras.utils.set_random_seed(seed)
        layers = keras.layers
        generator = keras.Sequential(
            [
                keras.Input([NOISE]),
                layers.Dense(128, activation="relu"),
                layers.Dense(128, activation="relu"),
                layers.Dense(64, activation="sigmoid"),
            ],
            name="generator",
        )
        discriminator = keras.Sequential(
            [
                keras.Input([64]),
                layers.Dense(128, activation="leaky_relu"),
                layers.Dense(128, activation="leaky_relu"),
                layers.Dense(1),
            ],
            name="discriminator",
        )
        self.discriminator = DiscriminatorTrainer(
            discriminator,
            generator,
            optimizer=keras.optimizers.Adam(5e-4, beta_1=0.5),
            accumulation=Accumulation(micro_batch_size=16),
            seed=seed,
        )
        self.generator = GeneratorTrainer(
            generator,
            discriminator,
            optimizer=keras.optimizers.Adam(5e-4, beta_1=0.5),
            accumulation=Accumulation(micro_batch_size=32),
            seed=seed,
        )

    def play(self, images, updates):
        """Train both until they have made that many updates.

        Args:
            images: array `[n, 64]`, float32, from 0 to 1.
            updates: int, counted from the beginning.

        Returns:
            Their last losses, of the discriminator and of the generator.
        """
        losses = None
        for update in range(self.generator.progress.updates, updates):
            # Every update draws by its own number, wherever one begins.
            rng = np.random.default_rng(update)
            chosen = rng.choice(len(images), BATCH_SIZE, replace=False)
            noise = rng.normal(size=[BATCH_SIZE, NOISE]).astype("float32")
            losses = (
                self.discriminator.train_on_batch(images[chosen]),
                self.generator.train_on_batch(noise),
            )
        return losses

    def save(self, folder):
        """Save both Trainers in a folder."""
        self.discriminator.save(folder / "discriminator")
        self.generator.save(folder / "generator")

    def restore(self, folder):
        """Restore both Trainers from a folder."""
        self.discriminator.restore(folder / "discriminator")
        self.generator.restore(folder / "generator")

    def weights(self):
        """Return the weights of both models, a list of arrays."""
        trainers = self.discriminator, self.generator
        return sum((t.model.get_weights() for t in trainers), [])

    def draw(self, count):
        """Generate images of the same noise every time, `[count, 64]`."""
        rng = np.random.default_rng(0)
        noise = rng.normal(size=[count, NOISE]).astype("float32")
        return self.generator.predict(noise, verbose=0)


def measure_distance(images, others):
    """Compute how far images are, on average, from the nearest other one.

    Args:
        images: array `[n, 64]`.
        others: array `[m, 64]`; where an image is among them, it does not
            count as its own nearest.

    Returns:
        Float, a Euclidean distance.
    """
    nearest = []
    for image in images:
        distances = np.linalg.norm(others - image, axis=1)
        nearest.append(distances[distances > 0].min())
    return np.mean(nearest)


def draw_picture(images, path):
    """Write images as a picture of ten in a row, if matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed, so there is no picture.")
        return
    from matplotlib.figure import Figure

    framed = np.pad(images.reshape([-1, 8, 8]), [(0, 0), (1, 1), (1, 1)])
    tiles = framed.reshape([-1, 10, 10, 10])
    rows = tiles.swapaxes(1, 2).reshape([-1, 100])
    figure = Figure(figsize=[5, 5 * len(rows) / 100])
    axes = figure.add_axes([0, 0, 1, 1])
    axes.imshow(rows, cmap="gray_r")
    axes.set_axis_off()
    figure.savefig(path)
    print(f"picture         {path}")


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--folder", type=Path, default=Path("runs/gan"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    """Train, stop and go on, and look at what the generator makes."""
    arguments = read_arguments()
    images = (load_digits().data / 16).astype("float32")
    game = Game(arguments.seed)
    before = measure_distance(game.draw(100), images)
    game.play(images, arguments.updates // 2)
    game.save(arguments.folder)
    losses = game.play(images, arguments.updates)

    other = Game(arguments.seed + 1)
    other.restore(arguments.folder)
    other.play(images, arguments.updates)
    is_same = all(map(np.array_equal, game.weights(), other.weights()))

    drawn = game.draw(100)
    draw_picture(drawn, arguments.folder / "digits.png")
    after, real = (measure_distance(x, images) for x in (drawn, images))
    print(f"losses          {losses[0]:.2f} discriminator")
    print(f"                {losses[1]:.2f} generator")
    print(f"nearest digit   {before:.2f} away before training")
    print(f"                {after:.2f} after it")
    print(f"                {real:.2f} from a digit to another")
    print(f"gone on         from halfway, to the same weights: {is_same}")


if __name__ == "__main__":
    main()
