"""How a program trains, on which data, and what both make of it."""

import dataclasses

from fuzz import templates
from fuzz.data import DrawnData


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known before the data are drawn.

    Args:
        backend: name of the backend.
        which: how batches make updates: `"steps"`, `"sizes"` (a number of
            batches that changes), `"slices"`, `"fit"`, `"batch"`
            (`train_on_batch`) or `"whole"`.
        has_hook: whether `compute_loss` of a subclass computes the loss.
        may_weigh_classes: whether there may be class weights.
        may_spoil: whether an update may be not finite.
        may_be_dataset: whether `tf.data` can hold the structures.
        may_be_eager: whether it runs without being traced, as float8 layers
            cannot on TensorFlow.
        may_use_xla: whether XLA computes what TensorFlow itself does, as it
            does not for the gradient of a vector of zeros that is normalized.
        plain_options: text of what plain Keras is compiled with.
    """

    backend: str
    which: str
    has_hook: bool
    may_weigh_classes: bool
    may_spoil: bool
    may_be_dataset: bool
    may_be_eager: bool
    may_use_xla: bool

    @property
    def plain_options(self):
        """The quickest way to run a few tiny windows once."""
        if self.backend == "jax":
            return "jit_compile=True,"
        if not self.may_be_eager:
            return "jit_compile=False,"
        return "run_eagerly=True, jit_compile=False,"


@dataclasses.dataclass(frozen=True)
class Training:
    """The texts of how a program trains, and on which data."""

    data: str
    text: str
    features: tuple


def draw_training(draw, model, plan):
    """Draw how to accumulate, and the batches of every fit.

    Args:
        draw: `random.Random`.
        model: `Model`.
        plan: `Plan`.

    Returns:
        `Training`.
    """
    drawn = DrawnData(draw, model, plan.backend, plan.which)
    k, tail, steps, accumulation = draw_accumulation(
        draw, plan.which, model.only_one_micro_batch, drawn.fewest
    )
    if model.is_padded and plan.which in ("steps", "sizes"):
        drawn.draw_lengths(1)
    elif tail != "carry":
        # Keras's `fit` looks at the first batches for what all are like.
        alike = 99 if plan.which in ("sizes", "fit") else k
        drawn.draw_lengths(alike)
        if model.has_extra:
            drawn.draw_extras(1 if plan.which == "batch" else alike)
    can_spoil = plan.may_spoil and plan.which not in ("sizes", "batch")
    if can_spoil and draw.random() < 0.5:
        drawn.spoil(k)
    class_weight = None
    if plan.may_weigh_classes and plan.which != "batch":
        if draw.random() < 0.5:
            class_weight = {0: 0.5, 1: 2.0, 2: 1.5}
    data = (
        f"\n\nrng = np.random.default_rng(SEED)\n"
        f"FITS = [  # how many epochs, of which batches\n{drawn.rows}]\n"
        f"TEST = make_batch(rng, {drawn.test_size}, {drawn.test_length})\n"
        f"STEPS, TAIL = {steps}, '{tail}'\n"
        f"CLASS_WEIGHT = {class_weight}\n"
    )
    text, features = write_training(
        draw, plan, drawn, accumulation, class_weight is not None
    )
    if class_weight:
        features.append("class weights")
    if any(drawn.spoilt):
        features.append("skipped windows")
    if drawn.differ_within(k):
        features.append("lengths within a window")
    return Training(data, text, tuple(features))


def draw_accumulation(draw, which, is_whole, fewest):
    """Draw how many batches make an update.

    Returns:
        How many at the start, the tail, the text of a function of the updates
        made that says how many, and the text of the arguments of
        `Accumulation`.
    """
    one = "lambda updates: 1"
    if which in ("slices", "batch"):
        size = draw.choice([1, 2, 3])
        return 1, "flush", one, f"micro_batch_size={size}"
    if which == "sizes":
        counts = draw.choices(draw.sample([1, 2, 3, 4], 2), k=6)
        steps = f"lambda updates: {counts}[updates % 6]"
        return 1, "flush", steps, f"steps={steps}"
    k = 1 if is_whole else draw.choice([1, 2, 2, 3, 3, 4, 5])
    steps = f"lambda updates: {k}"
    if which != "steps":
        return k, "flush", steps, f"steps={k}"
    tail = draw.choice(["flush", "carry"] + ["drop"] * (fewest >= k))
    return k, tail, steps, f"steps={k}, tail='{tail}'"


def write_training(draw, plan, drawn, accumulation, weighs_classes):
    """Write both ways to train, as fast as a few tiny windows can be.

    Returns:
        The text, and a list of words that say what it is about.
    """
    is_fit = plan.which == "fit"
    options = draw_options(draw, plan)
    source, arguments, definition = draw_source(
        draw, plan, drawn, weighs_classes
    )
    if weighs_classes:
        arguments += ", class_weight=CLASS_WEIGHT"
    # Keras on JAX reads the weights of losses once, when it compiles.
    changes = plan.backend == "tensorflow" and plan.which != "batch"
    # Both compile one more program each.
    has_results = draw.random() < 0.2
    fields = {
        "accumulation": accumulation,
        "trainer": "MyTrainer" if plan.has_hook else "Trainer",
        "prepare": "compute_by_hook" if plan.has_hook else "",
        "data": source,
        "fit_options": arguments,
        "between": "change_weights()" if changes else "",
        "between_text": "change_weights" if changes else "lambda: None",
        "as_dict": str(plan.has_hook or draw.random() < 0.6),
        "plain_options": plan.plain_options,
        "is_fit": str(plan.which != "batch"),
    }
    by_trainer, is_compiled = draw_trainer(draw, plan, has_results)
    text = (templates.HOOK if plan.has_hook else "") + definition
    text += results_text(has_results, is_fit)
    text += by_trainer + templates.TRAINED_PLAINLY
    features = [plan.which, options.strip(",") or "as it chooses", source]
    features += ["hook"] * plan.has_hook + ["compiled"] * is_compiled
    features += ["evaluate and predict"] * has_results
    return filled(text, options, fields), features


def draw_trainer(draw, plan, has_results):
    """Choose who trains; returns the text, and if the model is compiled."""
    if plan.which == "fit":
        return templates.TRAINED_INSIDE_FIT, False
    is_compiled = not plan.has_hook and draw.random() < 0.2
    text = templates.TRAINER_OF_COMPILED if is_compiled else templates.TRAINER
    text += (
        templates.TRAINED_BY_BATCH
        if plan.which == "batch"
        else templates.TRAINED_BY_TRAINER
    )
    if has_results:
        text += templates.RESULTS_OF_TRAINER
    return text, is_compiled


def results_text(has_results, is_fit):
    """Write how Keras evaluates and predicts, or nobody does."""
    if has_results:
        text = templates.RESULTS_OF_MODEL
        keras_text = text.replace("{name}", "add_results_of_keras")
        return keras_text + text.replace("{name}", "add_results") * is_fit
    text = templates.NO_RESULTS
    return text.replace("{name}", "add_results_of_keras") + text.replace(
        "{name}", "add_results"
    )


def draw_options(draw, plan):
    """Draw how ours is compiled; mostly what is quickest."""
    if plan.backend == "jax":
        return draw.choice(["jit_compile=True,", "jit_compile=True,", ""])
    ways = ["run_eagerly=True,", "jit_compile=False,", "", "jit_compile=True,"]
    by_xla = int(plan.may_use_xla)
    shares = [28 if plan.may_be_eager else 0, 7, by_xla, by_xla]
    if plan.backend == "torch":
        shares = [1, 1, 2, 0]  # what compiles takes seconds for each program
    return draw.choices(ways, shares)[0]


def draw_source(draw, plan, drawn, weighs_classes):
    """Draw in which form `fit` is given batches.

    Returns:
        Text of the data, of further arguments, and of what defines them.
    """
    ways = ["list", "list", "PyDataset", "generator", "tf.data"]
    if plan.which == "fit":
        ways = ["PyDataset", "PyDataset", "generator", "tf.data"]
    if drawn.are_even and plan.which in ("fit", "steps", "slices"):
        ways += ["arrays"] * 3
    way = draw.choice(ways)
    # Keras's own `fit` takes no weights of classes with a generator.
    may_generate = not (plan.which == "fit" and weighs_classes)
    if way == "generator" and drawn.has_one_epoch and may_generate:
        return "(batch for batch in batches)", "", ""
    may_be_dataset = plan.may_be_dataset and drawn.have_same_parts
    if way == "tf.data" and may_be_dataset:
        return "dataset(batches)", "", templates.DATASET
    if way == "arrays":
        return "**arrays(batches)", ", shuffle=False", ""
    if way == "PyDataset" or plan.which == "fit":
        return "Batches(batches)", ", shuffle=False", templates.BATCHES
    return "batches", "", ""


def filled(text, options, fields):
    """Fill the fields of a template in."""
    text = text.replace(
        "        {options}\n", f"        {options}\n" if options else ""
    ).replace("{options}", options)
    for name, value in fields.items():
        text = text.replace(f"{{{name}}}", value)
    return text
