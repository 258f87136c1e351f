"""What a newcomer runs first: every example, and the code in README.md."""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

import environments
import forked
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


# Two more processes with a VGG-16 each, which JAX compiles for a minute.
NO_MEMORY = ("--no-memory",) if BACKEND == "jax" else ()
MEMORY = (
    r"peak memory of 2 x 1 +[\d,]+ MiB, [\d,]+ MiB .*",
    r"peak memory of 1 x 2 +[\d,]+ MiB, [\d,]+ MiB .*",
)

# One entry per file in examples/.
SHORT = {
    "digits.py": Short(
        arguments=("--epochs", "8"),
        lines=(
            r"128 samples per update = 16 micro-batches x 8; .*",
            r"Epoch 8/8 .*val_accuracy.*",
            r"test accuracy +(9[5-9]|100)\.\d%",
            r"updates +88 of 88 planned",
            # The warm-up is a tenth of the run, here 8 updates.
            r"learning rates +1\.00e-03, 2\.13e-03, 3\.25e-03, .*",
            r" +1\.00e-02 at update 9, the peak",
            r" +\d\.\d\de-0\d at update 88, the last",
            r"16 x 8 vs 128 .* differ by \d\.\de-(0[6-9]|[1-9]\d), .*",
        ),
    ),
    "triplet_vgg16.py": Short(
        arguments=(
            *("--updates", "1", "--examples", "2"),
            *("--ways", "batch-hard", "--unseen", "60"),
            *NO_MEMORY,
        ),
        lines=(
            r"2 samples per update = 2 micro-batches x 1; 1 .*",
            r"batch-hard:",
            r"verification accuracy \d+\.\d% before, \d+\.\d% after",
            *(() if NO_MEMORY else MEMORY),
        ),
    ),
    "gan.py": Short(
        arguments=("--updates", "200", "--folder", "runs/gan"),
        lines=(
            r"picture +runs/gan/digits\.png",
            r"losses +\d\.\d\d discriminator",
            r" +\d\.\d\d generator",
            r"nearest digit +[3-9]\.\d\d away before training",
            r" +[12]\.\d\d after it",
            r" +1\.03 from a digit to another",
            r"gone on +from halfway, to the same weights: True",
        ),
    ),
    "language_model.py": Short(
        arguments=(
            *("--updates", "10", "--blocks", "1", "--samples", "1"),
            *("--wandb", "runs"),
        ),
        lines=(
            r"64 samples per update = 8 micro-batches x 8; .*",
            r"16,000 documents of .* bytes to train on, 512 .*",
            r"def .*",
            # One in 256 is 8 bits; ten updates learn which bytes are usual.
            r"bits per byte +[89]\.\d\d before training",
            r" +[2-5]\.\d\d after 10 updates",
            r"8 x 8 vs 64 .* by \d\.\de-(0[67]) where bytes are weighed,",
            r" +by \d\.\de-0[123] with the mean of the means",
        ),
    ),
    "dp_sgd.py": Short(
        arguments=("--epochs", "6", "--noise-multiplier", "2"),
        lines=(
            r"test accuracy +(8[5-9]|9\d)\.\d% plain",
            r"test accuracy +([6-9]\d)\.\d% private",
            r"privacy +epsilon 2\.49 at delta 0\.0001",
            # The noise in each of 2,410 numbers is of 2 / 256: together 0.38,
            # give or take 0.01.
            r"last gradient +0\.[0-2]\d without noise, 0\.(3[6-9]|4\d) with it",
        ),
    ),
    "finetune_lora.py": Short(
        arguments=("--epochs", "6"),
        lines=(
            r"weights +72,704 trained at first",
            r" +8,960 with LoRA",
            r"letters guessed +[1-5]\d\.\d% of gossip before fine-tuning",
            r" +[6-9]\d\.\d% after it",
            r"updates +48, of 64 texts",
            r"one of them +64 samples in 4 micro-batches and at once: the .*",
        ),
    ),
    "mean_teacher.py": Short(
        arguments=("--epochs", "10"),
        lines=(
            r"1437 digits to train on, 50 of them with labels, .*",
            r"test accuracy +[789]\d\.\d% by labels alone",
            r"test accuracy +[789]\d\.\d% student",
            r"test accuracy +[789]\d\.\d% teacher",
            r"one bad image +moves the student: False, teacher: False",
            r"good images +moves the student: True, teacher: True",
        ),
    ),
    "distributed.py": Short(
        arguments=("--epochs", "2"),
        lines=(
            r"128 samples per update = 16 micro-batches x 8; 11 .*",
            r"Epoch 2/2 .*",
            r"test accuracy \d+\.\d%, loss \d\.\d+",
        ),
    ),
    "tune_optuna.py": Short(
        arguments=("--trials", "6", "--epochs", "4"),
        lines=(
            r"trials +6, [1-3] pruned",
            r"best +val_loss \d\.\d+ in trial [0-5]",
            r"units +\d+",
            r"learning rate +\d\.\de-0[234]",
        ),
    ),
    "tune_keras_tuner.py": Short(
        arguments=("--trials", "2", "--epochs", "2"),
        lines=(
            r"trials +2",
            r"best +\{'units': .*'learning_rate': .*'micro_batch_size': .*\}",
            r"its best epoch +val_loss (\d\.\d+)",
            r"loaded again +val_loss \d\.\d+, accuracy \d+\.\d%",
        ),
    ),
    "sweep_wandb.py": Short(
        arguments=("--epochs", "2"),
        lines=(
            r"val_loss \d\.\d+  \{'learning_rate': 0\.001, 'units': 32\}",
            r"val_loss \d\.\d+  \{'learning_rate': 0\.01, 'units': 64\}",
            r"best +\{'learning_rate': 0\.01, 'units': \d\d\}",
        ),
    ),
    "wandb_run.py": Short(
        arguments=("--epochs", "1"),
        lines=(
            r"128 samples per update = 16 micro-batches x 8; 12 .*",
            r"the last point of training: update 12, \{.*'loss': .*",
            r"as lines of JSON +wandb_run\.jsonl",
            r"the run of W&B +\S+offline-run-\S+",
            r"to the server +wandb sync \S+offline-run-\S+",
        ),
    ),
}


# Modules of an extra that not every environment has.
NEEDS = {
    "finetune_lora.py": (
        "keras_hub",
        *(("tensorflow_text",) if BACKEND == "tensorflow" else ()),
    ),
    "tune_optuna.py": ("optuna",),
    "tune_keras_tuner.py": ("keras_tuner",),
}

# KerasTuner calls Python's threads by names that are going. Where Keras itself
# evaluates targets of int64, which JAX has not by default, JAX 0.12 says so.
ALLOWED = {
    "tune_keras_tuner.py": (
        *("-W", "ignore:Explicitly requested dtype int64"),
        *("-W", "ignore:currentThread() is deprecated"),
        *("-W", "ignore:getName() is deprecated"),
    )
}

# Convolutions take long in code that XLA spends no time on.
SLOW_UNLESS_OPTIMIZED = {"triplet_vgg16.py"}
LITTLE_OPTIMIZED = {
    "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("level=0", "level=1")
}


def run_python(program, *arguments, folder):
    """Run Python, warnings being errors, and return what it printed."""
    environment = environments.of_one_backend()
    if program.name in SLOW_UNLESS_OPTIMIZED:
        environment |= LITTLE_OPTIMIZED
    if "keras_hub" in NEEDS.get(
        program.name, ()
    ):  # layers of KerasHub mix dtypes
        environment |= {"JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    warnings = (*WARNINGS, *ALLOWED.get(program.name, ()))
    finished = forked.run([*warnings, program, *arguments], environment, folder)
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


@pytest.mark.any_backend
@pytest.mark.parametrize("name", SHORT)
def test_example_runs_and_prints_what_it_promises(name, tmp_path):
    for module in NEEDS.get(name, ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}, of an extra")
    example = ROOT / "examples" / name
    printed = run_python(example, *SHORT[name].arguments, folder=tmp_path)
    lines = printed.splitlines()
    missing = [
        pattern
        for pattern in SHORT[name].lines
        if not any(re.fullmatch(pattern, line) for line in lines)
    ]
    assert not missing, printed


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
