"""The data sets that training is validated on."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accumtrainer import errors
from accumtrainer.checks import require_count
from accumtrainer.data.source import Source, SourceOptions, check_ends
from accumtrainer.data.sources import Arrays, FirstBatches, Loader
from accumtrainer.keras_api.types import Model
from accumtrainer.steps.memory import Backup
from accumtrainer.training.fit_options import checked_steps
from accumtrainer.window.objective import metric_variables


class Validation:
    """The data sets a fit is validated on.

    Args:
        sets: the data by name, see `recognize_sets`.
        batch_size: samples per loader batch of arrays, `None` for the default.
        steps: loader batches in a validation, `None` for all.
        first: how many of these to keep in a trial, `None` for all.
    """

    def __init__(
        self,
        sets: Mapping[str, Arrays | Loader],
        *,
        batch_size: int | None,
        steps: int | None,
        first: int | None = None,
    ):
        if batch_size is not None:
            require_count(
                "validation_batch_size", batch_size, "Leave it out for 32."
            )
        if sets:
            steps = checked_steps("validation_steps", steps)
        self._validated: set[str] = set()
        self._sources = {}
        for name, data in sets.items():
            options = SourceOptions(
                batch_size=batch_size if isinstance(data, Arrays) else None,
                shuffle=False,
                steps=steps,
            )
            source = data.source(options)
            if first is None:
                check_ends(source, "validation_steps")
            else:
                source = FirstBatches(source, first)
            self._sources[f"{name}_" if name else ""] = source

    def __bool__(self) -> bool:
        return bool(self._sources)

    def run(
        self, evaluate: Callable[[Source], dict[str, Any]]
    ) -> dict[str, Any]:
        """Evaluate every set.

        Returns:
            Numbers, `val_loss` or `val_<set>_loss` and so on.

        """
        logs: dict[str, Any] = {}
        sets: dict[str, str] = {}
        for prefix, source in self._sources.items():
            try:
                results = evaluate(source)
            except errors.NothingLeftError:
                if prefix not in self._validated:
                    raise
                warnings.warn(errors.NO_MORE_VALIDATION, stacklevel=2)
                continue
            self._validated.add(prefix)
            for name, value in results.items():
                key, of = f"val_{prefix}{name}", prefix.removesuffix("_")
                if key in logs:
                    message = errors.SAME_VALIDATION_LOGS.format(
                        key=key, one=sets[key], other=of
                    )
                    warnings.warn(message, stacklevel=2)
                    continue
                logs[key], sets[key] = value, of
        return logs


@contextlib.contextmanager
def metrics_kept(
    model: Model, write_back: Callable[[], None]
) -> Iterator[None]:
    """Put a model's metrics back after a validation amid an epoch.

    Args:
        model: whose metrics they are.
        write_back: makes its variables current.
    """
    write_back()
    backup = Backup(metric_variables(model))
    try:
        yield
    finally:
        write_back()
        backup.put_back()
