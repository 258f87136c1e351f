"""Optimizers that keep something of each variable, for tests of what stays."""

from accumtrainer.keras_api import keras

OPTIMIZERS = {
    "SGD": {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"learning_rate": 0.02, "amsgrad": True},
    "Nadam": {"learning_rate": 0.02},
    "Adafactor": {"learning_rate": 0.02},
    "AdamW": {"learning_rate": 0.02, "use_ema": True, "ema_momentum": 0.5},
    "Lion": {"learning_rate": 0.01},
    "RMSprop": {"learning_rate": 0.01, "centered": True, "momentum": 0.5},
}


def make_optimizer(kind, **options):
    return getattr(keras.optimizers, kind)(**OPTIMIZERS[kind] | options)
