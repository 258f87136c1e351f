"""Random losses, metrics and optimizers, as source text."""

import dataclasses
import re

REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")


@dataclasses.dataclass(frozen=True)
class Target:
    """What an output is compared with.

    Args:
        loss: text of a loss, `"None"` for none.
        data: text that makes its labels, given `shape` and `rng`.
        metrics: list of texts of metrics that take it.
        width: int, of the output.
        has_classes: whether its labels are numbers of classes.
    """

    loss: str
    data: str
    metrics: tuple
    width: int
    has_classes: bool = False


def draw_target(draw, output, is_number=False):
    """Draw a loss for an output, with labels and metrics that go with it."""
    number = "rng.normal(size={shape}).astype('float32')"
    kinds = ["number"] * 3 + ["binary"]
    if output.width > 1:
        kinds += ["class"] * 2 + ["one hot"]
    if is_number:
        kinds = ["number"]
    kind = draw.choice(kinds)
    if kind == "number":
        names = {
            "mse": "MeanSquaredError",
            "mae": "MeanAbsoluteError",
            "huber": "Huber",
            "log_cosh": "LogCosh",
        }
        if output.width > 1:
            names["cosine_similarity"] = "CosineSimilarity"
        name = draw.choice(["mse", *names])
        metrics = (
            "'mse'",
            "'mae'",
            "metrics.RootMeanSquaredError()",
            "SumAndCount()",
        )
        loss = loss_text(draw, name, names[name])
        return Target(loss, number, metrics, output.width)
    options = "from_logits=True"
    if kind == "binary":
        data = "rng.integers(0, 2, {shape}).astype('float32')"
        name = draw.choice(["BinaryCrossentropy", "BinaryFocalCrossentropy"])
        metrics = ("metrics.BinaryAccuracy(threshold=0.0)", "'mae'")
        loss = loss_text(draw, None, name, options)
        return Target(loss, data, metrics, output.width)
    if kind == "class":
        data = "rng.integers(0, {width}, {shape_without_width})"
        if draw.random() < 0.2:
            options += ", ignore_class=0"
        metrics = (
            "'sparse_categorical_accuracy'",
            "metrics.SparseTopKCategoricalAccuracy(2)",
        )
        name = "SparseCategoricalCrossentropy"
        loss = loss_text(draw, None, name, options)
        has_classes = output.kind == "vector"
        return Target(loss, data, metrics, output.width, has_classes)
    data = (
        "np.eye({width}, dtype='float32')"
        "[rng.integers(0, {width}, {shape_without_width})]"
    )
    name = draw.choice(
        ["CategoricalCrossentropy", "CategoricalFocalCrossentropy"]
    )
    loss = loss_text(draw, None, name, options)
    return Target(loss, data, ("'categorical_accuracy'",), output.width)


def loss_text(draw, name, class_name, options=""):
    """Write a loss, by its name or as an object."""
    if name and draw.random() < 0.5:
        return f"'{name}'"
    reduction = draw.choice(["", *REDUCTIONS])
    arguments = [options] if options else []
    if reduction:
        arguments.append(f"reduction='{reduction}'")
    if draw.random() < 0.15:
        arguments.append("name='same'")
    return f"losses.{class_name}({', '.join(arguments)})"


def nested(structure, texts):
    """Fill texts into a structure."""
    return structure.format(*texts)


def draw_compile_arguments(draw, structure, targets, untold):
    """Draw what `compile` is given besides the optimizer.

    Args:
        draw: `random.Random`.
        structure: text of the nest of outputs.
        targets: list of `Target`, one for each output.
        untold: for each output, whether it should have no metrics.

    Returns:
        Text of keyword arguments, and the targets, whose losses may have
        become `None`.
    """
    count = len(targets)
    targets = list(targets)
    if count > 1 and draw.random() < 0.3:
        # Outputs of one number have no direction that could be learnt.
        narrowest = min(targets, key=lambda target: target.width)
        targets = [narrowest] * count if _same(targets) else targets
    if count > 1 and draw.random() < 0.15:
        index = draw.randrange(count)
        targets[index] = dataclasses.replace(targets[index], loss="None")
    texts = [target.loss for target in targets]
    losses = nested(structure, texts)
    arguments = [f"loss={losses}"]
    if count > 1 and draw.random() < 0.4:
        weights = [f"{draw.choice([0.0, 0.3, 0.5, 2.0])}" for _ in targets]
        if draw.random() < 0.3:
            weights = [f"weight({weight})" for weight in weights]
        if "None" not in texts:
            arguments.append(f"loss_weights={nested(structure, weights)}")
    for name in ("metrics", "weighted_metrics"):
        if draw.random() < 0.35:
            arguments.append(
                f"{name}={draw_metrics(draw, structure, targets, untold)}"
            )
    return ", ".join(arguments), targets


def _same(targets):
    return len({target.data for target in targets}) == 1


def draw_metrics(draw, structure, targets, untold):
    """Draw metrics for some of the outputs."""
    if draw.random() < 0.15:
        return "[]"
    texts = []
    for target, is_untold in zip(targets, untold, strict=True):
        most = 0 if is_untold else len(target.metrics)
        chosen = draw.sample(target.metrics, draw.randint(0, most))
        texts.append(f"[{', '.join(chosen)}]")
    if is_nested(structure):
        return "[]"  # Keras takes metrics of flat outputs only.
    return nested(structure, texts)


def draw_metrics_alone(draw, structure, targets):
    """Draw what `compile` is given where no loss compares outputs."""
    if draw.random() < 0.5:
        return ""
    untold = [False] * len(targets)
    return f"metrics={draw_metrics(draw, structure, targets, untold)}"


def is_nested(structure):
    """Say whether a nest holds nests."""
    return len(re.findall(r"[\[(]|\{\{", structure)) > 1


OPTIMIZERS = (
    "SGD(0.1{o})",
    "SGD(0.1, momentum=0.9{o})",
    "SGD(0.1, momentum=0.9, nesterov=True{o})",
    "Adam(0.01, epsilon=1e-3{o})",
    "Adam(0.01{o})",
    "Adam(0.01, amsgrad=True, epsilon=1e-3{o})",
    "AdamW(0.01, epsilon=1e-3{o})",
    "Nadam(0.01, epsilon=1e-3{o})",
    "Adamax(0.01, epsilon=1e-3{o})",
    "Adagrad(0.1, epsilon=1e-3{o})",
    "Adadelta(0.5, epsilon=1e-3{o})",
    "RMSprop(0.01, epsilon=1e-3{o})",
    "RMSprop(0.01, centered=True, momentum=0.5, epsilon=1e-3{o})",
    "Ftrl(0.1{o})",
    "Lion(0.01{o})",
    "Lamb(0.01, epsilon=1e-3{o})",
    "Adafactor(0.01{o})",
    "Muon(0.01, epsilon=1e-3{o})",
    "ScheduleFreeAdamW(0.01, epsilon=1e-3{o})",
)
SCHEDULES = (
    "optimizers.schedules.ExponentialDecay(0.05, 1, 0.7)",
    "optimizers.schedules.CosineDecay(0.05, 4)",
    "optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.01, 0.05])",
    "optimizers.schedules.PolynomialDecay(0.05, 5)",
)


def draw_optimizer(draw, backend):
    """Draw an optimizer, or one for biases and one for all else."""
    if draw.random() < 0.1:
        parts = (draw_single(draw, backend) for _ in range(2))
        return (
            "optimizers.MultiOptimizer(optimizers.OptimizerMap("
            f"{next(parts)}, {{'.*bias': {next(parts)}}}))"
        )
    return draw_single(draw, backend)


def draw_single(draw, backend):
    """Draw one optimizer."""
    # JAX multiplies float32 by int32 there, which a strict one refuses.
    overwrite = ", ema_overwrite_frequency=2" * (backend == "tensorflow")
    options = draw.choice(
        [""] * 5
        + [
            f", use_ema=True, ema_momentum=0.8{overwrite}",
            ", clipnorm=0.05",
            ", clipvalue=0.02",
            ", global_clipnorm=0.1",
            ", use_ema=True, ema_momentum=0.8",
            ", weight_decay=0.05",
        ]
    )
    if draw.random() < 0.1:
        options += ", weight_decay=0.1" * ("weight_decay" not in options)
    text = draw.choice(OPTIMIZERS)
    if draw.random() < 0.25:
        first = text.index("(") + 1
        last = min(
            i for i in (text.find(",", first), text.find("{", first)) if i > 0
        )
        text = text[:first] + draw.choice(SCHEDULES) + text[last:]
    return f"optimizers.{text.format(o=options)}"


def labels_text(output, target):
    """Write the making of an output's labels."""
    if output.kind == "vector":
        shape, short = f"[size, {output.width}]", "[size]"
    else:
        shape, short = f"[size, length, {output.width}]", "[size, length]"
    return target.data.format(
        shape=shape, shape_without_width=short, width=output.width
    )


def weights_text(draw, output):
    """Write the making of an output's sample weights."""
    shape = "[size]"
    if output.kind == "sequence":
        shape = draw.choice(["[size, length]", "[size, 1]"])
    return f"rng.uniform(0.1, 2.0, {shape}).astype('float32')"
