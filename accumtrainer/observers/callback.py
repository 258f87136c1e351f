"""Host-side observers: their hooks and their base class."""

import inspect
from typing import Any

from accumtrainer import errors
from accumtrainer.keras_api import keras, refuse_other_keras
from accumtrainer.keras_api.types import Model

RUN_HOOKS = (
    "on_train_begin",
    "on_train_end",
    "on_test_begin",
    "on_test_end",
    "on_predict_begin",
    "on_predict_end",
)
"""Hooks that take logs and nothing else."""

BATCH_HOOKS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_predict_batch_begin",
    "on_predict_batch_end",
)
"""Hooks that Keras calls with `logs` as a keyword."""

WINDOW_HOOKS = ("on_micro_batch", "on_accumulate", "on_apply")
"""Hooks whose names a Trainer shares, for tensors instead of numbers."""

HOOKS = (
    *RUN_HOOKS,
    *BATCH_HOOKS,
    *WINDOW_HOOKS,
    "on_epoch_begin",
    "on_epoch_end",
    "on_validation_end",
    "on_safe_point",
)
"""The name of every hook of a callback."""

CALLED = tuple(
    name
    for name in vars(keras.callbacks.Callback)
    if name.startswith(("on_train", "on_test", "on_epoch", "set_"))
)
"""What Keras calls of a callback that `fit` is given."""


class Callback(keras.callbacks.Callback):
    """Observe training, one micro-batch, window and update at a time.

    A callback sees numbers on the host and returns nothing; what should
    change the computation is a method of `Trainer`. Every hook of
    `keras.callbacks.Callback` may be overridden too. There, a "batch" is one
    update. In a fused window the hooks of its micro-batches are called, in
    order, when the window returns.

    Attributes:
        model: the `keras.Model` in training.
        params: dict with the run's `epochs`, infinity if nothing but
            `max_updates` or `max_seconds` ends it, and `steps`; in a `fit` of
            a Trainer also the `batch_size` and `samples` of an epoch. `None`
            where unknown.
        trainer: the `Trainer`, or `None` before one has set it.
        looks_at_model: whether its hooks read or write the model. Say
            `False` in a class whose hooks do not. Then JAX need not make the
            model's variables current for them, and PyTorch does not look at
            what they may have changed in it.
        is_logger: whether its hooks are called after those of the other
            callbacks, to see what these write into the logs; but the opening
            ones, such as `on_train_begin`, before them.
        needs_gradient_norms: whether `gradient_norm` and `gradient_weight`
            shall be in the logs of `on_micro_batch` and `on_accumulate`, and
            in `trainer.micro_batch_logs`: the norm of the gradient that is
            added to the window, unscaled, and by what it is multiplied then.
            Measuring it reads every gradient once more.
        checkpoints: the `CheckpointDirectory` it saves into, where
            `fit(resume_from="auto")` looks, or `None`.
        signals: names of signals, such as `"SIGTERM"`, at which training
            shall end in good order, with `Preempted`.
        needs_trainer: whether it is of no use without a `trainer`, and so
            refused among the callbacks of `keras.Model.fit`.
        has_state: whether `get_state` and `set_state` say what a checkpoint
            keeps of it. Otherwise a checkpoint keeps those of its attributes
            that are plain values and have changed in training.

    Examples:
        >>> class PrintUpdates(Callback):
        ...     def on_apply(self, update, logs=None):
        ...         print(update, logs["loss"])
        >>> PrintUpdates().on_apply(7, {"loss": 0.5})
        7 0.5
    """

    trainer: Any = None
    looks_at_model = True
    is_logger = False
    needs_gradient_norms = False
    checkpoints: Any = None
    signals: tuple[str, ...] = ()
    needs_trainer = False
    has_state = False
    _is_told_its_trainer = False

    @property
    def may_write(self) -> bool:
        """Whether it may leave anything behind.

        Not in a trial (`fast_dev_run`), and in one process of several.
        """
        is_trial = (self.params or {}).get("fast_dev_run", False)
        return not is_trial and getattr(self.trainer, "is_chief", True)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: all but the Trainer.

        Like the model, it is set again when a training begins; unlike it, it
        holds what has been compiled, which cannot be copied.
        """
        return vars(self) | {"trainer": None}

    def set_trainer(self, trainer: Any) -> None:
        """Tell the callback which Trainer it watches."""
        self.trainer = trainer
        self._is_told_its_trainer = True

    def set_model(self, model: Model) -> None:
        """Tell the callback which model it watches.

        Raises:
            TypeError: it needs a Trainer, and Keras trains without one.
        """
        is_told, self._is_told_its_trainer = self._is_told_its_trainer, False
        if self.needs_trainer and not is_told:
            raise TypeError(
                errors.NEEDS_TRAINER.format(callback=type(self).__name__)
            )
        super().set_model(model)

    def on_micro_batch(self, index: int, logs: Any = None) -> None:
        """Look at one micro-batch, after its forward and backward pass.

        Args:
            index: position of the micro-batch in its window, from 0.
            logs: `Logs` of this micro-batch.
        """

    def on_accumulate(self, index: int, logs: Any = None) -> None:
        """Look on when a micro-batch has been added to its window.

        Args:
            index: position of the micro-batch in its window, from 0.
            logs: `Logs` of this micro-batch.
        """

    def on_apply(self, update: int, logs: Any = None) -> None:
        """Look at one window, applied or skipped.

        Args:
            update: number of updates made so far, over the Trainer's life.
            logs: `Logs` of this window alone.
        """

    def on_validation_end(self, update: int, logs: Any = None) -> None:
        """Look at the result of one validation during training.

        Args:
            update: number of updates made so far, over the Trainer's life.
            logs: `Logs` of the validation, names prefixed with `val_`.
        """

    def on_safe_point(self, reason: str, logs: Any = None) -> None:
        """Look at training at rest: `trainer.snapshot()` is consistent now.

        Called after all other hooks of all callbacks.

        Args:
            reason: `"update"` or `"epoch"`, that one is done; `"stop"`, that
                training ends amid an epoch; `"interruption"`, that a signal
                has ended it; `"error"`, that the data have; `"end"`.
            logs: empty.
        """

    def get_state(self) -> Any:
        """Return what a checkpoint must keep, for a class with `has_state`.

        Returns:
            Dict of what JSON knows: numbers, strings, `None`, lists, dicts.
        """
        return {}

    def set_state(self, state: Any) -> None:
        """Go on from a state.

        Called twice: before `on_train_begin`, so that it can be taken into
        account there, and when everything has begun, so that nothing is
        reset.

        Args:
            state: what `get_state` returned when the checkpoint was made.
        """


def flatten_callbacks(callbacks: Any) -> list[Any]:
    """List the callbacks in nested lists, in their order, without `None`.

    Examples:
        >>> flatten_callbacks(None), flatten_callbacks(["a", ["b", None]])
        ([], ['a', 'b'])
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    if isinstance(callbacks, list | tuple):
        return [c for item in callbacks for c in flatten_callbacks(item)]
    return [callbacks]


def check_callback(callback: Any) -> None:
    """Refuse what is not a callback, or is a Trainer's method in disguise.

    Raises:
        TypeError: if it lacks hooks of a `keras.callbacks.Callback`.
        ValueError: if one of its hooks takes what a Trainer's hook takes.
    """
    if isinstance(callback, type):
        raise TypeError(
            "callbacks must hold callbacks, not classes. Received: the class "
            f"{callback.__name__}. Call it: {callback.__name__}(...)."
        )
    refuse_other_keras("callbacks", callback)
    # Keras asks for no more of a class that is not derived from its own.
    if not all(callable(getattr(callback, name, None)) for name in CALLED):
        raise TypeError(
            "callbacks must hold keras.callbacks.Callback objects, or others "
            f"with all their hooks. Received: {callback!r} of type "
            f"{type(callback).__name__}. Derive its class from "
            "accumtrainer.Callback, or wrap a function in "
            "keras.callbacks.LambdaCallback."
        )
    for hook in WINDOW_HOOKS:
        parameters = _hook_parameters(callback, hook)
        if {"gradients", "info"} & set(parameters):
            raise ValueError(
                errors.CALLBACK_WITH_TRAINER_HOOK.format(
                    callback=type(callback).__name__,
                    hook=hook,
                    parameters=", ".join(parameters),
                    position="update" if hook == "on_apply" else "index",
                )
            )


def is_overridden(callback: Any, name: str) -> bool:
    """Say whether a callback does anything at the hook called `name`.

    Hooks set on the object count, as do Keras's older names `on_batch_begin`
    and `on_batch_end`, which the hooks of training batches call.

    Examples:
        >>> nan_guard = keras.callbacks.TerminateOnNaN()
        >>> is_overridden(nan_guard, "on_train_batch_end")
        True
        >>> is_overridden(nan_guard, "on_epoch_end")
        False
    """
    function = _unbound(getattr(callback, name, None))
    unfilled = (
        None,
        vars(keras.callbacks.Callback).get(name),
        vars(Callback).get(name),
    )
    if not any(function is default for default in unfilled):
        return True
    return name.startswith("on_train_batch_") and is_overridden(
        callback, name.replace("_train_batch_", "_batch_")
    )


def _unbound(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _hook_parameters(callback: Any, name: str) -> tuple[str, ...]:
    if not is_overridden(callback, name):
        return ()
    try:
        return tuple(inspect.signature(getattr(callback, name)).parameters)
    except ValueError:  # Some functions written in C have no signature.
        return ()
