"""Shows what the model says about the same examples, again and again."""

from collections.abc import Callable
from typing import Any

import numpy as np

from accumtrainer import Callback, Every, Image, Progress, Table
from accumtrainer.keras_api import tree


class Predictions(Callback):
    """Log predictions on fixed examples as a table, every so often.

    The table goes to every logger that takes tables, such as `WandbLogger`.
    It has a row per example: its number, its input if that is an image, its
    label if there is one, and what the model says. Of a vector of scores it
    tells the class with the largest one, and the scores. `to_row` makes other
    rows. Predicting changes nothing of the training. In a trial
    (`fast_dev_run`) it does nothing.

    Args:
        x: arrays of examples, or a nest of them, as `Trainer.predict` takes.
        y: array of their labels, or `None`.
        every: how often; default every epoch.
        name: of the table in the logs.
        most: how many examples to show, the first ones.
        to_row: function from an example's input, label (`None` without `y`)
            and prediction to a dict by name of column; as Python numbers,
            strings, small arrays or `Image`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: an argument breaks its rule.

    Examples:
        >>> predictions = Predictions(np.zeros([4, 2]), np.arange(4), most=2)
        >>> predictions.every
        Every(n=1, unit='epochs')
    """

    looks_at_model = False
    has_state = True

    def __init__(
        self,
        x: Any,
        y: Any = None,
        *,
        every: Every | None = None,
        name: str = "predictions",
        most: int = 16,
        to_row: Callable[[Any, Any, Any], dict[str, Any]] | None = None,
    ):
        super().__init__()
        every = Every(1, "epochs") if every is None else every
        _check(every, most, to_row)
        self.every = every
        self.name = name
        self._x = tree.map_structure(lambda a: np.array(a[:most]), x)
        self._y = None if y is None else np.array(y[:most])
        self._to_row = to_row or _row
        self._since = Progress()
        self._was_restored = False

    def on_train_begin(self, logs: Any = None) -> None:
        if not self._was_restored:
            self._since = self.trainer.progress
        self._was_restored = False

    def on_safe_point(self, reason: str, logs: Any = None) -> None:
        is_trial = (self.params or {}).get("fast_dev_run", False)
        if is_trial or not self.trainer.is_due(self.every, self._since):
            return
        self._since = self.trainer.progress
        # Every process predicts, as they may have to do it together.
        outputs = self.trainer.predict(self._x, verbose=0)
        if self.trainer.is_chief:
            self.trainer.log_media(self.name, self._table(outputs))

    def get_state(self) -> dict[str, Any]:
        return {"since": self._since.as_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._since = Progress.from_dict(state["since"])
        self._was_restored = True

    def on_train_end(self, logs: Any = None) -> None:
        self._was_restored = False

    def _table(self, outputs: Any) -> Table:
        first = tree.flatten(outputs)[0]
        rows = []
        for index in range(len(first)):
            row = self._to_row(
                _pick(self._x, index),
                None if self._y is None else self._y[index],
                _pick(outputs, index),
            )
            rows.append({"example": index} | row)
        columns = list(rows[0]) if rows else []
        return Table(columns, [[row.get(c) for c in columns] for row in rows])


def _pick(nest: Any, index: int) -> Any:
    """Take one example of every array of a nest."""
    return tree.map_structure(lambda array: array[index], nest)


def _row(x: Any, y: Any, prediction: Any) -> dict[str, Any]:
    """Show an example as well as can be guessed."""
    row: dict[str, Any] = {}
    if _is_image(x):
        row["input"] = Image(x)
    if y is not None:
        row["label"] = y
    if isinstance(prediction, np.ndarray):
        return row | _cells("prediction", prediction)
    outputs = tree.flatten(prediction)
    for index, output in enumerate(outputs):
        row |= _cells(f"prediction_{index}", output)
    return row


def _cells(name: str, prediction: Any) -> dict[str, Any]:
    prediction = np.asarray(prediction)
    if prediction.size == 1:
        return {name: prediction.reshape([])}
    if prediction.ndim == 1:
        return {name: int(prediction.argmax()), f"{name}_scores": prediction}
    return {name: Image(prediction) if _is_image(prediction) else prediction}


def _is_image(x: Any) -> bool:
    return isinstance(x, np.ndarray) and (
        x.ndim == 3 and x.shape[-1] in (1, 3, 4)
    )


def _check(every: Any, most: Any, to_row: Any) -> None:
    if not isinstance(every, Every):
        raise TypeError(
            "every must be an Every. Received: "
            f"every={every!r}. Use for example Every(5, 'epochs')."
        )
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ValueError(
            "most must be a whole number of at least 1. Received: "
            f"most={most!r}. Leave it out for 16."
        )
    if to_row is not None and not callable(to_row):
        raise TypeError(
            "to_row must be a function of an input, a label and a prediction. "
            f"Received: to_row={to_row!r}. Leave it out for rows made here."
        )
