"""Show where Keras's own gradient accumulation differs, one line for each.

Every model here is one weight that begins at 0 (or a table of such), and its
loss is the mean of its outputs. So its gradient is the mean of its inputs, and
what SGD with a rate of 1 makes of the weight can be told in the head. Keras's
number comes first, then that of accumtrainer. Runs on TensorFlow:

    python docs/keras_differences.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

from accumtrainer import NonFiniteError, Trainer


class CountedRate(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that shows what it is called with: the rate is `step + 1`."""

    def __call__(self, step):
        return keras.ops.cast(step, "float32") + 1.0


class Weights(keras.callbacks.Callback):
    """Keep the weight after every batch of Keras, or every update of ours."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(weight_of(self.model))


def mean_output(y, outputs):
    """Compute the loss of each sample, which is its output."""
    del y
    return keras.ops.mean(outputs, axis=-1)


def make_model():
    """Make a model of one weight."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input([1]), dense])


def make_table(layer):
    """Make a model of a table of two rows, looked up or multiplied with."""
    inputs = keras.Input([2] if isinstance(layer, keras.layers.Dense) else [])
    return keras.Sequential([inputs, layer])


def weight_of(model):
    """Read the first weight of a model."""
    return float(model.get_weights()[0].flat[0])


def column(values):
    """Make inputs `[n, 1]` of a list of n numbers."""
    return np.array(values, "float32")[:, None]


def fit_keras(x, optimizer, batch_size=1, model=None, callbacks=()):
    """Train with Keras's `fit`, and return the model."""
    model = make_model() if model is None else model
    model.compile(optimizer, mean_output)
    options = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    model.fit(x, np.zeros([len(x), 1]), batch_size, **options)
    return model


def fit_ours(x, optimizer, batch_size=1, callbacks=(), **options):
    """Train with a Trainer, and return it."""
    options = {"model": make_model(), "seed": 0} | options
    trainer = Trainer(optimizer=optimizer, loss=mean_output, **options)
    trainer.fit(
        *(x, np.zeros([len(x), 1]), batch_size),
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return trainer


def compare(x, batch_size, steps, **options):
    """Train both ways with SGD; return the weight after each batch or update.

    Args:
        x: array `[n, 1]`.
        batch_size: int.
        steps: int, batches in an update.
        **options: of the optimizer, but for a rate of 1.

    Returns:
        Two pairs, Keras's first: the weights on the way, and the one at the
        end.
    """
    sgd, options = keras.optimizers.SGD, {"learning_rate": 1.0} | options
    keras_weights, our_weights = Weights(), Weights()
    model = fit_keras(
        *(x, sgd(**options, gradient_accumulation_steps=steps), batch_size),
        callbacks=[keras_weights],
    )
    trainer = fit_ours(
        *(x, sgd(**options), batch_size, [our_weights]), accumulation=steps
    )
    return (keras_weights.seen, weight_of(model)), (
        our_weights.seen,
        weight_of(trainer.model),
    )


def show_schedule():
    """Compare the rates of updates, which are how far the weight falls."""
    ways = compare(column([1] * 12), 1, 4, learning_rate=CountedRate())
    fallen = [-np.diff([0.0, *seen]) for seen, _ in ways]
    rates = [", ".join(f"{r:g}" for r in rates if r) for rates in fallen]
    yield "rates of a schedule step + 1, 4 batches an update", *rates


def show_means():
    """Compare an update of two batches: of 4 samples, and of 1."""
    ways = compare(column([1, 1, 1, 1, 6]), 4, 2)
    moved = [f"{weight:g}" for _, weight in ways]
    yield "batches of 4 and 1, as one batch -2", *moved


def show_tail():
    """Compare what 6 batches, 4 to an update, make of a gradient of 1."""
    ways = compare(column([1] * 6), 1, 4)
    updates = [f"{-weight:g}" for _, weight in ways]
    yield "updates made of 6 batches, 4 an update", *updates


def show_average():
    """Compare a moving average after updates to -1, -2 and -3."""
    options = {"use_ema": True, "ema_momentum": 0.5}
    ways = compare(column([1] * 12), 1, 4, **options)
    averages = [f"{weight:g}" for _, weight in ways]
    yield "use_ema, momentum 0.5, after weights -1, -2, -3", *averages


def show_embedding():
    """Compare Adam on a row that is twice in a batch, and its dense twin."""
    table = {"embeddings_initializer": "zeros"}
    dense = {"kernel_initializer": "zeros", "use_bias": False}
    batches = np.array([0, 0, 0, 1, 0, 0], "int32")
    adam = keras.optimizers.Adam
    by_row = make_table(keras.layers.Embedding(2, 1, **table))
    fit_keras(batches, adam(0.1), 2, by_row)
    twin = make_table(keras.layers.Dense(1, **dense))
    fit_keras(np.eye(2, dtype="float32")[batches], adam(0.1), 2, twin)
    ours = make_table(keras.layers.Embedding(2, 1, **table))
    fit_ours(batches, adam(0.1), 2, model=ours)
    moved = [f"{weight_of(m):.4f}" for m in (by_row, ours, twin)]
    yield f"row twice in a batch, Adam, dense {moved[2]}", *moved[:2]


def show_nan():
    """Compare what an update with a batch of NaN, and a good one, leave."""
    ways = compare(column([1, np.nan, 1, 1]), 1, 2)
    moved = [f"{weight:g}" for _, weight in ways]
    yield "weight after batches of 1, NaN; 1, 1", *moved


def show_loss_scale():
    """Compare the loss scale and the weight after 200 bad batches, and one."""
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    bad, good = column([np.nan] * 200), column([1])
    model = fit_keras(bad, keras.optimizers.SGD(1.0))
    keras_scale = float(model.optimizer.dynamic_scale)
    model.fit(good, np.zeros_like(good), verbose=0)
    trainer = fit_ours(
        bad, keras.optimizers.SGD(1.0), max_consecutive_skips=None
    )
    our_scale = trainer.window_logs["loss_scale"]
    trainer.fit(good, np.zeros_like(good), verbose=0)
    yield (
        "float16: loss scale after 200 batches of NaN",
        f"{keras_scale:g}",
        f"{our_scale:g}",
    )
    yield (
        "float16: weight after them and a gradient of 1",
        f"{weight_of(model):g}",
        f"{weight_of(trainer.model):g}",
    )
    try:
        fit_ours(bad, keras.optimizers.SGD(1.0))
        stopped = "nothing"
    except NonFiniteError as error:
        stopped = type(error).__name__
    yield "float16: what 200 batches of NaN raise", "nothing", stopped
    keras.mixed_precision.set_dtype_policy("float32")


def main():
    """Print a line for every difference."""
    keras.utils.set_random_seed(0)
    if keras.backend.backend() != "tensorflow":
        raise SystemExit("These numbers are those of Keras on TensorFlow.")
    print(f"{'':50}{'Keras':>10}  accumtrainer")
    for show in (
        show_schedule,
        show_means,
        show_tail,
        show_average,
        show_embedding,
        show_nan,
        show_loss_scale,
    ):
        for what, of_keras, ours in show():
            print(f"{what:50}{of_keras:>10}  {ours}")


if __name__ == "__main__":
    main()
