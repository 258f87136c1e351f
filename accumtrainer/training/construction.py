"""What a Trainer checks and settles before it exists.

Everything here runs before anything changes: a refused argument leaves the
model and the optimizer as they were. The one exception is a model whose class
compiles it in its own way: what it has settled then is known only afterwards.
"""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from accumtrainer import errors
from accumtrainer.config import Accumulation, LossScale
from accumtrainer.keras_api import (
    check_loss_support,
    check_replica_support,
    check_support,
    compiled_arguments,
    flatten_layers,
    is_known_to,
    keras,
    optimizers_of,
    overrides,
    refuse_other_keras,
    tree,
)
from accumtrainer.keras_api.rebuild import keeps_of_frozen, rebuild_in_scope
from accumtrainer.keras_api.types import Model, Optimizer
from accumtrainer.observers.callback import check_callback, flatten_callbacks
from accumtrainer.steps import Backend, make_backend
from accumtrainer.training.train_steps import refusal_of_train_step
from accumtrainer.window.hooks import Hooks
from accumtrainer.window.loss_scale import computes_in_float16


def check_model(model: Any) -> None:
    """Refuse what cannot be trained as a window.

    Raises:
        TypeError: not a Keras model.
        ValueError: it steps by itself.
    """
    refuse_other_keras("model", model)
    if not isinstance(model, keras.Model):
        wrapped = getattr(model, "module", None)
        if isinstance(wrapped, keras.Model):
            raise TypeError(
                errors.WRAPPED_MODEL.format(
                    wrapper=type(model).__name__, model=type(wrapped).__name__
                )
            )
        raise TypeError(
            "model must be a keras.Model. Received: "
            f"{type(model).__name__}. Wrap your layers in keras.Model or "
            "keras.Sequential."
        )
    if overrides(model, "train_step"):
        raise ValueError(refusal_of_train_step(model))
    if "make_train_function" in vars(model):
        # Of `GradientAccumulation`, in a `fit` that an error has ended: called,
        # as by the next `fit`, it goes. Another one stays, and is refused.
        model.make_train_function()
    if overrides(model, "make_train_function"):
        raise ValueError(
            errors.MODEL_WITH_OWN_STEP.format(
                model=type(model).__name__,
                step="make_train_function",
                remedy="hooks of a Trainer",
            )
        )


@dataclass(frozen=True, slots=True)
class Compilation:
    """How a Trainer compiles its model.

    Args:
        optimizer: bare, without loss scaling around it.
        loss_scale: `None` for no scaling.
        arguments: the others of `Model.compile`, by name.
        is_new: whether the model is not compiled like this yet.
    """

    optimizer: Optimizer
    loss_scale: LossScale | None
    arguments: dict[str, Any]
    is_new: bool

    @property
    def initial_scale(self) -> float:
        """By what the first loss is multiplied."""
        return self.loss_scale.initial if self.loss_scale else 1.0

    def apply(self, model: Model, *, run_eagerly: bool) -> None:
        """Compile a model with the live optimizer.

        Args:
            model: compiled or not.
            run_eagerly: whether it runs eagerly from now on, as one does that
                was compiled so.
        """
        run_eagerly = run_eagerly or model.run_eagerly
        if not self.is_new:
            model.optimizer = self.optimizer
            model.run_eagerly = run_eagerly
            return
        # That of the model's own class may take other arguments.
        keras.Model.compile(
            model,
            optimizer=self.optimizer,
            auto_scale_loss=False,
            run_eagerly=run_eagerly,
            **self.arguments,
        )


class AsCompiled:
    """What of a compiled model has to stay as its Trainer has left it.

    Args:
        hooks: the Trainer, which has compiled the model.
    """

    def __init__(self, hooks: Hooks):
        self._hooks = hooks
        self._metrics = list(hooks.model.metrics)

    def check_metrics(self) -> None:
        """Refuse a model that has been compiled anew, with new metrics."""
        model = self._hooks.model
        now = model.metrics
        if any(all(old is not new for new in now) for old in self._metrics):
            raise ValueError(errors.COMPILED_ANEW.format(model=model.name))

    def check_optimizer(self) -> None:
        """Refuse another optimizer than that of compiled windows."""
        now, before = self._hooks.model.optimizer, self._hooks.optimizer
        if now is not before:
            raise ValueError(
                errors.OTHER_OPTIMIZER.format(
                    now=type(now).__name__, before=type(before).__name__
                )
            )


def settle_compilation(
    model: Model, optimizer: Any, loss_scale: Any, given: dict[str, Any]
) -> Compilation:
    """Settle how a model is compiled, and refuse what is wrong.

    Args:
        model: compiled or not.
        optimizer: what the user gave, or `None`.
        loss_scale: `"auto"`, `LossScale`, `None` or `False`.
        given: other arguments of `compile`, `None` where not given.
    """
    with make_backend(model=model).replicas.scope():
        # An optimizer that is made here is where the model's weights are.
        if not model.compiled and overrides(model, "compile"):
            optimizer, given = compile_by_itself(model, optimizer, given)
        is_new = optimizer is not None or any(
            value is not None for value in given.values()
        )
        optimizer, carried = resolve_optimizer(model, optimizer)
    loss_scale = resolve_loss_scale(model, loss_scale, carried)
    arguments = resolve_compile_arguments(model, given)
    check_loss(arguments)
    return Compilation(optimizer, loss_scale, arguments, is_new)


def checked_callbacks(callbacks: Any) -> Any:
    """Refuse callbacks that are none, and return them."""
    for callback in flatten_callbacks(callbacks):
        check_callback(callback)
    return callbacks


def check_devices(
    trainer: Hooks,
    accumulation: Accumulation,
    seed: int | None,
    *,
    run_eagerly: bool,
) -> int:
    """Refuse devices and memory that an update cannot be made with.

    Returns:
        The seed; one that all processes have drawn together where none is
        given.
    """
    if accumulation.per_example and trainer.has_window_loss:
        raise ValueError(
            errors.PER_EXAMPLE_WINDOW_LOSS.format(
                trainer=type(trainer).__name__
            )
        )
    backend = make_backend(model=trainer.model)
    check_replicas(trainer, trainer.model, backend.replicas.count, run_eagerly)
    check_memory(accumulation, backend, run_eagerly)
    return draw_seed(backend) if seed is None else int(seed)


def compile_by_itself(
    model: Model, optimizer: Any, given: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Have a model compile itself by its own method.

    Args:
        model: one whose class overrides `compile`.
        optimizer: what the user gave.
        given: other arguments of `compile`, `None` where not given.

    Returns:
        The optimizer and the dict that it leaves to settle: nothing where it
        has called the `compile` of Keras.

    Raises:
        ValueError: its method takes other arguments.
    """
    arguments = {"optimizer": optimizer, **given}
    arguments = {k: v for k, v in arguments.items() if v is not None}
    if not arguments:
        return optimizer, given
    try:
        model.compile(**arguments)
    except TypeError as error:
        # Its own signature does not say what it hands on to others.
        raise ValueError(
            errors.OWN_COMPILE.format(
                model=type(model).__name__,
                signature=inspect.signature(model.compile),
                given=", ".join(arguments),
                error=error,
            )
        ) from error
    if not model.compiled:
        return optimizer, given
    return None, dict.fromkeys(given)


def resolve_optimizer(
    model: Model, optimizer: Any
) -> tuple[Optimizer, LossScale | None]:
    """Find the optimizer, and the loss scale that goes with it.

    Args:
        model: what it trains.
        optimizer: what the user gave, or `None` for the compiled one.

    Returns:
        The optimizer, bare; and `None` where no `LossScaleOptimizer` was
        around it.

    Raises:
        ValueError: there is none, or it accumulates or scales by itself, or
            Keras cannot use it rightly with this model.
    """
    refuse_other_keras("optimizer", optimizer)
    if optimizer is None:
        if not model.compiled or model.optimizer is None:
            raise ValueError(
                "optimizer must be given for a model that is not compiled. "
                "Received: optimizer=None. Give an optimizer, for example "
                "Trainer(model, optimizer='adam', ...)."
            )
        optimizer = model.optimizer
    optimizer = _get(keras.optimizers.get, "optimizer", optimizer, "'adam'")
    loss_scale = None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        loss_scale = _carried_loss_scale(optimizer)
        optimizer = optimizer.inner_optimizer
    for member in optimizers_of(optimizer)[1]:
        steps = getattr(member, "gradient_accumulation_steps", None)
        if steps:
            raise ValueError(errors.OPTIMIZER_ACCUMULATES.format(steps=steps))
    _check_loss_scaling(optimizer)
    trained = model.trainable_variables
    unknown = [v for v in trained if not is_known_to(optimizer, v)]
    for variable in unknown:
        if not keeps_of_frozen(optimizer, model, variable):
            path = variable.path
            raise ValueError(errors.OPTIMIZER_OF_OTHERS.format(variable=path))
    check_support(model, optimizer)
    if unknown:
        rebuild_in_scope(optimizer, model)
    return optimizer, loss_scale


def _check_loss_scaling(optimizer: Optimizer) -> None:
    """Refuse an optimizer that scales the loss, which nobody asks it to."""
    if getattr(optimizer, "loss_scale_factor", None) is not None:
        raise ValueError(
            "optimizer must not scale the loss itself. Received: "
            f"loss_scale_factor={optimizer.loss_scale_factor}. Make it "
            "without, and use Trainer(loss_scale=LossScale(initial=...))."
        )
    plain = getattr(keras.optimizers.Optimizer, "scale_loss", None)
    if getattr(type(optimizer), "scale_loss", None) is not plain:
        name = type(optimizer).__name__
        raise ValueError(errors.OVERRIDDEN_LOSS_SCALING.format(optimizer=name))


def _get(get: Callable[[Any], Any], name: str, value: Any, example: str) -> Any:
    """Look up what may be given by name, refusing what Keras refuses."""
    try:
        return get(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be what keras.{name.rstrip('s')}s.get understands. "
            f"Received: {name}={value!r}. Write for example "
            f"{name}={example}."
        ) from error


def _carried_loss_scale(optimizer: Optimizer) -> LossScale:
    initial = float(optimizer.initial_scale)
    if optimizer.built:
        initial = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
    bounds = LossScale()
    return LossScale(
        initial=initial,
        growth_interval=optimizer.dynamic_growth_steps,
        minimum=min(initial, bounds.minimum),
        maximum=max(initial, bounds.maximum),
    )


def resolve_loss_scale(
    model: Model, loss_scale: Any, carried: LossScale | None
) -> LossScale | None:
    """Settle how the loss is scaled.

    Args:
        model: what is trained.
        loss_scale: `"auto"`, `LossScale`, `None` or `False`.
        carried: that of a `LossScaleOptimizer`.
    """
    if loss_scale is None or loss_scale is False:
        return None
    if isinstance(loss_scale, LossScale):
        return loss_scale
    if loss_scale != "auto":
        raise TypeError(
            "loss_scale must be 'auto', a LossScale or None. Received: "
            f"loss_scale={loss_scale!r}. Use LossScale(initial=...) to choose "
            "one."
        )
    if carried is not None:
        return carried
    return LossScale() if computes_in_float16(model) else None


def resolve_compile_arguments(
    model: Model, given: dict[str, Any]
) -> dict[str, Any]:
    """Merge the Trainer's arguments over what the model was compiled with.

    Args:
        model: compiled or not.
        given: `loss`, `loss_weights`, `metrics` and `weighted_metrics`, each
            `None` where not given.

    Raises:
        TypeError: one of them belongs to the other Keras.
    """
    for name, value in given.items():
        refuse_other_keras(name, *tree.flatten(value))
    if not model.compiled:
        return dict(given)
    compiled = compiled_arguments(model)
    if given["loss"] is not None:
        compiled["loss_weights"] = None  # they belonged to the other loss
    return {
        name: compiled[name] if value is None else value
        for name, value in given.items()
    }


def check_loss(arguments: dict[str, Any]) -> None:
    """Refuse losses that Keras does not know, or computes wrongly.

    Whether there is any loss shows when the model runs: layers may add some.
    """
    for leaf in tree.flatten(arguments["loss"]):
        if str(leaf).lower() not in ("crossentropy", "ce"):
            get = keras.losses.get
            example = "'sparse_categorical_crossentropy'"
            check_loss_support(_get(get, "loss", leaf, example))


def draw_seed(backend: Backend) -> int:
    """Draw a seed, the same in all processes.

    It is drawn as Keras draws those of its layers, so that
    `keras.utils.set_random_seed` settles it too.
    """
    seed = random.getrandbits(32)
    if backend.replicas.processes == 1:
        return seed
    # In two parts, which float32 holds exactly.
    high, low = backend.replicas.gather([seed >> 16, seed & 0xFFFF])[0]
    return int(high) << 16 | int(low)


def check_options(
    *,
    denominator: Any,
    max_consecutive_skips: Any,
    jit_compile: Any,
    run_eagerly: Any,
    seed: Any,
) -> None:
    """Refuse options of the wrong kind."""
    if not (
        denominator is None or denominator == "samples" or callable(denominator)
    ):
        raise TypeError(
            "denominator must be None, 'samples' or a function of a batch. "
            f"Received: denominator={denominator!r}. Use 'samples' for a loss "
            "that averages over the batch."
        )
    if max_consecutive_skips is not None:
        _check_whole(
            "max_consecutive_skips",
            max_consecutive_skips,
            "Use None to allow any number of them.",
            minimum=1,
        )
    if jit_compile != "auto" and not isinstance(jit_compile, bool):
        raise TypeError(
            "jit_compile must be 'auto', True or False. Received: "
            f"jit_compile={jit_compile!r}. Use 'auto' to have it chosen."
        )
    if not isinstance(run_eagerly, bool):
        raise TypeError(
            "run_eagerly must be True or False. Received: "
            f"run_eagerly={run_eagerly!r}. Use True to run without compiling, "
            "for debugging."
        )
    if seed is not None:
        _check_whole("seed", seed, "Use None to draw one.", minimum=0)


def _check_whole(name: str, value: Any, remedy: str, *, minimum: int) -> None:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < minimum:
        raise ValueError(
            f"{name} must be a whole number of at least {minimum}, or None. "
            f"Received: {name}={value!r}. {remedy}"
        )


def check_replicas(
    hooks: Hooks, model: Model, replicas: int, run_eagerly: bool
) -> None:
    """Refuse several devices where they would not make one update.

    Raises:
        ValueError: something needs a single device.
    """
    if replicas == 1:
        return
    check_replica_support(replicas)
    synchronized = [
        layer.name
        for layer in flatten_layers(model)
        if getattr(layer, "synchronized", False)
    ]
    for is_refused, received in (
        (run_eagerly, "run_eagerly=True"),
        (hooks.has_window_loss, "a loss over the whole window"),
        (synchronized, f"synchronized=True in {', '.join(synchronized)}"),
    ):
        if is_refused:
            raise ValueError(
                errors.NOT_WITH_REPLICAS.format(
                    replicas=replicas, received=received
                )
            )


def check_memory(
    accumulation: Accumulation, backend: Backend, run_eagerly: bool
) -> None:
    """Refuse to look for what fits where nobody knows what there is.

    Raises:
        ValueError: there is no limit, or no prediction.
    """
    if accumulation.micro_batch_size != "auto":
        return
    if run_eagerly:
        raise ValueError(errors.EAGER_MEMORY)
    limit = accumulation.memory_limit_bytes
    if limit is None and backend.memory_limit_bytes() is None:
        raise ValueError(errors.NO_MEMORY_LIMIT)
