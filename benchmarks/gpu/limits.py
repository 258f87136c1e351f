"""Updates for which there is not memory enough, and what becomes of them.

On a processor, memory is made scarce by a limit of the system for this
process, so that it runs out for real there too.
"""

import gc
import re
import resource
import warnings
from pathlib import Path

import keras
import numpy as np

from accumtrainer import Accumulation, Trainer
from accumtrainer.steps import make_backend

FEATURES = 8
STYLE = re.compile(r"\x1b\[\d*m")  # with which Keras writes in bold


def rows(device, sizes, **_):
    """Yield a row for each way to ask for too much."""
    limit = device.memory_bytes()
    if not device.is_accelerator:
        limit = sizes.squeezed_bytes
        warm_up(sizes)
        squeeze(limit)
    # For the backward pass, a layer leaves what goes in and what comes out of
    # its activation.
    per_sample = sum(2 * 4 * width for width in sizes.widths)
    # Many sizes divide it.
    samples = int(sizes.beyond * limit / per_sample) // 1024 * 1024
    cases = {
        "'auto'": Accumulation(
            micro_batch_size="auto", memory_limit_bytes=9 * limit // 10
        ),
        "'auto', told of far too much memory": Accumulation(
            micro_batch_size="auto", memory_limit_bytes=2**60
        ),
        "all samples": Accumulation(micro_batch_size=samples),
    }
    for asked_for, accumulation in cases.items():
        gc.collect()  # models refer to themselves
        yield {"micro-batch size asked for": asked_for} | attempt(
            make_trainer(sizes, accumulation), samples
        )


def make_trainer(sizes, accumulation):
    """Make a Trainer of layers that remember much and compute little."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input([FEATURES])]
    for width in sizes.widths:
        layers.append(keras.layers.Dense(width, activation="gelu"))
        layers.append(keras.layers.Dense(FEATURES))
    return Trainer(
        keras.Sequential(layers),
        optimizer="adam",
        loss="mse",
        accumulation=accumulation,
        seed=0,
    )


def attempt(trainer, samples):
    """Make an update, and tell what happened, dict."""
    x = np.random.default_rng(0).standard_normal(
        [samples, FEATURES], dtype="float32"
    )
    before = trainer.model.get_weights()
    told = {"samples": samples}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            history = trainer.fit(x, x, batch_size=samples, verbose=0)
        except Exception as error:
            is_known = make_backend().is_out_of_memory(error)
            message = STYLE.sub("", f"{type(error).__name__}: {error}")
            told["what came"] = " ".join(message.split())[:150]
            told["known as lack of memory"] = "yes" if is_known else "no"
        else:
            (loss,) = history.history["loss"]
            told["what came"] = f"an update, loss {loss:.3f}"
            told["in micro-batches of"] = trainer.plan.micro_batch_size
    shrunk = [w for w in caught if "ran out of memory" in str(w.message)]
    told["times memory ran out"] = len(shrunk)
    told["weights"] = compare(before, trainer.model)
    return told


def compare(before, model):
    """Say what has become of the weights."""
    try:
        after = model.get_weights()
    except Exception as error:
        return f"lost, {type(error).__name__}"
    pairs = list(zip(before, after, strict=True))
    if all(np.array_equal(one, other) for one, other in pairs):
        return "as before"
    is_finite = all(np.isfinite(array).all() for array in after)
    return "trained" if is_finite else "not finite"


def warm_up(sizes):
    """Have the process take what it takes once."""
    trainer = make_trainer(sizes, Accumulation(micro_batch_size=4))
    x = np.zeros([8, FEATURES], "float32")
    trainer.fit(x, x, batch_size=8, verbose=0)


def squeeze(count):
    """Leave this process a number of bytes; Linux alone tells what it has."""
    status = Path("/proc/self/status").read_text()
    data = 1024 * int(re.search(r"VmData:\s*(\d+) kB", status)[1])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + 2 * count, hard))
