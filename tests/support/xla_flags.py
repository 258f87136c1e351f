"""Have XLA compile quickly, by flags that the installed XLA knows.

Every JAX and TensorFlow comes with an XLA of its own, and an XLA ends its
process at a flag that it does not know.
"""

import importlib.util
import mmap
import pathlib

QUICK = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": "false",
    "xla_cpu_parallel_codegen_split_count": "1",
}
"""XLA spends half of the time on code that is fast enough for a test, and a
tenth on doing so in pieces."""

LIBRARIES = {
    "jaxlib": "libjax_common.so*",
    "tensorflow": "libtensorflow_framework.so*",
}
"""By package, the file that holds the names of the flags."""


def quick_flags():
    """Join those of `QUICK`, for JAX or TensorFlow imported after that."""
    return known_flags(QUICK)


def known_flags(flags):
    """Join the flags that every installed XLA knows.

    Args:
        flags: dict of values by the flags' names.

    Returns:
        str, for the environment variable XLA_FLAGS.
    """
    names = _names_known_everywhere(list(flags))
    return " ".join(f"--{name}={flags[name]}" for name in names)


def _names_known_everywhere(names):
    for package, pattern in LIBRARIES.items():
        spec = importlib.util.find_spec(package)
        if spec is not None:
            folder = pathlib.Path(spec.origin).parent
            files = list(folder.glob(pattern))
            names = [n for n in names if any(_holds(f, n) for f in files)]
    return names


def _holds(file, name):
    """Say whether a library was compiled with a flag of this name.

    The name is then a string of C in it. What is left of a flag that is gone,
    in the description of a message, has no zero around it.
    """
    with (
        file.open("rb") as library,
        mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.find(f"\0{name}\0".encode()) >= 0
