"""What the benchmark promises: it runs, compares fairly, and tells."""

import argparse
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
        [BENCHMARKS / script, "--rounds", "2", *arguments],
        environment,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def bench(*arguments):
    return run("bench.py", "--round-secs", "0.01", *arguments)


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
        re.sub(r" \(.*\)$", "", name)  # with XLA, or one thread
        for name in rows
    }
    assert any(name.startswith("hand-written") for name in rows)
    for name, (milliseconds, *_) in rows.items():
        if name and not name.startswith("-"):
            assert re.fullmatch(r"[\d.]+ \([\d.]+-[\d.]+\)", milliseconds)


@pytest.mark.any_backend
def test_memory_is_measured_in_a_process_of_its_own():
    printed = bench(
        *("--cells", "tiny", "--contenders", "trainer"),
        *("--micro-batches", "1", "--measure", "times", "peaks"),
    )
    rows = rows_of(printed)
    place = rows[""].index("peak memory")
    (trainer,) = (v for k, v in rows.items() if k.startswith("Trainer"))
    assert re.fullmatch(r"[\d,]+ MiB", trainer[place])
    assert trainer[0].endswith(")")
    assert "1 micro-batches of 1" in printed


@pytest.mark.skipif(
    BACKEND == "torch", reason="PyTorch compiles nothing that it could keep"
)
def test_first_updates_are_measured_where_programs_were_kept():
    printed = bench(
        *("--cells", "tiny", "--contenders", "trainer", "--starts", "1"),
        *("--micro-batches", "1", "--measure", "second-runs"),
    )
    told = r"First update of a second run, Trainer, auto.*: (\S+) s"
    assert float(re.search(told, printed)[1]) > 0


@pytest.mark.any_backend
def test_two_processes_are_compared_with_one():
    printed = run(
        *("processes.py", "--round-secs", "0.01"),
        *("--cells", "tiny", "--micro-batches", "2"),
    )
    heading, ratio = printed.splitlines()[-1].rsplit(", ", 1)
    assert heading.startswith("tiny, 2 micro-batches, 2 rounds: ")
    assert re.fullmatch(r"[\d.]+x \([\d.]+x-[\d.]+x\)", ratio)


@pytest.mark.any_backend
def test_methods_are_compared_by_where_their_data_come_from():
    printed = run(
        *("pipelines.py", "--batches", "8", "--only", "arrays, validated"),
        *("PyDataset, 2 workers", "Grain", "generator"),
    )
    lines = printed.splitlines()[1:]
    ratio = r"[\d.]+x \([\d.]+x-[\d.]+x\)"
    told = rf"(.+?)  +(\w.*?)  .* ms, {ratio}, processor {ratio}"
    found = [re.fullmatch(told, line).groups() for line in lines]
    trainings = ["fit", "fit, accumulating"]
    asked = [*trainings, "evaluate", "predict"]
    assert found == [
        *(("arrays, validated", method) for method in trainings),
        *(("PyDataset, 2 workers", method) for method in asked),
        *(("Grain", method) for method in asked),
        *(("generator", method) for method in asked),
    ]


@pytest.fixture
def telling():
    import telling

    return telling


@pytest.fixture
def results(monkeypatch, tmp_path):
    import results

    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "MEASURED", tmp_path / "measured.json")
    monkeypatch.setattr(results, "PIPELINES", tmp_path / "pipelines.json")
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    return results


CELL = {"title": "a model", "micro_batches": 8, "precision": "float32"}
TIMES = {
    "contenders": {
        "Trainer, auto (fused)": {"ms_per_update": [3.0, 2.0, 4.0]},
        "Keras fit, accumulating": {"ms_per_update": [6.0, 6.0, 6.0]},
    },
    "ratios": {"Keras": 7.0, "by hand": 1.0},
}


def keep(results, key="mlp 32x8", backend=BACKEND, **parts):
    results.keep(backend, key, CELL, parts)


def test_ratio_that_fell_is_told(telling, results):
    keep(results, times=TIMES)
    compare = telling.compare_with_recorded
    assert compare("mlp 32x8", {"Keras": 6.5, "by hand": 0.95}) == []
    (line,) = compare("mlp 32x8", {"Keras": 6.2})
    assert line == "mlp 32x8: Keras 6.20x, recorded 7.00x"
    assert compare("another cell", {"Keras": 0.1}) == []


def test_target_that_is_missed_is_told(telling):
    met, missed = telling.compare_with_targets(
        "gpt 4x8", {"Keras": 5.0, "by hand": 0.5}
    )
    assert met.startswith("Keras 5.00x, target 1.") and "below" not in met
    assert missed == "by hand 0.50x, target 0.98x: below"


@pytest.mark.skipif(BACKEND != "torch", reason="loops are PyTorch's")
def test_loops_of_pytorch_are_targets_where_kernels_are_the_same(telling):
    small = telling.targets_of("mlp 32x8")
    large = telling.targets_of("gpt 4x8")
    assert small[telling.LOOP] < large[telling.LOOP] < 1
    assert small["Keras"] == 1.5
    assert large["Keras"] == large["Lightning"] == 1


SLOW_WITH_SEVERAL_THREADS = """
import json, os, sys, time

print(json.dumps({}), flush=True)
for line in sys.stdin:
    time.sleep(0.01 if os.environ.get("OMP_NUM_THREADS") == "1" else 0.05)
    print(json.dumps({"loss": 0.5}), flush=True)
"""


def test_processes_run_with_the_threads_with_which_they_are_faster():
    from contenders import start_fastest

    peer = start_fastest([sys.executable, "-c", SLOW_WITH_SEVERAL_THREADS])
    try:
        assert peer.fit(1) == 0.5
        assert peer.detail == "1 thread"
    finally:
        peer.close()


def test_peers_compute_with_the_same_pytorch():
    from contenders import check_version

    pytest.importorskip("torch", reason="needs PyTorch")
    import torch

    check_version(torch.__version__)
    with pytest.raises(AssertionError, match="Install the same"):
        check_version("1.0")


def test_run_that_was_ended_goes_on_with_what_is_missing(results, monkeypatch):
    import bench

    monkeypatch.setattr(bench, "read", results.read)
    (_, cell), (_, other) = bench.make_cells(
        argparse.Namespace(cells=["tiny"], micro_batches=[2], k1=True)
    )
    asked = argparse.Namespace(measure=["times", "peaks"])
    assert not bench.is_kept(cell, asked)
    keep(results, cell.key, times=TIMES)
    assert not bench.is_kept(cell, asked)
    asked.measure = ["times"]
    assert bench.is_kept(cell, asked) and not bench.is_kept(other, asked)
    asked.measure = ["second-runs"]
    assert not bench.is_kept(cell, asked)


def test_peak_memory_is_told_beside_times(telling):
    rows = [("", "ms"), ("Keras fit", "3"), ("Keras fit (XLA)", "2")]
    peaks = {"Keras fit": 3 * 2**20, "Keras fit (XLA)": 2**31, "Other": 2**20}
    assert telling.add_peaks(rows, peaks) == [
        ("", "ms", "peak memory"),
        ("Keras fit", "3", "3 MiB"),
        ("Keras fit (XLA)", "2", "2,048 MiB"),
        ("Other", "", "1 MiB"),
    ]


def test_peak_memory_is_told_beside_times_that_say_more(telling):
    rows = [("", "ms"), ("Trainer (fused, 1 thread)", "3")]
    assert telling.add_peaks(rows, {"Trainer (fused)": 2**20})[1:] == [
        ("Trainer (fused, 1 thread)", "3", "1 MiB")
    ]


def test_picture_shows_what_was_measured(results):
    keep(results, times=TIMES)
    assert results.draw(BACKEND).stat().st_size > 1000


def test_ratio_of_ours_compiled_stands_beside_that_of_ours(results):
    compiled = {"Trainer, compiled (fused)": {"advantage": [0.5, 0.4, 0.6]}}
    keep(results, times=TIMES)
    others = TIMES | {"contenders": TIMES["contenders"] | compiled}
    keep(results, "conv 8x8", times=others)
    results.write_page()
    page = results.PAGE.read_text()
    assert re.search(r"\| mlp 32x8 +\| +3.00 \| +7.00 \| +1.00 \|", page)
    both = r"\| conv 8x8 +\| +3.00 \| +7.00 / 14.00 \| +1.00 / 2.00 \|"
    assert re.search(both, page)


def test_what_was_not_measured_again_stays(results):
    keep(results, times=TIMES)
    keep(results, "conv 8x8", times=TIMES)
    keep(results, "mlp 32x8", "another", times=TIMES)
    peaks = {"mib": {"Trainer, auto (fused)": 5, "Keras fit, accumulating": 9}}
    keep(results, peaks=peaks)
    measured = json.loads(results.MEASURED.read_text())
    assert set(measured) == {BACKEND, "another"}
    assert set(measured[BACKEND]) == {"mlp 32x8", "conv 8x8"}
    assert measured[BACKEND]["mlp 32x8"] == CELL | {
        "times": TIMES,
        "peaks": peaks,
    }


def test_page_has_a_row_for_each_cell(results):
    keep(results, times=TIMES)
    keep(results, peaks={"mib": {"Trainer, auto": 5}})
    keep(results, "gpt 4x8", peaks={"mib": {"Trainer, auto": 6}})
    results.write_page()
    rows = rows_of(results.PAGE.read_text())
    heading = rows["cell"]
    row = dict(zip(heading, rows["mlp 32x8"], strict=True))
    assert row == {"ms": "3.00", "Keras": "7.00", "by hand": "1.00"} | {
        "MiB": "5 / -"
    }
    assert rows["gpt 4x8"] == ["", "", "", "6 / -"]


def test_page_shows_spreads_where_all_have_the_same_kernels(results):
    contenders = {
        "Trainer, auto (streamed, 1 thread)": {"advantage": [1, 1, 1]},
        "Lightning (1 thread)": {"advantage": [1.5, 1.25, 2]},
        "PyTorch loop": {"advantage": [1, 0.5, 1.75]},
    }
    ratios = {"Lightning": 1.5, results.LOOP: 1.0}
    times = {"contenders": contenders, "ratios": ratios}
    keep(results, "gpt 4x8", "torch", times=times)
    results.write_page()
    table, spreads = results.PAGE.read_text().split(results.SPREADS)
    rows = rows_of(table)
    assert rows["cell"] == ["Lightning", "loop"]
    assert rows["gpt 4x8"] == ["1.50", "1.00"]
    rows = rows_of(spreads)
    assert rows["cell"] == ["Lightning", "PyTorch loop"]
    assert rows["gpt 4x8"] == ["1.50 (1.25-2.00)", "1.00 (0.50-1.75)"]


def test_page_is_made_of_what_was_measured(tmp_path, monkeypatch):
    import results

    page = results.PAGE.read_text()
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    results.write_page()
    assert results.PAGE.read_text() == page, (
        "RESULTS.md must be what results.py makes of measured.json. "
        "Run `python benchmarks/results.py`."
    )


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


def test_page_shows_the_ratios_of_each_pipeline(results):
    keep(results, times=TIMES)
    numbers = {"ratio": [1.5, 1.25, 2.0]}
    results.keep_pipeline("jax", "a machine", "arrays", "fit", numbers)
    results.keep_pipeline("jax", "a machine", "tf.data", "predict", numbers)
    results.write_page()
    rows = rows_of(results.PAGE.read_text())
    assert rows["jax"] == ["fit", "predict"]
    assert rows["arrays"] == ["1.50 (1.25-2.00)", ""]
    assert rows["tf.data"] == ["", "1.50 (1.25-2.00)"]
    kept = results.read_pipelines()["jax"]["arrays"]["fit"]
    assert kept == numbers | {"machine": "a machine"}
