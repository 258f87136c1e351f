"""What `WandbLogger(watch=...)` sends of weights and gradients."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from accumtrainer import Every, Histogram
from accumtrainer.callbacks.keep_gradients import (
    KeepGradientNorms,
    KeepGradients,
    norm,
)
from accumtrainer.keras_api import by_path, keras

WATCHED = (None, "weights", "gradients", "all", "norms")


class Watch:
    """Say when weights and gradients are looked at, and what is seen.

    Args:
        what: one of `WATCHED`, `None` for nothing.
        every: how often.
    """

    def __init__(self, what: str | None, every: Every):
        self.what = what
        self.every = every

    def start(self, trainer: Any) -> None:
        """Begin to count.

        Raises:
            ValueError: the Trainer keeps no gradients to be looked at.
        """
        self._seen = trainer.progress
        needed = {
            "gradients": KeepGradients,
            "all": KeepGradients,
            "norms": (KeepGradientNorms, KeepGradients),
        }.get(self.what or "", object)
        if isinstance(trainer, needed):
            return
        name = "KeepGradients"
        if self.what == "norms":
            name = "KeepGradientNorms"
        raise ValueError(
            "watch must be 'weights' unless the Trainer keeps its gradients. "
            f"Received: watch={self.what!r} with a {type(trainer).__name__}. "
            f"Derive it from accumtrainer.callbacks.{name}, or use 'weights'."
        )

    def look_if_due(
        self, trainer: Any
    ) -> tuple[int, Callable[[], dict[str, Any]]] | None:
        """Look, if it is time to.

        Returns:
            The updates made, and a function to be called in W&B's thread,
            which returns histograms or numbers by name; or `None`.
        """
        if self.what is None or not trainer.is_due(self.every, self._seen):
            return None
        self._seen = trainer.progress
        looks = _look_at_norms if self.what == "norms" else self._look_at_all
        return self._seen.updates, looks(trainer)

    def _look_at_all(self, trainer: Any) -> Callable[[], dict[str, Any]]:
        """Copy what histograms are made of, as the next update changes it."""
        seen = {}
        if self.what in ("weights", "all"):
            named = by_path(trainer.model.trainable_variables)
            for path, variable in named.items():
                seen[f"weights/{path}"] = Histogram(variable)
        if self.what in ("gradients", "all"):
            for path, variable in trainer.kept_gradients.items():
                seen[f"gradients/{path}"] = Histogram(variable)
        return lambda: seen


def _look_at_norms(trainer: Any) -> Callable[[], dict[str, Any]]:
    """Have the device compute the norms; they are read in the thread."""
    variables = by_path(trainer.model.trainable_variables)
    names = [f"weight_norm/{path}" for path in variables]
    norms = [norm(variable) for variable in variables.values()]
    for path, gradient_norm in trainer.kept_norms().items():
        names.append(f"gradient_norm/{path}")
        norms.append(gradient_norm)
    return functools.partial(_read, names, keras.ops.stack(norms))


def _read(names: list[str], norms: Any) -> dict[str, float]:
    read = np.asarray(keras.ops.convert_to_numpy(norms)).tolist()
    return dict(zip(names, read, strict=True))
