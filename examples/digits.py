"""Train a small convolutional network on handwritten digits.

The data are scikit-learn's: 1,797 real images of 8 x 8 pixels, which come
with the library. An update sees 128 of them, in 16 micro-batches of 8, and the
learning rate follows a cosine with warm-up that moves once per update.

    python examples/digits.py
    KERAS_BACKEND=jax python examples/digits.py
    python examples/digits.py --epochs 2
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from accumtrainer import Accumulation, Callback, Trainer

BATCH_SIZE = 128
ACCUMULATION = Accumulation(micro_batch_size=8)


class LearningRates(Callback):
    """Collect the learning rate of every update, as it was applied."""

    def __init__(self):
        super().__init__()
        self.applied = []

    def on_apply(self, update, logs=None):
        self.applied.append(logs["learning_rate"])


def load_data(seed):
    """Load the digits, split into training, validation and test sets.

    Returns:
        Three pairs of arrays: images `[n, 8, 8, 1]`, float32, from 0 to 1,
        and labels `[n]`.
    """
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    x, x_test, y, y_test = train_test_split(
        images,
        digits.target,
        test_size=0.2,
        stratify=digits.target,
        random_state=seed,
    )
    x, x_valid, y, y_valid = train_test_split(
        x, y, test_size=0.1, stratify=y, random_state=seed
    )
    return (x, y), (x_valid, y_valid), (x_test, y_test)


def make_model():
    """Make a network of three convolutions, not compiled."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(10),
        ]
    )


def make_loss():
    """Make the loss of class labels and logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_schedule(updates):
    """Make a cosine of this many updates, the first tenth of them warm-up."""
    warmup = max(1, updates // 10)
    return keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=1e-3,
        warmup_target=1e-2,
        warmup_steps=warmup,
        decay_steps=updates - warmup,
    )


def compare_with_big_batch(model, x, y):
    """Make the same update twice: accumulated, and by Keras in one batch.

    Args:
        model: model whose weights both start from; it is left as it is.
        x: images of one update.
        y: their labels.

    Returns:
        Largest difference between the two, over the largest change of a
        weight, a float. Rounding leaves some millionths.
    """

    def changes(update):
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        update(clone)
        pairs = zip(clone.get_weights(), model.get_weights(), strict=True)
        return np.concatenate([np.ravel(new - old) for new, old in pairs])

    def accumulate(clone):
        trainer = Trainer(
            clone,
            optimizer=keras.optimizers.SGD(1.0),
            loss=make_loss(),
            accumulation=ACCUMULATION,
        )
        trainer.train_on_batch(x, y)

    def take_at_once(clone):
        clone.compile(keras.optimizers.SGD(1.0), make_loss())
        clone.train_on_batch(x, y)

    accumulated, at_once = changes(accumulate), changes(take_at_once)
    return np.abs(accumulated - at_once).max() / np.abs(at_once).max()


def print_results(results, trainer, updates, rates, difference):
    """Print what came out, and whether it is what was promised."""
    peak = int(np.argmax(rates))
    first = ", ".join(f"{rate:.2e}" for rate in rates[:3])
    print()
    print(f"test accuracy   {results['accuracy']:.1%}")
    print(f"updates         {trainer.progress.updates} of {updates} planned")
    print(f"learning rates  {first}, ... one per update")
    print(f"                {rates[peak]:.2e} at update {peak + 1}, the peak")
    print(f"                {rates[-1]:.2e} at update {len(rates)}, the last")
    print(f"16 x 8 vs 128   the updates differ by {difference:.1e}, relatively")


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    """Train, test, and check one update against the big batch."""
    arguments = read_arguments()
    keras.utils.set_random_seed(arguments.seed)
    train, valid, (x_test, y_test) = load_data(arguments.seed)
    model = make_model()
    difference = compare_with_big_batch(
        model, *(part[:BATCH_SIZE] for part in train)
    )
    updates = ACCUMULATION.updates(
        samples=len(train[0]), batch_size=BATCH_SIZE, epochs=arguments.epochs
    )
    rates = LearningRates()
    trainer = Trainer(
        model,
        optimizer=keras.optimizers.Adam(make_schedule(updates)),
        loss=make_loss(),
        metrics=["accuracy"],
        accumulation=ACCUMULATION,
        callbacks=[rates],
        seed=arguments.seed,
    )
    print(
        f"{len(train[0]):,} digits to train on, {len(valid[0])} to validate, "
        f"{len(x_test)} to test; Keras on {keras.backend.backend()}"
    )
    trainer.fit(
        *train,
        batch_size=BATCH_SIZE,
        epochs=arguments.epochs,
        validation_data=valid,
    )
    results = trainer.evaluate(x_test, y_test, verbose=0, return_dict=True)
    print_results(results, trainer, updates, rates.applied, difference)


if __name__ == "__main__":
    main()
