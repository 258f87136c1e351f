"""What the progress bar shows, when it looks, and what stays behind."""

import io
import json
import re

import pytest
from progressed import BAR, Clock, Session
from rich.console import Console

from accumtrainer.observers.logs import Logs
from accumtrainer.observers.progress_bar import ProgressBar
from accumtrainer.observers.progress_line import format_duration
from accumtrainer.saving.callback_state import CallbackStates

pytestmark = pytest.mark.any_backend

# --- Plain lines ---


def test_plain_mode_writes_one_line_per_epoch():
    session = Session(2)
    with session.dispatcher.training():
        session.run_epoch(0, {"loss": 0.5, "val_loss": 0.75})
        session.run_epoch(1, {"loss": 0.31249, "val_loss": 0.5})
    assert session.output == (
        "Epoch 1/2 · 4/4 updates · 64 samples/s · 4.0 s · loss 0.5"
        " · val_loss 0.75\n"
        "Epoch 2/2 · 4/4 updates · 64 samples/s · 4.0 s · loss 0.3125"
        " · val_loss 0.5\n"
    )


def test_plain_mode_looks_only_when_the_epoch_ends():
    session = Session(2)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1, 2, 3, secs=100.0)
        assert session.looks == 0
        assert session.output == ""
        session.call("on_epoch_end", 0, Logs(session.fetch))
    assert session.looks == 1


def test_plain_line_is_not_broken_at_the_width():
    session = Session(2, width=20)
    with session.dispatcher.training():
        session.run_epoch(0, {"loss": 0.5, "val_loss": 0.75})
    assert session.output.count("\n") == 1


def test_names_are_written_as_they_are():
    session = Session(2)
    with session.dispatcher.training():
        session.run_epoch(0, {"[bold]loss": 0.5})
    assert session.output.endswith("· [bold]loss 0.5\n")


def test_what_loggers_are_for_is_not_shown():
    session = Session(2)
    logs = {"loss": 0.5, "gradient_norm": 1.0, "updates": 4, "applied": True}
    logs |= {"skipped_updates": 1, "loss_scale": 2.0, "has_begun": True}
    logs |= {"micro_batches": 8, "samples": 64, "learning_rate": 0.1}
    with session.dispatcher.training():
        session.run_epoch(0, logs)
    assert session.output.endswith("4.0 s · loss 0.5\n")


def test_separator_suits_an_ascii_terminal():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    bar = ProgressBar(2, console=Console(file=file), clock=Clock())
    bar.set_params({"epochs": 1, "steps": 1})
    bar.on_epoch_begin(0)
    bar.on_epoch_end(0, {"loss": 0.5})
    file.seek(0)
    assert file.read() == "Epoch 1/1 - 0/1 updates - 0.0 s - loss 0.5\n"


def test_unlimited_epochs_have_no_total():
    session = Session(2, epochs=None, steps=None)
    with session.dispatcher.training():
        session.run_epoch(6, {"loss": 0.5})
    assert session.output.startswith("Epoch 7 · 4/4 updates ·")


# --- When it is live ---


@pytest.mark.parametrize(
    ("mode", "is_terminal", "has_bar"),
    [
        ("auto", True, True),
        ("auto", False, False),
        (1, True, True),
        (1, False, True),
        (2, True, False),
        (2, False, False),
    ],
)
def test_mode_and_terminal_decide_on_a_bar(mode, is_terminal, has_bar):
    session = Session(mode, is_terminal=is_terminal)
    with session.dispatcher.training():
        session.run_epoch(0, {"loss": 0.5})
    assert (BAR in session.output) == has_bar
    assert ("\x1b" in session.output) == (is_terminal and has_bar)
    assert session.frames[-1].endswith("4.0 s · loss 0.5")


@pytest.mark.parametrize("mode", [0, 3, "bar", None])
def test_unknown_mode_is_refused(mode):
    with pytest.raises(ValueError, match=r"mode must be .*Received: mode="):
        ProgressBar(mode)


def test_live_line_shows_progress_speed_and_remaining_time():
    session = Session(1, is_terminal=True)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, secs=60.0)
        session.run_updates(1, 2, secs=0.5)
        frame = session.frames[-1]
        session.call("on_epoch_end", 0, {})
    assert re.fullmatch(
        rf"Epoch 1/2 {BAR}+\W*3/4 updates · 128 samples/s · ETA 0.5 s"
        r" · loss 0.25 · accuracy 0.875",
        frame,
    )


def test_bar_grows_with_the_updates():
    session = Session(1, is_terminal=True)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        lengths = []
        for index in range(4):
            session.run_updates(index)
            lengths.append(session.frames[-1].count(BAR))
        session.call("on_epoch_end", 0, {})
    assert lengths == sorted(set(lengths))


def test_logs_are_looked_at_ten_times_a_second():
    session = Session(1, is_terminal=True, steps=1000)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(*range(1000), secs=1 / 1024)
        session.call("on_epoch_end", 0, {})
    assert session.looks == 9


def test_live_bar_sent_to_a_file_looks_only_when_the_epoch_ends():
    session = Session(1, is_terminal=False)
    with session.dispatcher.training():
        session.run_epoch(0, {"loss": 0.5})
    assert session.looks == 0
    assert session.output.count("\n") == 1


def test_live_line_stays_one_line_on_a_narrow_terminal():
    session = Session(1, is_terminal=True, width=40)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1, 2)
        frame = session.frames[-1]
        session.call("on_epoch_end", 0, {})
    assert frame.startswith("Epoch 1/2 3/4 updates")
    assert frame.endswith("…")
    assert len(frame) <= 40


def test_last_line_on_a_narrow_terminal_is_whole():
    session = Session(1, is_terminal=True, width=40)
    with session.dispatcher.training():
        session.run_epoch(0, {"loss": 0.5, "val_accuracy": 0.875})
    assert session.output.endswith("loss 0.5 · val_accuracy 0.875\n")


def test_narrow_ascii_terminal_gets_ascii():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=20, force_terminal=True)
    bar = ProgressBar(1, console=console, clock=Clock())
    bar.set_params({"epochs": 1, "steps": 1000})
    bar.on_train_begin()
    bar.on_epoch_begin(0)
    bar.on_epoch_end(0, {"loss": 0.5})
    file.seek(0)
    assert "loss 0.5" in file.read()


def test_unknown_number_of_updates_has_neither_total_nor_eta():
    session = Session(1, is_terminal=True, steps=None)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1, 2)
        frame = session.frames[-1]
        session.call("on_epoch_end", 0, {})
    assert "3 updates" in frame
    assert "/3" not in frame
    assert "ETA" not in frame
    assert "3/3 updates" in session.frames[-1]


def test_more_updates_than_promised_are_shown():
    session = Session(1, is_terminal=True, steps=2)
    with session.dispatcher.training():
        session.run_epoch(0, {"loss": 0.5})
    assert "4/2 updates" in session.frames[-1]
    assert "ETA 0.0 s" in session.output
    assert "ETA -" not in session.output


def test_speed_is_that_of_all_updates_but_the_first():
    session = Session(2)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, secs=50.0)
        session.run_updates(1, 2, secs=1.0)
        session.run_updates(3, secs=4.0)
        session.call("on_epoch_end", 0, {"loss": 0.5})
    assert "· 32 samples/s · 56.0 s ·" in session.output


# --- Validation ---


def test_validation_time_is_not_training_time():
    session = Session(2)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1)
        with session.dispatcher.testing():
            session.clock.secs += 100
        session.run_updates(2, 3)
        with session.dispatcher.testing():
            session.clock.secs += 100
        session.clock.secs += 10
        session.call("on_epoch_end", 0, {"loss": 0.5})
    assert "· 64 samples/s · 0:03:34 ·" in session.output


def test_validation_is_announced_and_its_batches_are_not_counted():
    session = Session(1, is_terminal=True)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1)
        with session.dispatcher.testing():
            session.call("on_test_batch_end", 7, {"loss": 9.0})
            frame = session.frames[-1]
        session.call("on_epoch_end", 0, {})
    assert frame.endswith(
        "2/4 updates · validating · loss 0.25 · accuracy 0.875"
    )


def test_validation_within_the_epoch_stays_on_its_line():
    session = Session(1, is_terminal=True)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.call("on_validation_end", 2, {"val_loss": 0.75})
        session.run_updates(0, 1)
        assert session.frames[-1].endswith("accuracy 0.875 · val_loss 0.75")
        session.call("on_epoch_end", 0, {"loss": 0.5})
        assert session.frames[-1].endswith("loss 0.5 · val_loss 0.75")
        session.run_epoch(1, {"loss": 0.5})
    assert session.frames[-1].endswith("loss 0.5")


def test_line_of_an_epoch_ends_with_the_epoch_s_own_numbers():
    session = Session(2)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.call("on_validation_end", 2, {"val_loss": 0.75})
        session.run_updates(0, 1, 2, 3)
        session.call("on_epoch_end", 0, {"loss": 0.5, "val_loss": 0.25})
    assert session.output.endswith("· loss 0.5 · val_loss 0.25\n")


# --- Ends, good and bad ---


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_leaves_the_last_line_and_gives_the_cursor_back(error):
    session = Session(1, is_terminal=True)
    with pytest.raises(error), session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1)
        looks = session.looks
        raise error
    assert session.looks == looks
    assert session.frames[-1].endswith(
        "2/4 updates · stopped · 2.0 s · loss 0.25 · accuracy 0.875"
    )
    assert session.output.rindex("\x1b[?25h") > session.output.rindex(
        "\x1b[?25l"
    )


def test_error_in_validation_is_survived():
    session = Session(2)
    with pytest.raises(ValueError), session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0)
        with session.dispatcher.testing():
            raise ValueError
    assert session.output.startswith("Epoch 1/2 · 1/4 updates · stopped")


def test_error_between_epochs_adds_no_line():
    session = Session(2)
    with pytest.raises(ValueError), session.dispatcher.training():
        session.run_epoch(0, {"loss": 0.5})
        raise ValueError
    assert session.output.count("\n") == 1


@pytest.mark.parametrize("is_terminal", [False, True])
def test_second_fit_starts_afresh(is_terminal):
    session = Session("auto", is_terminal=is_terminal)
    for _ in range(2):
        with session.dispatcher.training():
            session.run_epoch(0, {"loss": 0.5})
    assert session.frames[-1].startswith("Epoch 1/2 ")
    assert session.frames[-1].endswith("64 samples/s · 4.0 s · loss 0.5")


def test_epoch_without_updates_has_a_line():
    session = Session(2)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.call("on_epoch_end", 0)
    assert session.output == "Epoch 1/2 · 0/4 updates · 0.0 s\n"


# --- Evaluation and prediction by themselves ---


@pytest.mark.parametrize("is_terminal", [False, True])
def test_evaluation_has_a_line_of_its_own(is_terminal):
    session = Session("auto", is_terminal=is_terminal)
    with session.dispatcher.testing():
        for index in range(4):
            session.clock.secs += 1
            session.call("on_test_batch_end", index, Logs(session.fetch))
        session.dispatcher.last_logs = {"loss": 0.5}
    assert session.frames[-1].startswith("Evaluate ")
    assert session.frames[-1].endswith("4/4 batches · 4.0 s · loss 0.5")


def test_prediction_does_not_look_at_the_outputs():
    session = Session(1, is_terminal=True)
    with session.dispatcher.predicting():
        for index in range(4):
            session.clock.secs += 1
            session.call("on_predict_batch_end", index, Logs(session.fetch))
        session.dispatcher.last_logs = Logs(session.fetch)
    assert session.looks == 0
    assert session.frames[-1].endswith("4/4 batches · 4.0 s")


# --- Small parts ---


@pytest.mark.parametrize(
    ("secs", "words"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "0:01:00"),
        (3661, "1:01:01"),
        (100_000, "1 day, 3:46:40"),
    ],
)
def test_durations_are_written_the_way_people_read_them(secs, words):
    assert format_duration(secs) == words


# --- After a resume ---


def resume(session):
    """Go on in a process whose clock is another, and that trains longer."""
    state = json.loads(json.dumps(CallbackStates([session.bar]).get()))
    resumed = Session(2, epochs=5)
    resumed.clock.secs = 10.0
    return resumed, state


def go_on(resumed, state, samples):
    """Put back what a Trainer does, amid the first epoch."""
    resumed.call("on_epoch_begin", 0)
    resumed.trainer.samples_seen = samples
    CallbackStates([resumed.bar]).set(state)


def test_resumed_epoch_is_told_by_the_clock_of_its_own_process():
    session = Session(2)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1)
        resumed, state = resume(session)
    with resumed.dispatcher.training():
        go_on(resumed, state, samples=128)
        resumed.run_updates(2, secs=20.0)  # compiles
        resumed.run_updates(3, secs=0.5)
        resumed.call("on_epoch_end", 0, {"loss": 0.5})
    assert resumed.output == (
        "Epoch 1/5 · 4/4 updates · 128 samples/s · 22.5 s · loss 0.5\n"
    )


def test_first_update_after_a_resume_claims_no_speed_of_those_before():
    session = Session(2)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1)
        resumed, state = resume(session)
    with resumed.dispatcher.training():
        go_on(resumed, state, samples=128)
        resumed.run_updates(2, secs=32.0)
        resumed.call("on_epoch_end", 0, {"loss": 0.5})
    assert "· 2 samples/s · 34.0 s ·" in resumed.output


def test_resumed_epoch_keeps_what_its_validation_has_said():
    session = Session(2)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1)
        session.call("on_validation_end", 2, {"val_loss": 0.75})
        resumed, state = resume(session)
    with resumed.dispatcher.training():
        go_on(resumed, state, samples=128)
        resumed.call("on_epoch_end", 0, {"loss": 0.5})
    assert "2/4 updates" in resumed.output
    assert resumed.output.endswith("· loss 0.5 · val_loss 0.75\n")


def test_live_line_of_a_resume_begins_where_it_stopped():
    session = Session("auto", is_terminal=True)
    with session.dispatcher.training():
        session.call("on_epoch_begin", 0)
        session.run_updates(0, 1)
        state = CallbackStates([session.bar]).get()
    resumed = Session("auto", is_terminal=True)
    with resumed.dispatcher.training():
        go_on(resumed, state, samples=128)
        assert "2/4 updates" in resumed.frames[-1]


def test_line_that_is_closed_leaves_the_next_run_nothing():
    session = Session(2)
    with session.dispatcher.training():
        session.run_epoch(0, {"loss": 0.5})
        assert CallbackStates([session.bar]).get() == {}
