"""Search for settings with Optuna, and stop the trials that lag behind.

Each trial trains a new model with a new Trainer on scikit-learn's digits,
1,797 real images of 8 x 8 pixels, which come with the library. After every
epoch Optuna learns the validation loss, and may prune the trial.

    python examples/tune_optuna.py
    KERAS_BACKEND=jax python examples/tune_optuna.py --trials 20
"""

import argparse

import keras
import optuna
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from accumtrainer import Accumulation, Trainer


class Pruning(keras.callbacks.Callback):
    """Tells a trial of every epoch, and ends a training that is pruned."""

    def __init__(self, trial):
        super().__init__()
        self.trial = trial

    def on_epoch_end(self, epoch, logs=None):
        """Report the validation loss."""
        self.trial.report(logs["val_loss"], step=epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


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


def make_trainer(trial):
    """Make a Trainer of what a trial suggests."""
    keras.utils.set_random_seed(0)
    units = trial.suggest_int("units", 16, 128, log=True)
    rate = trial.suggest_float("learning_rate", 1e-4, 0.1, log=True)
    layers = [
        keras.Input([64]),
        keras.layers.Dense(units, activation="relu"),
        keras.layers.Dense(10),
    ]
    return Trainer(
        keras.Sequential(layers),
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        accumulation=Accumulation(micro_batch_size=32),
        seed=0,
    )


def main():
    """Search, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    x, x_valid, y, y_valid = load_data()

    def objective(trial):
        history = make_trainer(trial).fit(
            x,
            y,
            batch_size=128,
            epochs=arguments.epochs,
            validation_data=(x_valid, y_valid),
            callbacks=[Pruning(trial)],
            verbose=0,
        )
        return history.history["val_loss"][-1]

    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=3, n_warmup_steps=1
        ),
    )
    study.optimize(objective, n_trials=arguments.trials, gc_after_trial=True)
    states = [trial.state.name for trial in study.trials]
    best = study.best_trial
    print()
    print(f"trials            {len(states)}, {states.count('PRUNED')} pruned")
    print(f"best              val_loss {best.value:.3f} in trial {best.number}")
    print(f"units             {best.params['units']}")
    print(f"learning rate     {best.params['learning_rate']:.1e}")


if __name__ == "__main__":
    main()
