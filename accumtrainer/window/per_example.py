"""The examples of a micro-batch, each run as a micro-batch of one, at once.

With `Accumulation(per_example=True)` a pass is, in plain Python,

    for example in micro_batch:  # all at the same time
        gradients = on_accumulate(differentiate(losses(example)))
        sums += weight * gradients

A function is mapped over the examples. It may draw random numbers, of which
each example has its own, and writes to no other variable: of those that are
made at once none can follow the other. So metrics are given the outputs of the
whole micro-batch, afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

from accumtrainer import errors
from accumtrainer.data.batches import Batch, leaves, map_leaves
from accumtrainer.keras_api import (
    is_overwritten,
    keras_mask,
    ops,
    set_keras_mask,
)
from accumtrainer.keras_api.types import Nest, Variable
from accumtrainer.window.backend import WindowBackend
from accumtrainer.window.losses import WeightedLoss, count_samples
from accumtrainer.window.objective import is_random_state, total_loss, unique
from accumtrainer.window.parts import WindowParts
from accumtrainer.window.passed import Passed
from accumtrainer.window.state import (
    EXAMPLE_DISTANCE,
    Scratch,
    shifted_seed,
)
from accumtrainer.window.weighing import Share, where_sum, window_means

SUMMED = (
    "numerators",
    "denominators",
    "weight",
    "gradient_weight",
    "samples",
)
"""What is told of a micro-batch that adds up over its examples."""


def map_examples(
    parts: WindowParts,
    function: Callable[[Batch], Nest],
    batch: Batch,
    streams: Sequence[Variable] = (),
) -> Nest:
    """Run a function on each example of a micro-batch, all at once.

    Args:
        parts: for what the function may read and draw from.
        function: takes a `Batch` of tensors `[1, ...]`, returns a nest.
        batch: tensors `[m, ...]`.
        streams: random states besides, that belong to nobody.

    Returns:
        Nest of tensors `[m, ...]`.

    Raises:
        ValueError: the function writes to a variable.
    """
    of_loss = parts.hooks.variables_of_loss  # which nobody reads
    known = unique([*parts.variables, *streams])
    drawn = list(filter(is_random_state, known))
    others = [v for v in known if not is_random_state(v)]

    def run(item: Nest) -> Nest:
        index, row = item
        row = map_leaves(lambda leaf: ops.expand_dims(leaf, 0), row)
        with Scratch([*known, *of_loss]) as scope:
            for variable in drawn:
                variable.assign(shifted_seed(variable, index, EXAMPLE_DISTANCE))
            result = function(row)
            written = filter(scope.has_written, others)
            _check_written([*written, *scope.others_written.values()])
            return result, [variable.value for variable in drawn]

    _check_written(
        list(filter(is_overwritten, parts.model.trainable_variables))
    )
    count = ops.shape(leaves(batch)[0])[0]
    indices = ops.arange(count, dtype="int32")
    result, after = parts.backend.map(run, (indices, batch))
    for variable, values in zip(drawn, after, strict=True):
        # The first example has drawn as if it had been alone.
        variable.assign(values[0])
    return result


def _check_written(variables: list[Variable]) -> None:
    if variables:
        paths = ", ".join(sorted(variable.path for variable in variables))
        raise ValueError(errors.WRITTEN_PER_EXAMPLE.format(paths=paths))


def count_each(share: Share, batch: Batch) -> Share:
    """Count each example of a window as a micro-batch.

    Args:
        share: of micro-batches.
        batch: one of them.
    """
    if share.weighing.needs_totals:
        # Their number was measured with the denominators.
        return share._replace(total=share.totals[-1])
    # Where it counts, all micro-batches have the shape of this one.
    total = ops.cast(share.total, "float32") * count_samples(batch.x)
    return share._replace(total=total)


def joined(
    examples: Passed, losses: list[WeightedLoss], backend: WindowBackend
) -> Passed:
    """Make of what was made of examples what is told of their micro-batch.

    Args:
        examples: tensors `[m, ...]`.
        losses: of which kind and coefficient count.
        backend: adds up.
    """
    each = examples.summary
    summary = each | {k: ops.sum(each[k], axis=0) for k in SUMMED}
    numerators = summary["numerators"]
    means = window_means(numerators, summary["denominators"])
    means = where_sum(losses, numerators, means)
    regularization = ops.mean(each["regularization"])
    summary["regularization"] = regularization
    summary["loss"] = total_loss(means, losses, regularization)
    gradients = [
        None if g is None else backend.sum_rows(g) for g in examples.gradients
    ]
    return Passed(summary, gradients, None)


def to_be_judged(batch: Batch, outputs: Nest) -> dict[str, Any]:
    """Note what the metrics are given; the masks aside, which no map keeps."""
    if outputs is None:
        return {"batch": None, "outputs": None, "masks": None}
    masks = [keras_mask(leaf) for leaf in leaves(outputs)]
    return {"batch": batch, "outputs": outputs, "masks": masks}


def judged_of(examples: dict[str, Any]) -> tuple[Batch, Nest]:
    """Join the batch and the outputs of all examples, masks attached.

    Args:
        examples: has tensors `[m, 1, ...]` of what `to_be_judged` noted.
    """
    batch, outputs, masks = (
        map_leaves(lambda leaf: ops.squeeze(leaf, 1), examples[name])
        for name in ("batch", "outputs", "masks")
    )
    for leaf, mask in zip(leaves(outputs), masks, strict=True):
        if mask is not None:
            set_keras_mask(leaf, mask)
    return batch, outputs
