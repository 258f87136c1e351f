"""Compare a Trainer with Keras's own methods, by where the data come from.

The small perceptron of `bench.py` is trained, evaluated and asked for
predictions from every kind of data that `fit` takes. A turn is one call, once
over 256 batches of 32; the two take turns, and each begins as often as the
other, so that whatever else the machine does meets both alike. Printed are the
medians of the ratios of speeds, taken turn by turn, and in brackets the
interval that holds the true median in 95 of 100 such measurements. Above 1
ours is faster.

    python benchmarks/pipelines.py
    KERAS_BACKEND=jax python benchmarks/pipelines.py --rounds 41
    python benchmarks/pipelines.py --only tf.data --methods predict
    python benchmarks/pipelines.py --write

The processor's time of the process is compared as well. On cores that are
shared it tells more than the clock, but nothing of waiting.
"""

import argparse
import time

import keras
import numpy as np
from cells import mlp
from contenders import BACKEND, make_loss
from measuring import interval_of_median, start_backend
from results import keep_pipeline, write_page
from telling import describe_machine

from accumtrainer import Trainer

BATCH_SIZE = 32
BATCHES = 256
MICRO_BATCHES = 8
WORKERS = 2
PIPELINES = {}


def pipeline(name):
    """Add a way to feed data, a function that returns what makes it.

    What is made is a dict of arguments of `fit`, once for every call.
    """

    def add(function):
        PIPELINES[name] = function
        return function

    return add


def kept(**arguments):
    """Give the same data for every call."""
    return lambda: arguments


@pipeline("arrays")
def arrays(x, y):
    """Let the Trainer, or Keras, make the batches."""
    return kept(x=x, y=y, batch_size=BATCH_SIZE)


@pipeline("arrays, validated")
def arrays_with_validation(x, y):
    """Validate on as much as is trained on."""
    return kept(
        x=x,
        y=y,
        batch_size=BATCH_SIZE,
        validation_data=(x, y),
        validation_batch_size=BATCH_SIZE,
    )


def tensor_slices(x, y):
    """Make a `tf.data.Dataset` of samples."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y))


@pipeline("tf.data")
def tf_data(x, y):
    """Only batch."""
    return kept(x=tensor_slices(x, y).batch(BATCH_SIZE).prefetch(-1))


@pipeline("tf.data, shuffled, mapped")
def tf_data_mapped(x, y):
    """Shuffle, batch and compute something of each batch."""
    data = tensor_slices(x, y).shuffle(2048).batch(BATCH_SIZE)
    data = data.map(lambda x, y: (x * 2 - 1, y), num_parallel_calls=-1)
    return kept(x=data.prefetch(-1))


@pipeline("tf.data, cached")
def tf_data_cached(x, y):
    """Take batches that are all in memory."""
    return kept(x=tensor_slices(x, y).batch(BATCH_SIZE).cache().prefetch(-1))


class Sequence(keras.utils.PyDataset):
    """Cuts batches in threads."""

    def __init__(self, x, y):
        super().__init__(workers=WORKERS)
        self._x, self._y = x, y

    def __len__(self):
        return len(self._x) // BATCH_SIZE

    def __getitem__(self, index):
        rows = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        return self._x[rows], self._y[rows]


@pipeline("PyDataset, 2 workers")
def py_dataset(x, y):
    """Have threads load ahead."""
    return kept(x=Sequence(x, y))


@pipeline("torch DataLoader")
def data_loader(x, y):
    """Have PyTorch join samples, in this process."""
    import torch

    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, (x, y)))
    return kept(x=torch.utils.data.DataLoader(data, BATCH_SIZE, shuffle=True))


@pipeline("Grain")
def grain_dataset(x, y):
    """Have Grain join samples, ahead in threads."""
    import grain

    samples = list(zip(x, y, strict=True))
    data = grain.MapDataset.source(samples).shuffle(seed=0).batch(BATCH_SIZE)
    return kept(x=data.to_iter_dataset())


@pipeline("generator")
def generator(x, y):
    """Yield slices; it serves a single call."""
    data = Sequence(x, y)
    return lambda: {"x": (data[i] for i in range(len(data)))}


# --- What is done with them ---


def train(fits):
    """Make a call of `fit`."""
    return lambda arguments: fits.fit(**arguments, verbose=0)


def evaluate(evaluates):
    """Make a call of `evaluate`."""
    return lambda arguments: evaluates.evaluate(**arguments, verbose=0)


def predict(predicts):
    """Make a call of `predict`, which is given no targets of arrays."""

    def call(arguments):
        predicts.predict(
            **{k: v for k, v in arguments.items() if k != "y"}, verbose=0
        )

    return call


METHODS = {
    "fit": (train, 1),
    "fit, accumulating": (train, MICRO_BATCHES),
    "evaluate": (evaluate, 1),
    "predict": (predict, 1),
}
"""By name: what makes the call, and micro-batches of an update."""


def make_trainer(micro_batches):
    """Make a Trainer of a fresh model."""
    return Trainer(
        mlp().make_model(),
        optimizer=keras.optimizers.Adam(),
        loss=make_loss(),
        accumulation=micro_batches,
        seed=0,
    )


def make_compiled(micro_batches):
    """Make a model as Keras trains it."""
    model = mlp().make_model()
    steps = micro_batches if micro_batches > 1 else None
    model.compile(
        keras.optimizers.Adam(gradient_accumulation_steps=steps), make_loss()
    )
    return model


def measure(method, make_arguments, rounds):
    """Time one method of ours and of Keras's by turns.

    Returns:
        Pair of arrays `[rounds, 2]`, of ours and of Keras's: seconds by the
        clock, and of processor time.
    """
    make_call, micro_batches = METHODS[method]
    calls = [
        make_call(make(micro_batches)) for make in (make_trainer, make_compiled)
    ]
    for call in calls * 2:
        call(make_arguments())
    secs = ([], [])
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            arguments = make_arguments()
            begun = now()
            calls[index](arguments)
            secs[index].append(now() - begun)
    return tuple(map(np.array, secs))


def now():
    """Read the clock, and what this process has taken of all processors."""
    return np.array([time.perf_counter(), time.process_time()])


def numbers_of(ours, theirs):
    """Return what is kept of a measurement, a dict."""
    by_clock, by_processor = (theirs / ours).T

    def shorten(values):
        return [float(f"{value:.4g}") for value in values]

    def median_of(ratios):
        return shorten([np.median(ratios), *interval_of_median(ratios)])

    return {
        "ms": shorten(1000 * np.median([ours, theirs], axis=1)[:, 0]),
        "ratio": median_of(by_clock),
        "processor": median_of(by_processor),
    }


def describe(name, method, numbers):
    """Return the line that is printed of a measurement."""
    ours, theirs = numbers["ms"]
    ratios = [
        "{:.2f}x ({:.2f}x-{:.2f}x)".format(*numbers[kind])
        for kind in ("ratio", "processor")
    ]
    return (
        f"{name:<26} {method:<18} {ours:7.1f} ms, Keras {theirs:7.1f} ms, "
        f"{ratios[0]}, processor {ratios[1]}"
    )


def main():
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--batches", type=int, default=BATCHES, help="in every call"
    )
    parser.add_argument("--only", choices=PIPELINES, nargs="+")
    parser.add_argument("--methods", choices=METHODS, nargs="+")
    parser.add_argument(
        "--write", action="store_true", help="update the page of results"
    )
    options = parser.parse_args()
    start_backend()
    x, y = (part[: options.batches * BATCH_SIZE] for part in mlp().head(100))
    print(BACKEND)
    for name in options.only or PIPELINES:
        try:
            make_arguments = PIPELINES[name](x, y)
        except ImportError as error:
            print(f"{name:<26} left out: {error}", flush=True)
            continue
        for method in options.methods or METHODS:
            if "validation_data" in make_arguments() and "fit" not in method:
                continue
            secs = measure(method, make_arguments, options.rounds)
            numbers = numbers_of(*secs) | {"rounds": options.rounds}
            print(describe(name, method, numbers), flush=True)
            if options.write:
                machine = describe_machine()
                keep_pipeline(BACKEND, machine, name, method, numbers)
    if options.write:
        write_page()


if __name__ == "__main__":
    main()
