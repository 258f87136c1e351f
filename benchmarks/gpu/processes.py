"""How a part is run: in a process that tells its rows as it goes."""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

ROW = "row: "
"""What a line of standard output begins with that has a row."""


COMMAND = ("-m", "gpu.part")
"""What of Python runs a part."""

FAILED = "failed"
"""The only column of a row that says what failed."""

REASON = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*", re.M)
"""The line of a traceback that says what was raised."""


@dataclass
class Outcome:
    """What a part has measured, as far as it came.

    Args:
        rows: list of dicts from columns to values.
        errors: list of str, why it came no further.
    """

    rows: list = field(default_factory=list)
    errors: list = field(default_factory=list)

    def add(self, other):
        """Add what another process of the part has measured."""
        self.rows += other.rows
        self.errors += other.errors


def run_part(backend, part, options, secs):
    """Run one process, and return its `Outcome`.

    Args:
        backend: str, as in `KERAS_BACKEND`.
        part: str, name of the part.
        options: tuple of str, further arguments of `gpu.part`.
        secs: float, after which it is ended; `None` for never.
    """
    command = [sys.executable, *COMMAND, part, *options]
    # By files, so that what was told before an end stays.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as e:
        try:
            code = subprocess.run(
                command,
                stdout=out,
                stderr=e,
                env=environment(backend),
                timeout=secs,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        out.seek(0)
        e.seek(0)
        told, complaints = out.read().splitlines(), e.read()
    outcome = Outcome()
    for line in told:
        if line.startswith(ROW):
            row = json.loads(line.removeprefix(ROW))
            if FAILED in row:
                outcome.errors.append(row[FAILED])
            else:
                outcome.rows.append(row)
    which = " ".join([part, *options])
    if code is None:
        outcome.errors.append(f"{which} did not end within {secs:.0f} s")
    elif code:
        reasons = REASON.findall(complaints) or complaints.split("\n")[-2:]
        reason = " ".join(reasons[-1:]).strip() or "it said nothing"
        outcome.errors.append(f"{which}: code {code}, {reason[:300]}")
    return outcome


def environment(backend):
    """Make the environment of a process that uses one backend."""
    defaults = {
        # JAX takes three quarters of a card otherwise.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        # PyTorch then joins pieces that were freed.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    return defaults | os.environ | {"KERAS_BACKEND": backend}


def row_or_failure(what, make_row):
    """Return a row, or one that says why there is none; others go on.

    Args:
        what: str, what the row is about.
        make_row: function that returns a dict.
    """
    try:
        return make_row()
    except Exception as error:
        return {FAILED: f"{what}: {type(error).__name__}: {error}"[:300]}


def tell(row):
    """Print a row, in the process of a part."""
    print(ROW + json.dumps(row), flush=True)
