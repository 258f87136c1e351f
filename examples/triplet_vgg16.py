"""Teach VGG-16 which digits are alike, 128 micro-batches of one to an update.

Two ways to train a triplet network where only one example fits:

- *Triplets*: each micro-batch is one triplet (anchor, positive, negative),
  and accumulation gives the update of all 128 at once.
- *Batch-hard*: each micro-batch is one image, and every one of the 128 is
  compared with the farthest of its class and the nearest of another. Plain
  accumulation cannot do that, because every micro-batch sees only itself; a
  `WindowLossTrainer` can, and needs no more memory.

The data are scikit-learn's digits, real images of 8 x 8 pixels, enlarged to
32 x 32 x 3. What is printed: how often two unseen images are rightly told to
show the same digit, before and after, and the most memory that one update
takes, beside that of the big batch.

    python examples/triplet_vgg16.py
    KERAS_BACKEND=jax python examples/triplet_vgg16.py
    python examples/triplet_vgg16.py --updates 1 --examples 4 --no-memory
"""

import argparse
import os
import subprocess
import sys

import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from accumtrainer import (
    Accumulation,
    Trainer,
    WeightedLoss,
    WindowLossTrainer,
    peak_memory_bytes,
)
from accumtrainer.window_losses import batch_hard_triplet_loss

SHAPE = (32, 32, 3)
ONE_BY_ONE = Accumulation(micro_batch_size=1)


class TripletTrainer(Trainer):
    """Pull an anchor to its positive, and push its negative away."""

    def compute_loss(self, batch, info):
        """Compute the soft loss of triplets, images `[m, 3, 32, 32, 3]`."""
        images = ops.reshape(batch.x, [-1, *SHAPE])
        embeddings = self.model(images, training=info.training)
        embeddings = ops.reshape(embeddings, [-1, 3, embeddings.shape[-1]])
        anchor, positive, negative = ops.unstack(embeddings, 3, axis=1)
        near = ops.norm(anchor - positive, axis=1)
        far = ops.norm(anchor - negative, axis=1)
        self.log("right", ops.mean(ops.cast(near < far, "float32")))
        losses = ops.softplus(near - far)
        return WeightedLoss(ops.mean(losses), ops.shape(losses)[0])


class BatchHardTrainer(WindowLossTrainer):
    """Compare each of all images with the hardest of the others."""

    def window_loss(self, embeddings, batch, info):
        """Compute the batch-hard loss of all images of an update."""
        return batch_hard_triplet_loss(embeddings, batch.y, margin="soft")


def load_data(seed):
    """Load the digits, enlarged, split into training and test sets.

    Returns:
        Two pairs of arrays: images `[n, 32, 32, 3]`, float32, from -1 to 1,
        and labels `[n]`.
    """
    digits = load_digits()
    images = np.kron(digits.images, np.ones([4, 4])) / 8 - 1
    images = np.repeat(images[..., None], 3, axis=-1).astype("float32")
    x, x_test, y, y_test = train_test_split(
        images,
        digits.target,
        test_size=0.2,
        stratify=digits.target,
        random_state=seed,
    )
    return (x, y), (x_test, y_test)


def make_model(seed):
    """Make VGG-16 with random weights, and 64 outputs."""
    keras.utils.set_random_seed(seed)
    backbone = keras.applications.VGG16(
        include_top=False, weights=None, input_shape=SHAPE, pooling="avg"
    )
    # A deep plain network whose weights begin as Glorot's shrinks what
    # passes through it to almost nothing; those of He keep its size.
    for layer in backbone.layers:
        if isinstance(layer, keras.layers.Conv2D):
            initializer = keras.initializers.HeNormal(seed=seed)
            layer.kernel.assign(initializer(layer.kernel.shape))
    return keras.Sequential([backbone, keras.layers.Dense(64)])


def make_optimizer(updates):
    """Make Adam with a warm-up over the first quarter of the updates."""
    warmup = max(1, updates // 4)
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=3e-5,
        warmup_target=3e-4,
        warmup_steps=warmup,
        decay_steps=max(1, updates - warmup),
        alpha=0.1,
    )
    return keras.optimizers.Adam(schedule, global_clipnorm=1.0)


def make_triplets(x, y, count, rng):
    """Draw triplets: two of a class, and one of another.

    Returns:
        Array `[count, 3, 32, 32, 3]`.
    """
    rows = []
    for anchor in rng.integers(len(y), size=count):
        alike = np.setdiff1d(np.flatnonzero(y == y[anchor]), anchor)
        others = np.flatnonzero(y != y[anchor])
        rows.append((anchor, rng.choice(alike), rng.choice(others)))
    return x[np.array(rows)]


def verification_accuracy(model, x, y, rng, pairs=4000):
    """Tell how often pairs are rightly called alike or different.

    Half of the pairs are alike, and the threshold on their distance is the
    best there is, so that guessing is right half of the time.
    """
    embeddings = model.predict(x, batch_size=120, verbose=0)
    first, second = rng.integers(len(y), size=[2, 40 * pairs])
    alike = y[first] == y[second]
    chosen = np.concatenate(
        [
            np.flatnonzero(alike & (first != second))[: pairs // 2],
            np.flatnonzero(~alike)[: pairs // 2],
        ]
    )
    first, second, alike = first[chosen], second[chosen], alike[chosen]
    distances = np.linalg.norm(embeddings[first] - embeddings[second], axis=1)
    order = np.argsort(distances)
    # Calling the nearest i pairs alike is right for those of them that are,
    # and for the others that are not.
    right = np.cumsum(np.where(alike[order], 1, -1)) + np.sum(~alike)
    return max(right.max(), np.sum(~alike)) / len(alike)


def train_on_triplets(model, x, y, options, rng):
    """Train on random triplets, each a micro-batch of its own."""
    trainer = TripletTrainer(
        model,
        optimizer=make_optimizer(options.updates),
        accumulation=ONE_BY_ONE,
        seed=options.seed,
    )
    triplets = make_triplets(x, y, options.updates * options.examples, rng)
    trainer.fit(triplets, batch_size=options.examples)


def train_batch_hard(model, x, y, options, rng):
    """Train on the hardest comparisons among all images of an update."""
    trainer = BatchHardTrainer(
        model,
        optimizer=make_optimizer(options.updates),
        accumulation=ONE_BY_ONE,
        seed=options.seed,
    )
    rows = rng.permutation(len(y))[: options.updates * options.examples]
    trainer.fit(x[rows], y[rows], batch_size=options.examples)


WAYS = {"triplets": train_on_triplets, "batch-hard": train_batch_hard}


def peak_of_one_update(micro_batch_size, examples, seed):
    """Make one batch-hard update.

    Returns:
        Pair of ints, bytes: the most memory of this process, and how much
        more that is than before the update.
    """
    (x, y), _ = load_data(seed)
    trainer = BatchHardTrainer(
        make_model(seed),
        optimizer=make_optimizer(1),
        accumulation=Accumulation(micro_batch_size=micro_batch_size),
        seed=seed,
    )
    before = peak_memory_bytes()
    trainer.train_on_batch(x[:examples], y[:examples])
    return peak_memory_bytes(), peak_memory_bytes() - before


def compare_memory(options):
    """Print the memory of an update in micro-batches and in one batch.

    Each is made in a process of its own, because a process never has less
    than its peak.
    """
    peaks = {}
    for size in (1, options.examples):
        arguments = [
            f"--peak-of={size}",
            f"--examples={options.examples}",
            f"--seed={options.seed}",
        ]
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), *arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        peaks[size] = [int(number) for number in done.stdout.split()[-2:]]
    for size, (peak, more) in peaks.items():
        name = f"{options.examples // size} x {size}"
        print(
            f"peak memory of {name:<8} {peak / 2**20:6,.0f} MiB, "
            f"{more / 2**20:,.0f} MiB of it for the update"
        )


def main():
    """Train both ways, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument(
        "--unseen", type=int, default=360, help="images to verify, at most 360"
    )
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.peak_of:
        examples, seed = options.examples, options.seed
        print(*peak_of_one_update(options.peak_of, examples, seed))
        return
    (x, y), unseen = load_data(options.seed)
    x_test, y_test = (array[: options.unseen] for array in unseen)
    for way in options.ways:
        model = make_model(options.seed)
        accuracies = []
        for train in (None, WAYS[way]):
            if train is not None:
                print(f"{way}:")
                train(model, x, y, options, np.random.default_rng(options.seed))
            rng = np.random.default_rng(options.seed)
            accuracies.append(verification_accuracy(model, x_test, y_test, rng))
        before, after = accuracies
        print(f"verification accuracy {before:.1%} before, {after:.1%} after")
    if not options.no_memory:
        compare_memory(options)


if __name__ == "__main__":
    main()
