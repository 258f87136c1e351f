"""Claims about what all trackers share, of one that tracks nothing."""

import pytest
from copied import in_every_way
from pointed import fit

from accumtrainer.callbacks import Checkpoint
from accumtrainer.callbacks.background import Background
from accumtrainer.callbacks.tracker import Tracker

pytestmark = [
    pytest.mark.any_backend,
    pytest.mark.usefixtures("without_xla"),
]


class Notes(Tracker):
    """Notes which runs are begun, and may fail to end one."""

    def __init__(self):
        super().__init__(None, {}, close_secs=60)
        self.begun = []
        self.fails = False

    def get_starter(self):
        return fit  # any function: none of its options is given

    def start(self):
        self.begun.append(self._run_id)
        self._run_id = "first"
        self._background = Background("notes")

    def send_point(self, updates, numbers):
        self._send(str)

    def finish(self):
        self._end_thread(str)
        if self.fails:
            raise OSError("no answer")


def test_training_after_a_resumed_one_that_failed_to_end_is_another_run(
    tmp_path,
):
    notes, checkpoint = Notes(), Checkpoint(tmp_path)
    fit(notes, checkpoint)
    notes.fails = True
    with pytest.raises(OSError, match="no answer"):
        fit(notes, checkpoint, epochs=2, resume_from="auto")
    notes.fails = False
    fit(notes)
    assert notes.begun == [None, "first", None]


@in_every_way
def test_copy_begins_a_run_of_its_own(copied):
    notes = Notes()
    trainer = fit(notes)
    another = copied(notes)
    another.begun = []
    fit(another, trainer=trainer)
    fit(another, notes, trainer=trainer)
    assert another.begun == [None, "first"]
    assert notes.begun == [None, "first"]
