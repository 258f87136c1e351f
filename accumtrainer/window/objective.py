"""What a micro-batch is trained or judged on: its losses and its metrics."""

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accumtrainer import errors
from accumtrainer.data.batches import Batch, map_leaves
from accumtrainer.keras_api import (
    compiled_metrics,
    keras,
    leaf_names,
    noting_activity,
    ops,
    read_metrics,
    untold_results,
)
from accumtrainer.keras_api.arrays import to_array
from accumtrainer.keras_api.types import Model, Nest, Tensor, Variable
from accumtrainer.window.added_losses import AddedLosses
from accumtrainer.window.backend import WindowBackend
from accumtrainer.window.hooks import Hooks, Info, context_of
from accumtrainer.window.losses import (
    BareLoss,
    WeightedLoss,
    count_samples,
    known_length,
    logged,
    shape_of,
    sort_of,
)
from accumtrainer.window.numbers import Sums
from accumtrainer.window.state import RunningSums
from accumtrainer.window.weighing import window_means


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The losses of one micro-batch.

    Args:
        losses: those that are logged have a name.
        regularization: scalar tensor, float32, counted once per window.
        samples: scalar tensor, float32.
        outputs: nest of tensors that metrics are given, or `None`.
        untold: names of results that the model leaves out of its logs; noted
            where the losses are being found out.
    """

    losses: list[WeightedLoss]
    regularization: Any
    samples: Any
    outputs: Nest = None
    untold: Collection[str] = ()

    @property
    def weight(self) -> Tensor:
        """How much the micro-batch counts, a scalar tensor, float32."""
        losses = self.losses
        if len(losses) == 1 and not losses[0].is_sum:
            return ops.cast(losses[0].denominator, "float32")
        return self.samples

    def total(self) -> Tensor:
        """Add the losses up, with the regularization; see `total_loss`."""
        return total_loss(self.means(), self.losses, self.regularization)

    def means(self) -> Tensor:
        """Stack the losses' values, tensor `(n,)`, float32."""
        return _stack([logged(loss)[0] for loss in self.losses])

    def denominators(self) -> Tensor:
        """Stack the denominators, tensor `(n,)`, float32, 1 for sums."""
        return _stack([logged(loss)[1] for loss in self.losses])


class Objective:
    """Measures micro-batches by the hooks of a Trainer and its model.

    Args:
        hooks: `Hooks`, of a model.
        backend: on which losses are tried.

    Attributes:
        expected: list of `WeightedLoss`, of which only kind and name count:
            the losses there must be; `None` where they are being found out.
        added: what layers add.
    """

    def __init__(self, hooks: Hooks, backend: WindowBackend):
        self.expected: list[WeightedLoss] | None = None
        self._hooks = hooks
        model = hooks.model
        context, overrides = context_of(hooks), hooks.overrides("compute_loss")
        if context.compiled_loss is not None:
            context.compiled_loss.on_its_own = backend.on_its_own
        self._lacks_a_loss = context.compiled_loss is None and not (
            overrides or context.model_computes_loss
        )
        self._has_metrics = context.has_metrics
        self._model = model
        self.added = AddedLosses(model)
        self._parts: Any = [self.added, *filter(None, [context.compiled_loss])]

    def measure(
        self,
        batch: Batch,
        info: Info,
        compute_loss: Callable[[Batch, Info], Any] | None = None,
        *,
        updates_metrics: bool = True,
    ) -> Measured:
        """Compute the losses of a micro-batch and update the metrics.

        Args:
            batch: `Batch` of tensors.
            compute_loss: function of both, default that of the hooks.
            updates_metrics: whether not somebody else does.
        """
        compute_loss = compute_loss or self._hooks.compute_loss
        model_losses = self._hooks._model_losses
        with noting_activity(self._model) as of_activity:
            losses = _as_losses(compute_loss(batch, info))
        outputs = _outputs(losses)
        samples = count_samples(batch.x)
        regularization = None
        # A model's own loss has what its layers add in it.
        if self._hooks._model_losses == model_losses:
            expected = self.expected and self.expected[len(losses) :]
            added, regularization = self.added.collect(
                of_activity(), known_length(batch.x), expected
            )
            is_nothing = not added and regularization is None
            if is_nothing and info.training and self._lacks_a_loss:
                raise ValueError(errors.NO_LOSS)
            losses += self._weigh_added(added, batch, samples)
        outputs = outputs if self._has_metrics else None
        untold: Collection[str] = ()
        if updates_metrics:
            untold = self.update_metrics(batch, outputs)
        if self._hooks.overrides("compute_loss"):
            # These are not the model's to leave out.
            untold = set(untold).difference(loss.name for loss in losses)
        if regularization is None:
            regularization = ops.zeros((), dtype="float32")
        return Measured(
            losses=losses,
            regularization=regularization,
            samples=samples,
            outputs=outputs,
            untold=untold,
        )

    def forget(self) -> None:
        """Forget which losses there must be, to have them found out."""
        self.expected = None
        self.added.forget()

    @property
    def is_unsure(self) -> bool:
        """Whether twice the data would tell more of the losses."""
        return any(part.is_unsure for part in self._parts)

    def look_at_twice(self, look: Callable[[Batch], Any], batch: Batch) -> None:
        """Learn more of the losses, after a look at a batch.

        Args:
            look: function of a batch that measures it, and has no other effect.
            batch: `Batch` of arrays, or of tensors.
        """
        once = [part.shapes for part in self._parts]
        # A model may take no other number of examples.
        with contextlib.suppress(Exception):
            look(map_leaves(_twice, batch))
            for part, shapes in zip(self._parts, once, strict=True):
                part.learn(shapes)

    def update_metrics(self, batch: Batch, outputs: Nest) -> Collection[str]:
        """Have the model's metrics judge outputs, if there are any.

        Returns:
            `Measured.untold`.
        """
        if outputs is None:
            return ()
        returned = self._model.compute_metrics(
            batch.x, batch.y, outputs, sample_weight=batch.sample_weight
        )
        if self.expected is not None or not isinstance(returned, dict):
            return ()
        _warn_of_unread(self._model, returned)
        return untold_results(self._model, returned)

    def check(self, losses: list[WeightedLoss]) -> None:
        """Refuse losses other than what windows were made to add up.

        Raises:
            ValueError: they are not the expected ones.
        """
        if self.expected is None:
            return
        expected, received = map(_kinds, (self.expected, losses))
        if expected != received:
            raise ValueError(
                errors.OTHER_LOSSES.format(
                    expected=", ".join(expected), received=", ".join(received)
                )
            )

    def _weigh_added(
        self, added: list[tuple[str, Any]], batch: Batch, samples: Tensor
    ) -> list[WeightedLoss]:
        losses = []
        for kind, value in added:
            if kind == "bare":
                losses.append(self._hooks._known_weight(value, batch))
                continue
            is_guess = isinstance(value, BareLoss)
            mean, origin = value if is_guess else (value, "")
            is_sum = kind == "sum"
            losses.append(
                WeightedLoss(
                    mean,
                    None if is_sum else samples,
                    is_uniform=is_sum or known_length(batch.x) is not None,
                    origin=origin,
                )
            )
        return losses


def _twice(leaf: Any) -> np.ndarray:
    return np.concatenate([to_array(leaf)] * 2)


def _warn_of_unread(model: Model, returned: dict[str, Any]) -> None:
    """Tell which values of its `compute_metrics` a model has no other way to.

    Results are read where there is no micro-batch to compute them of.
    """
    read = read_metrics(model, leaving_out=[])
    unread = sorted(map(repr, leaf_names(returned) - leaf_names(read)))
    if unread:
        message = errors.UNREAD_RESULTS.format(
            names=", ".join(unread), model=type(model).__name__
        )
        warnings.warn(message, stacklevel=2)


def total_loss(
    means: Tensor | list[Tensor],
    losses: list[WeightedLoss],
    regularization: Tensor,
) -> Tensor:
    """Add the losses up by their coefficients, with the regularization.

    Args:
        means: `(n,)`, float32, or list of n scalars.
        losses: for their coefficients, numbers all.
        regularization: scalar, float32.

    Returns:
        Scalar, float32.
    """
    if not isinstance(means, list):
        means = ops.unstack(means, len(losses))
    total = regularization
    for mean, loss in zip(means, losses, strict=True):
        total = total + loss.coefficient * mean
    return total


def named_losses(
    losses: list[WeightedLoss], means: Tensor
) -> dict[str, Tensor]:
    """Pick the losses that are logged by name out of all of them.

    Args:
        losses: list of n `WeightedLoss`.
        means: `(n,)`, float32.

    Returns:
        Dict from name to scalar tensor.

    Examples:
        >>> losses = [WeightedLoss(0.5, 2.0, name="a"), WeightedLoss(1.0, 2.0)]
        >>> named_losses(losses, [0.5, 1.0])
        {'a': 0.5}
    """
    return {
        loss.name: means[i]
        for i, loss in enumerate(losses)
        if loss.name is not None
    }


@dataclass(frozen=True, slots=True)
class EpochSums:
    """What the windows of an epoch, or an evaluation's batches, have added up.

    Args:
        losses: those that all of them have; names and coefficients count.
        sums: with 0 samples where there was none.
        means: `(n,)`, float32, NaN where there was none.
        loss: scalar, float32, the total of the means.
    """

    losses: list[WeightedLoss]
    sums: Sums
    means: Tensor
    loss: Tensor

    @classmethod
    def read(
        cls, losses: list[WeightedLoss], running: RunningSums
    ) -> "EpochSums":
        """Read what was added up so far."""
        added = running.read()
        means = window_means(added.numerators, added.denominators)
        # The quotient is NaN, of which TensorFlow's `enable_check_numerics`
        # tells where it is computed, and of a constant always.
        is_empty = ops.equal(added.samples, 0)
        means = ops.where(is_empty, added.samples / added.samples, means)
        regularization = ops.divide_no_nan(added.regularization, added.weight)
        total = total_loss(means, losses, regularization)
        return cls(losses, added, means, total)


def joined(
    parts: list[EpochSums],
) -> tuple[list[WeightedLoss], Any, Tensor]:
    """Average over parts whose losses differ, if there are several.

    The total counts by samples, as in Keras; a loss of a name, over the
    windows that have it.

    Returns:
        Triple: the losses, their means, and the total.
    """
    if len(parts) == 1:
        return parts[0].losses, parts[0].means, parts[0].loss
    samples = sum(part.sums.samples for part in parts)
    total = sum(
        ops.where(
            ops.equal(part.sums.samples, 0), 0.0, part.sums.samples * part.loss
        )
        for part in parts
    )
    losses: dict[str, WeightedLoss] = {}
    amounts: dict[str, tuple[Tensor, Tensor]] = {}
    for part in parts:
        over = named_losses(part.losses, part.sums.numerators)
        under = named_losses(part.losses, part.sums.denominators)
        losses |= {v.name: v for v in part.losses if v.name is not None}
        for name, amount in over.items():
            above, below = amounts.get(name, (0.0, 0.0))
            amounts[name] = above + amount, below + under[name]
    return (
        [losses[name] for name in amounts],
        [above / below for above, below in amounts.values()],
        total / samples,
    )


def _kinds(losses: list[WeightedLoss]) -> list[str]:
    """Describe losses by what a window adds up of them, list of strings."""
    return [f"{sort_of(loss)} {loss.name or 'loss'!r}" for loss in losses]


def _as_losses(result: Any) -> list[WeightedLoss]:
    if isinstance(result, WeightedLoss):
        result = {"loss": result}
    is_dict = isinstance(result, dict) and bool(result)
    if not is_dict or not all(
        isinstance(loss, WeightedLoss) for loss in result.values()
    ):
        raise TypeError(errors.NOT_A_WEIGHTED_LOSS.format(result=result))
    for name, loss in result.items():
        if shape_of(loss.mean) and not loss.is_sum:
            raise ValueError(
                "compute_loss must return scalar means. Received: shape "
                f"{tuple(loss.mean.shape)} for {name!r}. Average it, and "
                "give what you divided by as the denominator; or give None, "
                "to descend the sum, as a tape does that is given such a loss."
            )
    if len(result) == 1:  # the total says it all
        (loss,) = result.values()
        return _counted(replace(loss, name=None))
    return [
        part
        for name, loss in result.items()
        for part in _counted(replace(loss, name=loss.name or name))
    ]


def _counted(loss: WeightedLoss) -> list[WeightedLoss]:
    """Multiply a loss by a coefficient that may be another one later.

    What is added up of it has to count by what the coefficient is now. Beside
    that stands what is logged by its name, which counts nothing.
    """
    if isinstance(loss.coefficient, (int, float)):
        return [loss]
    now = ops.cast(ops.convert_to_tensor(loss.coefficient), "float32")
    mean = now * ops.cast(loss.mean, "float32")
    counted = replace(loss, mean=mean, coefficient=1.0, name=None)
    if loss.name is None:
        return [counted]
    return [replace(loss, coefficient=0.0, origin=""), counted]


def names_of(losses: list[WeightedLoss]) -> list[str]:
    """Name the losses that are logged by name, list of str."""
    return [loss.name for loss in losses if loss.name is not None]


def _outputs(losses: list[WeightedLoss]) -> Nest:
    found = (loss.outputs for loss in losses)
    return next((v for v in found if v is not None), None)


def _stack(scalars: list[Tensor]) -> Tensor:
    return ops.stack([ops.cast(value, "float32") for value in scalars])


def metric_variables(model: Model) -> list[Variable]:
    """List the variables behind the model's metrics."""
    metrics = [*model.metrics, *compiled_metrics(model)]
    return unique(v for metric in metrics for v in metric.variables)


def unique(variables: Iterable[Variable]) -> list[Variable]:
    """List variables in their order, each once."""
    return list({id(v): v for v in variables}.values())


def is_random_state(variable: Variable) -> bool:
    """Tell whether a variable is the state of a `SeedGenerator`.

    Keras gives all of them this name. Nobody made one to ask, as this is asked
    where none may be made: amid a trace.
    """
    is_float = keras.backend.is_float_dtype(variable.dtype)
    return variable.name == "seed_generator_state" and not is_float
