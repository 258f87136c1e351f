"""What the tests inside `Model.fit` are given."""

import gc

import pytest


@pytest.fixture
def unended_data_are_let_go_of():
    """Delete the iterator that `fit` leaves amid its data, at once.

    A thread of TensorFlow looks after each, ever more rarely, and who deletes
    one waits for the thread: up to a minute, in whichever test that falls.
    """
    yield
    gc.collect()
