"""What notebooks show of results: tables, with text as it is."""

import re
from html.parser import HTMLParser

import pytest
from linear import X, Y, fit, make_trainer

from accumtrainer import Equivalence, RangeTest, notebook
from accumtrainer.diagnosis.inspection import Finding, Inspection
from accumtrainer.keras_api import keras
from accumtrainer.steps.memory import MemoryPlan, MemoryRow
from accumtrainer.steps.plan import COMPILER, Plan

pytestmark = pytest.mark.usefixtures("without_xla")


class Reader(HTMLParser):
    """Reads the rows of the tables, and the text beside them."""

    def __init__(self, content):
        super().__init__()
        self.rows, self.texts, self.open = [], [], []
        self.feed(content)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tr" in self.open:
            self.rows[-1][-1] += data
        else:
            self.texts.append(data)


def read(result):
    """Read what a notebook shows of a result."""
    return Reader(result._repr_html_())


def make_equivalence(**options):
    options = {"errors": {"a<b>": 2e-3, "c": 0.0}} | options
    return Equivalence(samples=8, micro_batches=4, tolerance=1e-5, **options)


def test_text_is_shown_as_it_is():
    content = notebook.paragraph("<b>&") + notebook.table(["<i>"], [["<u>"]])
    assert not re.search("<[biu]>", content)
    shown = Reader(content)
    assert shown.texts == ["<b>&"]
    assert shown.rows == [["<i>"], ["<u>"]]


def test_long_table_leaves_out_its_middle_and_says_so():
    shown = Reader(notebook.table(["row"], [[i] for i in range(100)], 8))
    assert [row[0] for row in shown.rows] == [
        *("row", "0", "1", "… 92 more …"),
        *("94", "95", "96", "97", "98", "99"),
    ]


def test_table_that_just_fits_leaves_nothing_out():
    shown = Reader(notebook.table(["row"], [[i] for i in range(8)], 8))
    assert [row[0] for row in shown.rows] == ["row", *"01234567"]


def test_numbers_stand_to_the_right_and_words_to_the_left():
    content = notebook.table(["path"], [["dense"], [1.5]])
    sides = re.findall(r"text-align:(\w+)[^>]*>([^<]+)", content)
    assert sides == [("left", "path"), ("left", "dense"), ("right", "1.5")]


def test_memory_plan_is_a_table():
    row = MemoryRow(micro_batch_size=8, micro_batches=4, peak_bytes=3 * 2**29)
    assert read(MemoryPlan((row,))).rows == [
        ["micro-batch size", "micro-batches", "peak memory"],
        ["8", "4", "1.50 GiB"],
    ]


def test_plan_is_a_table_of_what_is_known():
    shown = read(Plan(name="fused", jit_compile=True, peak_bytes=2**20))
    assert shown.texts == [f"fused, {COMPILER}"]
    assert ["peak memory, predicted", "1.00 MiB"] in shown.rows
    assert not any("measured" in row[0] for row in shown.rows)


def test_equivalence_is_a_verdict_a_table_and_its_reasons():
    shown = read(make_equivalence(reasons=("one <reason>",)))
    assert "different updates" in shown.texts[0]
    assert shown.rows[1:] == [["a<b>", "2.0e-03"], ["c", "0.0e+00"]]
    assert "- one <reason>" in shown.texts[-1]


def test_inspection_is_a_verdict_and_a_table_of_findings():
    finding = Finding(
        what="x",
        stage="batch",
        micro_batch=2,
        nans=1,
        infinities=0,
        size=64,
        rows=(5,),
    )
    shown = read(
        Inspection(findings=(finding,), micro_batches=4, loss_scale=1.0)
    )
    assert shown.texts[0].startswith("First came, in micro-batch 3 of 4, x")
    assert shown.rows[1] == ["micro-batch 3 of 4", "x", "1", "0", "64", "5"]


def test_inspection_without_findings_is_its_verdict():
    shown = read(Inspection(findings=(), micro_batches=4, loss_scale=1.0))
    assert shown.rows == []
    assert "is finite" in shown.texts[0]


def test_range_test_is_its_report_and_a_table_of_rates():
    shown = read(
        RangeTest(
            learning_rates=(0.001, 0.01, 0.1, 1.0),
            losses=(2.0, 1.5, 0.5, 9.0),
            smoothing=0.1,
            ended_by="divergence",
        )
    )
    assert "suggested" in "".join(shown.texts)
    assert shown.rows[2][:2] == ["0.01", "1.5"]


def test_history_is_a_table_of_its_epochs():
    trainer, _ = make_trainer(metrics=["mae"])
    history = fit(trainer, epochs=3, validation_data=(X, Y))
    shown = read(history)
    assert shown.rows[0][:2] == ["epoch", "loss"]
    assert [row[0] for row in shown.rows[1:]] == ["1", "2", "3"]
    place = shown.rows[0].index("val_mae")
    assert float(shown.rows[3][place]) == pytest.approx(
        history.history["val_mae"][2], rel=1e-3
    )
    assert isinstance(history, keras.callbacks.History)


def test_history_leaves_cells_empty_where_an_epoch_had_no_validation():
    trainer, _ = make_trainer()
    history = fit(trainer, epochs=4, validation_data=(X, Y), validation_freq=2)
    column = [row[-1] for row in read(history).rows]
    assert column[0] == "val_loss"
    assert [bool(cell) for cell in column[1:]] == [False, True, False, True]


def test_history_before_training_is_an_empty_table():
    trainer, _ = make_trainer()
    history = fit(trainer)
    fresh = type(history)()
    assert read(fresh).rows == [["epoch"]]
