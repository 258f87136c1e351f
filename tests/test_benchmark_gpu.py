"""What the benchmark for GPUs promises, seen where there is none."""

import re
import subprocess
import sys
from pathlib import Path

import environments
import pytest

from accumtrainer.keras_api import BACKEND

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gpu.page import PARTS, table, write_page  # noqa: E402, by that path
from gpu.processes import Outcome  # noqa: E402


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Run everything small, and read the page that it writes."""
    if BACKEND == "tensorflow":
        reason = "it is for JAX and PyTorch"
        print(f"Not run on {BACKEND}: {reason}.")
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("gpu") / "page.md"
    # Here the dtypes are as users have them.
    environment = environments.of_one_backend({"JAX_NUMPY_DTYPE_PROMOTION"})
    environment["PYTHONPATH"] += f":{BENCHMARKS}"
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "gpu", "--small"),
            *("--backends", BACKEND, "--out", str(path)),
        ],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return path.read_text(encoding="utf-8")


def rows_of(page, part):
    """Read the table of a part, list of dicts."""
    title, _ = PARTS[part]
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def number(text):
    return float(text.replace(",", ""))


def test_every_part_is_there_and_none_failed(page):
    assert "**Failed**" not in page, page
    assert all(rows_of(page, part) for part in PARTS)
    (machine,) = rows_of(page, "machine")
    assert f"{BACKEND} " in machine["versions"]


def test_page_says_whether_a_gpu_has_run_it(page):
    (machine,) = rows_of(page, "machine")
    assert ("No GPU has run it" in page) == (machine["card"] == "CPU")


def test_overflows_are_skipped_and_leave_no_trace(page):
    rows = {row["precision"]: row for row in rows_of(page, "precisions")}
    assert number(rows["mixed_float16"]["updates skipped"]) > 1
    assert rows["mixed_float16"]["after a skip"] == "bit for bit as before"
    for name, row in rows.items():
        before, after = map(float, row["loss"].split(" to "))
        assert after < before
        if name != "mixed_float16":
            assert row["updates skipped"] == "0"


def test_memory_is_measured_for_each_number_of_micro_batches(page):
    rows = rows_of(page, "memory")
    assert [row["micro-batches"] for row in rows] == ["2", "4"]
    assert all(number(row["peak MiB"]) > 0 for row in rows)
    assert re.search(r"The largest is [\d.]+ times the smallest\.", page)


def test_update_that_does_not_fit_is_made_in_smaller_pieces_or_refused(page):
    predicted, tried, given = rows_of(page, "limits")
    for row in (predicted, tried):
        assert row["what came"].startswith("an update")
        assert row["weights"] == "trained"
        size = number(row["in micro-batches of"])
        assert size < number(row["samples"])
    if BACKEND == "jax":  # whose compiler foresees what is never run
        assert int(tried["times memory ran out"]) > 0
    assert given["known as lack of memory"] == "yes"


def test_speed_is_a_share_of_what_products_of_matrices_do(page):
    (row,) = rows_of(page, "filling")
    share = number(row["TFLOP/s"]) / number(row["TFLOP/s of products"])
    assert number(row["share"]) == pytest.approx(share, rel=0.02)


def test_plans_take_turns_with_keras_and_windows_by_hand(page):
    names = {row["who"].partition(" (")[0] for row in rows_of(page, "contests")}
    assert names == {
        "Trainer, auto",
        "Trainer, fused",
        "Trainer, streamed",
        "hand-written window",
        "hand-written window, guarded",
        "Keras fit, accumulating",
    }


def test_what_failed_is_written_beside_what_was_measured(tmp_path):
    path = tmp_path / "page.md"
    row = {"micro-batches": 4, "peak MiB": 1.5}
    memory = Outcome([row], ["memory did not end within 3 s"])
    failed = Outcome([], ["filling: code 1, ValueError: `x` is wrong"])
    outcomes = {"jax": {"memory": memory, "filling": failed}}
    write_page(path, outcomes, is_small=False)
    text = path.read_text(encoding="utf-8")
    assert "**Failed**: `memory did not end within 3 s`" in text
    assert "**Failed**: `filling: code 1, ValueError: x is wrong`" in text
    assert rows_of(text, "memory") == [
        {"micro-batches": "4", "peak MiB": "1.5"}
    ]


def test_table_has_a_column_for_whatever_a_row_has():
    heading, _, *rows = table([{"a": 1}, {"b": 2_000.0, "a": None}])
    assert [c.strip() for c in heading.split("|")[1:-1]] == ["a", "b"]
    assert [c.strip() for c in rows[1].split("|")[1:-1]] == ["", "2,000"]


def test_part_that_ends_early_keeps_its_rows(monkeypatch):
    from gpu import processes

    code = (
        "import time; from gpu.processes import tell; tell({'a': 1});"
        "raise ValueError('no more')"
    )
    monkeypatch.setattr(processes, "COMMAND", ["-c", code])
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    outcome = processes.run_part(BACKEND, "some part", (), None)
    assert outcome.rows == [{"a": 1}]
    assert outcome.errors == ["some part: code 1, ValueError: no more"]
