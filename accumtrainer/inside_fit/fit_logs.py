"""How a window is told to `Model.fit`: in metrics, and in logs read late."""

from typing import Any

from accumtrainer.keras_api import keras, ops
from accumtrainer.steps import Report
from accumtrainer.window.objective import names_of
from accumtrainer.window.program import Outcome, WindowProgram


def show_in_metrics(program: WindowProgram, outcome: Outcome) -> None:
    """Keep the losses that `fit` reads current, in what is compiled.

    At the end of an epoch it reads the model's metrics, of which the first is
    its loss, and those after it the losses of several outputs.

    Args:
        program: which has learnt what losses there are.
        outcome: what it tells of a window.
    """
    names = ["loss", *names_of(program.survey.losses)]
    for metric in program.survey.idle_metrics:
        if metric.name in names and isinstance(metric, keras.metrics.Mean):
            value = outcome["running"][metric.name]
            metric.total.assign(ops.cast(value, metric.total.dtype))
            metric.count.assign(ops.ones_like(metric.count.value))


def late_logs(report: Report) -> dict[str, Any]:
    """Return the epoch so far as `Model.fit` wants it, to be read later.

    Returns:
        By name what `float` turns into a number, waiting for the device only
        then; tensors where a metric is not a scalar.
    """
    tensors = report.tensors("running")
    return {
        name: _LateNumber(report, name) if tensor is None else tensor
        for name, tensor in tensors.items()
    }


class _LateNumber:
    """A number of `Report.running` that is read when Keras wants a float."""

    __slots__ = ("_name", "_report")

    def __init__(self, report: Report, name: str):
        self._report = report
        self._name = name

    def __float__(self) -> float:
        return float(self._report.running()[self._name])

    def __repr__(self) -> str:
        return repr(float(self))
