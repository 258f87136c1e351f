"""Claims about which tests are known to take long."""

import pathlib

import pytest
import slow

pytestmark = pytest.mark.any_backend

ROOT = pathlib.Path(__file__).parents[2]
REPORT = "<testsuites><testsuite>{cases}</testsuite></testsuites>"
CASE = (
    '<testcase classname="tests.{file}" name="{name}" time="{time}">'
    "{was}</testcase>"
)


def report(*cases):
    return REPORT.format(
        cases="".join(
            CASE.format(file=file, name=name, time=time, was=was)
            for file, name, time, was in cases
        )
    )


def test_a_test_runs_as_often_as_the_slowest_backend_has_time_for():
    one = report(
        ("window.test_sum", "test_mean[a]", 4.2, ""),
        ("window.test_sum", "test_mean[b.c]", 2.1, ""),
        ("window.test_sum", "test_quick", 0.4, ""),
    )
    other = report(
        ("window.test_sum", "test_mean[a]", 1.1, ""),
        ("window.test_sum", "test_mean[b.c]", 90, "<skipped/>"),
        ("test_docs", "test_page[a]", 30, ""),
    )
    assert slow.measured([one, other]) == {
        "tests/window/test_sum.py::test_mean": 9
    }


def test_all_that_are_known_are_there():
    for test, commits in slow.commits_of_tests().items():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test
        assert isinstance(commits, int), test
        assert commits > 1, test
