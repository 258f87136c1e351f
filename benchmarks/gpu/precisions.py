"""Cells in three precisions; in float16 the first windows overflow."""

import time

import keras
import numpy as np
from contenders import make_loss

from accumtrainer import Accumulation, LossScale, Trainer
from gpu.processes import row_or_failure

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
TOO_LARGE = 2.0**32
"""A loss scale with which gradients overflow in float16."""

LOOKED_AT = 40
"""Updates that are looked at one by one."""


def rows(device, sizes, **_):
    """Yield a row for each cell and precision."""
    for make_cell in sizes.cells:
        for policy in POLICIES:
            keras.config.set_dtype_policy(policy)
            cell = make_cell()
            yield row_or_failure(
                f"{cell.key} in {policy}",
                lambda c=cell, p=policy: measure(c, p, sizes.updates, device),
            )


def measure(cell, policy, updates, device):
    """Train a cell, and return its row."""
    keras.utils.set_random_seed(0)
    scale = LossScale(initial=TOO_LARGE, maximum=TOO_LARGE)
    is_scaled = policy == "mixed_float16"
    trainer = Trainer(
        cell.make_model(),
        optimizer=keras.optimizers.Adam(),
        loss=make_loss(),
        accumulation=Accumulation(micro_batch_size=cell.micro_batch_size),
        loss_scale=scale if is_scaled else "auto",
        seed=0,
    )
    x, y = cell.head(1)
    undone = []
    first = trainer.train_on_batch(x, y, return_dict=True)["loss"]
    for _ in range(LOOKED_AT if is_scaled else 1):
        before, skipped = state_of(trainer), trainer.progress.skipped_updates
        trainer.train_on_batch(x, y)
        if trainer.progress.skipped_updates == skipped:
            break
        undone.append(are_equal(before, state_of(trainer)))
    begun = time.perf_counter()
    history = trainer.fit(x, y, batch_size=len(x), epochs=updates, verbose=0)
    device.wait()
    secs = (time.perf_counter() - begun) / updates
    return {
        "cell": cell.key,
        "precision": policy,
        "ms per update": 1000 * secs,
        "updates applied": trainer.progress.updates,
        "updates skipped": trainer.progress.skipped_updates,
        "loss scale": trainer.window_logs["loss_scale"] if is_scaled else None,
        "after a skip": describe(undone),
        "loss": f"{float(first):.3f} to {history.history['loss'][-1]:.3f}",
    }


def state_of(trainer):
    """Copy weights and optimizer, list of arrays; not random states."""
    variables = [*trainer.model.weights, *trainer.optimizer.variables]
    return [
        np.array(keras.ops.convert_to_numpy(variable)) for variable in variables
    ]


def are_equal(before, after):
    """Compare copies bit for bit."""
    return len(before) == len(after) and all(
        one.tobytes() == other.tobytes()
        for one, other in zip(before, after, strict=True)
    )


def describe(undone):
    """Say whether skipped windows left everything as it was."""
    if not undone:
        return None
    return "bit for bit as before" if all(undone) else "something has changed"
