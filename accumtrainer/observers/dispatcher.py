"""Who calls callbacks, and in what order."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from accumtrainer.keras_api import keras
from accumtrainer.keras_api.types import Model
from accumtrainer.observers.callback import (
    BATCH_HOOKS,
    HOOKS,
    RUN_HOOKS,
    Callback,
    check_callback,
    flatten_callbacks,
    is_overridden,
)
from accumtrainer.observers.history import History

WATCHERS = ("keras", "accumtrainer", "wandb")
"""Packages whose callbacks change no more of a model than its variables."""


class Dispatcher:
    """Call each hook of the callbacks that override it, and only of those.

    The order is the user's, then loggers, then the history, then the progress
    bar, so that the last ones see what the others wrote into the logs. Loggers
    alone are opened first, so that the others can log from their opening on.

    Args:
        callbacks: a `keras.callbacks.Callback`, a list of them in which lists
            may be nested, or `None`.
        model: the `keras.Model` in training.
        trainer: what our own callbacks find as `self.trainer`.
        params: dict that the callbacks find as `self.params`.
        add_history: whether to add a `keras.callbacks.History` if there is
            none among the callbacks.
        progress_bar: callback to be called last, or `None`.
        make_current: function to be called before a hook at which a callback
            may look at the model, with `for_others`, whether one is neither
            Keras's nor ours; or `None`.

    Attributes:
        callbacks: tuple of callbacks, flat, in the order of calling.
        history: the `keras.callbacks.History` among them, or `None`.
        last_logs: what the closing hook of the innermost open block will
            get; set it inside the block.

    Raises:
        TypeError: if something in `callbacks` is not a callback.
        ValueError: if a callback's hook is written like a Trainer's.

    Examples:
        >>> from keras.callbacks import LambdaCallback
        >>> dispatcher = Dispatcher(
        ...     LambdaCallback(on_epoch_end=lambda epoch, logs: print(logs)),
        ...     model=keras.Sequential(),
        ...     trainer=None,
        ...     params={"epochs": 1, "steps": 2},
        ... )
        >>> dispatcher.listens("on_epoch_end"), dispatcher.listens("on_apply")
        (True, False)
        >>> with dispatcher.training():
        ...     dispatcher.call("on_epoch_end", 0, {"loss": 0.5})
        {'loss': 0.5}
    """

    def __init__(
        self,
        callbacks: Any,
        *,
        model: Model,
        trainer: Any,
        params: dict[str, Any],
        add_history: bool = False,
        progress_bar: Any = None,
        make_current: Callable[..., None] | None = None,
    ):
        given = flatten_callbacks(callbacks)
        for callback in given:
            check_callback(callback)
        given.sort(key=lambda callback: getattr(callback, "is_logger", False))
        self.history = _find_history(given)
        if self.history is None and add_history:
            self.history = History()
            given.append(self.history)
        self.callbacks = (*given, *([progress_bar] if progress_bar else []))
        self.last_logs: dict[str, Any] = {}
        self._introduce(model, trainer, params)
        self._listeners = {
            name: [c for c in self.callbacks if is_overridden(c, name)]
            for name in HOOKS
        }
        self._make_current = make_current
        self._looked_at = {
            name
            for name, listeners in self._listeners.items()
            if any(getattr(c, "looks_at_model", True) for c in listeners)
        }
        self._of_others = {
            name
            for name, listeners in self._listeners.items()
            if any(is_of_others(c, name) for c in listeners)
        }

    def _introduce(
        self, model: Model, trainer: Any, params: dict[str, Any]
    ) -> None:
        if self.history is not None:
            model.history = self.history
        for callback in self.callbacks:
            if isinstance(callback, Callback):
                callback.set_trainer(trainer)
            callback.set_model(model)
            callback.set_params(params)

    def listens(self, name: str) -> bool:
        """Say whether any callback overrides the hook called `name`."""
        return bool(self._listeners[name])

    def call(
        self, name: str, *args: Any, told: list[Any] | None = None
    ) -> None:
        """Call one hook of every callback that overrides it.

        Args:
            name: one of `HOOKS`.
            *args: what the hook takes. Logs, the last, may be left out; all
                callbacks of one call get the same object.
            told: callbacks that have been called before; who is called now
                joins them.
        """
        listeners = self._listeners[name]
        if listeners:
            self._prepare_for(name)
            arguments, keywords = _hook_arguments(name, args)
            before = set(map(id, told or ()))
            for callback in listeners:
                if id(callback) in before:
                    continue
                if told is not None:
                    told.append(callback)
                getattr(callback, name)(*arguments, **keywords)

    def training(self) -> AbstractContextManager["Dispatcher"]:
        """Open the callbacks for training, and close them on leaving.

        After an error, Ctrl-C included, only our own callbacks and the
        history are closed. Keras closes nothing then, and its callbacks rely
        on that: `BackupAndRestore` deletes the backup when it is closed.

        Returns:
            Context manager.
        """
        return self._block("on_train_begin", "on_train_end")

    def testing(self) -> AbstractContextManager["Dispatcher"]:
        """Open the callbacks for an evaluation; see `training`."""
        return self._block("on_test_begin", "on_test_end")

    def predicting(self) -> AbstractContextManager["Dispatcher"]:
        """Open the callbacks for a prediction; see `training`."""
        return self._block("on_predict_begin", "on_predict_end")

    @contextlib.contextmanager
    def _block(self, begin: str, end: str) -> "Iterator[Dispatcher]":
        outer_logs, self.last_logs = self.last_logs, {}
        opened: set[int] = set()
        self._prepare_for(begin)
        try:
            for callback in self._openers_first():
                getattr(callback, begin)({})
                opened.add(id(callback))
            yield self
        except BaseException as error:
            ours = (Callback, keras.callbacks.History)
            closing = [
                callback
                for callback in self.callbacks
                if id(callback) in opened and isinstance(callback, ours)
            ]
            _add_notes(error, self._close(end, closing))
            raise
        else:
            failures = self._close(end, self.callbacks)
            if failures:
                _add_notes(failures[0], failures[1:])
                raise failures[0]
        finally:
            self.last_logs = outer_logs

    def _openers_first(self) -> list[Any]:
        """List the callbacks as they are opened, loggers before the others.

        So what the others log as they are opened finds an open logger, as it
        does until they are closed.
        """
        return sorted(
            self.callbacks,
            key=lambda callback: not getattr(callback, "is_logger", False),
        )

    def _prepare_for(self, name: str) -> None:
        """Have the model current where a callback may look at it."""
        if self._make_current is not None and name in self._looked_at:
            self._make_current(for_others=name in self._of_others)

    def _close(self, end: str, callbacks: Iterable[Any]) -> list[Exception]:
        failures = []
        self._prepare_for(end)
        for callback in callbacks:
            try:
                getattr(callback, end)(self.last_logs)
            except Exception as failure:
                failure.add_note(f"Raised by {type(callback).__name__}.{end}.")
                failures.append(failure)
        return failures


def is_of_others(callback: Any, name: str) -> bool:
    """Say whether anybody else's code may run in a hook of that name.

    It may be what somebody has given to a callback of Keras's, as the schedule
    of a `LearningRateScheduler`.
    """
    attributes = getattr(callback, "__dict__", {})
    kept = [v for v in attributes.values() if not isinstance(v, keras.Model)]
    given = (v.func if isinstance(v, functools.partial) else v for v in kept)
    codes = (type(callback), getattr(callback, name), *filter(callable, given))
    return any(
        _package_of(code) not in (*WATCHERS, *sys.stdlib_module_names, "numpy")
        for code in codes
    )


def _package_of(code: Any) -> str:
    """Name the package that something callable comes from."""
    named = (
        code
        if isinstance(getattr(code, "__module__", None), str)
        else type(code)
    )
    return named.__module__.partition(".")[0]


def _hook_arguments(name: str, args: tuple) -> tuple[tuple, dict[str, Any]]:
    """Split a hook's arguments as Keras does, with logs always a dict."""
    position_count = 0 if name in RUN_HOOKS else 1
    position = args[:position_count]
    logs = args[position_count] if len(args) > position_count else None
    logs = {} if logs is None else logs
    if name in BATCH_HOOKS:
        return position, {"logs": logs}
    return (*position, logs), {}


def _find_history(callbacks: list[Any]) -> Any:
    # Keras takes the last one where there are several.
    histories = [c for c in callbacks if isinstance(c, keras.callbacks.History)]
    return histories[-1] if histories else None


def _add_notes(error: BaseException, failures: list[Exception]) -> None:
    for failure in failures:
        error.add_note(f"While closing callbacks: {failure!r}")
