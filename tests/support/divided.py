"""Divide among the backends the tests that need not run on each of them.

`make test` says which backends it tests and which commit. Who leaves what to
the others is drawn anew with every commit, so that in a few of them every case
has run on every backend. pytest alone runs all, as does `make test-everything`.
"""

import importlib.util
import os
import zlib


def leave_to_others(config, items, group_of, backend):
    """Take out of a run what another backend runs.

    Args:
        config: the configuration of pytest.
        items: list of what pytest has collected; changes in place.
        group_of: callable, gives the group of which an item is a part, a str,
            or None where every backend runs the item.
        backend: str, name of the backend that runs these.
    """
    groups = {}
    for item in items:
        groups.setdefault(group_of(item), []).append(item.nodeid)
    kept = set(groups.pop(None, ()))
    for group, names in groups.items():
        kept |= share(names, group, backend, tested_backends(backend))
    config.hook.pytest_deselected(
        items=[item for item in items if item.nodeid not in kept]
    )
    items[:] = [item for item in items if item.nodeid in kept]


def tested_backends(backend):
    """List the backends that are tested together, where they are installed."""
    names = os.environ.get("TESTED_BACKENDS", backend).split()
    return [name for name in names if importlib.util.find_spec(name)]


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
    return zlib.crc32(f"{commit} {name}".encode())
