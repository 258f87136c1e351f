"""The numbers of a window: packed by kind, and read when somebody looks."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from accumtrainer.keras_api import ops
from accumtrainer.keras_api.arrays import to_array
from accumtrainer.keras_api.types import Tensor
from accumtrainer.observers.logs import is_learning_rate
from accumtrainer.window.numbers import OfMicroBatch

CLOCKS = ("gradient_norm", "loss_scale", "updates", "skipped_updates")
"""What every log carries beside losses, metrics and learning rates."""


class Place(NamedTuple):
    """Where a number belongs, and among which of `Packed` it comes next."""

    section: str
    name: str
    kind: Literal["floats", "ints", "others"]


class Packed(NamedTuple):
    """Tensors of several sections, as a compiled function returns them.

    Args:
        floats: `(n,)`, float32, the scalars that are no integers.
        ints: `(m,)`, int32.
        others: those that are no scalars.
        places: a dict of one key, a `Place` for each in their order. As a key
            it is a part of the result's structure, as tracing has found it,
            and no tensor.
    """

    floats: Tensor | None
    ints: Tensor | None
    others: list[Tensor]
    places: dict[tuple[Place, ...], tuple[()]]


def pack(sections: dict[str, dict[str, Tensor]]) -> Packed:
    """Pack tensors by kind; runs while tracing."""
    places: list[Place] = []
    tensors: dict[str, list[Tensor]]
    tensors = {"floats": [], "ints": [], "others": []}
    for section, values in sections.items():
        for name, value in values.items():
            value = ops.convert_to_tensor(value)
            kind = _kind(value)
            places.append(Place(section, name, kind))
            tensors[kind].append(value)
    floats = [ops.cast(value, "float32") for value in tensors["floats"]]
    ints = tensors["ints"]
    return Packed(
        ops.stack(floats) if floats else None,
        ops.stack(ints) if ints else None,
        tensors["others"],
        {tuple(places): ()},
    )


def _kind(value: Tensor) -> Literal["floats", "ints", "others"]:
    if len(value.shape) != 0:
        return "others"
    dtype = str(value.dtype)
    return "ints" if "int32" in dtype and "uint" not in dtype else "floats"


class Report:
    """The numbers of one window, on the device until somebody looks.

    Args:
        packed: what a compiled function returned.
        micro_batches: packed `OfMicroBatch`es, k tensors or one; or parts.
        join: makes them of parts that replicas have run, `[n, ...]`.
    """

    def __init__(
        self,
        packed: Packed,
        micro_batches: Sequence[Tensor] | Tensor = (),
        join: Callable[[np.ndarray], OfMicroBatch] = OfMicroBatch.unpack,
    ):
        self._packed = packed
        (self._places,) = packed.places
        self._micro_batches = micro_batches
        self._join = join
        self._numbers: dict[str, dict[str, Any]] | None = None

    def wait(self) -> None:
        """Wait until the window has run."""
        to_array(self._packed.ints)

    def section(self, name: str) -> dict[str, Any]:
        """Read a section as Python numbers; `Update.apply` has their names."""
        if self._numbers is None:
            floats, ints, others, _ = self._packed
            unread = {
                "floats": iter([] if floats is None else _to_list(floats)),
                "ints": iter([] if ints is None else _to_list(ints)),
                "others": map(to_array, others),
            }
            self._numbers = {place.section: {} for place in self._places}
            for section, key, kind in self._places:
                self._numbers[section][key] = next(unread[kind])
        return dict(self._numbers[name])

    def has(self, name: str) -> bool:
        """Whether a section is there; without waiting for the device."""
        return any(place.section == name for place in self._places)

    def tensors(self, name: str) -> dict[str, Tensor | None]:
        """Name a section's numbers, and hand out its other tensors.

        Without waiting for the device: a number is `None`.
        """
        others = iter(self._packed.others)
        found = [
            (place, next(others) if place.kind == "others" else None)
            for place in self._places
        ]
        return {place.name: v for place, v in found if place.section == name}

    def was_applied(self) -> bool:
        """Read whether the update was made, not skipped."""
        return bool(self.section("counters")["applied"])

    def window_logs(self) -> dict[str, Any]:
        """Read what this window alone was like."""
        counters = self.section("counters")
        return self.section("window") | {
            **self.section("step"),
            "applied": self.was_applied(),
            "updates": counters["updates"],
            "skipped_updates": counters["skipped_updates"],
        }

    def running(self) -> dict[str, Any]:
        """Read the epoch so far as one of its windows shows it.

        A window's loss that is not finite is shown, although the running
        mean has forgotten that window: `TerminateOnNaN` looks for it here.
        Where there are no means yet, the window's losses are shown.
        """
        logs = self.section("running")
        if self.has("window"):
            window = self.section("window")
            if not np.isfinite(window["loss"]):
                logs["loss"] = window["loss"]
            logs |= {
                name: window[name]
                for name, value in logs.items()
                if name in window and np.all(np.isnan(value))
            }
        return logs

    def running_logs(self) -> dict[str, Any]:
        """Read `running` and the clocks."""
        return self._with_clocks(self.running())

    def epoch_logs(self) -> dict[str, Any]:
        """Read the epoch so far and the clocks.

        Windows that were skipped are forgotten; the loss is NaN if all were.
        """
        return self._with_clocks(self.section("running"))

    def _with_clocks(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Add the clocks whose names no metric and no loss has."""
        window = self.window_logs()
        rates = filter(is_learning_rate, self.section("step"))
        clocks = {name: window[name] for name in (*rates, *CLOCKS)}
        return logs | clocks | logs

    def micro_batches(self) -> dict[str, np.ndarray]:
        """Read each number of `OfMicroBatch` that is known, `(k,)`."""
        rows = self._micro_batches
        if isinstance(rows, Sequence):
            rows = np.asarray([to_array(row) for row in rows])
        return self._join(to_array(rows)).as_dict()


def _to_list(tensor: Tensor) -> list[Any]:
    return to_array(tensor).tolist()
