"""A random program: a model, its data, and how it is trained twice."""

import dataclasses
import pathlib
import random

from fuzz.arguments import (
    draw_compile_arguments,
    draw_optimizer,
    draw_target,
    labels_text,
    nested,
    weights_text,
)
from fuzz.models import WORDS, draw_model
from fuzz.training import draw_training

HEAD = '''"""Case {seed}: a Trainer and plain Keras should agree."""

import os

os.environ["KERAS_BACKEND"] = "{backend}"

import keras
import numpy as np
from keras import layers, losses, metrics, ops, optimizers, regularizers

import accumtrainer
from accumtrainer import Accumulation, Trainer
from accumtrainer.callbacks import GradientAccumulation

'''

DICT_METRIC = '''

class SumAndCount(metrics.Metric):
    """Tells two numbers at once."""

    def __init__(self, name="sum_and_count"):
        super().__init__(name=name)
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.cast(y_pred, "float32")))
        self.count.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))

    def result(self):
        return {"sum": self.total.value, "count": self.count.value}
'''

NO_CHANGE = '''

def change_weights():
    """Between fits, change nothing."""
'''

CHANGE = '''

def change_weights():
    """Between fits, change the weights of the losses."""
    for weight in WEIGHTS[-COUNT:]:
        weight.assign(weight * 0.5)
'''

WEIGHT = '''

def weight(value):
    """Make a loss weight that fits may change."""
    WEIGHTS.append(keras.Variable(value, trainable=False))
    return WEIGHTS[-1]
'''


LAST = """
if __name__ == "__main__":
    print("\\n".join(found) or "They agree.")
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A program drawn from a seed.

    Args:
        seed: int.
        backend: name of the backend it is for.
        text: the program.
        features: words that say what it is about, for counting.
    """

    seed: int
    backend: str
    text: str
    features: tuple

    @property
    def program(self):
        """The program as a file of its own."""
        return self.text + LAST


def case_of(seed, backend):
    """Draw a case; the same seed always gives the same.

    Args:
        seed: int.
        backend: `"tensorflow"` or `"jax"`.

    Returns:
        `Case`.
    """
    draw = random.Random(seed)
    whole_batches = draw.random() < 0.2
    which = draw.choices(["steps", "sizes", "slices", "fit"], [3, 2, 3, 3])[0]
    which = "batch" if draw.random() < 0.1 else which
    if whole_batches:
        which = draw.choice(["whole", "fit"])
    model = draw_model(
        draw,
        whole_batches,
        allow_lists=which != "fit",
        allow_extra=which != "fit",
    )
    targets = [draw_target(draw, output) for output in model.outputs]
    if len(targets) > 1 and draw.random() < 0.3:
        targets = repeat_losses(targets, model.outputs)
    # On JAX Keras 3.15 loses masks on the way to the metrics of training.
    untold = [backend == "jax" and output.is_masked for output in model.outputs]
    arguments, targets = draw_compile_arguments(
        draw, model.structure, targets, untold
    )
    batches = batch_text(draw, model, targets)
    may_weigh = len(targets) == 1 and targets[0].has_classes
    training = draw_training(
        draw,
        model,
        backend,
        which,
        may_weigh_classes=may_weigh and "weights" not in batches,
        # The largest of numbers and NaN is a number on some devices.
        may_spoil="normal" in batches
        and "None" not in arguments
        and "Max" not in model.text,
    )
    change = NO_CHANGE
    if "weight(" in arguments:
        change = CHANGE.replace("COUNT", str(len(targets)))
    parts = [
        HEAD.format(seed=seed, backend=backend),
        f"SEED = {seed}\n",
        *model.definitions,
        DICT_METRIC if "SumAndCount" in arguments else "",
        "WEIGHTS = []\n" if "weight(" in arguments else "",
        WEIGHT if "weight(" in arguments else "",
        "\n",
        model.text,
        f"\n\ndef make_optimizer():\n    return {draw_optimizer(draw)}\n",
        f"\n\ndef compile_arguments():\n    return dict({arguments})\n",
        "\n\n# What Keras makes of it.\n\n",
        read_plain_keras(),
        "\n\n# The data.",
        change,
        batches,
        training.data,
        "\n\n# The comparison.\n",
        training.text,
    ]
    features = (model.kind, *training.features)
    if model.has_extra:
        features += ("an extra input",)
    return Case(seed, backend, "".join(parts), features)


def repeat_losses(targets, outputs):
    """Give outputs of one width the same loss."""
    first = {}
    return [
        first.setdefault(output.width, target)
        for target, output in zip(targets, outputs, strict=True)
    ]


def read_plain_keras():
    """Return the text of the reference, without its docstring."""
    text = (pathlib.Path(__file__).parent / "plain_keras.py").read_text()
    return text.split('"""', 2)[2].strip() + "\n"


def batch_text(draw, model, targets):
    """Write the function that makes a batch."""
    shapes = {
        "vector": "rng.normal(size=[size, {0}]).astype('float32')",
        # The first is no padding: a mean of nothing is NaN.
        "words": f"np.maximum(rng.integers(0, {WORDS}, [size, length]), "
        "np.eye(1, length, dtype=int))",
        "sequence": "rng.normal(size=[size, length, {0}]).astype('float32')",
        "image": "rng.normal(size=[size, 4, 4, {0}]).astype('float32')",
    }
    x = [shapes[t.kind].format(t.width) for t in model.inputs]
    y = [
        labels_text(output, target)
        for output, target in zip(model.outputs, targets, strict=True)
    ]
    parts = [
        f"x = {nested(model.input_structure, x)}",
        f"y = {nested(model.structure, y)}",
    ]
    result = "x, y"
    if draw.random() < 0.35 and model.structure != "[{0}]":
        weights = [weights_text(draw, output) for output in model.outputs]
        parts.append(f"weights = {nested(model.structure, weights)}")
        result += ", weights"
    arguments = "rng, size, length"
    if model.has_extra:
        arguments += ", extra=False"
        parts += [
            "if extra:",
            "    x['extra'] = rng.normal(size=[size, 2]).astype('float32')",
        ]
    lines = "".join(f"    {part}\n" for part in parts)
    return f"\n\ndef make_batch({arguments}):\n{lines}    return {result}\n"
