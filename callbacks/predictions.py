"""Shows what the model says about the same examples, again and again."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from accumtrainer import Callback, Every, Image, Progress, Table
from accumtrainer.callbacks.arguments import require_every, require_whole
from accumtrainer.keras_api import flatten_layers, keras, tree


class Predictions(Callback):
    """Log predictions on fixed examples as a table, every so often.

    The table goes to every logger that takes tables, such as `WandbLogger`.
    It has a row per example: its number, its inputs that are images or text,
    its labels if there are any, and what the model says. Of a vector of scores
    it tells the class with the largest one, and the scores. Where there are
    several inputs, labels or outputs, their keys are in the names of the
    columns, as in `label_age`. `to_row` makes other rows. It predicts in
    batches of the training's size, and changes nothing of the training. In a
    trial (`fast_dev_run`) it does nothing.

    Args:
        x: array of examples, or a nest of arrays; no generator or dataset,
            whose first batch is easily taken.
        y: array of their labels, or a nest of arrays, or `None`.
        every: how often; default every epoch.
        name: of the table in the logs.
        most: how many examples to show, the first ones.
        to_row: function from an example's input, label (`None` without `y`)
            and prediction to a dict by name of column; as Python numbers,
            strings, small arrays or `Image`. A column that some rows lack is
            empty there.

    Raises:
        TypeError: an argument is of the wrong kind, or `to_row` returned no
            dict; the latter is raised when it is called.
        ValueError: an argument breaks its rule.

    Examples:
        >>> predictions = Predictions(np.zeros([4, 2]), np.arange(4), most=2)
        >>> predictions.every
        Every(n=1, unit='epochs')
    """

    looks_at_model = False
    needs_trainer = True
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
        self._x = _first("x", x, most)
        self._y = None if y is None else _first("y", y, most)
        _check_lengths(self._x, self._y)
        self._to_row = to_row or _row
        self._since = Progress()
        self._was_restored = False

    def on_train_begin(self, logs: Any = None) -> None:
        if not (self._was_restored and self.params.get("resumes")):
            self._since = self.trainer.progress
        self._was_restored = False

    def on_safe_point(self, reason: str, logs: Any = None) -> None:
        is_trial = (self.params or {}).get("fast_dev_run", False)
        if is_trial or not self.trainer.is_due(self.every, self._since):
            return
        self._since = self.trainer.progress
        # Every process predicts, as they may have to do it together.
        outputs = self.trainer.predict(
            self._x,
            batch_size=self.params.get("batch_size"),
            verbose=0,
            callbacks=_KeepStates(),
        )
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
                None if self._y is None else _pick(self._y, index),
                _pick(outputs, index),
            )
            if not isinstance(row, dict):
                raise TypeError(
                    "to_row must return a dict by name of column. Received: "
                    f"{row!r}. Return for example {{'guess': guess}}."
                )
            rows.append({"example": index} | row)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return Table(columns, [[row.get(c) for c in columns] for row in rows])


class _KeepStates(Callback):
    """Puts the states of stateful layers back, which predicting moves."""

    def on_predict_begin(self, logs: Any = None) -> None:
        states = [
            state
            for layer in flatten_layers(self.model)
            if getattr(layer, "stateful", False)
            for state in tree.flatten(getattr(layer, "states", None))
        ]
        self._kept = [
            (state, np.array(keras.ops.convert_to_numpy(state)))
            for state in states
            if isinstance(state, keras.Variable)
        ]

    def on_predict_end(self, logs: Any = None) -> None:
        for state, kept in self._kept:
            state.assign(kept)


def _first(name: str, nest: Any, most: int) -> Any:
    """Copy the first examples of every array of a nest to the host."""

    def first(leaf: Any) -> np.ndarray:
        if not hasattr(leaf, "shape") or not len(leaf.shape):
            raise TypeError(
                f"{name} must hold arrays of examples. Received: {name} with "
                f"{type(leaf).__name__!r} in it. Give arrays, of a generator "
                "or a dataset one batch: x, y = next(iter(data))."
            )
        return np.array(keras.ops.convert_to_numpy(leaf[:most]))

    return tree.map_structure(first, nest)


def _check_lengths(x: Any, y: Any) -> None:
    lengths = [
        len(array) for array in tree.flatten((x, [] if y is None else y))
    ]
    if not lengths or not lengths[0] or len(set(lengths)) > 1:
        raise ValueError(
            "x and y must hold the same number of examples, at least 1, in "
            f"every array. Received: {lengths}, of what is shown. Check how "
            "the arrays were sliced or joined."
        )


def _pick(nest: Any, index: int) -> Any:
    """Take one example of every array of a nest."""
    return tree.map_structure(lambda array: array[index], nest)


def _row(x: Any, y: Any, prediction: Any) -> dict[str, Any]:
    """Show an example as well as can be guessed."""
    row: dict[str, Any] = {}
    for name, value in _named("input", x):
        if _is_image(value):
            row[name] = _picture(value)
        elif isinstance(value, str | bytes):
            row[name] = value
    if y is not None:
        row |= dict(_named("label", y))
    for name, value in _named("prediction", prediction):
        row |= _cells(name, value)
    return row


def _named(name: str, nest: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a nest holds, each with a name of its own."""
    if isinstance(nest, dict):
        items: Any = nest.items()
    elif isinstance(nest, list | tuple):
        items = enumerate(nest)
    else:
        yield name, nest
        return
    for key, value in items:
        yield from _named(f"{name}_{key}", value)


def _cells(name: str, prediction: Any) -> dict[str, Any]:
    prediction = np.asarray(prediction)
    if prediction.size == 1:
        return {name: prediction.reshape([])}
    if prediction.ndim == 1:
        return {name: int(prediction.argmax()), f"{name}_scores": prediction}
    is_image = _is_image(prediction)
    return {name: _picture(prediction) if is_image else prediction}


def _is_image(x: Any) -> bool:
    return isinstance(x, np.ndarray) and (
        x.ndim == 3 and x.shape[-1] in (1, 3, 4)
    )


def _picture(pixels: np.ndarray) -> Image:
    """Make an image of what a model takes or returns, in whatever range."""
    if np.issubdtype(pixels.dtype, np.integer):
        return Image(pixels)
    known = np.nan_to_num(pixels.astype("float32"), posinf=0.0, neginf=0.0)
    low, high = known.min(), known.max()
    if low > -0.5 and high < 1.5:
        return Image(known)  # a little more than from 0 to 1 is clipped
    if low >= 0 and high <= 255:
        return Image(known / 255)
    return Image((known - low) / max(high - low, 1e-6))


def _check(every: Any, most: Any, to_row: Any) -> None:
    require_every("every", every, "Use for example Every(5, 'epochs').")
    require_whole("most", most, "Leave it out for 16.")
    if to_row is not None and not callable(to_row):
        raise TypeError(
            "to_row must be a function of an input, a label and a prediction. "
            f"Received: to_row={to_row!r}. Leave it out for rows made here."
        )
