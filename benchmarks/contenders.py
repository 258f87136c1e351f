"""Who trains it: this library, what Keras offers, and windows by hand.

A further contender is a function under `@contender` of a cell and a fresh
model, which returns a `Runner`; nothing else needs to know it.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import keras
import numpy as np
from handwritten import (
    make_optax_loop,
    make_recipe,
    make_torch_loop,
    make_window,
)

from accumtrainer import Accumulation, Trainer

BACKEND = keras.backend.backend()
CONTENDERS = {}
PEERS = {
    "lightning": "Lightning",
    "torch_loop": "PyTorch loop",
    "accelerate": "Accelerate",
}
"""Those that run in an environment of their own, see `peers.py`."""

PEER_ARGUMENTS = {"torch_loop": "loop"}


def contender(*backends):
    """Add a contender to the benchmark, for some backends or for all."""

    def add(function):
        if not backends or BACKEND in backends:
            CONTENDERS[function.__name__] = function
        return function

    return add


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A contender that is ready to train a cell.

    Args:
        name: str, who it is.
        fit: function of a number of updates, which makes them, waits for
            them, and returns the loss of their epoch.
        describe: function that returns str, to be called after the first
            update.
        close: function to be called at the end.
    """

    name: str
    fit: Callable[[int], float]
    describe: Callable[[], str] = str
    close: Callable[[], None] = lambda: None

    @property
    def label(self):
        """Who it is and how it is compiled, a str."""
        detail = self.describe()
        return self.name + f" ({detail})" * bool(detail)


def make_loss():
    """Make the loss of every cell."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# --- This library ---


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


@contender("torch")
def trainer_compiled(cell, model):
    """Have `torch.compile` compile our Trainer."""
    return run_trainer("Trainer, compiled", cell, model, jit_compile=True)


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


# --- Keras ---


@contender()
def keras_accumulating(cell, model):
    """Let the optimizer of Keras accumulate."""
    return run_keras(
        "Keras fit, accumulating", cell, model, **_accumulating(cell)
    )


@contender("tensorflow")
def keras_accumulating_with_xla(cell, model):
    """Have XLA compile that; without an accelerator Keras does not."""
    return run_keras(
        "Keras fit, accumulating",
        cell,
        model,
        **_accumulating(cell),
        jit_compile=True,
    )


@contender()
def keras_big_batch(cell, model):
    """Give Keras the whole batch, as if there were memory for it."""
    return run_keras(
        "Keras fit, big batch", cell, model, batch_size=cell.samples_per_update
    )


def _accumulating(cell):
    steps = cell.micro_batches
    return {
        "batch_size": cell.micro_batch_size,
        # Keras takes no 1 here.
        "gradient_accumulation_steps": steps if steps > 1 else None,
    }


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


# --- By hand ---


@contender("jax", "torch")
def handwritten(cell, model):
    """Write the window by hand, for this model alone."""
    return run_handwritten("hand-written window", cell, model)


@contender("jax")
def handwritten_stream(cell, model):
    """Write the window by hand, one compiled call for each micro-batch."""
    return run_handwritten("hand-written stream", cell, model, is_fused=False)


@contender("jax", "torch")
def guarded(cell, model):
    """Let that window skip gradients that are not finite."""
    return run_handwritten(
        "hand-written window, guarded", cell, model, is_guarded=True
    )


@contender("jax")
def guarded_stream(cell, model):
    """Let that stream skip gradients that are not finite."""
    return run_handwritten(
        "hand-written stream, guarded",
        cell,
        model,
        is_fused=False,
        is_guarded=True,
    )


@contender("jax")
def optax(cell, model):
    """Let optax accumulate, in a jitted step of one's own."""
    make_step = make_optax_loop(model, make_loss(), cell.micro_batches)
    return run_by_hand("optax.MultiSteps", cell, make_step)


@contender("tensorflow")
def handwritten_with_xla(cell, model):
    """Write the window by hand, compiled by XLA."""
    return run_handwritten("hand-written, XLA", cell, model, jit_compile=True)


@contender("tensorflow")
def handwritten_without_xla(cell, model):
    """Write the window by hand, not compiled by XLA."""
    return run_handwritten("hand-written", cell, model, jit_compile=False)


@contender("tensorflow")
def guarded_with_xla(cell, model):
    """Let the window skip gradients that are not finite, compiled by XLA."""
    return run_handwritten(
        "hand-written, guarded, XLA",
        cell,
        model,
        jit_compile=True,
        is_guarded=True,
    )


@contender("tensorflow")
def guarded_without_xla(cell, model):
    """Let it do so, not compiled by XLA."""
    return run_handwritten(
        "hand-written, guarded",
        cell,
        model,
        jit_compile=False,
        is_guarded=True,
    )


@contender("tensorflow")
def parallel_window(cell, model):
    """Have several micro-batches of that under way at once."""
    return run_handwritten(
        "hand-written, parallel", cell, model, jit_compile=False, parallel=10
    )


@contender("tensorflow")
def recipe(cell, model):
    """Follow the recipe: a function that accumulates and one that applies."""
    window = make_recipe(model, keras.optimizers.Adam(), make_loss())
    return run_by_hand("accumulate/apply recipe", cell, window)


@contender("torch")
def loop(cell, model):
    """Treat the Keras model as any module of PyTorch, in a loop by hand."""
    return run_by_hand(
        "PyTorch loop over the Keras model", cell, make_torch_loop(model)
    )


def run_handwritten(
    name, cell, model, *, jit_compile=BACKEND != "torch", **options
):
    """Get a hand-written window ready, `Runner`."""
    window = make_window(
        model,
        keras.optimizers.Adam(),
        make_loss(),
        jit_compile=jit_compile,
        **options,
    )
    is_compiled = jit_compile and BACKEND != "torch"
    return run_by_hand(name, cell, window, detail="XLA" * is_compiled)


def run_by_hand(name, cell, window, detail=""):
    """Get a window of arrays ready, `Runner`; it shuffles, as `fit` does."""
    run, wait = window
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

    return Runner(name=name, fit=fit, describe=lambda: detail)


# --- Peers ---


def start_peer(name, cell, model, python):
    """Start a contender in an environment without Keras, `Runner`.

    Args:
        name: one of `PEERS`.
        cell: `Cell`.
        model: Keras model of the cell, to compare the number of parameters.
        python: path of that environment's interpreter.
    """
    command = command_of_peer(name, cell, python)
    peer = start_fastest(command)
    if BACKEND == "torch":
        check_version(peer.about["versions"]["torch"])
    ours = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    if peer.about["parameters"] != ours:
        raise AssertionError(
            f"{PEERS[name]} trains {peer.about['parameters']:,} parameters of "
            f"{cell.name} where Keras trains {ours:,}"
        )
    return Runner(
        name=PEERS[name],
        fit=peer.fit,
        describe=lambda: peer.detail,
        close=peer.close,
    )


def start_fastest(command):
    """Start a process with as many threads as make it faster.

    That is one, or as many as PyTorch takes by itself: small operations take
    longer where several threads share them.

    Args:
        command: list of str, what starts a `Peer`.

    Returns:
        `Peer`.
    """
    peers = [Peer(command, threads) for threads in (None, 1)]
    fastest, slower = sorted(peers, key=Peer.seconds_per_update)
    slower.close()
    return fastest


def check_version(theirs):
    """Make sure that peers compute with the PyTorch that Keras uses here."""
    ours = metadata.version("torch")
    if theirs != ours:
        raise AssertionError(
            f"Peers run on PyTorch {theirs}, Keras on {ours}. Install the "
            "same for both."
        )


def command_of_peer(name, cell, python):
    """Return what starts a contender in an environment of its own."""
    command = [
        *(python, str(Path(__file__).with_name("peers.py"))),
        *(PEER_ARGUMENTS.get(name, name), cell.name),
        *("--micro-batch-size", str(cell.micro_batch_size)),
        *("--micro-batches", str(cell.micro_batches)),
        *("--most-updates", str(cell.most_updates)),
    ]
    if keras.config.dtype_policy().name == "mixed_bfloat16":
        command.append("--bfloat16")
    return command


class Peer:
    """A process that trains when it is told to, see `peers.py`.

    Args:
        command: list of str.
        threads: int, `None` for its default.
        environment: dict, what else its environment has.

    Attributes:
        about: dict, what it said when it was ready.
    """

    def __init__(self, command, threads=None, environment=None):
        self.threads = threads
        limit = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | limit | (environment or {}),
        )
        self.id = self._process.pid
        self.about = self._read()

    @property
    def detail(self):
        """How it runs where that is not PyTorch's default, a str."""
        return "1 thread" if self.threads == 1 else ""

    def fit(self, updates):
        """Make some updates, and return their mean loss."""
        self._process.stdin.write(json.dumps({"updates": updates}) + "\n")
        self._process.stdin.flush()
        return self._read()["loss"]

    def seconds_per_update(self):
        """Time an update, the first one left out."""
        self.fit(1)
        secs = []
        for _ in range(2):
            begun = time.perf_counter()
            self.fit(2)
            secs.append((time.perf_counter() - begun) / 2)
        return min(secs)

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _read(self):
        return json.loads(self._process.stdout.readline())
