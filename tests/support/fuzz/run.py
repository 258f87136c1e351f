"""Run a case, and tell what came of it."""

import dataclasses
import linecache
import traceback
import warnings

import keras

from fuzz.programs import case_of


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a case.

    Args:
        case: the `Case`.
        verdict: `"same"`, `"different"`, `"ours failed"`, or `"untold"` where
            Keras itself cannot train the program.
        text: what differs, or the error.
    """

    case: object
    verdict: str
    text: str = ""


def run(seed, backend=None):
    """Run the case of a seed in this process.

    Args:
        seed: int.
        backend: name of the backend, default the one in use.

    Returns:
        `Result`.
    """
    case = case_of(seed, backend or keras.backend.backend())
    name = f"<case {seed}>"
    # TensorFlow reads the source of what it traces.
    linecache.cache[name] = (
        len(case.text),
        None,
        case.text.splitlines(True),
        name,
    )
    space = {"__name__": f"case_{seed}"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(case.text, name, "exec"), space)
    except Exception as error:
        return failure(case, error)
    finally:
        del linecache.cache[name]
    if space["found"]:
        return Result(case, "different", "\n".join(space["found"]))
    return Result(case, "same")


def failure(case, error):
    """Say whose error it was."""
    names = {f.name for f in traceback.extract_tb(error.__traceback__)}
    is_keras = isinstance(error, FloatingPointError)
    is_keras = is_keras or "train_by_keras" in names
    verdict = "untold" if is_keras else "ours failed"
    lines = traceback.format_exception(error)
    text = "".join(lines)
    return Result(case, verdict, text[-6000:])
