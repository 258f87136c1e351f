"""Search for settings with KerasTuner, each trial trained by a Trainer.

`HyperModel.fit` is where a Trainer comes in: it is given the model that
`build` has made, and the callbacks by which KerasTuner keeps the best epoch.
The data are scikit-learn's: 1,797 real images of 8 x 8 pixels, which come with
the library.

    python examples/tune_keras_tuner.py
    KERAS_BACKEND=jax python examples/tune_keras_tuner.py --trials 20
"""

import argparse

import keras
import keras_tuner
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from accumtrainer import Accumulation, Trainer


class Digits(keras_tuner.HyperModel):
    """A classifier, and how it is trained."""

    def build(self, hp):
        """Make a compiled model of what a trial suggests."""
        keras.utils.set_random_seed(0)
        units = hp.Int("units", 16, 128, sampling="log")
        rate = hp.Float("learning_rate", 1e-4, 0.1, sampling="log")
        model = keras.Sequential(
            [
                keras.Input([64]),
                keras.layers.Dense(units, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        # Then the best model is loaded with what its optimizer has learnt.
        model.optimizer.build(model.trainable_variables)
        return model

    def fit(self, hp, model, *data, **options):
        """Train it; `options` are those of `search`, with its callbacks."""
        size = hp.Choice("micro_batch_size", [16, 32])
        trainer = Trainer(
            model, accumulation=Accumulation(micro_batch_size=size), seed=0
        )
        return trainer.fit(*data, **options)


def load_data():
    """Load the digits, split into a training and a validation set."""
    images, labels = load_digits(return_X_y=True)
    return train_test_split(
        (images / 16).astype("float32"),
        labels,
        test_size=0.2,
        stratify=labels,
        random_state=0,
    )


def main():
    """Search, and evaluate the best model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    x, x_valid, y, y_valid = load_data()
    tuner = keras_tuner.RandomSearch(
        Digits(),
        objective="val_loss",
        max_trials=arguments.trials,
        seed=0,
        directory="tuned",
        project_name="digits",
        overwrite=True,
    )
    tuner.search(
        x,
        y,
        batch_size=128,
        epochs=arguments.epochs,
        validation_data=(x_valid, y_valid),
        verbose=0,
    )
    (best,) = tuner.oracle.get_best_trials(1)
    (model,) = tuner.get_best_models(1)
    loss, accuracy = model.evaluate(x_valid, y_valid, verbose=0)
    print(f"trials            {len(tuner.oracle.trials)}")
    print(f"best              {best.hyperparameters.values}")
    print(f"its best epoch    val_loss {best.score:.4f}")
    print(f"loaded again      val_loss {loss:.4f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
