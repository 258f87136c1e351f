"""What a newcomer runs first: every example, and the code in README.md."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from accumtrainer.keras_api import BACKEND

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


# Warnings are errors, but for one that Keras's own variables provoke: they do
# not know the newest protocol of NumPy, which says so when they are read.
WARNINGS = ("-W", "error", "-W", "ignore:__array__ impl")


class Short(NamedTuple):
    """How an example is run here, and what it must print.

    Args:
        arguments: tuple of str that make it short.
        lines: tuple of patterns, each the whole of some line.
    """

    arguments: tuple[str, ...]
    lines: tuple[str, ...]


# One entry per file in examples/.
SHORT = {
    "digits.py": Short(
        arguments=("--epochs", "2"),
        lines=(
            r"128 samples per update = 16 micro-batches x 8; .*",
            r"Epoch 2/2 .*val_accuracy.*",
            r"test accuracy +\d+\.\d%",
            r"updates +22 of 22 planned",
            # The warm-up is a tenth of the run, here 2 updates.
            r"learning rates +1\.00e-03, 5\.50e-03, 1\.00e-02, .*",
            r" +1\.00e-02 at update 3, the peak",
            r" +\d\.\d\de-0\d at update 22, the last",
            r"16 x 8 vs 128 .* differ by \d\.\de-(0[6-9]|[1-9]\d), .*",
        ),
    ),
}


def run_python(*arguments, folder):
    """Run Python, warnings being errors, and return what it printed."""
    finished = subprocess.run(
        [sys.executable, *WARNINGS, *arguments],
        cwd=folder,
        env=os.environ | {"KERAS_BACKEND": BACKEND},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def code_blocks(markdown):
    """List the Python code of a Markdown text, each in its own lines.

    Returns:
        List of str, with a blank line for every line of the text above, so
        that the numbers in a traceback are those of the text.
    """
    pattern = r"^```python\n(.*?)^```"
    found = re.finditer(pattern, markdown, flags=re.MULTILINE | re.DOTALL)
    return [
        "\n" * markdown.count("\n", 0, match.start(1)) + match[1]
        for match in found
    ]


def test_every_example_is_run_here():
    assert {file.name for file in EXAMPLES} == set(SHORT), (
        "Every file in examples/ needs an entry in SHORT of this test, which "
        "says how to run it shortly and what it must print."
    )


@pytest.mark.parametrize("name", SHORT)
def test_example_runs_and_prints_what_it_promises(name, tmp_path):
    example = ROOT / "examples" / name
    printed = run_python(example, *SHORT[name].arguments, folder=tmp_path)
    lines = printed.splitlines()
    missing = [
        pattern
        for pattern in SHORT[name].lines
        if not any(re.fullmatch(pattern, line) for line in lines)
    ]
    assert not missing, printed


def test_digits_example_tests_at_97_percent_or_more(tmp_path):
    printed = run_python(ROOT / "examples" / "digits.py", folder=tmp_path)
    accuracy = re.search(r"^test accuracy +(\S+)%$", printed, re.MULTILINE)
    assert float(accuracy[1]) >= 97.0


def test_code_in_the_readme_runs_from_top_to_bottom(tmp_path):
    blocks = code_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert blocks
    program = tmp_path / "readme.py"
    program.write_text(
        f"blocks, names = {blocks!r}, {{'__name__': '__main__'}}\n"
        "for block in blocks:\n"
        "    exec(compile(block, 'README.md', 'exec'), names)\n",
        encoding="utf-8",
    )
    run_python(program, folder=tmp_path)
