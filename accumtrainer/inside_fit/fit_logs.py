"""How a window is told to `Model.fit`: in logs that are read late."""

from typing import Any

from accumtrainer.steps import Report


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
