"""Fused and streamed windows, by hand and Keras's `fit`, round by round."""

import dataclasses
from unittest import mock

import keras
import numpy as np
from contenders import CONTENDERS, contender, run_trainer
from measuring import measure, start_backend

from accumtrainer.steps import choose_plan
from accumtrainer.training import engine
from gpu.processes import FAILED

NAMES = (
    "trainer",
    "fused",
    "streamed",
    "handwritten",
    "guarded",
    "keras_accumulating",
)


def run_planned(name, cell, model):
    """Get a Trainer ready that runs by one plan, `Runner`."""
    runner = run_trainer(f"Trainer, {name}", cell, model, jit_compile="auto")

    def choose(*arguments, **options):
        plan = choose_plan(*arguments, **options)
        return dataclasses.replace(plan, name=name)

    def fit(updates):
        # There is no option for it: what a Trainer chooses is what is right.
        with mock.patch.object(engine, "choose_plan", choose):
            return runner.fit(updates)

    return dataclasses.replace(runner, fit=fit)


@contender()
def fused(cell, model):
    """Run a window by one compiled call."""
    return run_planned("fused", cell, model)


@contender()
def streamed(cell, model):
    """Run a window by a call for each micro-batch."""
    return run_planned("streamed", cell, model)


def rows(device, sizes, **_):
    """Yield a row for each contender on each cell."""
    del device
    start_backend()
    for policy, make_cell in sizes.contests:
        keras.config.set_dtype_policy(policy)
        cell = make_cell()
        try:
            found = compare(cell, policy, sizes)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:300]
            found = [{FAILED: f"{cell.key} in {policy}: {why}"}]
        yield from found


def compare(cell, policy, sizes):
    """Let all contenders train a cell, and return a row for each."""
    timings = measure(
        cell,
        [name for name in NAMES if name in CONTENDERS],
        rounds=sizes.rounds,
        round_secs=sizes.round_secs,
        starts=1,
    )
    ours = np.array(timings["trainer"].rounds)
    found = []
    for timing in timings.values():
        secs = np.array(timing.rounds)
        ratios = secs / ours
        found.append(
            {
                "cell": cell.key,
                "precision": policy,
                "who": timing.runner.label,
                "ms per update": 1000 * float(np.median(secs)),
                "ours against it": f"{np.median(ratios):.2f} "
                f"({ratios.min():.2f}-{ratios.max():.2f})",
                "first update, s": timing.first_updates[0],
            }
        )
    return found
