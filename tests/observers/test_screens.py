"""What of progress a log file has, and what the cell of a notebook shows."""

import dataclasses
import functools
import re
import sys
import types

import pytest
from progressed import Session

from accumtrainer.observers.logs import Logs
from accumtrainer.observers.progress_line import Line
from accumtrainer.observers.screens import make_bar

pytestmark = pytest.mark.any_backend

# --- In a log file ---


def test_log_is_never_silent_for_more_than_a_minute():
    session = Session("auto", steps=400)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(*range(400))
        session.call("on_epoch_end", 0, {"loss": 0.5})
    counts = [int(re.search(r"(\d+)/400", f)[1]) for f in session.frames]
    assert counts == [10, 30, 70, 130, 190, 250, 310, 370, 400]
    assert session.looks == 8
    assert session.frames[1] == (
        "Epoch 1/2 · 30/400 updates · 64 samples/s · ETA 0:06:10"
        " · loss 0.25 · accuracy 0.875"
    )


def test_log_of_endless_data_tells_of_its_updates():
    session = Session("auto", epochs=None, steps=None)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(*range(10))
        assert session.output == (
            "Epoch 1 · 10 updates · 64 samples/s · loss 0.25 · accuracy 0.875\n"
        )


def test_log_of_short_epochs_has_a_line_for_each():
    session = Session("auto")
    with session.dispatcher.training():
        for epoch in range(100):
            session.run_epoch(epoch, {"loss": 0.5})
    assert session.output.count("\n") == 100


def test_log_of_a_second_training_begins_with_short_silences_again():
    session, counts = Session("auto", steps=200), []
    for _ in range(2):
        before = session.output.count("\n")
        with session.dispatcher.training():
            session.call("on_epoch_begin", 0)
            session.run_updates(*range(200))
        counts.append(session.output.count("\n") - before)
    assert counts[0] == counts[1]


def test_log_of_a_training_of_days_goes_on():
    session = Session("auto", steps=3000)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(*range(3000), secs=100.0)
        assert session.output.count("\n") == 3000


def test_log_tells_of_a_long_validation():
    session = Session("auto")
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1)
        with session.dispatcher.testing():
            for batch in range(30):
                session.clock.secs += 1
                session.call("on_test_batch_end", batch, {"loss": 9.0})
        assert session.frames == [
            f"Epoch 1/2 · 2/4 updates · validating, {batches} batches"
            " · loss 0.25 · accuracy 0.875"
            for batches in (8, 28)
        ]


def test_log_of_a_long_evaluation_tells_of_its_batches():
    session = Session("auto", steps=40)
    with session.dispatcher.testing():
        for index in range(40):
            session.clock.secs += 1
            session.call("on_test_batch_end", index, Logs(session.fetch))
    assert [line[:24] for line in session.frames] == [
        "Evaluate · 10/40 batches",
        "Evaluate · 30/40 batches",
        "Evaluate · 40/40 batches",
    ]


@pytest.mark.parametrize(
    ("heading", "running", "batch_end"),
    [
        ("Evaluate", "testing", "on_test_batch_end"),
        ("Predict", "predicting", "on_predict_batch_end"),
    ],
)
def test_log_of_a_second_one_begins_with_short_silences_again(
    heading, running, batch_end
):
    session, counts = Session("auto", steps=40), []
    for _ in range(2):
        before = len(session.frames)
        with getattr(session.dispatcher, running)():
            for index in range(40):
                session.clock.secs += 1
                session.call(batch_end, index, {})
        counts.append(len(session.frames) - before)
    assert session.frames[0].startswith(f"{heading} · 10/40 batches")
    assert counts == [3, 3]


# --- In a terminal ---


def test_bar_is_full_at_the_end_and_a_pulse_beyond_it():
    line = Line(heading="", finished=4, total=4, unit="updates", details=())
    assert make_bar(line, width=9, clock=float).percentage_completed == 100
    beyond = dataclasses.replace(line, finished=5)
    assert make_bar(beyond, width=9, clock=float).total is None


# --- In a notebook ---


class Cell:
    """Shows what a notebook would below a cell: the latest of each output."""

    def __init__(self):
        self.outputs = []
        self.redraws = 0

    def display(self, content, *, raw, display_id):
        assert raw and display_id
        self.outputs.append(content)
        return types.SimpleNamespace(
            update=functools.partial(self.redraw, len(self.outputs) - 1)
        )

    def redraw(self, place, content, *, raw):
        assert raw
        self.redraws += 1
        self.outputs[place] = content


@pytest.fixture
def cell(monkeypatch):
    """Give the cell of a notebook that a progress bar writes to."""
    cell = Cell()
    display = types.SimpleNamespace(display=cell.display)
    ipython = types.SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return cell


@pytest.mark.parametrize("mode", ["auto", 1])
def test_notebook_has_a_bar_for_each_epoch(cell, mode):
    session = Session(mode, is_notebook=True)
    with session.dispatcher.training():
        session.run_epoch(0, {"loss": 0.5})
        session.run_epoch(1, {"loss": 0.25})
    assert [output["text/plain"] for output in cell.outputs] == [
        "Epoch 1/2 · 4/4 updates · 64 samples/s · 4.0 s · loss 0.5",
        "Epoch 2/2 · 4/4 updates · 64 samples/s · 4.0 s · loss 0.25",
    ]
    assert 'value="4" max="4"' in cell.outputs[0]["text/html"]
    assert session.output == ""


def test_notebook_redraws_its_bar_with_the_updates(cell):
    session = Session("auto", is_notebook=True)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        assert 'value="0" max="4"' in cell.outputs[0]["text/html"]
        session.run_updates(0, 1)
        assert 'value="2" max="4"' in cell.outputs[0]["text/html"]
        session.call("on_epoch_end", 0, {})
    assert len(cell.outputs) == 1


def test_notebook_is_written_to_ten_times_a_second(cell):
    session = Session("auto", is_notebook=True, steps=1000)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(*range(1000), secs=1 / 1024)
        assert cell.redraws == session.looks == 9
        session.call("on_epoch_end", 0, {})


def test_notebook_shows_names_as_they_are(cell):
    session = Session("auto", is_notebook=True)
    with session.dispatcher.training():
        session.run_epoch(0, {"<b>loss": 0.5})
    assert "&lt;b&gt;loss 0.5" in cell.outputs[0]["text/html"]


def test_notebook_moves_its_bar_where_the_end_is_unknown(cell):
    session = Session("auto", is_notebook=True, steps=None)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1)
        assert "value=" not in cell.outputs[0]["text/html"]
        session.call("on_epoch_end", 0, {})
    assert 'value="2" max="2"' in cell.outputs[0]["text/html"]


def test_error_leaves_the_last_bar_in_the_notebook(cell):
    session = Session("auto", is_notebook=True)
    with pytest.raises(ValueError), session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1)
        raise ValueError
    assert "2/4 updates · stopped" in cell.outputs[0]["text/plain"]


def test_mode_2_writes_text_below_the_cell(cell, capsys):
    session = Session(2, is_notebook=True)
    with session.dispatcher.training():
        session.run_epoch(0, {"loss": 0.5})
    assert cell.outputs == []
    assert capsys.readouterr().out.endswith("4.0 s · loss 0.5\n")
