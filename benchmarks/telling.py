"""How measurements are told: a table, and what was expected of them."""

import datetime
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import keras
import numpy as np
from contenders import BACKEND
from results import LOOP, LOOP_OVER_KERAS, format_table, ratios_of

from accumtrainer.steps.plan import COMPILER

OURS = "trainer"
REFERENCE = "keras_accumulating"
GUARDED = "by hand, guarded"
"""The fastest by hand of those that skip what is not finite, as we do."""

TARGETS = {
    # cell: against Keras accumulating on TensorFlow, on JAX, Lightning, and
    # the best window written by hand
    "mlp 32x8": (10, 4.5, 5, 0.95),
    "mlp 4x32": (20, 6, 15, 0.95),
    "conv 8x8": (1.7, 1.2, 1.5, 0.98),
    "gpt 4x8": (1.9, 1.15, 1.4, 0.98),
    "vgg16 1x16": (1.5, 1.2, 1.2, 0.98),
    "text 16x8": (2, 1.3, 1.2, 0.98),
    # Shows what is not compiled, of which others have less to do.
    "tiny 1x1": (None, None, None, None),
}
TARGETS_OF_K1 = (1, 1, 1, 0.95)
TARGETS_OF_LOOPS = (0.87, 0.95)
"""Against PyTorch's loops, where nearly all is overhead, and elsewhere."""

MOST_OF_FIRST_UPDATE = 1.2
"""How long our first update may take, in those of Keras compiled alike."""


def tell(timings, peaks=None):
    """Turn measurements into the lines of a Markdown table.

    Args:
        timings: dict from contender to `Timing`.
        peaks: dict from a contender's label, or what it begins with, to
            bytes.

    Returns:
        List of str.
    """
    rows = [
        (
            "",
            "ms per update",
            "Trainer against it",
            "first update",
            "compiled",
        )
    ]
    for name, timing in timings.items():
        secs = np.array(timing.rounds)
        rows.append(
            (
                timing.runner.label,
                spread(secs * 1000, "{:.2f}"),
                spread(advantage(timings, name), "{:.2f}x"),
                spread(timing.first_updates, "{:.1f} s"),
                "" if timing.compilations is None else str(timing.compilations),
            )
        )
    if peaks is not None:
        rows = add_peaks(rows, peaks)
    filled = [any(column[1:]) for column in zip(*rows, strict=True)]
    return format_table(
        [
            [text for text, keep in zip(row, filled, strict=True) if keep]
            for row in rows
        ]
    )


def add_peaks(rows, peaks):
    """Add peak memory as the last column of a table.

    Args:
        rows: list of tuples of str, the first of them the heading.
        peaks: as for `tell`. What no row begins with becomes one of its own.

    Returns:
        List of tuples of str.
    """
    heading, *rows = rows
    column = {}
    for label, peak in peaks.items():
        # What is timed may say more of itself, as "(fused, 1 thread)".
        begin = label.removesuffix(")")
        found = [row for row in rows if row[0].startswith(begin)]
        if not found:
            found = [(label, *[""] * (len(heading) - 1))]
            rows += found
        # Of "Keras fit" and "Keras fit (XLA)" the first is the shorter one.
        label = min((row[0] for row in found), key=len)
        column[label] = f"{peak / 2**20:,.0f} MiB"
    rows = [(*row, column.get(row[0], "")) for row in rows]
    return [(*heading, "peak memory"), *rows]


def tell_second_runs(second_runs):
    """Return lines on first updates of processes that find compiled programs.

    Args:
        second_runs: dict from a contender's label to seconds, list.
    """
    return [
        f"First update of a second run, {label}: {spread(secs, '{:.1f} s')}"
        for label, secs in second_runs.items()
    ]


def numbers_of(timings):
    """Return what is kept of some timings, dict by the contenders' labels."""
    kept = {}
    for name, timing in timings.items():
        secs = np.array(timing.rounds)
        numbers = {
            "ms_per_update": median_and_ends(secs * 1000),
            "advantage": median_and_ends(advantage(timings, name)),
            "first_update_secs": median_and_ends(timing.first_updates),
            "compilations": timing.compilations,
        }
        kept[timing.runner.label] = {
            k: v for k, v in numbers.items() if v not in ([], None)
        }
    return kept


def median_and_ends(values):
    """Return the median, the smallest and the largest, list of float.

    Example:
        >>> median_and_ends([1, 2, 6])
        [2.0, 1.0, 6.0]
        >>> median_and_ends([])
        []
    """
    if not len(values):
        return []
    found = (np.median(values), np.min(values), np.max(values))
    return [float(f"{value:.4g}") for value in found]


def advantage(timings, name):
    """Return how many times as fast our Trainer is, an array of rounds."""
    ours = timings.get(OURS)
    if ours is None:
        return []
    return np.array(timings[name].rounds) / np.array(ours.rounds)


def summarize(timings):
    """Return our ratios to those that matter, dict of floats by who it is."""
    medians = {
        name: float(np.median(advantage(timings, name)))
        for name in timings
        if OURS in timings
    }

    def fastest(prefix):
        found = [v for k, v in medians.items() if k.startswith(prefix)]
        return min(found, default=None)

    ratios = {
        "Keras": medians.get(REFERENCE),
        "Lightning": medians.get("lightning"),
        "by hand": fastest("handwritten"),
        GUARDED: fastest("guarded"),
    }
    if BACKEND == "torch":
        # Elsewhere they compute with other kernels.
        ratios |= {
            "Accelerate": medians.get("accelerate"),
            LOOP: medians.get("torch_loop"),
            LOOP_OVER_KERAS: medians.get("loop"),
        }
    return {name: round(v, 3) for name, v in ratios.items() if v is not None}


def compare_first_updates(timings):
    """Say how long our first update takes, and Keras's.

    Only who has XLA compile, or has it not, is compared with whom does alike.

    Returns:
        List of str.
    """
    if OURS not in timings:
        return []
    ours = timings[OURS]
    alike = [
        timing
        for name, timing in timings.items()
        if name.startswith(REFERENCE) and _uses_xla(timing) == _uses_xla(ours)
    ]
    lines = []
    for timing in alike:
        ratio = np.median(ours.first_updates) / np.median(timing.first_updates)
        lines.append(
            f"First update {ratio:.2f}x of Keras's time, target at most "
            f"{MOST_OF_FIRST_UPDATE}x"
            + (": above" if ratio > MOST_OF_FIRST_UPDATE else "")
        )
    return lines


def _uses_xla(timing):
    return COMPILER in timing.runner.describe()


def compare_with_targets(key, ratios):
    """Say which targets are met.

    Args:
        key: str, the cell's.
        ratios: dict, what `summarize` returns.

    Returns:
        List of str.
    """
    lines = [
        f"{name} {ratios[name]:.2f}x, target {target}x"
        + (": below" if ratios[name] < target else "")
        for name, target in targets_of(key).items()
        if target is not None and name in ratios
    ]
    if GUARDED in ratios:
        lines.append(f"{GUARDED} {ratios[GUARDED]:.2f}x")
    return lines


def targets_of(key):
    """Return what each ratio of a cell should be, dict of float or `None`."""
    tensorflow, jax, lightning, by_hand = TARGETS.get(
        key, TARGETS_OF_K1 if key.endswith("x1") else (None,) * 4
    )
    if BACKEND != "torch":
        return {
            "Keras": tensorflow if BACKEND == "tensorflow" else jax,
            "Lightning": lightning,
            "by hand": by_hand,
        }
    is_mlp, is_one = key.startswith("mlp"), key.endswith("x1")
    is_overhead = is_mlp or key.startswith("tiny")
    loops = TARGETS_OF_LOOPS[0 if is_overhead else 1]
    return {
        "Keras": 1.5 if is_mlp and not is_one else 1.0,
        "Lightning": 1.0,
        LOOP: loops,
        LOOP_OVER_KERAS: loops,
        "by hand": by_hand,
    }


def compare_with_recorded(key, ratios, backend=BACKEND):
    """Say which ratios are more than a tenth below the recorded ones.

    Returns:
        List of str.

    Example:
        >>> compare_with_recorded("no such cell", {"Keras": 2.0})
        []
    """
    recorded = ratios_of(backend, key)
    return [
        f"{key}: {name} {ratios[name]:.2f}x, recorded {before:.2f}x"
        for name, before in recorded.items()
        if name in ratios and ratios[name] < 0.9 * before
    ]


def spread(values, form):
    """Write the median, and in brackets the smallest and the largest.

    Example:
        >>> spread([1, 2, 6], "{:.0f}x")
        '2x (1x-6x)'
        >>> spread([3], "{:.0f}x")
        '3x'
    """
    if not len(values):
        return ""
    if len(values) == 1:
        return form.format(values[0])
    low, high = form.format(np.min(values)), form.format(np.max(values))
    return f"{form.format(np.median(values))} ({low}-{high})"


def describe_cell(cell, rounds):
    """Return the heading of a cell."""
    policy = keras.config.dtype_policy().name
    precision = "" if policy == "float32" else f", {policy}"
    return (
        f"### {cell.title}{precision}; {cell.micro_batches} micro-batches of "
        f"{cell.micro_batch_size}; {rounds} rounds"
    )


def describe_machine():
    """Return the date, the versions and the machine, str."""
    packages = ("accumtrainer", "keras", BACKEND, "numpy")
    versions = [f"{name} {metadata.version(name)}" for name in packages]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{datetime.date.today()}; Python {platform.python_version()}, "
        f"{', '.join(versions)}; {processor_name()}, {os.cpu_count()} cores, "
        f"{memory:.0f} GiB; devices: " + ", ".join(list_devices())
    )


def list_devices():
    """List the devices that Keras may compute on, list of str."""
    if BACKEND != "torch":
        return keras.distribution.list_devices()
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return ["cpu:0"]
    count = torch.accelerator.device_count()
    return [f"{accelerator.type}:{index}" for index in range(count)]


def processor_name():
    """Name the processor as the system does."""
    path = Path("/proc/cpuinfo")
    found = path.exists() and re.search(
        r"^model name\s*: (.*)$", path.read_text(), flags=re.MULTILINE
    )
    return found[1] if found else platform.processor()
