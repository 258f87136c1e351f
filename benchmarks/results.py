"""What stands in `RESULTS.md`: a section for each backend and cell."""

import re

from contenders import BACKEND
from telling import FOLDER, describe_machine, format_table

RESULTS = FOLDER / "RESULTS.md"
TITLE = "# Benchmarks\n\nMade by `benchmarks/bench.py --write`.\n\n"
PEAK = "peak memory"
REMARK_ON_PEAKS = "Peak memory measured: "


def write_cell(lines):
    """Put a cell into the results, in place of what it was before.

    Args:
        lines: list of str, the first of them from `telling.describe_cell`.
    """
    before, cells, after = _read()
    cells[_cell_of(lines[0])] = "\n".join([*lines, "", ""])
    RESULTS.write_text(before + "".join(cells.values()) + after, "utf-8")


def read_cell(heading):
    """Return the lines of a cell, or a heading for what is not there yet."""
    _, cells, _ = _read()
    name = _cell_of(heading)
    if name not in cells:
        return [f"{name}; no times"]
    return cells[name].rstrip("\n").split("\n")


def add_peaks(lines, peaks):
    """Return the lines of a cell with peak memory as its last column.

    Args:
        lines: list of str, of which some may be a table of contenders.
        peaks: dict from what a row begins with to bytes. What no row begins
            with becomes a row of its own.
    """
    is_row = [line.startswith("|") for line in lines]
    start = is_row.index(True) if any(is_row) else len(lines)
    end = start + sum(is_row)
    heading, _, *rows = [
        [text.strip() for text in line.split("|")[1:-1]]
        for line in lines[start:end]
    ] or ([""], [])
    if PEAK not in heading:
        heading, *rows = ([*row, ""] for row in (heading, *rows))
        heading[-1] = PEAK
    for label, peak in peaks.items():
        found = [row for row in rows if row[0].startswith(label)]
        if not found:
            found = [[label] + [""] * (len(heading) - 1)]
            rows += found
        # Of "Keras fit" and "Keras fit (XLA)" the first is the shorter one.
        row = min(found, key=lambda row: len(row[0]))
        row[-1] = f"{peak / 2**20:,.0f} MiB"
    # What is there is taken out, and written anew at the end.
    others = [
        line
        for line in lines[end:]
        if line and not line.startswith(REMARK_ON_PEAKS)
    ]
    return [
        *lines[:start],
        *[""] * (not any(is_row)),
        *format_table([heading, *rows]),
        *(part for line in others for part in ("", line)),
        *("", REMARK_ON_PEAKS + describe_machine()),
    ]


def _read():
    """Take the results apart.

    Returns:
        Triple of what comes before the cells of this backend, those cells, a
        dict of str, and what comes after them.
    """
    text = RESULTS.read_text("utf-8") if RESULTS.exists() else TITLE
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    by_backend = {section.split("\n", 1)[0]: section for section in sections}
    heading = f"## {BACKEND}"
    names = list(by_backend | {heading: ""})
    place = names.index(heading)
    section = by_backend.get(heading, f"{heading}\n\n")
    start, *cells = re.split(r"^(?=### )", section, flags=re.MULTILINE)
    before = head + "".join(by_backend[name] for name in names[:place])
    after = "".join(by_backend[name] for name in names[place + 1 :])
    by_cell = {_cell_of(cell.split("\n", 1)[0]): cell for cell in cells}
    return before + start, by_cell, after


def _cell_of(heading):
    """Leave the number of rounds out of a cell's heading."""
    return heading.rpartition(";")[0]
