"""Reads results as they are logged: losses and metrics by name, as in Keras."""

from collections.abc import Collection, Container
from typing import Any

from accumtrainer.keras_api import (
    keras,
    metric_names,
    ops,
    read_metrics,
    reads_metrics_itself,
)
from accumtrainer.keras_api.types import Metric, Model, Tensor
from accumtrainer.window.losses import WeightedLoss
from accumtrainer.window.objective import named_losses, names_of
from accumtrainer.window.state import Scratch


def idle_metrics(model: Model, scope: Scratch) -> list[Metric]:
    """List the metrics of a model that nobody has updated in a scope.

    Keras's own of losses are among them: here, losses are added up exactly.

    Args:
        scope: `Scratch`, in which its metrics would have been updated.
    """
    return [
        metric
        for metric in model.metrics
        if not any(map(scope.has_written, metric.variables))
    ]


def results(
    model: Model,
    losses: list[WeightedLoss],
    total: Tensor,
    means: Tensor,
    idle: list[Metric],
    *,
    untold: Collection[str] = (),
) -> dict[str, Tensor]:
    """Read losses and metrics as they are logged: by name, as in Keras.

    A metric that nobody updates stands back where a loss has its name, as
    Keras's own of losses do. It is given the loss first, for who reads it: a
    `get_metrics_result` of the model's own says what is told of that. A loss
    stands back where another metric has its name: it then has `_loss` after it.

    Args:
        losses: list of n `WeightedLoss`.
        total: scalar, float32, the loss.
        means: `(n,)`, float32, the values of the losses.
        idle: list of metrics, see `idle_metrics`.
        untold: names to leave out, see `Measured`.

    Returns:
        Dict from name to tensor, those of a nested one beside the others.
    """
    named = named_losses(losses, means)
    values = named | {"loss": total}
    of_losses = [metric for metric in idle if metric.name in values]
    shown = _show(of_losses, values)
    if not reads_metrics_itself(model):
        shown = []
    found = read_metrics(
        model, leaving_out=[m for m in of_losses if m not in shown]
    )
    told = {metric.name for metric in shown}
    if "loss" not in told:
        found.setdefault("loss", total)
    for name, value in named.items():
        if name in told:
            continue
        found[_free_name(name, found)] = value
    return {k: v for k, v in _in_order(found).items() if k not in untold}


def result_names(model: Model, losses: list[WeightedLoss]) -> list[str]:
    """Name losses and metrics as `results` does, as Keras orders them."""
    of_metrics = metric_names(model, [])
    of_losses = [_free_name(name, of_metrics) for name in names_of(losses)]
    return metric_names(model, of_losses)


def _free_name(name: str, taken: Container[str]) -> str:
    """Name a loss otherwise where a metric has its name."""
    while name in taken:
        name += "_loss"
    return name


def _show(metrics: list[Metric], values: dict[str, Tensor]) -> list[Metric]:
    """Give means to those metrics that can tell them, and return these."""
    shown = [m for m in metrics if isinstance(m, keras.metrics.Mean)]
    for metric in shown:
        value = ops.cast(values[metric.name], metric.total.dtype)
        metric.total.assign(value)
        metric.count.assign(ops.ones_like(metric.count.value))
    return shown


def _in_order(found: dict[str, Any]) -> dict[str, Tensor]:
    """Put dicts of results in the order and shape in which Keras logs them."""
    ordered: dict[str, Tensor] = {}
    for name, value in sorted(found.items()):
        is_nested = isinstance(value, dict)
        ordered |= _in_order(value) if is_nested else {name: _as_logged(value)}
    return ordered


def _as_logged(value: Tensor) -> Tensor:
    """Make a scalar of what has a single element, as `float` does."""
    value = ops.convert_to_tensor(value)
    has_one = len(value.shape) and all(size == 1 for size in value.shape)
    return ops.reshape(value, ()) if has_one else value
