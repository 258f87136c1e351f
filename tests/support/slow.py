"""Know which tests take long, so that a commit runs only some of them.

`slow.json` has, for every test whose cases take half a second and more, at one
of how many commits a case runs, so that each takes a third of a second of a
commit on average. It is written anew of reports of pytest, one for each
backend:

    make test-jax ONE_IN=1 PYTEST_ARGS=--junit-xml=jax.xml
    make test-tensorflow ONE_IN=1 PYTEST_ARGS=--junit-xml=tensorflow.xml
    python tests/support/slow.py jax.xml tensorflow.xml
"""

import collections
import json
import pathlib
import statistics
import sys
from xml.etree import ElementTree

FILE = pathlib.Path(__file__).with_name("slow.json")

ALWAYS = ("tests/test_docs.py", "tests/test_examples.py", "tests/test_fuzz.py")
"""What runs at every commit all the same: what users run, and random models."""

SECONDS = 1 / 3
"""What a case may take of a commit on average."""


def commits_of_tests():
    """Read at one of how many commits a case runs, by the name of its test.

    Returns:
        dict from str to int of at least 2; others run at each.
    """
    return json.loads(FILE.read_text())


def measured(reports):
    """Find tests that take long in reports; on the backend where it is most.

    Args:
        reports: iterable of texts, what `pytest --junit-xml` has written.

    Returns:
        dict as that of `commits_of_tests`.
    """
    commits = {}
    for report in reports:
        taken = collections.defaultdict(list)
        for case in ElementTree.fromstring(report).iter("testcase"):
            if case.find("skipped") is None:
                taken[_test_of(case)].append(float(case.get("time")))
        for test, times in taken.items():
            enough = round(statistics.fmean(times) / SECONDS)
            commits[test] = max(enough, commits.get(test, 0))
    return {
        test: number
        for test, number in sorted(commits.items())
        if number > 1 and not test.startswith(ALWAYS)
    }


def _test_of(case):
    path = case.get("classname").replace(".", "/")
    return f"{path}.py::{case.get('name').partition('[')[0]}"


if __name__ == "__main__":
    found = measured(pathlib.Path(name).read_text() for name in sys.argv[1:])
    FILE.write_text(json.dumps(found, indent=2) + "\n")
