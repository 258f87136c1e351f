"""Claims about the counters of a training run."""

import dataclasses
import json

import pytest

from accumtrainer.progress import Progress


def test_progress_starts_at_zero():
    assert set(Progress().as_dict().values()) == {0}


def test_progress_copy_has_every_counter():
    names = [field.name for field in dataclasses.fields(Progress)]
    progress = Progress(**{name: 1 + i for i, name in enumerate(names)})
    assert progress.copy() == progress


def test_progress_copy_does_not_follow_the_original():
    progress = Progress(updates=1)
    copy = progress.copy()
    progress.updates += 1
    assert (copy.updates, progress.updates) == (1, 2)


def test_progress_survives_being_saved_as_json():
    progress = Progress(updates=3, samples=96, seconds=1.5)
    saved = json.loads(json.dumps(progress.as_dict()))
    assert Progress.from_dict(saved) == progress


def test_progress_refuses_a_counter_it_does_not_know():
    with pytest.raises(TypeError):
        Progress.from_dict({"steps": 3})


def test_progress_refuses_a_misspelt_counter():
    with pytest.raises(AttributeError):
        Progress().update = 1
