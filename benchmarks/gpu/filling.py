"""A GPT that fills the card, as a share of what its matrix units can do.

Operations per token are counted as by Chowdhery et al. 2022 (PaLM, appendix
B): `6 N + 12 L d T` for a forward and a backward pass, with N the weights that
multiply (the tables that tokens and positions are looked up in do not), L
layers of width d, and T tokens in a sequence. What runs a second time, what
causal masks spare, and the optimizer are not counted.

Activations are foreseen as by Korthikanti et al. 2022, section 4.1: `T d (34 +
5 h T / d)` bytes per sequence and layer, with h heads, in 16-bit precision.
"""

import gc
import time

import keras
from cells import make_gpt
from contenders import make_loss

from accumtrainer import Accumulation, Trainer, peak_memory_bytes
from accumtrainer.steps import make_backend

STATE_BYTES = 16
"""Of a weight: itself, its gradient, both moments of Adam; float32."""

LOGIT_BYTES = 14
"""Of a token's score: in 16 bits, and in float32 with its gradients."""


def rows(device, sizes, **_):
    """Yield one row."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    memory = device.memory_bytes()
    width, depth = choose_filler(sizes, memory)
    rate = device.matmul_rate(sizes.matmul)
    size = micro_batch_size(sizes, width, depth, memory)
    while True:
        cell = make_filler(sizes, width, depth, size)
        try:
            trainer, secs, losses = train(cell, device)
            break
        except Exception as error:
            if size == 1 or not make_backend().is_out_of_memory(error):
                raise
        # Out of the except block, whose traceback keeps arrays.
        gc.collect()
        size //= 2
    counted = operations_per_token(trainer.model, width, depth, sizes.length)
    tokens = cell.samples_per_update * sizes.length / secs
    peak = peak_memory_bytes()
    yield {
        "GPT": f"{depth} layers, d={width}, T={sizes.length}",
        "million weights": trainer.model.count_params() / 1e6,
        "update": f"{cell.micro_batches} x {size}",
        "ms per update": 1000 * secs,
        "tokens per second": tokens,
        "TFLOP/s": tokens * counted / 1e12,
        "TFLOP/s of products": rate / 1e12,
        "share": tokens * counted / rate,
        "peak GiB": peak / 2**30,
        "share of memory": peak / memory,
        "loss": f"{losses[0]:.3f} to {losses[-1]:.3f}",
    }


def choose_filler(sizes, memory):
    """Choose the largest model whose state takes a quarter of the memory."""
    fitting = [
        filler
        for filler in sizes.fillers
        if weights_of(sizes, *filler) * STATE_BYTES <= memory / 4
    ]
    return (fitting or sizes.fillers)[-1 if fitting else 0]


def weights_of(sizes, width, depth):
    """Estimate how many weights a GPT has."""
    return 12 * depth * width**2 + 2 * width * sizes.vocabulary


def heads_of(width):
    """Return how many heads a width has, of 128 numbers each."""
    return max(1, width // 128)


def micro_batch_size(sizes, width, depth, memory):
    """Foresee how many sequences take half of what memory is left, int."""
    length = sizes.length
    per_layer = length * width * (34 + 5 * heads_of(width) * length / width)
    logits = length * sizes.vocabulary * LOGIT_BYTES
    left = memory - STATE_BYTES * weights_of(sizes, width, depth)
    fitting = int(left / 2 / (depth * per_layer + logits))
    most = 16 if len(sizes.fillers) > 1 else 2
    return 2 ** (max(1, min(most, fitting)).bit_length() - 1)


def make_filler(sizes, width, depth, size):
    """Make the GPT, a `Cell`."""
    return make_gpt(
        "filler",
        width=width,
        depth=depth,
        length=sizes.length,
        vocabulary=sizes.vocabulary,
        heads=heads_of(width),
        shape=(size, sizes.micro_batches),
    )


def train(cell, device):
    """Train, and return the Trainer, seconds per update, and losses."""
    keras.utils.set_random_seed(0)
    trainer = Trainer(
        cell.make_model(),
        optimizer=keras.optimizers.Adam(1e-4),
        loss=make_loss(),
        accumulation=Accumulation(micro_batch_size=cell.micro_batch_size),
        seed=0,
    )
    x, y = cell.head(1)

    def fit(updates):
        begun = time.perf_counter()
        history = trainer.fit(
            x, y, batch_size=len(x), epochs=updates, verbose=0
        )
        device.wait()
        return (time.perf_counter() - begun) / updates, history.history["loss"]

    _, before = fit(1)
    secs, _ = fit(2)
    secs, after = fit(max(2, min(20, int(8 / secs))))
    return trainer, secs, [*before, *after]


def operations_per_token(model, width, depth, length):
    """Count the operations of a forward and a backward pass for a token."""
    tables = sum(
        layer.count_params()
        for layer in model.layers
        if type(layer).__name__ in ("Embedding", "AddPositions")
    )
    multiplying = model.count_params() - tables
    return 6 * multiplying + 12 * depth * width * length
