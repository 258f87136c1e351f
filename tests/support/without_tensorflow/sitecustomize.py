"""Hides TensorFlow from a process of Python whose path begins here."""

from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec


def find_others(name, path=None, target=None):
    """Find TensorFlow nowhere, as where it is not installed."""
    return None if name == "tensorflow" else find_spec(name, path, target)


PathFinder.find_spec = staticmethod(find_others)
