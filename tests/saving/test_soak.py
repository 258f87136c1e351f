"""Kills a few runs; `make soak` kills two hundred."""

from pathlib import Path

import environments
import forked
import pytest

SOAK = Path(__file__).with_name("soak.py")


@pytest.mark.parametrize("configuration", ["carrying", "scaled", "watched"])
def test_a_run_that_is_killed_ends_like_one_that_is_not(configuration):
    finished = forked.run(
        [SOAK, "--kills=1", "--configurations", configuration],
        environments.of_one_backend(),
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "1 kills, 0 differences" in finished.stdout
