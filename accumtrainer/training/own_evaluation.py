"""Evaluates models whose classes have a way of their own for it.

What a `test_step` computes, and of which examples together, nobody but Keras
can know: so batches go to `Model.evaluate` as the loader yields them.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from accumtrainer.data.source import Source
from accumtrainer.keras_api import keras, overrides
from accumtrainer.keras_api.types import Model, Nest, Variable
from accumtrainer.observers.dispatcher import Dispatcher
from accumtrainer.observers.logs import Logs
from accumtrainer.window.hooks import Hooks
from accumtrainer.window.objective import metric_variables


def evaluates_itself(hooks: Hooks) -> bool:
    """Whether a model evaluates itself, and no Trainer in its place.

    A `compute_loss` of the Trainer's own is what it evaluates by, too.
    """
    steps = ("test_step", "make_test_function")
    own = any(overrides(hooks.model, step) for step in steps)
    return own and not hooks.overrides("compute_loss")


def evaluate_by_itself(
    model: Model,
    source: Source,
    dispatcher: Dispatcher,
    rest: Callable[[], None] | None,
) -> dict[str, float]:
    """Have a model evaluate the batches of a source.

    Args:
        model: `keras.Model`, compiled, whose variables are current.
        source: the data.
        dispatcher: `Dispatcher` to tell about it.
        rest: function to be called after every loader batch, or `None`.

    Returns:
        Dict of numbers.
    """
    failures: list[Exception] = []
    with _kept_whole(model, failures) as keep, warnings.catch_warnings():
        # Of what it does not know the length of, Keras always says so.
        warnings.filterwarnings("ignore", "Your input ran out of data")
        return model.evaluate(
            _batches(source, failures),
            steps=source.batches_per_epoch,
            verbose=0,
            callbacks=[_Telling(dispatcher, rest, keep)],
            return_dict=True,
        )


@contextlib.contextmanager
def _kept_whole(
    model: Model, failures: list[Exception]
) -> Iterator[Callable[[], None]]:
    """Raise what data raised; leave the model its values all the same.

    On JAX, Keras takes the values out of the variables meanwhile, and does not
    put them back when something fails. Each batch gives older values away.

    Yields:
        Function to be called before each batch.
    """
    variables = [*model.variables, *metric_variables(model)]
    values: list[Any] = []

    def keep() -> None:
        values[:] = [variable.value for variable in variables]

    keep()
    try:
        yield keep
    except BaseException:  # a second Ctrl-C, too
        for variable, value in zip(variables, values, strict=True):
            if not _has_value(variable):
                variable.assign(value)
        if not failures:
            raise
    if failures:
        raise failures[0]


def _batches(source: Source, failures: list[Exception]) -> Iterator[tuple]:
    """Yield what Keras hands to the step, until something is wrong.

    An error would come out of TensorFlow as another one, so it is noted.
    """
    try:
        for item in source.iterate(0):
            (batch,) = source.window([item], None).split()
            packed = keras.utils.pack_x_y_sample_weight(
                *map(_without_lists, (batch.x, batch.y, batch.sample_weight))
            )
            yield packed if isinstance(packed, tuple) else (packed,)
    except Exception as failure:
        failures.append(failure)


class _Telling(keras.callbacks.Callback):
    """Tells a dispatcher of what Keras evaluates."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        rest: Callable[[], None] | None,
        keep: Callable[[], None],
    ):
        super().__init__()
        self._keep = keep
        self._tells = dispatcher
        self._rest = rest

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See `Callback`."""
        self._tells.call("on_test_batch_begin", batch, {})
        self._keep()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `Callback`."""
        # On JAX, Keras makes the model current when a callback asks for it.
        assert self.model is not None
        logs = dict(logs or {})
        self._tells.call("on_test_batch_end", batch, Logs(lambda: logs))
        if self._rest is not None:
            self._rest()


def _without_lists(nest: Nest) -> Nest:
    """Make tuples of lists, which TensorFlow would take for tensors."""
    if isinstance(nest, dict):
        return {name: _without_lists(part) for name, part in nest.items()}
    if isinstance(nest, list | tuple):
        return tuple(map(_without_lists, nest))
    return nest


def _has_value(variable: Variable) -> bool:
    try:
        return variable.value is not None
    except TypeError:  # Keras asks for an initializer that it has let go
        return False
