"""Compare the speed of a Trainer with that of Keras's own `fit`.

Every cell (a model with its batch) is trained by every contender in turn,
round after round, so that whatever else the machine does meets all of them
alike. A round is one call of `fit` that takes about a second. Printed are the
medians over rounds and in brackets the smallest and the largest; ratios are
taken round by round.

    python benchmarks/bench.py
    python benchmarks/bench.py --cells mlp --rounds 9
    KERAS_BACKEND=jax python benchmarks/bench.py --write

A further cell is a function under `@cell`, a further contender one under
`@contender`; nothing else needs to know them.
"""

import argparse
import datetime
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import keras
import numpy as np
from handwritten import make_window

from accumtrainer import Accumulation, Trainer

RESULTS = Path(__file__).parent / "RESULTS.md"
BACKEND = keras.backend.backend()
REFERENCE = "keras_accumulating"

CELLS = {}
CONTENDERS = {}


def cell(function):
    """Add a cell to the benchmark, under its function's name."""
    CELLS[function.__name__] = function
    return function


def contender(*backends):
    """Add a contender to the benchmark, for some backends or for all."""

    def add(function):
        if not backends or BACKEND in backends:
            CONTENDERS[function.__name__] = function
        return function

    return add


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model and the data of a round at its longest.

    Args:
        title: what it is.
        make_model: function that returns a fresh model, not compiled.
        micro_batch_size: samples in a micro-batch.
        micro_batches: micro-batches in an update.
        x: array `[n, ...]`, n samples for as many updates as a round may have.
        y: array `[n, ...]` of class labels.
    """

    title: str
    make_model: Callable
    micro_batch_size: int
    micro_batches: int
    x: np.ndarray
    y: np.ndarray

    @property
    def samples_per_update(self):
        """Samples in an update."""
        return self.micro_batch_size * self.micro_batches

    @property
    def most_updates(self):
        """Updates in the longest round."""
        return len(self.x) // self.samples_per_update

    def head(self, updates):
        """Return x and y of the first few updates."""
        samples = updates * self.samples_per_update
        return self.x[:samples], self.y[:samples]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A contender that is ready to train a cell.

    Args:
        name: str, who it is.
        fit: function of a number of updates, which makes them, waits for
            them, and returns the loss of their epoch.
        describe: function that returns str, to be called after the first
            update.
    """

    name: str
    fit: Callable[[int], float]
    describe: Callable[[], str]


@dataclass(kw_only=True)
class Timing:
    """What was measured of one contender on one cell.

    Args:
        runner: `Runner`.
        first_update_secs: seconds from the model to its first update,
            compilation included.
        first_loss: loss before the first update.
        updates: updates in a round.
        rounds: list of seconds per update, one per round.
    """

    runner: Runner
    first_update_secs: float
    first_loss: float
    updates: int = 1
    rounds: list[float] = field(default_factory=list)


# --- Cells ---


@cell
def mlp():
    """Make a small perceptron, where nearly everything is overhead."""
    layers = keras.layers

    def make_model():
        return keras.Sequential(
            [
                keras.Input([784]),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )

    return Cell(
        title="MLP 784-64-10",
        make_model=make_model,
        micro_batch_size=32,
        micro_batches=8,
        **random_data([784], classes=10, samples=100 * 256),
    )


@cell
def conv():
    """Make three convolutions on small colour images."""
    layers = keras.layers

    def make_model():
        return keras.Sequential(
            [
                keras.Input([32, 32, 3]),
                layers.Conv2D(32, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.MaxPooling2D(),
                layers.Conv2D(64, 3, padding="same", activation="relu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10),
            ]
        )

    return Cell(
        title="conv net, 3 layers, 32x32x3",
        make_model=make_model,
        micro_batch_size=8,
        micro_batches=8,
        **random_data([32, 32, 3], classes=10, samples=40 * 64),
    )


@cell
def gpt():
    """Make a language model of four transformer layers."""
    width, length, vocabulary, depth = 128, 64, 256, 4
    layers = keras.layers

    def add_block(x):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(num_heads=4, key_dim=width // 4)
        x = layers.add([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        return layers.add([x, layers.Dense(width)(y)])

    def make_model():
        tokens = keras.Input([length], dtype="int32")
        x = layers.Embedding(vocabulary, width)(tokens)
        x = AddPositions()(x)
        for _ in range(depth):
            x = add_block(x)
        x = layers.LayerNormalization()(x)
        return keras.Model(tokens, layers.Dense(vocabulary)(x))

    text = np.random.default_rng(0).integers(
        vocabulary, size=[40 * 32, length + 1], dtype="int32"
    )
    return Cell(
        title=f"GPT, {depth} layers, d={width}, T={length}, V={vocabulary}",
        make_model=make_model,
        micro_batch_size=4,
        micro_batches=8,
        x=text[:, :-1],
        y=text[:, 1:],
    )


@cell
def vgg16():
    """Make VGG-16, one example at a time."""

    def make_model():
        return keras.applications.VGG16(
            weights=None,
            input_shape=(32, 32, 3),
            classes=10,
            classifier_activation=None,
        )

    return Cell(
        title="VGG-16 at 32x32",
        make_model=make_model,
        micro_batch_size=1,
        micro_batches=16,
        **random_data([32, 32, 3], classes=10, samples=40 * 16),
    )


class AddPositions(keras.layers.Layer):
    """Adds a learned vector for each position of a sequence."""

    def build(self, input_shape):
        self.table = self.add_weight(shape=input_shape[1:], name="table")

    def call(self, x):
        return x + self.table


def random_data(shape, *, classes, samples):
    """Make data without meaning, dict of `x` and `y`."""
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal([samples, *shape], dtype="float32"),
        "y": rng.integers(classes, size=samples, dtype="int32"),
    }


# --- Contenders: functions of a cell and a fresh model ---


@contender()
def trainer(cell, model):
    """Let our Trainer choose its plan."""
    return run_trainer("Trainer, auto", cell, model, jit_compile="auto")


@contender("tensorflow")
def trainer_with_xla(cell, model):
    """Have XLA compile our Trainer; on JAX it always does."""
    return run_trainer("Trainer, XLA", cell, model, jit_compile=True)


@contender("tensorflow")
def trainer_without_xla(cell, model):
    """Keep XLA away from our Trainer."""
    return run_trainer("Trainer, no XLA", cell, model, jit_compile=False)


@contender()
def keras_accumulating(cell, model):
    """Let the optimizer of Keras accumulate."""
    return run_keras(
        "Keras fit, accumulating",
        cell,
        model,
        batch_size=cell.micro_batch_size,
        gradient_accumulation_steps=cell.micro_batches,
    )


@contender("tensorflow")
def keras_accumulating_with_xla(cell, model):
    """Have XLA compile that; without an accelerator Keras does not."""
    return run_keras(
        "Keras fit, accumulating",
        cell,
        model,
        batch_size=cell.micro_batch_size,
        gradient_accumulation_steps=cell.micro_batches,
        jit_compile=True,
    )


@contender()
def keras_big_batch(cell, model):
    """Give Keras the whole batch, as if there were memory for it."""
    return run_keras(
        "Keras fit, big batch", cell, model, batch_size=cell.samples_per_update
    )


@contender("jax")
def handwritten(cell, model):
    """Write the window by hand, for this model alone."""
    return run_handwritten("hand-written window", cell, model)


@contender("jax")
def handwritten_stream(cell, model):
    """Write the window by hand, one compiled call for each micro-batch."""
    return run_handwritten("hand-written stream", cell, model, is_fused=False)


@contender("tensorflow")
def handwritten_with_xla(cell, model):
    """Write the window by hand, compiled by XLA."""
    return run_handwritten("hand-written, XLA", cell, model, jit_compile=True)


@contender("tensorflow")
def handwritten_without_xla(cell, model):
    """Write the window by hand, not compiled by XLA."""
    return run_handwritten("hand-written", cell, model, jit_compile=False)


def run_handwritten(name, cell, model, *, jit_compile=True, is_fused=True):
    """Get a hand-written window ready, `Runner`; it shuffles, as `fit` does."""
    run, wait = make_window(
        model,
        keras.optimizers.Adam(),
        make_loss(),
        jit_compile=jit_compile,
        is_fused=is_fused,
    )
    shape = (cell.micro_batches, cell.micro_batch_size)
    rng = np.random.default_rng(0)

    def fit(updates):
        order = rng.permutation(updates * cell.samples_per_update)
        losses = [
            run(
                *(
                    data[rows].reshape(*shape, *data.shape[1:])
                    for data in (cell.x, cell.y)
                )
            )
            for rows in np.split(order, updates)
        ]
        wait()
        return float(np.mean([float(loss) for loss in losses]))

    return Runner(name=name, fit=fit, describe=lambda: "XLA" * jit_compile)


def run_trainer(name, cell, model, *, jit_compile):
    """Get a Trainer ready, `Runner`."""
    trainer = Trainer(
        model,
        optimizer=keras.optimizers.Adam(),
        loss=make_loss(),
        accumulation=Accumulation(micro_batch_size=cell.micro_batch_size),
        jit_compile=jit_compile,
        seed=0,
    )

    def fit(updates):
        history = trainer.fit(
            *cell.head(updates), batch_size=cell.samples_per_update, verbose=0
        )
        return history.history["loss"][0]

    return Runner(name=name, fit=fit, describe=lambda: str(trainer.plan))


def run_keras(
    name,
    cell,
    model,
    *,
    batch_size,
    gradient_accumulation_steps=None,
    jit_compile="auto",
):
    """Get `Model.fit` ready, `Runner`."""
    optimizer = keras.optimizers.Adam(
        gradient_accumulation_steps=gradient_accumulation_steps
    )
    model.compile(optimizer, make_loss(), jit_compile=jit_compile)

    def fit(updates):
        history = model.fit(
            *cell.head(updates), batch_size=batch_size, verbose=0
        )
        return history.history["loss"][0]

    return Runner(
        name=name, fit=fit, describe=lambda: "XLA" * bool(model.jit_compile)
    )


def make_loss():
    """Make the loss of every cell."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# --- Measuring ---


def measure(cell, contenders, *, rounds, round_secs):
    """Time some contenders on one cell, in turn.

    Args:
        cell: `Cell`.
        contenders: list of names.
        rounds: int.
        round_secs: seconds that a round should take at most.

    Returns:
        Dict from name to `Timing`.
    """
    timings = {name: start(CONTENDERS[name], cell) for name in contenders}
    check_losses(timings)
    for timing in timings.values():
        # The faster one is free of what happens only once.
        secs = min(seconds_per_update(timing.runner, 2) for _ in range(2))
        affordable = int(round_secs / secs)
        timing.updates = max(2, min(affordable, cell.most_updates))
        timing.runner.fit(timing.updates)
    for _ in range(rounds):
        for timing in timings.values():
            timing.rounds.append(
                seconds_per_update(timing.runner, timing.updates)
            )
    return timings


def start(make_runner, cell):
    """Make the first update of a contender, `Timing` without rounds."""
    keras.utils.set_random_seed(0)
    model = cell.make_model()
    begun = time.perf_counter()
    runner = make_runner(cell, model)
    loss = runner.fit(1)
    return Timing(
        runner=runner,
        first_update_secs=time.perf_counter() - begun,
        first_loss=loss,
    )


def check_losses(timings):
    """Make sure that all begin with the same weights and the same data."""
    losses = {name: timing.first_loss for name, timing in timings.items()}
    if not np.allclose(list(losses.values()), min(losses.values()), rtol=1e-3):
        raise AssertionError(f"The first losses differ: {losses}")


def seconds_per_update(runner, updates):
    """Time one call of `fit`."""
    begun = time.perf_counter()
    runner.fit(updates)
    return (time.perf_counter() - begun) / updates


def start_backend():
    """Pay for what a process does once, at nobody's expense."""
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.zeros([2, 1]), np.zeros([2, 1]), verbose=0)


# --- Telling ---


def tell(timings):
    """Turn measurements into the lines of a Markdown table.

    Args:
        timings: dict from contender to `Timing`.

    Returns:
        List of str.
    """
    reference = timings.get(REFERENCE)
    rows = [
        (
            "",
            "ms per update",
            "updates/s",
            "vs Keras accumulating",
            "first update",
        )
    ]
    for timing in timings.values():
        secs = np.array(timing.rounds)
        ratio = ""
        if reference is not None:
            ratio = spread(np.array(reference.rounds) / secs, "{:.2f}x")
        detail = timing.runner.describe()
        rows.append(
            (
                timing.runner.name + f" ({detail})" * bool(detail),
                spread(secs * 1000, "{:.2f}"),
                f"{1 / np.median(secs):,.1f}",
                ratio,
                f"{timing.first_update_secs:.1f} s",
            )
        )
    return format_table(rows)


def spread(values, form):
    """Write the median, and in brackets the smallest and the largest.

    Example:
        >>> spread([1, 2, 6], "{:.0f}x")
        '2x (1x-6x)'
    """
    low, high = form.format(np.min(values)), form.format(np.max(values))
    return f"{form.format(np.median(values))} ({low}-{high})"


def format_table(rows):
    """Align a Markdown table, whose first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *others in [rows[0], rule, *rows[1:]]:
        cells = [
            first.ljust(widths[0]),
            *map(str.rjust, others, widths[1:]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def describe_cell(cell, rounds):
    """Return the heading of a cell."""
    return (
        f"### {cell.title}; {cell.micro_batches} micro-batches of "
        f"{cell.micro_batch_size}; {rounds} rounds"
    )


def describe_machine():
    """Return the date, the versions and the machine, list of str."""
    packages = ("accumtrainer", "keras", BACKEND, "numpy")
    versions = [f"{name} {metadata.version(name)}" for name in packages]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return [
        f"{datetime.date.today()}; Python {platform.python_version()}, "
        + ", ".join(versions),
        f"{processor_name()}, {os.cpu_count()} cores, {memory:.0f} GiB; "
        "devices: " + ", ".join(keras.distribution.list_devices()),
    ]


def processor_name():
    """Name the processor as the system does."""
    path = Path("/proc/cpuinfo")
    found = path.exists() and re.search(
        r"^model name\s*: (.*)$", path.read_text(), flags=re.MULTILINE
    )
    return found[1] if found else platform.processor()


def write_results(section):
    """Put a section into the results, in place of the backend's older one."""
    title = "# Benchmarks\n\nMade by `benchmarks/bench.py --write`.\n\n"
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else title
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept = [s for s in sections if not s.startswith(f"## {BACKEND}\n")]
    RESULTS.write_text(head + "".join([*kept, section]), encoding="utf-8")


def read_arguments():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, known in (("cells", CELLS), ("contenders", CONTENDERS)):
        parser.add_argument(
            f"--{name}",
            choices=known,
            default=list(known),
            help="of " + ", ".join(known),
            nargs="+",
            metavar="NAME",
        )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-secs", type=float, default=1.0)
    parser.add_argument(
        "--write", action="store_true", help=f"update {RESULTS.name}"
    )
    return parser.parse_args()


def main():
    """Measure, print, and write if asked to."""
    arguments = read_arguments()
    lines = []

    def say(*new):
        print(*new, sep="\n", flush=True)
        lines.extend(new)

    start_backend()
    say(f"## {BACKEND}", "", *describe_machine())
    for name in arguments.cells:
        cell = CELLS[name]()
        say("", describe_cell(cell, arguments.rounds), "")
        timings = measure(
            cell,
            arguments.contenders,
            rounds=arguments.rounds,
            round_secs=arguments.round_secs,
        )
        say(*tell(timings))
    if arguments.write:
        write_results("\n".join([*lines, "", ""]))


if __name__ == "__main__":
    main()
