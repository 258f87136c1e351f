"""Claims about how tests are divided among the backends."""

from types import SimpleNamespace

import pytest
from divided import leave_to_others, share

BACKENDS = ["tensorflow", "jax", "torch"]
CASES = [f"test_sum[{number}]" for number in range(11)]

pytestmark = pytest.mark.any_backend


def shares(names, group="test_sum"):
    return [share(names, group, backend, BACKENDS) for backend in BACKENDS]


def test_every_case_runs_on_one_backend_and_each_has_its_part():
    parts = shares(CASES)
    assert sorted(case for part in parts for case in part) == sorted(CASES)
    assert sorted(map(len, parts)) == [3, 4, 4]


def test_groups_of_one_are_spread():
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


def test_what_has_no_group_runs_everywhere(monkeypatch):
    monkeypatch.setenv("TESTED_BACKENDS", "tensorflow jax")
    told = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    items = [SimpleNamespace(nodeid=name) for name in ["test_alone", *CASES]]
    leave_to_others(
        SimpleNamespace(hook=hook),
        items,
        lambda item: "test_sum" if "[" in item.nodeid else None,
        "jax",
    )
    assert items[0].nodeid == "test_alone"
    assert len(items) in (6, 7)
    assert len(items) + len(told) == 12


def test_backend_alone_runs_everything():
    assert share(CASES, "test_sum", "jax", ["jax"]) == set(CASES)
