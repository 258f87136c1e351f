"""What was measured, kept in `measured.json`, and the page made from it.

The file has, by backend and cell, what every contender took: nothing else
remembers it. `RESULTS.md` and the pictures are made anew from it whenever it
changes, and by `python benchmarks/results.py`.
"""

import json
import re
from itertools import compress
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
MEASURED = FOLDER / "measured.json"
PIPELINES = FOLDER / "pipelines.json"
PAGE = FOLDER / "RESULTS.md"

OURS = "Trainer, auto"
COMPILED = "Trainer, compiled"
KERAS = "Keras fit, accumulating"
LOOP = "PyTorch loop"
LOOP_OVER_KERAS = "PyTorch loop, Keras model"
COLUMNS = {
    "Keras": "Keras",
    "Lightning": "Lightning",
    "Accelerate": "Accelerate",
    LOOP: "loop",
    LOOP_OVER_KERAS: "Keras in a loop",
    "by hand": "by hand",
    "by hand, guarded": "guarded",
}
"""The ratios of a table, and what heads their columns."""

BARS = ("Keras", "Lightning", "by hand")
"""The ratios of a picture."""

DRAWN = (
    "mlp 32x8",
    "mlp 4x32",
    "conv 8x8",
    "resnet 8x8",
    "gpt 4x8",
    "gpt_medium 2x16",
    "vgg16 1x16",
    "text 16x8",
)
"""The cells of the picture, which is to be read at a glance."""

INTRODUCTION = """\
# Benchmarks

How long an update takes, of ours and of others, on one processor. Made by
`benchmarks/bench.py --write` from what `measured.json` keeps of every
contender: spreads, further ones, and each cell's date and versions.
`NOTES.md` says what was learnt on the way. On a GPU, `make bench-gpu` makes a
[page of its own](RESULTS-GPU.md).

A cell is a model with `micro-batch size x micro-batches`; all contenders take
turns, round by round, on the same data from the same weights. The columns:

- **ms**: of an update of ours, the median over the rounds.
- **Keras**, **Lightning**, **by hand**, **guarded**: updates per second of
  ours, times those of Keras's `fit` with `gradient_accumulation_steps`, of
  Lightning on PyTorch, of the fastest window written by hand for the backend,
  and of the fastest that skips what is not finite, as ours does. Above 1 ours
  is faster. Lightning computes with PyTorch's kernels, on torch with the same
  as ours, elsewhere not with these.
- **Accelerate**, **loop**, **Keras in a loop**: on torch also Accelerate's, and
  those of a plain loop with PyTorch's own loss and optimizer: over the same
  model written in PyTorch, and over the Keras model. All on torch run with one
  thread or with PyTorch's default, whichever is faster for them. The second
  number of two is that of ours with `jit_compile=True`, which is
  `torch.compile`; it is not the default, as its first update takes up to a
  hundred seconds.
- **first update**: seconds from a model to its first update, compilation
  included, ours / Keras's as it compiles by default.
- **second run**: the same in a process that finds what an earlier one has
  compiled, as [here](../docs/compiling.md#keep-what-was-compiled).
- **MiB**: what two updates take at their peak in a process of their own beyond
  the model, ours / Keras's; on TensorFlow XLA alone leaves up to 200 behind.
"""

OF_PIPELINES = """\
## Where the data come from

One round over 256 batches of 32 for the MLP, by `benchmarks/pipelines.py`:
how many times as fast as Keras's the same method of ours is, each called by
turns with the other. Medians over the turns, and in brackets the interval that
holds the true median in 95 of 100 such measurements; `pipelines.json` has
milliseconds and processor time too. *Accumulating* is over 8 batches. Two
shared cores; beside PyTorch's measurements, from `tf.data` on, other work ran.
From one run to the next the ratios of JAX's `fit` move by 0.1. `NOTES.md` says
what makes it slower than Keras's where there is nothing to accumulate.
"""

SECTIONS = {
    "Several micro-batches": lambda cell: (
        not _is_mixed(cell) and cell["micro_batches"] > 1
    ),
    "One micro-batch, which is no accumulation": lambda cell: (
        not _is_mixed(cell) and cell["micro_batches"] == 1
    ),
    "In `mixed_bfloat16`": lambda cell: _is_mixed(cell),
}


WITH_SPREADS = ("torch",)
SPREADS = """\
### Each contender

How many times as fast as it ours is: the median over the rounds, and in
brackets the smallest and the largest."""


def read():
    """Read what was measured, dict by backend and cell."""
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def ratios_of(backend, key):
    """Return the ratios of a cell as they were kept, dict of floats."""
    times = read().get(backend, {}).get(key, {}).get("times", {})
    return times.get("ratios", {})


def keep(backend, key, about, parts):
    """Keep measurements of a cell, in place of those of the same part.

    Args:
        backend: str.
        key: str, the cell's.
        about: dict, what the cell is.
        parts: dict of dicts, by `times`, `peaks` and `second-runs`.
    """
    measured = read()
    cell = measured.setdefault(backend, {}).setdefault(key, {})
    cell |= about | parts
    _write(MEASURED, measured)


def keep_pipeline(backend, machine, name, method, numbers):
    """Keep what was measured of a way to feed data, and when and where.

    Args:
        backend: str.
        machine: str, versions and date.
        name: str, where the data come from.
        method: str, what was done with them.
        numbers: dict.
    """
    measured = read_pipelines()
    ways = measured.setdefault(backend, {})
    ways.setdefault(name, {})[method] = numbers | {"machine": machine}
    _write(PIPELINES, measured)


def read_pipelines():
    """Read what was measured of pipelines, dict by backend, way and method."""
    return json.loads(PIPELINES.read_text()) if PIPELINES.exists() else {}


def _write(path, measured):
    text = json.dumps(measured, indent=1)
    # A line for each contender, not for each of its numbers.
    for brackets in (r"\[[^\[\]{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(brackets, lambda found: _on_one_line(found[0]), text)
    path.write_text(text + "\n")


def _on_one_line(text):
    return re.sub(r"\s*\n\s*", " ", text).replace("[ ", "[").replace(" ]", "]")


def write_page():
    """Write `RESULTS.md` from what was measured."""
    lines = [INTRODUCTION]
    for backend, cells in sorted(read().items()):
        lines += [f"## {backend}", ""]
        if (FOLDER / picture_of(backend)).exists():
            lines += [f"![Ratios on {backend}]({picture_of(backend)})", ""]
        for title, is_in in SECTIONS.items():
            found = {k: cell for k, cell in cells.items() if is_in(cell)}
            if found:
                lines += [f"### {title}", "", *_table(found), ""]
        if backend in WITH_SPREADS and (table := _spreads(cells)):
            lines += [SPREADS, "", *table, ""]
    lines += _tell_pipelines()
    lines += ["## The models", ""]
    titles = {
        key.split()[0]: cell["title"]
        for cells in read().values()
        for key, cell in cells.items()
    }
    lines += [f"- **{name}**: {title}" for name, title in titles.items()]
    PAGE.write_text("\n".join(lines) + "\n", "utf-8")


def _tell_pipelines():
    """Return the page's lines on pipelines, none if there is no number."""
    measured = read_pipelines()
    lines = [OF_PIPELINES] if measured else []
    for backend, ways in sorted(measured.items()):
        methods = list(dict.fromkeys(m for way in ways.values() for m in way))
        rows = [(backend, *methods)]
        for name, way in ways.items():
            ratios = [way.get(method, {}).get("ratio") for method in methods]
            found = [
                "{:.2f} ({:.2f}-{:.2f})".format(*r) if r else "" for r in ratios
            ]
            rows.append((name, *found))
        lines += [*format_table(rows), ""]
    return lines


def _is_mixed(cell):
    return cell["precision"] != "float32"


def _table(cells):
    heads = ("first update", "second run", "MiB")
    rows = [("cell", "ms", *COLUMNS.values(), *heads)]
    for key, cell in _by_model(cells):
        times, peaks = cell.get("times", {}), cell.get("peaks", {})
        second_runs = cell.get("second-runs", {}).get("secs", {})
        contenders, ratios = times.get("contenders", {}), times.get("ratios")
        ours = _of(OURS, contenders) or {}
        rows.append(
            (
                key.removesuffix(f" {cell['precision']}"),
                *_numbers(ours.get("ms_per_update", [])[:1], "{:,.2f}"),
                *(
                    _ratio((ratios or {}).get(name), contenders)
                    for name in COLUMNS
                ),
                _both(_medians(contenders, "first_update_secs"), "{:.1f}"),
                _both(_medians(second_runs), "{:.1f}"),
                _both(peaks.get("mib", {}), "{:,.0f}"),
            )
        )
    filled = [any(column[1:]) for column in zip(*rows, strict=True)]
    return format_table([list(compress(row, filled)) for row in rows])


def _ratio(ratio, contenders):
    """Write a ratio, and beside it that of ours compiled, where it is known."""
    if ratio is None:
        return ""
    compiled = (_of(COMPILED, contenders) or {}).get("advantage")
    ratios = [ratio] if compiled is None else [ratio, ratio / compiled[0]]
    return " / ".join(_numbers(ratios, "{:.2f}"))


def _by_model(cells):
    """List cells, those of a model together, in the order models came in."""
    names = [key.split()[0] for key in cells]
    return sorted(
        cells.items(), key=lambda item: names.index(item[0].split()[0])
    )


def _spreads(cells):
    """Make a table of every contender's ratios, or an empty list."""
    found = {
        key: {
            label.split(" (")[0]: numbers["advantage"]
            for label, numbers in cell["times"]["contenders"].items()
            if not label.startswith(OURS) and "advantage" in numbers
        }
        for key, cell in _by_model(cells)
        if "times" in cell
    }
    names = list(dict.fromkeys(name for row in found.values() for name in row))
    if not names:
        return []
    form = "{:.2f} ({:.2f}-{:.2f})"
    return format_table(
        [
            ("cell", *names),
            *(
                (
                    key,
                    *(form.format(*row[n]) if n in row else "" for n in names),
                )
                for key, row in found.items()
            ),
        ]
    )


def _numbers(values, form):
    """Write the numbers that are there, one text for each that is asked."""
    values = [value for value in values if value is not None]
    return [form.format(value) for value in values] or [""]


def _medians(measured, name=None):
    """Return each label's median, of what has its ends beside it."""
    if name is not None:
        measured = {k: v[name] for k, v in measured.items() if v.get(name)}
    return {label: median for label, (median, *_) in measured.items()}


def _both(found, form):
    """Write a number of ours beside Keras's, where ours is known."""
    ours, keras = _of(OURS, found), _of(KERAS, found)
    if ours is None:
        return ""
    (ours,), (keras,) = _numbers([ours], form), _numbers([keras], form)
    return f"{ours} / {keras or '-'}"


def _of(label, contenders):
    """Find whose label begins so, of several the shortest."""
    found = sorted((k for k in contenders if k.startswith(label)), key=len)
    return contenders[found[0]] if found else None


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


def picture_of(backend):
    """Name the picture of a backend's ratios."""
    return f"ratios-{backend}.png"


def draw(backend):
    """Draw the ratios of a backend, as far as they were measured.

    Returns:
        The picture's path.
    """
    from matplotlib.figure import Figure

    cells = read().get(backend, {})
    keys = [key for key in DRAWN if "times" in cells.get(key, {})]
    ratios = [cells[key]["times"]["ratios"] for key in keys]
    figure = Figure(figsize=(8, 1.3 + 0.55 * len(keys)), layout="tight")
    axes = figure.subplots()
    places = np.arange(len(keys))
    for index, name in enumerate(BARS):
        values = np.array([found.get(name, np.nan) for found in ratios])
        # From one to the ratio, left or right.
        bars = axes.barh(
            *(places + 0.27 * (index - 1), values - 1, 0.25, 1), label=name
        )
        labels = ["" if np.isnan(v) else f"{v:.2f}" for v in values]
        axes.bar_label(bars, labels, padding=2, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    ticks = [0.5, 1, 2, 5, 10, 20]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.margins(x=0.1, y=0.02)  # room for the labels
    axes.set_yticks(places, keys)
    axes.invert_yaxis()
    axes.set_xlabel(f"updates per second, times those of ... ({backend})")
    axes.legend(loc="lower right")
    path = FOLDER / picture_of(backend)
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    for name in read():
        draw(name)
    write_page()
