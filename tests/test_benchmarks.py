"""What the benchmark promises: it runs, compares fairly, and tells."""

import json
import re
import sys
from pathlib import Path

import environments
import forked
import numpy as np
import pytest

from accumtrainer.keras_api import BACKEND, keras

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


def run(script, *arguments):
    # Here the dtypes are as users have them; optax mixes some, for example.
    environment = environments.of_one_backend({"JAX_NUMPY_DTYPE_PROMOTION"})
    finished = forked.run(
        [
            *(BENCHMARKS / script, "--rounds", "2"),
            *("--round-secs", "0.01", *arguments),
        ],
        environment,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def bench(*arguments):
    return run("bench.py", *arguments)


def rows_of(table):
    """Read a Markdown table, dict of its rows by the first column."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
    return {first: rest for first, *rest in cells}


def test_every_contender_trains_and_is_compared():
    printed = bench("--cells", "tiny")
    rows = rows_of(printed)
    # Whichever way Keras is compiled, there is one that is compiled alike.
    assert printed.count("First update ") == 1
    heading = rows[""]
    trainer = next(v for k, v in rows.items() if k.startswith("Trainer, auto"))
    ratio = heading.index("Trainer against it")
    assert trainer[ratio] == "1.00x (1.00x-1.00x)"
    assert {"Keras fit, accumulating", "Keras fit, big batch"} <= {
        name.removesuffix(" (XLA)") for name in rows
    }
    assert any(name.startswith("hand-written") for name in rows)
    for name, (milliseconds, *_) in rows.items():
        if name and not name.startswith("-"):
            assert re.fullmatch(r"[\d.]+ \([\d.]+-[\d.]+\)", milliseconds)


def test_memory_is_measured_in_a_process_of_its_own():
    printed = bench(
        *("--cells", "tiny", "--contenders", "trainer"),
        *("--micro-batches", "1", "--memory"),
    )
    rows = rows_of(printed)
    place = rows[""].index("peak memory")
    (trainer,) = (v for k, v in rows.items() if k.startswith("Trainer"))
    assert re.fullmatch(r"[\d,]+ MiB", trainer[place])
    assert trainer[0].endswith(")") and printed.count("Peak memory ") == 1
    assert "1 micro-batches of 1" in printed


def test_two_processes_are_compared_with_one():
    printed = run("processes.py", "--cells", "tiny", "--micro-batches", "2")
    heading, ratio = printed.splitlines()[-1].rsplit(", ", 1)
    assert heading.startswith("tiny, 2 micro-batches, 2 rounds: ")
    assert re.fullmatch(r"[\d.]+x \([\d.]+x-[\d.]+x\)", ratio)


@pytest.fixture
def telling(monkeypatch, tmp_path):
    import telling

    monkeypatch.setattr(telling, "RECORDED", tmp_path / "recorded.json")
    return telling


def test_ratio_that_fell_is_told(telling):
    telling.record({"mlp 32x8": {"Keras": 7.0, "by hand": 1.0}})
    compare = telling.compare_with_recorded
    assert compare("mlp 32x8", {"Keras": 6.5, "by hand": 0.95}) == []
    (line,) = compare("mlp 32x8", {"Keras": 6.2})
    assert line == "mlp 32x8: Keras 6.20x, recorded 7.00x"
    assert compare("another cell", {"Keras": 0.1}) == []


def test_cells_that_were_not_run_stay_recorded(telling):
    telling.record({"mlp 32x8": {"Keras": 7.0}})
    telling.record({"conv 8x8": {"Keras": 2.0}})
    assert set(telling.read_recorded()[BACKEND]) == {"mlp 32x8", "conv 8x8"}
    json.loads(telling.RECORDED.read_text())


def test_target_that_is_missed_is_told(telling):
    met, missed = telling.compare_with_targets(
        "gpt 4x8", {"Keras": 5.0, "by hand": 0.5}
    )
    assert met.startswith("Keras 5.00x, target 1.") and "below" not in met
    assert missed == "by hand 0.50x, target 0.98x: below"


def test_picture_shows_what_was_recorded(telling, monkeypatch, tmp_path):
    monkeypatch.setattr(telling, "FOLDER", tmp_path)
    telling.record({"mlp 32x8": {"Keras": 7.0, "by hand": 1.0}})
    assert telling.draw().stat().st_size > 1000


@pytest.fixture
def results(monkeypatch, tmp_path):
    import results

    monkeypatch.setattr(results, "RESULTS", tmp_path / "RESULTS.md")
    return results


def test_cells_that_were_not_run_stay_in_the_results(results):
    for line in ("### a; 8 micro-batches of 4; 5 rounds", "### b; 1; 5 rounds"):
        results.write_cell([line, "", "first"])
    results.write_cell(["### a; 8 micro-batches of 4; 9 rounds", "", "again"])
    written = results.RESULTS.read_text()
    assert written.count("### ") == 2 and written.count("first") == 1
    assert written.index("again") < written.index("### b")
    assert written.count(f"## {BACKEND}\n") == 1


def test_other_backends_stay_in_the_results(results):
    before = "# Benchmarks\n\n## another\n\n### a; 1; 5 rounds\n\nthere\n\n"
    results.RESULTS.write_text(before + "## last\n\n")
    for remark in ("first", "again"):
        results.write_cell(["### a; 1; 5 rounds", "", remark])
    written = results.RESULTS.read_text()
    assert written.startswith(before)
    assert written.count("## last\n") == 1
    assert written.count("again") == 1 and "first" not in written


TIMES = [
    *("### a; 1; 5 rounds", "", "2026-11-24; versions", ""),
    "|                | ms per update |",
    "| -------------- | ------------: |",
    "| Keras fit      |          3.00 |",
    "| Keras fit (XLA) |         2.00 |",
    *("", "Keras 2.00x, target 1x"),
]


def test_peak_memory_is_written_beside_times(results):
    results.write_cell(TIMES)
    lines = results.read_cell("### a; 1; 9 rounds")
    assert lines == TIMES
    results.write_cell(results.add_peaks(lines, {"Keras fit": 2**20}))
    peaks = {"Keras fit": 3 * 2**20, "Keras fit (XLA)": 2**31}
    results.write_cell(
        results.add_peaks(results.read_cell("### a; 1; 9 rounds"), peaks)
    )
    written = results.RESULTS.read_text()
    assert {k: v for k, v in rows_of(written).items() if "--" not in k} == {
        "": ["ms per update", "peak memory"],
        "Keras fit": ["3.00", "3 MiB"],
        "Keras fit (XLA)": ["2.00", "2,048 MiB"],
    }
    assert written.count("Keras 2.00x, target 1x\n") == 1
    assert written.count("Peak memory measured: ") == 1


def test_peak_memory_is_written_without_times(results):
    lines = results.read_cell("### a; 1; 9 rounds")
    assert lines == ["### a; 1; no times"]
    printed = "\n".join(results.add_peaks(lines, {"Keras fit": 2**20}))
    assert rows_of(printed)["Keras fit"] == ["1 MiB"]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("is_guarded", [True, False])
def test_window_by_hand_skips_bad_gradients_where_it_is_guarded(
    is_fused, is_guarded
):
    from handwritten import make_window

    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    train, _ = make_window(
        model,
        keras.optimizers.Adam(),
        lambda y, outputs: keras.ops.mean((y - outputs) ** 2),
        jit_compile=False,
        is_fused=is_fused,
        is_guarded=is_guarded,
    )
    x, y = np.ones([2, 4, 3], "float32"), np.ones([2, 4, 1], "float32")
    before = float(train(x, y))
    assert np.isnan(float(train(x * np.nan, y)))
    after = float(train(x, y))
    assert (after < before) if is_guarded else np.isnan(after)
