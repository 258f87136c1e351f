"""What a training returns: the history of its epochs."""

from typing import Any

from accumtrainer import notebook
from accumtrainer.keras_api import keras
from accumtrainer.observers.progress_line import HIDDEN


class History(keras.callbacks.History):
    """The history of Keras, of which a notebook shows a table."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[dict[str, Any]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        # By epoch, as Keras's lists leave out what an epoch did not have.
        self._rows.append({"epoch": epoch + 1, **(logs or {})})

    def _repr_html_(self) -> str:
        names = dict.fromkeys(["epoch"])
        for row in self._rows:
            names |= dict.fromkeys(name for name in row if name not in HIDDEN)
        return notebook.table(
            list(names), [[row.get(n, "") for n in names] for row in self._rows]
        )
