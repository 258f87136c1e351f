"""Claims about how tests are divided among the backends."""

from types import SimpleNamespace

import pytest
import slow
from divided import leave_to_later, leave_to_others, sample, share

BACKENDS = ["tensorflow", "jax", "torch"]
CASES = [f"test_sum[{number}]" for number in range(11)]

pytestmark = pytest.mark.any_backend


def shares(names, group="test_sum"):
    return [share(names, group, backend, BACKENDS) for backend in BACKENDS]


def test_every_case_runs_on_one_backend_and_each_has_its_part():
    parts = shares(CASES)
    assert sorted(case for part in parts for case in part) == sorted(CASES)
    assert sorted(map(len, parts)) == [3, 4, 4]


def test_groups_of_one_are_spread(monkeypatch):
    # Any single commit may give them all to two.
    monkeypatch.setenv("TESTED_COMMIT", "0")
    runs = [shares([name], name).index({name}) for name in CASES]
    assert set(runs) == {0, 1, 2}


def test_every_case_comes_to_every_backend_with_the_commits(monkeypatch):
    seen = set()
    for commit in range(40):
        monkeypatch.setenv("TESTED_COMMIT", str(commit))
        seen |= {
            (backend, case)
            for backend, part in enumerate(shares(CASES))
            for case in part
        }
    assert len(seen) == len(BACKENDS) * len(CASES)


def choose(choice, *args):
    """Have one of the functions choose among a test alone and the cases."""
    told = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    items = [SimpleNamespace(nodeid=name) for name in ["test_alone", *CASES]]
    choice(
        SimpleNamespace(hook=hook),
        items,
        lambda item: "test_sum" if "[" in item.nodeid else None,
        *args,
    )
    assert len(items) + len(told) == 12
    return [item.nodeid for item in items]


def test_what_has_no_group_runs_everywhere(monkeypatch):
    monkeypatch.setenv("TESTED_BACKENDS", "tensorflow jax")
    chosen = choose(leave_to_others, "jax")
    assert chosen[0] == "test_alone"
    assert len(chosen) in (6, 7)


def test_some_cases_of_a_test_run_at_a_commit(monkeypatch):
    monkeypatch.setenv("TESTED_ONE_IN", "3")
    chosen = choose(leave_to_later)
    assert chosen[0] == "test_alone"
    assert len(chosen) == 1 + 4


def test_all_cases_run_where_no_number_is_given(monkeypatch):
    monkeypatch.delenv("TESTED_ONE_IN", raising=False)
    assert choose(leave_to_later) == ["test_alone", *CASES]


def test_at_least_one_case_runs_and_each_with_the_commits(monkeypatch):
    monkeypatch.setenv("TESTED_ONE_IN", "3")
    seen = set()
    for commit in range(20):
        monkeypatch.setenv("TESTED_COMMIT", str(commit))
        some = sample(CASES[:2])
        assert len(some) == 1
        seen |= some
    assert seen == set(CASES[:2])


def test_what_takes_long_runs_at_some_commits(monkeypatch):
    monkeypatch.setattr(slow, "commits_of_tests", lambda: {"test_sum": 5})
    monkeypatch.setenv("TESTED_ONE_IN", "3")
    runs = []
    for commit in range(200):
        monkeypatch.setenv("TESTED_COMMIT", str(commit))
        alone, *cases = choose(leave_to_later)
        assert alone == "test_alone"
        runs += cases
    assert 100 < len(runs) < 220  # 4 of them at one commit of 5
    assert set(runs) == set(CASES)


def test_what_takes_long_runs_where_all_is_wanted(monkeypatch):
    monkeypatch.setattr(slow, "commits_of_tests", lambda: {"test_alone": 9})
    monkeypatch.delenv("TESTED_ONE_IN", raising=False)
    assert choose(leave_to_later) == ["test_alone", *CASES]


def test_backend_alone_runs_everything():
    assert share(CASES, "test_sum", "jax", ["jax"]) == set(CASES)
