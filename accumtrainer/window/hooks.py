"""The hooks of a Trainer: what a researcher overrides, with the defaults.

Hooks are traced into the compiled step. They take tensors and return tensors;
what they do on the host happens once, while the step is traced.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from accumtrainer import errors
from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import (
    call_predict_step,
    losses_weighed_by,
    make_metrics_of_losses,
    ops,
    overrides,
    tree,
)
from accumtrainer.keras_api.types import Nest, Tensor
from accumtrainer.window.compiled_losses import CompiledLoss
from accumtrainer.window.losses import (
    BareLoss,
    WeightedLoss,
    count_samples,
    known_length,
    values_or_bare,
)

HOOK_NAMES = (
    "on_micro_batch",
    "compute_loss",
    "on_accumulate",
    "perturb",
    "on_apply",
    "after_apply",
    "predict_step",
)

REDUCTIONS = ("mean", "sum", "max", "min")


@dataclass(frozen=True, kw_only=True, slots=True)
class Info:
    """Where in training a hook is called, as far as it is known there.

    Args:
        update: scalar tensor, int32, updates applied so far.
        epoch: scalar tensor, int32, index of the epoch.
        index: scalar tensor, int32, index of the micro-batch in its window;
            `None` in `perturb`, `on_apply` and `after_apply`.
        micro_batches: scalar tensor, int32, k. With several replicas, those
            that this one runs; in `perturb`, `on_apply` and `after_apply` all
            of them.
        is_last: scalar tensor, bool, whether this is the window's last
            micro-batch; `None` where `index` is.
        loss: scalar tensor, float32: the micro-batch's loss in
            `on_accumulate`, the window's in `perturb`, `on_apply` and
            `after_apply`.
        weight: scalar tensor, float32, how much the micro-batch counts, in
            `on_accumulate`.
        total_weight: scalar tensor, float32, how much the window counts, in
            `perturb`, `on_apply` and `after_apply`.
        loss_scale: scalar tensor, float32, constant in a window, 1 where the
            loss is not scaled.
        training: whether gradients will be taken.
    """

    update: Any = None
    epoch: Any = None
    index: Any = None
    micro_batches: Any = None
    is_last: Any = None
    loss: Any = None
    weight: Any = None
    total_weight: Any = None
    loss_scale: Any = None
    training: bool = True


class LogBook:
    """Collects what hooks log while they are traced.

    Attributes:
        reductions: dict from what has been logged to how it is reduced.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple] | None = None
        self.reductions: dict[str, str] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[dict[str, tuple]]:
        """Collect what is logged inside, `{name: (value, weight)}`."""
        before, self._entries = self._entries, {}
        try:
            yield self._entries
        finally:
            self._entries = before

    @contextlib.contextmanager
    def surveying(self) -> Iterator[dict[str, str]]:
        """Note what is logged inside the block, and how it is reduced."""
        before, self.reductions = self.reductions, {}
        try:
            yield self.reductions
        finally:
            self.reductions = before | self.reductions

    def record(self, name: str, value: Any, weight: Any, reduce: str) -> None:
        """Note one scalar; see `Hooks.log`."""
        if self._entries is None:
            raise RuntimeError(errors.LOG_OUTSIDE_HOOK.format(name=name))
        if reduce not in REDUCTIONS:
            raise ValueError(
                f"reduce must be one of {REDUCTIONS}. Received: "
                f"reduce={reduce!r} for log name {name!r}. Use 'mean' for "
                "averages."
            )
        known = self.reductions.setdefault(name, reduce)
        if known != reduce or name in self._entries:
            raise ValueError(errors.LOGGED_TWICE.format(name=name))
        value = ops.cast(value, "float32")
        if len(value.shape) != 0:
            raise ValueError(
                f"value of log name {name!r} must be a scalar. Received: "
                f"shape {tuple(value.shape)}. Reduce it first, for example "
                "with keras.ops.mean."
            )
        weight = ops.cast(1.0 if weight is None else weight, "float32")
        self._entries[name] = (value, weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class HookContext:
    """What the default hooks go by, settled when their host is made.

    Args:
        compiled_loss: the loss of `Model.compile`; `None` where there is none,
            or the model computes its loss itself.
        denominator: what a bare scalar loss was averaged over: `"samples"`, a
            function of a `Batch`, or `None` for unknown.
        has_metrics: whether the model has metrics of its own to update.
        model_computes_loss: whether it has a `compute_loss` of its own.
        model_takes_training: whether its `call` is told of training.
        log_book: collects what hooks log.
        tracked_metrics: variables of metrics that are tracked beside the
            model's, filled until training begins.
        losses: nest of the losses of `Model.compile` and their weights.
    """

    compiled_loss: CompiledLoss | None
    denominator: Literal["samples"] | Callable[[Batch], Any] | None
    has_metrics: bool
    model_computes_loss: bool
    model_takes_training: bool
    log_book: LogBook = field(default_factory=LogBook)
    tracked_metrics: list[Any] = field(default_factory=list)
    losses: Nest = ()

    @classmethod
    def of(
        cls, model: Any, arguments: dict[str, Any], denominator: Any
    ) -> "HookContext":
        """Look at a model, and at the arguments of `Model.compile`."""
        computes_loss = overrides(model, "compute_loss")
        compiled_loss = None
        if arguments["loss"] is not None and not computes_loss:
            compiled_loss = CompiledLoss(
                arguments["loss"],
                arguments["loss_weights"],
                getattr(model, "output_names", None),
            )
        has_metrics = any(
            arguments[name] is not None
            for name in ("metrics", "weighted_metrics")
        )
        return cls(
            compiled_loss=compiled_loss,
            denominator=denominator,
            has_metrics=has_metrics or overrides(model, "compute_metrics"),
            model_computes_loss=computes_loss,
            model_takes_training=takes_argument(model.call, "training"),
            losses=(arguments["loss"], arguments["loss_weights"]),
        )

    def mode(self, *, training: bool) -> dict[str, bool]:
        """Make the arguments that tell the model, where it wants to know."""
        return {"training": training} if self.model_takes_training else {}


class Hooks:
    """What a Trainer does to a window, each part open to a subclass."""

    model: Any
    optimizer: Any
    loss_scale: Any
    rng: Any
    has_window_loss = False
    _model_losses = 0  # how often `compute_loss` of the model was called
    _context: HookContext  # a name that a subclass would not take

    def on_micro_batch(self, batch: Batch, info: Info) -> Batch:
        """Change a micro-batch before the forward pass, in training only.

        Args:
            batch: `Batch(x, y, sample_weight)` of tensors.

        Returns:
            `Batch` of the same structure.
        """
        del info
        return batch

    def compute_loss(
        self, batch: Batch, info: Info
    ) -> WeightedLoss | dict[str, WeightedLoss]:
        """Compute the loss of a micro-batch, in training and validation.

        Args:
            batch: `Batch(x, y, sample_weight)` of tensors.
            info: `info.training` is a Python bool.

        Returns:
            `WeightedLoss`, or a dict of them by name, which are added up.
            Losses of several outputs that share a name are numbered in it.
        """
        mode = self._context.mode(training=info.training)
        outputs = self.model(batch.x, **mode)
        if self._context.model_computes_loss:
            return self._model_loss(batch, outputs, info)
        parts, compiled_loss = [], self._context.compiled_loss
        if compiled_loss is not None:
            parts = compiled_loss(batch.y, outputs, batch.sample_weight)
        if len(parts) > 1:
            # Who reads the metrics of a model finds those of its losses.
            make_metrics_of_losses(self.model, batch.y, outputs)
        if not parts:
            samples = count_samples(batch.x)
            return WeightedLoss(
                ops.zeros(()),
                samples,
                outputs,
                is_uniform=known_length(batch.x) is not None,
            )
        losses: dict[str, WeightedLoss] = {}
        for part in parts:
            key = _unused(part.name, losses)
            losses[key] = replace(
                self._known_weight(part.loss, batch),
                coefficient=part.coefficient,
                name=None if key == part.name else part.name,
            )
        first = next(iter(losses))
        losses[first] = replace(losses[first], outputs=outputs)
        return losses if len(losses) > 1 else losses[first]

    def on_accumulate(self, gradients: list[Any], info: Info) -> list[Any]:
        """Change one micro-batch's gradients before they are added.

        Args:
            gradients: list of tensors, one per trainable variable, float32,
                unscaled, zeros where a variable is unused, or is assigned
                what its gradient is, as the scales of float8 layers are.
            info: `Info` with `loss` and `weight` of the micro-batch.

        Returns:
            List of tensors of the same shapes.
        """
        del info
        return gradients

    def perturb(self, gradients: list[Any], info: Info) -> list[Any]:
        """Say where beside the weights the update's gradient is to be taken.

        Where it is overridden, a window runs twice: at the weights, and where
        this moves them to. The gradients there are those of the update, which
        is made to the weights as they were.

        Args:
            gradients: list of tensors, those of the window at the weights, as
                `on_apply` gets them.
            info: `Info` with `loss` and `total_weight` of the window there.

        Returns:
            List of tensors of the same shapes, to be added to the weights.
        """
        del info
        return [ops.zeros_like(gradient) for gradient in gradients]

    def on_apply(self, gradients: list[Any], info: Info) -> list[Any]:
        """Change the window's gradients before the optimizer clips them.

        Args:
            gradients: list of tensors, one per trainable variable, float32,
                zeros where a variable is unused, or is assigned what its
                gradient is.
            info: `Info` with `loss` and `total_weight` of the window.

        Returns:
            List of tensors of the same shapes.
        """
        del info
        return gradients

    def after_apply(self, info: Info) -> None:
        """Act after an applied update; may assign to tracked state."""

    def predict_step(self, batch: Batch) -> Any:
        """Compute what `predict` returns for a batch.

        Args:
            batch: `Batch` of which only `x` is set.

        Returns:
            Nest of tensors whose first axis is the batch.
        """
        if overrides(self.model, "predict_step"):
            return self._predict_by_model(batch)
        return self.model(batch.x, **self._context.mode(training=False))

    def _predict_by_model(self, batch: Batch) -> Nest:
        if not self.model.built:
            self.model(batch.x, **self._context.mode(training=False))
        return call_predict_step(self.model, batch.x)

    def log(
        self,
        name: str,
        value: Any,
        weight: Any = None,
        reduce: Literal["mean", "sum", "max", "min"] = "mean",
    ) -> None:
        """Put a scalar tensor into the logs, from any hook.

        Args:
            name: key in `logs` and `History`.
            value: scalar tensor.
            weight: scalar tensor, how much it counts in a mean. Default 1.
            reduce: `"mean"`, `"sum"`, `"max"` or `"min"` over a window and
                over an epoch.

        Raises:
            RuntimeError: called outside a hook.
        """
        self._context.log_book.record(name, value, weight, reduce)

    @property
    def variables_of_loss(self) -> list[Any]:
        """Variables of the compiled loss, which mean nothing to training."""
        compiled_loss = self._context.compiled_loss
        return [] if compiled_loss is None else compiled_loss.variables

    def overrides(self, name: str) -> bool:
        """Whether a subclass has its own version of a hook."""
        hook = getattr(self, name)
        return getattr(hook, "__func__", hook) is not getattr(Hooks, name)

    def _model_loss(
        self, batch: Batch, outputs: Nest, info: Info
    ) -> WeightedLoss:
        model = self.model
        mode: dict[str, bool] = {}
        if takes_argument(model.compute_loss, "training"):
            mode["training"] = info.training
        self._model_losses += 1
        x, y, weight = batch
        given = {"x": x, "y": y, "y_pred": outputs, "sample_weight": weight}
        # Keras gives them by position, Keras Core by name.
        names = inspect.signature(model.compute_loss).parameters
        with losses_weighed_by(model, count_samples(batch.x)):
            if given.keys() <= names.keys():
                loss = model.compute_loss(**given, **mode)
            else:
                loss = model.compute_loss(*given.values(), **mode)
        if not isinstance(loss, WeightedLoss):
            origin = f"{type(model).__name__}.compute_loss"
            loss = values_or_bare(loss, origin)
        return replace(self._known_weight(loss, batch), outputs=outputs)

    def _known_weight(
        self, loss: "WeightedLoss | BareLoss", batch: Batch
    ) -> WeightedLoss:
        """Give a bare scalar the denominator that the user stated.

        Where nobody has, samples are a guess; `check_bare_losses` looks at
        what depends on it.
        """
        if isinstance(loss, WeightedLoss):
            return loss
        value, origin = loss
        denominator = self._context.denominator
        if callable(denominator):
            weight = ops.cast(denominator(batch), "float32")
            return WeightedLoss(value, weight, origin=origin)
        samples = count_samples(batch.x)
        return WeightedLoss(
            value,
            samples,
            is_uniform=known_length(batch.x) is not None,
            origin=origin,
        )


def context_of(hooks: Hooks) -> HookContext:
    """Return what the default hooks of a Trainer go by."""
    return hooks._context


def collect_logs(
    hooks: Hooks,
) -> contextlib.AbstractContextManager[dict[str, tuple]]:
    """Collect what hooks log inside a block, `{name: (value, weight)}`.

    Examples:
        ```
        with collect_logs(hooks) as logs:
            hooks.after_apply(info)
        ```
    """
    return hooks._context.log_book.open()


def _unused(name: str, names: Collection[str]) -> str:
    """Append a number to a name that is among others already."""
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    free = (key for key in itertools.chain([name], numbered))
    return next(key for key in free if key not in names)


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Tell whether a function names an argument; Keras asks no more."""
    return name in inspect.signature(function).parameters


def check_batch(given: Any, returned: Any) -> None:
    """Refuse a batch of another structure than `on_micro_batch` was given.

    Raises:
        TypeError: the structures differ.
    """
    try:
        tree.assert_same_structure(given, returned)
    except (ValueError, TypeError) as error:
        raise TypeError(
            errors.WRONG_STRUCTURE.format(
                hook="on_micro_batch",
                rule="a Batch of the structure it was given",
                received=tree.map_structure(lambda leaf: "*", returned),
            )
        ) from error


def check_gradients(hook: str, given: list[Tensor], returned: Any) -> None:
    """Refuse gradients of another number or other shapes than a hook was given.

    Args:
        hook: its name.
        returned: what came back.

    Raises:
        TypeError: they differ; the first difference is named.
    """
    rule = f"one gradient per trainable variable ({len(given)})"
    if not isinstance(returned, (list, tuple)) or len(returned) != len(given):
        received = type(returned).__name__
        if isinstance(returned, (list, tuple)):
            received = f"{received} of {len(returned)}"
        raise TypeError(
            errors.WRONG_STRUCTURE.format(
                hook=hook, rule=rule, received=received
            )
        )
    for position, (old, new) in enumerate(zip(given, returned, strict=True)):
        received = f"{type(new).__name__}"
        if ops.is_tensor(new):
            received = f"shape {tuple(new.shape)}"
        if received != f"shape {tuple(old.shape)}":
            raise TypeError(
                errors.WRONG_STRUCTURE.format(
                    hook=hook,
                    rule=f"a gradient of shape {tuple(old.shape)} in place "
                    f"{position}",
                    received=received,
                )
            )
