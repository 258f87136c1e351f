"""What tests of backends share."""

from accumtrainer import Trainer
from accumtrainer.keras_api import keras


def small_trainer(**options):
    model = keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    return Trainer(
        model, optimizer="adam", loss="mse", accumulation=2, **options
    )
