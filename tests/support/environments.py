"""What the processes that tests start find in their environment."""

import os
from pathlib import Path

BACKEND = os.environ["KERAS_BACKEND"]
SUPPORT = Path(__file__).parent
WITHOUT_TENSORFLOW = SUPPORT / "without_tensorflow"


def of_one_backend(left_out=(), backend=BACKEND):
    """Copy the environment for a process that uses one backend alone.

    It finds what several tests use. On others it finds no TensorFlow: where
    Keras does, it imports it to seed it, which takes every process four
    seconds.

    Args:
        left_out: names of variables that the process shall not have.
        backend: name of the backend, by default this process's.

    Returns:
        Dict of str.
    """
    environment = os.environ | {"KERAS_BACKEND": backend}
    paths = [] if backend == "tensorflow" else [str(WITHOUT_TENSORFLOW)]
    paths += [str(SUPPORT), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {k: v for k, v in environment.items() if k not in left_out}


def beside(file):
    """Copy the environment for a process that imports a test file.

    Args:
        file: path of the test file, beside which it finds its own kind.

    Returns:
        Dict of str.
    """
    paths = [str(Path(file).parent), str(SUPPORT)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
