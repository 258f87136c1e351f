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

TRAINED_BY_TRAINER = '''
class KeepLosses(accumtrainer.Callback):
    """Keeps the losses of every applied update."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def on_apply(self, update, logs=None):
        if logs["applied"]:
            self.kept.append(
                {n: v for n, v in logs.items() if n.endswith("loss")}
            )


def train():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    kept = KeepLosses()
    trainer = Trainer(
        make_model(),
        optimizer=make_optimizer(),
        accumulation=Accumulation({accumulation}),
        callbacks=[kept],
        seed=0,
        {options}
        **compile_arguments(),
    )
    histories = [
        trainer.fit(batches, epochs=epochs, verbose=0).history
        for epochs, batches in FITS
    ]
    outcome = outcome_of(
        trainer.model, trainer.optimizer, kept.kept, histories
    )
    x, *rest = TEST
    evaluation = trainer.evaluate([TEST], return_dict=True, verbose=0)
    return add_results(
        outcome, evaluation, trainer.predict(x, batch_size=64, verbose=0)
    )
'''

TRAINED_INSIDE_FIT = '''
class Batches(keras.utils.PyDataset):
    """Yields these batches, in this order."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def train():
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    model = make_model()
    model.compile(make_optimizer(), {options} **compile_arguments())
    accumulation = GradientAccumulation({accumulation})
    histories = [
        model.fit(
            Batches(batches),
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[accumulation],
        ).history
        for epochs, batches in FITS
    ]
    outcome = outcome_of(model, model.optimizer, [], histories)
    return add_results(
        outcome,
        model.evaluate(Batches([TEST]), return_dict=True, verbose=0),
        model.predict(Batches([TEST[:1]]), verbose=0),
    )
'''

TRAINED_PLAINLY = """
def train_by_keras(noise=0.0):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(SEED)
    model = make_model()
    initial[:] = model.get_weights()
    optimizer = with_dense_gradients(make_optimizer(), noise)
    model.compile(optimizer, {plain_options} **compile_arguments())
    outcome = train_plainly(
        model,
        [
            [
                [join(window) for window in windows]
                for windows in windows_of_epochs(batches, epochs, STEPS, TAIL)
            ]
            for epochs, batches in FITS
        ],
    )
    return add_results(
        outcome,
        model.evaluate(
            TEST[0],
            TEST[1],
            sample_weight=TEST[2] if TEST[2:] else None,
            batch_size=64,
            return_dict=True,
            verbose=0,
        ),
        model.predict(TEST[0], batch_size=64, verbose=0),
    )


initial = []
by_keras = train_by_keras()
ours = train()
found = differences(ours, by_keras, initial, train_by_keras)
"""

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
    if whole_batches:
        which = draw.choice(["whole", "fit"])
    model = draw_model(draw, whole_batches, allow_lists=which != "fit")
    targets = [draw_target(draw, output) for output in model.outputs]
    if len(targets) > 1 and draw.random() < 0.3:
        targets = repeat_losses(targets, model.outputs)
    arguments, targets = draw_compile_arguments(draw, model.structure, targets)
    training = draw_training(draw, model, backend, which)
    parts = [
        HEAD.format(seed=seed, backend=backend),
        f"SEED = {seed}\n",
        *model.definitions,
        "\n",
        model.text,
        f"\n\ndef make_optimizer():\n    return {draw_optimizer(draw)}\n",
        f"\n\ndef compile_arguments():\n    return dict({arguments})\n",
        batch_text(draw, model, targets),
        training.data,
        "\n\n# What Keras makes of it.\n\n",
        read_plain_keras(),
        "\n\n# The comparison.\n",
        training.text,
        TRAINED_PLAINLY.format(plain_options=training.plain_options),
    ]
    features = (model.kind, *training.features)
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
        "words": f"rng.integers(0, {WORDS}, [size, length])",
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
    if draw.random() < 0.35:
        weights = [weights_text(draw, output) for output in model.outputs]
        parts.append(f"weights = {nested(model.structure, weights)}")
        result += ", weights"
    lines = "".join(f"    {part}\n" for part in parts)
    return (
        f"\n\ndef make_batch(rng, size, length):\n{lines}    return {result}\n"
    )


@dataclasses.dataclass(frozen=True)
class Training:
    """The texts of how a program trains, and on which data."""

    data: str
    text: str
    plain_options: str
    features: tuple


def draw_training(draw, model, backend, which):
    """Draw how to accumulate, and the batches of every fit."""
    sizes = [1, 2, 3, 4] if backend == "tensorflow" else [2, 3]
    whole = model.only_one_micro_batch
    fits = [
        draw_fit(draw, model, sizes, which)
        for _ in range(draw.choice([1, 1, 1, 2, 2, 3]))
    ]
    tail, steps = "flush", "lambda updates: 1"
    if which == "slices":
        accumulation = f"micro_batch_size={draw.choice([1, 2, 3])}"
    elif which == "sizes":
        counts = [draw.randint(1, 4) for _ in range(8)]
        steps = f"lambda updates: {counts}[updates % 8]"
        accumulation = f"steps={steps}"
    else:
        k = 1 if whole else draw.choice([1, 2, 2, 3, 3, 4, 5])
        steps = f"lambda updates: {k}"
        accumulation = f"steps={k}"
        if which == "steps":
            enough = min(batches.count("make_batch") for _, batches in fits)
            tails = ["flush", "carry"] + ["drop"] * (enough >= k)
            tail = draw.choice(tails)
            accumulation += f", tail='{tail}'"
    lengths = [4] if not model.varies_in_length else [4, 2, 3]
    if which == "sizes":
        fits = fits[:1]  # Updates are counted over the life of a Trainer.
    rows = "".join(
        f"    ({epochs}, [{batches}]),\n" for epochs, batches in fits
    )
    data = (
        f"\n\nrng = np.random.default_rng(SEED)\n"
        f"FITS = [  # how many epochs, of which batches\n{rows}]\n"
        f"TEST = make_batch(rng, 5, {draw.choice(lengths)})\n"
        f"STEPS, TAIL = {steps}, '{tail}'\n"
    )
    return finish_training(draw, which, accumulation, data, backend)


def draw_fit(draw, model, sizes, which):
    """Draw the epochs and the batches of one fit."""
    epochs = draw.choice([1, 1, 2])
    length = 4
    batches = []
    count = draw.randint(1, 6)
    is_even = draw.random() < 0.5
    size = draw.choice(sizes)
    for _ in range(count):
        if not is_even:
            size = draw.choice(sizes)
        samples = size + draw.randint(0, 4) if which == "slices" else size
        if which == "slices" and model.varies_in_length:
            length = draw.choice([4, 4, 2, 3])
        batches.append(f"make_batch(rng, {samples}, {length})")
    if which == "slices":
        batches = batches[:3]
    return epochs, ", ".join(batches)


def finish_training(draw, which, accumulation, data, backend):
    """Choose how the two are run: as fast as a few tiny windows can be."""
    plain = "jit_compile=True,"
    how = ["jit_compile=True,"]
    if backend == "tensorflow":
        plain = "run_eagerly=True, jit_compile=False,"
        how = ["jit_compile=False,"] * 4 + ["run_eagerly=True,"] * 4
        how += [""] * (which != "fit")
    template = TRAINED_INSIDE_FIT if which == "fit" else TRAINED_BY_TRAINER
    options = draw.choice(how)
    text = template.replace("{accumulation}", accumulation).replace(
        "        {options}\n", f"        {options}\n" if options else ""
    )
    text = text.replace("{options}", options)
    features = (which, options.strip(",") or "XLA as it chooses")
    return Training(data, text, plain, features)
