"""Which numbers are good, and the best value of each in a run."""

import re
from typing import Any, Literal

import numpy as np

from accumtrainer.keras_api import KERAS_NAME, keras

LOWER_IS_BETTER = (
    *("loss", "error", "mse", "rmse", "mae", "mape", "msle", "nll"),
    *("perplexity", "crossentropy", "divergence"),
    *("false_positives", "false_negatives"),
)
HIGHER_IS_BETTER = (
    *("accuracy", "acc", "auc", "f1", "fbeta", "precision", "recall"),
    *("iou", "io_u", "similarity", "sensitivity", "specificity"),
    *("r2", "psnr", "true_positives", "true_negatives"),
)
KNOWN = re.compile(
    # Whole words of a name, whose words are joined by underscores.
    rf"(?<![^\W_])({'|'.join(LOWER_IS_BETTER + HIGHER_IS_BETTER)})(?![^\W_])"
)

Direction = Literal["min", "max"]


def direction_by_name(name: str) -> Direction | None:
    """Say which values of a number are good, `None` if its name does not.

    The last word known decides, as the first may be the name of an output.

    Examples:
        >>> direction_by_name("val_accuracy"), direction_by_name("accuracy_mae")
        ('max', 'min')
        >>> direction_by_name("val_acceleration") is None
        True
    """
    words = KNOWN.findall(name.lower())
    if not words:
        return None
    return "min" if words[-1] in LOWER_IS_BETTER else "max"


def direction_by_metric(name: str, model: Any) -> Direction | None:
    """Say which values of a metric are good, `None` if Keras does not know.

    What a metric says of itself Keras reads for its own callbacks alone, so
    one of them is asked.

    Args:
        name: of the metric in the logs.
        model: `keras.Model` whose metrics are built.
    """
    if KERAS_NAME != "keras":
        return None  # Keras Core goes by the name
    asked = keras.callbacks.EarlyStopping(name)
    asked.set_model(model)
    try:
        asked.on_epoch_end(0, {name: 0.0})
    except ValueError:
        return None
    return "max" if asked.monitor_op is keras.ops.greater else "min"


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
        return {"min": 1, "max": -1, None: 0}[direction_by_name(name)]
