"""Run a case, and tell what came of it."""

import dataclasses
import linecache
import re
import traceback
import warnings

import keras

from fuzz.programs import case_of

KNOWN = {
    "since the metric has not yet been built": "metrics=[]",
}
"""What fails for a reason that is known, by a pattern of its text."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a case.

    Args:
        case: the `Case`.
        verdict: `"same"`, `"different"`, `"ours failed"` or `"keras failed"`.
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
    verdict = "keras failed" if "train_by_keras" in names else "ours failed"
    lines = traceback.format_exception(error)
    text = "".join(lines)
    for pattern, reason in KNOWN.items():
        if re.search(pattern, text, re.DOTALL):
            return Result(case, f"known: {reason}", text)
    return Result(case, verdict, text[-6000:])
