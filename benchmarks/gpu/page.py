"""The page: a section for each part, a table for each backend."""

import datetime
import textwrap

from gpu.processes import Outcome

HOW_TO_RUN = """\
## How to run it

`make bench-gpu` takes less than ten minutes and writes this page. It needs
Linux, a Python with JAX or PyTorch for the GPU, and Keras; no TensorFlow, and
no network. `GPU_PYTHON=` names the Python, `BENCH_ARGS="--backends torch"` and
`BENCH_ARGS="--parts limits memory"` leave something out.

Where there is no network, bring Keras and all else that is needed as wheels.
On a machine that has one, with the same system and version of Python:

```sh
pip wheel --wheel-dir wheels .
```

For another version of Python, say which:

```sh
pip wheel --wheel-dir wheels --no-deps .
pip download --dest wheels --only-binary :all: --python-version 3.12 \\
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \\
    wheels/accumtrainer-*.whl
```

Copy the clone with `wheels` to the machine with the GPU. There:

```sh
python3 -m pip install --no-index --find-links wheels accumtrainer
make bench-gpu
```

JAX and PyTorch stay as they are there, and so does a NumPy that is new enough.
"""

NO_GPU = """\
**No GPU has run it yet: none was at hand.** What follows was made on a CPU with
models of a few weights (`BENCH_ARGS=--small`). It shows the page's shape, and
that every part runs; its times say nothing.
"""

PARTS = {
    "machine": ("What it ran on", ""),
    "filling": (
        "A GPT that fills the card",
        "Sized from the card's memory, in `mixed_bfloat16`. `share` is what "
        "the training computes per second, of what products of large bfloat16 "
        "matrices do on the same card a moment before. Operations per token: "
        "`6 N + 12 L d T` (Chowdhery et al. 2022, PaLM, appendix B), N without "
        "the tables that tokens and positions are looked up in.",
    ),
    "precisions": (
        "Three precisions, and overflows",
        "In float16 the loss scale begins at 2^32, so that gradients overflow "
        "for real: those updates are skipped, and the scale halves each time. "
        "After each skipped one, all weights and all of the optimizer are "
        "compared with what they were.",
    ),
    "contests": (
        "Fused, streamed, by hand, and Keras",
        "All take turns, round by round, from the same weights. `Trainer, "
        "auto` is ours; `ours against it` is how many times as many updates "
        "per second ours makes, the median of the rounds and their range.",
    ),
    "limits": (
        "More than fits into memory",
        "One update whose activations would take 2.5 times the memory there "
        "is. On a CPU the system leaves the process little.",
    ),
    "memory": (
        "Peak of memory by the number of micro-batches",
        "Each in a process of its own, after three updates. Of the `device`: "
        "by the backend's allocator. Of the `process`: on a CPU, with Python, "
        "compiler and data.",
    ),
}


def write_page(path, outcomes, *, is_small):
    """Write the page.

    Args:
        path: `pathlib.Path`.
        outcomes: dict from backends to dicts from parts to `Outcome`.
        is_small: whether the small sizes were run.
    """
    lines = ["# Benchmarks on a GPU", ""]
    has_gpu = any(
        row["card"] != "CPU"
        for parts in outcomes.values()
        for row in parts.get("machine", Outcome()).rows
    )
    if not has_gpu:
        lines += [NO_GPU]
    elif is_small:
        lines += ["Models of a few weights, for a try; times say nothing.", ""]
    lines += [
        f"Measured on {datetime.date.today()} by `make bench-gpu`.",
        "",
        HOW_TO_RUN,
    ]
    for part, (title, explanation) in PARTS.items():
        found = {
            backend: parts[part]
            for backend, parts in outcomes.items()
            if part in parts
        }
        if found:
            lines += [f"## {title}", ""]
        if found and explanation:
            lines += [textwrap.fill(explanation, 80), ""]
        for backend, outcome in found.items():
            lines += [f"### On {backend}", ""]
            lines += section(part, outcome)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def section(part, outcome):
    """Return the lines of one backend's table, and what failed."""
    lines = table(outcome.rows) + [""] if outcome.rows else []
    if part == "memory" and outcome.rows:
        peaks = [row["peak MiB"] for row in outcome.rows]
        lines += [
            f"The largest is {max(peaks) / min(peaks):.3f} times the smallest.",
            "",
        ]
    for error in outcome.errors:
        lines += [f"**Failed**: `{error.replace('`', '')}`", ""]
    return lines


def table(rows):
    """Return a Markdown table of rows, lines; columns as they come."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns] + [[text(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return lines


def text(value):
    """Write a value as a table has it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "/").replace("\n", " ")
