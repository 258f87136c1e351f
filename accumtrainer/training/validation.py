"""The data sets that training is validated on."""

import warnings

from accumtrainer import errors
from accumtrainer.config import require_count
from accumtrainer.data.source import check_ends
from accumtrainer.data.sources import FirstBatches, make_source
from accumtrainer.training.fit_options import checked_steps


class Validation:
    """The data sets a fit is validated on.

    Args:
        data: `None`; what `make_source` takes, or a tuple `(x, y)` or
            `(x, y, sample_weight)`; or a dict of these by name.
        batch_size: samples per loader batch, `None` for the default.
        steps: loader batches in a validation, `None` for all.
        first: how many of these to keep in a trial, `None` for all.
    """

    def __init__(self, data, *, batch_size, steps, first=None):
        if batch_size is not None:
            require_count(
                "validation_batch_size", batch_size, "Leave it out for 32."
            )
        if data is not None:
            steps = checked_steps("validation_steps", steps)
        self._validated = set()
        named = data if isinstance(data, dict) else {"": data}
        self._sources = {
            f"{name}_" if name else "": _validation_source(
                part, batch_size, steps, first
            )
            for name, part in named.items()
            if part is not None
        }

    def __bool__(self):
        return bool(self._sources)

    def run(self, evaluate):
        """Evaluate every set.

        Args:
            evaluate: function from a `Source` to a dict of numbers.

        Returns:
            Dict of numbers, `val_loss` or `val_<set>_loss` and so on.
        """
        logs = {}
        for prefix, source in self._sources.items():
            try:
                results = evaluate(source)
            except errors.NothingLeftError:
                if prefix not in self._validated:
                    raise
                warnings.warn(errors.NO_MORE_VALIDATION, stacklevel=2)
                continue
            self._validated.add(prefix)
            logs |= {f"val_{prefix}{k}": v for k, v in results.items()}
        return logs


def _validation_source(data, batch_size, steps, first):
    if isinstance(data, list) and not any(isinstance(v, tuple) for v in data):
        data = tuple(data)  # [x, y], as in Keras; else a list of batches
    arrays = data if isinstance(data, tuple) else (data,)
    batch_size = batch_size if isinstance(data, tuple) else None
    if not 1 <= len(arrays) <= 3:
        raise ValueError(
            "validation_data must be (x, y), (x, y, sample_weight), what "
            "yields such batches, or a dict of these by name. Received: "
            f"a tuple of {len(arrays)}. Put several inputs into one tuple."
        )
    source = make_source(
        *arrays, batch_size=batch_size, shuffle=False, steps=steps
    )
    if first is not None:
        return FirstBatches(source, first)
    check_ends(source, "validation_steps")
    return source
