"""Learn handwritten digits from a few labels, with a teacher's help.

In a mean teacher (Tarvainen and Valpola 2017, https://arxiv.org/abs/1703.01780)
the teacher is a moving average of the student's weights, which moves after
every update, and the student shall answer as the teacher does on images
without labels too. The two losses have denominators of their own: the one of
labels is divided by the labels, of which most micro-batches have none. The
data are scikit-learn's digits.

    python examples/mean_teacher.py
    KERAS_BACKEND=jax python examples/mean_teacher.py
    python examples/mean_teacher.py --labels 100
"""

import argparse

import keras
import numpy as np
from keras import ops
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from accumtrainer import Accumulation, Trainer, WeightedLoss

BATCH_SIZE = 128
ACCUMULATION = Accumulation(micro_batch_size=16)
UNKNOWN = -1  # stands in for a label
NOISE = 0.3


class MeanTeacher(Trainer):
    """Trains a model on its labels, and on what its own average says.

    Args:
        model: `keras.Model` that returns logits.
        consistency: float, how much the average's answers count; 0 learns
            from the labels alone.
        **options: what else a `Trainer` takes.
    """

    def __init__(self, model, *, consistency, **options):
        super().__init__(model, **options)
        self.consistency = consistency
        teacher = keras.models.clone_model(model)
        teacher.set_weights(model.get_weights())
        self.teacher = self.track(teacher)

    def compute_loss(self, batch, info):
        student = self.model(self._view(batch, info), training=info.training)
        teacher = self.teacher(self._view(batch, info), training=False)
        is_known = ops.cast(batch.y != UNKNOWN, "float32")
        labels = ops.sum(is_known)
        errors = keras.losses.sparse_categorical_crossentropy(
            ops.maximum(batch.y, 0), student, from_logits=True
        )
        answers = ops.stop_gradient(ops.softmax(teacher))
        distances = ops.sum(ops.square(ops.softmax(student) - answers), axis=-1)
        return {
            "supervised": WeightedLoss(
                ops.divide_no_nan(ops.sum(is_known * errors), labels), labels
            ),
            "consistency": WeightedLoss(
                ops.mean(distances),
                ops.shape(distances)[0],
                coefficient=self.consistency,
            ),
        }

    def after_apply(self, info):
        updates = ops.cast(info.update, "float32")
        decay = ops.minimum(0.99, 1.0 - 1.0 / (updates + 1.0))
        pairs = zip(self.teacher.weights, self.model.weights, strict=True)
        for old, new in pairs:
            old.assign(decay * old + (1.0 - decay) * new)

    def _view(self, batch, info):
        """Draw noise anew for whoever looks, in training."""
        if not info.training:
            return batch.x
        noise = keras.random.normal(ops.shape(batch.x), seed=self.rng)
        return batch.x + NOISE * noise


def load_data(count, seed):
    """Load the digits, and forget most of their labels.

    Args:
        count: int, how many labels to keep, as many of each class.
        seed: int.

    Returns:
        Two pairs of arrays, to train and to test: images `[n, 64]`, float32,
        from -1 to 1, and labels `[n]`, int32.
    """
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(
        (images / 8 - 1).astype("float32"),
        labels.astype("int32"),
        test_size=0.2,
        stratify=labels,
        random_state=seed,
    )
    _, known = train_test_split(
        np.arange(len(y)), test_size=count, stratify=y, random_state=seed
    )
    few = np.full_like(y, UNKNOWN)
    few[known] = y[known]
    return (x, few), (x_test, y_test)


def make_trainer(consistency, seed):
    """Make a Trainer of a new model; see `MeanTeacher`."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input([64]),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )
    return MeanTeacher(
        model,
        consistency=consistency,
        optimizer=keras.optimizers.Adam(3e-3),
        accumulation=ACCUMULATION,
        seed=seed,
    )


def measure_accuracy(model, x, y):
    """Tell how many images a model gets right, from 0 to 1."""
    logits = keras.ops.convert_to_numpy(model(x, training=False))
    return np.mean(np.argmax(logits, axis=1) == y)


def find_moved(trainer, x, y):
    """Train on a batch; tell whether student and teacher have moved by it."""
    models = trainer.model, trainer.teacher
    before = [model.get_weights() for model in models]
    trainer.train_on_batch(x, y)
    after = [model.get_weights() for model in models]
    return [
        not all(map(np.array_equal, old, new))
        for old, new in zip(before, after, strict=True)
    ]


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--labels", type=int, default=50)
    parser.add_argument("--consistency", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    """Train by labels alone and with the teacher, and compare."""
    arguments = read_arguments()
    (x, y), test = load_data(arguments.labels, arguments.seed)
    print(
        f"{len(x)} digits to train on, {np.sum(y != UNKNOWN)} of them with "
        f"labels, {len(test[0])} to test; Keras on {keras.backend.backend()}"
    )
    trainers = [
        make_trainer(consistency, arguments.seed)
        for consistency in (0.0, arguments.consistency)
    ]
    for trainer in trainers:
        trainer.fit(
            x, y, batch_size=BATCH_SIZE, epochs=arguments.epochs, verbose=0
        )
    alone, helped = trainers
    for name, model in {
        "by labels alone": alone.model,
        "student": helped.model,
        "teacher": helped.teacher,
    }.items():
        print(f"test accuracy   {measure_accuracy(model, *test):.1%} {name}")
    images, labels = x[:BATCH_SIZE], y[:BATCH_SIZE]
    broken = np.where(np.arange(BATCH_SIZE)[:, None] == 3, np.nan, images)
    for name, batch in {"one bad image": broken, "good images": images}.items():
        student, teacher = find_moved(helped, batch.astype("float32"), labels)
        print(f"{name:15} moves the student: {student}, teacher: {teacher}")


if __name__ == "__main__":
    main()
