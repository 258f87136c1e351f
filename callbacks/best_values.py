"""The best value of each number of validation, for the summary of a run."""

from typing import Any

import numpy as np

LOWER_IS_BETTER = ("loss", "error", "mse", "mae", "mape", "msle", "perplexity")
HIGHER_IS_BETTER = ("accuracy", "acc", "auc", "precision", "recall", "f1_score")


class BestValues:
    """The best value of each number of validation, and where it was.

    Args:
        directions: dict from names to `"min"` or `"max"`, before guessing.
    """

    def __init__(self, directions: dict[str, str]):
        self._directions = directions
        self.values: dict[str, Any] = {}

    def concerns(self, numbers: dict[str, Any]) -> bool:
        """Whether to look at a point.

        Those of training, which are no plain dicts, would have to be read.
        """
        return type(numbers) is dict or bool(self._directions)

    def update(self, row: dict[str, Any]) -> dict[str, Any]:
        """Look at a point; return what is new, by name in the summary."""
        new = {}
        for name, value in row.items():
            sign = self._sign(name)
            if sign and isinstance(value, int | float) and np.isfinite(value):
                best = self.values.get(name)
                if best is None or sign * value < sign * best:
                    self.values[name] = value
                    new[f"best_{name}"] = value
                    new[f"best_{name}_updates"] = row["updates"]
        return new

    def _sign(self, name: str) -> int:
        """Return 1 if lower is better, -1 if higher is, 0 if unknown."""
        if name in self._directions:
            return 1 if self._directions[name] == "min" else -1
        if not name.startswith("val_"):
            return 0
        if name.endswith(LOWER_IS_BETTER):
            return 1
        return -1 if name.endswith(HIGHER_IS_BETTER) else 0
