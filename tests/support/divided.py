"""Choose what of the tests runs at a commit, and divide it among the backends.

`make test` says which backends it tests, which commit, and one in how many of
a test's cases it wants. Of these, one that takes half a second and more runs
at some commits only (`slow.py`). What runs, and who leaves what to the others,
is drawn anew with every commit, so that with the commits every case runs on
every backend. pytest alone runs all, as does `make test-everything`.
"""

import hashlib
import importlib.util
import math
import os

import slow


def leave_to_later(config, items, sampled_test_of):
    """Take out of a run the cases of tests that other commits run.

    Args:
        config: the configuration of pytest.
        items: list of what pytest has collected; changes in place.
        sampled_test_of: callable, gives the test of which an item is a case, a
            str, or None where all cases are wanted.
    """
    groups = group(items, sampled_test_of)
    kept = set(groups.pop(None, ())).union(*map(sample, groups.values()))
    commits = slow.commits_of_tests()
    keep(
        config,
        items,
        {name for name in kept if is_due(name, commits.get(test_of(name), 1))},
    )


def test_of(name):
    """Give the name of the test of a case."""
    return name.partition("[")[0]


def leave_to_others(config, items, group_of, backend):
    """Take out of a run what another backend runs.

    Args:
        config: the configuration of pytest.
        items: list of what pytest has collected; changes in place.
        group_of: callable, gives the group of which an item is a part, a str,
            or None where every backend runs the item.
        backend: str, name of the backend that runs these.
    """
    groups = group(items, group_of)
    kept = set(groups.pop(None, ()))
    for name, parts in groups.items():
        kept |= share(parts, name, backend, tested_backends(backend))
    keep(config, items, kept)


def group(items, group_of):
    """Give the names of the items of every group."""
    groups = {}
    for item in items:
        groups.setdefault(group_of(item), []).append(item.nodeid)
    return groups


def keep(config, items, names):
    """Take all others out of a run, and have pytest count them."""
    config.hook.pytest_deselected(
        items=[item for item in items if item.nodeid not in names]
    )
    items[:] = [item for item in items if item.nodeid in names]


def tested_backends(backend):
    """List the backends that are tested together, where they are installed."""
    names = os.environ.get("TESTED_BACKENDS", backend).split()
    return [name for name in names if importlib.util.find_spec(name)]


def one_in():
    """Tell one in how many cases is wanted."""
    return int(os.environ.get("TESTED_ONE_IN", "1"))


def sample(names):
    """Draw as many of the names as run at a commit, at least one.

    Returns:
        set of str.
    """
    return set(sorted(names, key=draw)[: math.ceil(len(names) / one_in())])


def is_due(name, commits):
    """Whether a commit runs what one of some commits is to run."""
    return one_in() == 1 or draw(f"{name} again") % commits == 0


def share(names, group, backend, backends):
    """Choose what a backend runs of a group.

    The parts of it differ by one at most. As not every backend collects the
    same, some of a group may run on none of them until the next commit.

    Args:
        names: list of str.
        group: str, what the names have in common.
        backend: str, one of `backends`.
        backends: list of str.

    Returns:
        set of str.
    """
    place = backends.index(backend) - draw(group)
    return set(sorted(names, key=draw)[place % len(backends) :: len(backends)])


def draw(name):
    """Draw a number for a name, another one with every commit."""
    commit = os.environ.get("TESTED_COMMIT", "")
    digest = hashlib.sha256(f"{commit} {name}".encode()).digest()
    return int.from_bytes(digest[:8])
