"""A random program: a model, its data, and how it is trained twice."""

import dataclasses
import pathlib
import random
import re

from fuzz.arguments import (
    draw_compile_arguments,
    draw_metrics_alone,
    draw_optimizer,
    draw_target,
    labels_text,
    nested,
    weights_text,
)
from fuzz.drawer import WORDS
from fuzz.models import Allowed, draw_model
from fuzz.training import Plan, draw_training

HEAD = '''"""Case {seed}: a Trainer and plain Keras should agree."""

import os

os.environ["KERAS_BACKEND"] = "{backend}"

import keras
import numpy as np
from keras import layers, losses, metrics, ops, optimizers, regularizers

import accumtrainer
from accumtrainer import Accumulation, Trainer, WeightedLoss
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
WEIGHTS = []


def weight(value):
    """Make a loss weight that fits may change."""
    WEIGHTS.append(keras.Variable(value, trainable=False))
    return WEIGHTS[-1]
'''


LAST = """
if __name__ == "__main__":
    print("\\n".join(found) or "They agree.")
"""

SPOILT = "mse|MeanSquared|log_cosh|LogCosh|cosine|Cosine"
"""Losses whose gradient is NaN where a label is."""


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
        backend: `"tensorflow"`, `"jax"` or `"torch"`.

    Returns:
        `Case`.
    """
    draw = random.Random(seed)
    which, is_whole = draw_which(draw)
    losses_from = draw.choices(["compile", "hook", "layers"], [85, 9, 6])[0]
    allowed = Allowed(
        batch_state=is_whole,
        lists=which != "fit",
        # Where `fit` of Keras 3.15 on PyTorch gets lists, it fails by itself.
        inner_tuples=backend != "torch" or which != "fit",
        extra=which != "fit",
        padding=which in ("steps", "sizes") and losses_from == "compile",
        only_layers_add_losses=losses_from == "layers",
    )
    model = draw_model(draw, allowed)
    has_hook = losses_from == "hook" and which not in ("fit", "whole")
    targets = draw_targets(draw, model, has_hook)
    arguments = ""
    if model.only_layers_add_losses:
        arguments = draw_metrics_alone(draw, model.structure, targets)
    elif not has_hook:
        arguments, targets = draw_compile_arguments(
            draw, model.structure, targets, untold_outputs(model, backend)
        )
    batches = batch_text(draw, model, targets)
    plan = plan_of(backend, which, has_hook, model, targets, arguments, batches)
    training = draw_training(draw, model, plan)
    optimizer = draw_optimizer(draw, backend)
    parts = [
        HEAD.format(seed=seed, backend=backend),
        f"SEED = {seed}\n",
        *model.definitions,
        *compile_texts(arguments, len(targets)),
        model.text,
        f"\n\ndef make_optimizer():\n    return {optimizer}\n",
        f"\n\ndef compile_arguments():\n    return dict({arguments})\n",
        "\n\n# What Keras makes of it.\n\n",
        read_plain_keras(),
        "\n\n# The data.",
        batches,
        training.data,
        "\n\n# The comparison.\n",
        training.text,
    ]
    features = (model.kind, *training.features, *sorted(model.features))
    features += ("losses of layers only",) * model.only_layers_add_losses
    features += ("padded",) * model.is_padded
    return Case(seed, backend, "".join(parts), features)


def draw_which(draw):
    """Draw how batches make updates, and whether by one micro-batch each."""
    if draw.random() < 0.2:
        return draw.choice(["whole", "fit"]), True
    ways = ["steps", "sizes", "slices", "fit", "batch"]
    return draw.choices(ways, [27, 18, 27, 27, 10])[0], False


def untold_outputs(model, backend):
    """Say for each output whether no metrics can be told of it."""
    # On JAX Keras 3.15 loses masks on the way to the metrics of training.
    return [
        model.is_padded or (backend == "jax" and output.is_masked)
        for output in model.outputs
    ]


def plan_of(backend, which, has_hook, model, targets, arguments, batches):
    """Say what may be drawn of the training of a model."""
    has_loss = "loss=" in arguments
    # Keras would look for the class of a list, not of what is in it.
    may_weigh = model.structure == "{0}" and targets[0].has_classes
    # Only there labels that are NaN make every gradient of a loss NaN.
    may_spoil = any(
        "normal" in target.data and re.search(SPOILT, target.loss)
        for target in targets
    )
    # Keras itself raises there for what is not finite.
    raises = backend == "torch" and any(
        "BinaryFocal" in target.loss for target in targets
    )
    # XLA on TensorFlow makes NaN of these where rows are zero, as LoRA's are.
    of_rows = ("UnitNormalization", "OrthogonalRegularizer")
    return Plan(
        backend=backend,
        which=which,
        has_hook=has_hook,
        may_weigh_classes=may_weigh and "weights" not in batches and has_loss,
        may_spoil=may_spoil and has_loss and not raises,
        may_be_dataset="[" not in model.structure + model.input_structure,
        may_be_eager="float8" not in model.features,
        may_use_xla=not any(name in model.text for name in of_rows),
    )


def compile_texts(arguments, count):
    """Write what the arguments of `compile` refer to."""
    changes = "weight(" in arguments
    return [
        DICT_METRIC if "SumAndCount" in arguments else "",
        WEIGHT if changes else "",
        CHANGE.replace("COUNT", str(count)) if changes else NO_CHANGE,
        "\n\n",
    ]


def draw_targets(draw, model, are_numbers):
    """Draw what every output is compared with."""
    targets = [
        draw_target(draw, output, is_number=are_numbers)
        for output in model.outputs
    ]
    if len(targets) > 1 and draw.random() < 0.3:
        targets = repeat_losses(targets, model.outputs)
    return targets


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
