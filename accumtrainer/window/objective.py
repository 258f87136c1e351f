"""What a micro-batch is trained or judged on: its losses and its metrics."""

import functools
from dataclasses import dataclass
from typing import Any

from accumtrainer import errors
from accumtrainer.keras_api import keras, ops
from accumtrainer.window.losses import WeightedLoss, added_losses, count_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The losses of one micro-batch.

    Args:
        losses: dict from name to `WeightedLoss`, those users see first.
        regularization: scalar tensor, float32, counted once per window.
        samples: scalar tensor, float32.
    """

    losses: dict[str, WeightedLoss]
    regularization: Any
    samples: Any

    @property
    def weighted(self):
        """The losses without their names, in order."""
        return list(self.losses.values())

    @property
    def weight(self):
        """How much the micro-batch counts, a scalar tensor, float32."""
        weighted = self.weighted
        if len(weighted) == 1 and not weighted[0].is_sum:
            return ops.cast(weighted[0].denominator, "float32")
        return self.samples

    def means(self):
        """Stack the losses' values, tensor `(n,)`, float32."""
        return _stack([loss.mean for loss in self.weighted])

    def denominators(self):
        """Stack the denominators, tensor `(n,)`, float32, 1 for sums."""
        return _stack(
            [1.0 if v.is_sum else v.denominator for v in self.weighted]
        )


class Objective:
    """Measures micro-batches by the hooks of a Trainer and its model.

    Args:
        hooks: `Hooks`.
    """

    def __init__(self, hooks):
        self._hooks = hooks
        model = hooks.model
        self._adds_losses = hooks.overrides("compute_loss") or not (
            hooks._model_computes_loss
        )
        self._has_metrics = hooks.has_metrics
        self._model = model

    def measure(self, batch, info, compute_loss=None):
        """Compute the losses of a micro-batch and update the metrics.

        Args:
            batch: `Batch` of tensors.
            info: `Info`.
            compute_loss: function of both, default that of the hooks.

        Returns:
            `Measured`.
        """
        result = (compute_loss or self._hooks.compute_loss)(batch, info)
        losses = _as_losses(result)
        outputs = _outputs(losses)
        samples = count_samples(batch.x)
        regularization = None
        if self._adds_losses:
            added, regularization = added_losses(self._model)
            losses |= self._name_added(added, batch, info, samples)
        if self._has_metrics and outputs is not None:
            self._model.compute_metrics(
                batch.x, batch.y, outputs, sample_weight=batch.sample_weight
            )
        if regularization is None:
            regularization = ops.zeros((), dtype="float32")
        return Measured(
            losses=losses, regularization=regularization, samples=samples
        )

    def _name_added(self, added, batch, info, samples):
        losses = {}
        for position, (kind, value) in enumerate(added):
            if kind == "sum":
                loss = WeightedLoss(value, None, is_uniform=True)
            elif kind == "activity":
                loss = WeightedLoss(value, samples, is_uniform=True)
            else:
                loss = self._hooks._known_weight(value, batch, info)
            losses[f"added_{position}"] = loss
        return losses


def total_loss(means, losses, regularization):
    """Add the losses up by their coefficients, with the regularization.

    Args:
        means: tensor `(n,)`, float32, or list of n scalars.
        losses: list of `WeightedLoss`, for their coefficients.
        regularization: scalar tensor, float32.

    Returns:
        Scalar tensor, float32.
    """
    if not isinstance(means, list):
        means = ops.unstack(means, len(losses))
    total = regularization
    for mean, loss in zip(means, losses, strict=True):
        total = total + loss.coefficient * mean
    return total


def visible_names(names):
    """Pick the losses that are logged by name: several outputs, as in Keras.

    Example:
        >>> visible_names(["a_loss", "b_loss", "added_0"])
        ['a_loss', 'b_loss']
        >>> visible_names(["loss", "added_0"])
        []
    """
    visible = [name for name in names if not name.startswith("added_")]
    return visible if len(visible) > 1 else []


def named_losses(names, means):
    """Pick the losses that are logged by name out of all of them.

    Args:
        names: list of n str.
        means: tensor `(n,)`, float32.

    Returns:
        Dict from name to scalar tensor.
    """
    return {name: means[names.index(name)] for name in visible_names(names)}


def _as_losses(result):
    if isinstance(result, WeightedLoss):
        result = {"loss": result}
    is_dict = isinstance(result, dict) and bool(result)
    if not is_dict or not all(
        isinstance(loss, WeightedLoss) for loss in result.values()
    ):
        raise TypeError(errors.NOT_A_WEIGHTED_LOSS.format(result=result))
    for name, loss in result.items():
        if len(ops.shape(loss.mean)) != 0:
            raise ValueError(
                "compute_loss must return scalar means. Received: shape "
                f"{tuple(loss.mean.shape)} for {name!r}. Average it, and "
                "give what you divided by as the denominator."
            )
    return dict(result)


def _outputs(losses):
    found = (loss.outputs for loss in losses.values())
    return next((v for v in found if v is not None), None)


def _stack(scalars):
    return ops.stack([ops.cast(value, "float32") for value in scalars])


def metric_results(model, named):
    """Read the model's metrics, but for its losses.

    Keras gives a model that it has trained metrics of its losses, which
    nobody here updates.

    Args:
        model: `keras.Model`.
        named: names of the losses of several outputs.

    Returns:
        Dict from name to tensor.
    """
    results = model.get_metrics_result()
    return {k: v for k, v in results.items() if k not in ("loss", *named)}


def metric_variables(model):
    """List the variables behind the model's metrics."""
    variables = []
    for metric in model.metrics:
        variables.extend(metric.variables)
    return _unique(variables)


def _unique(variables):
    return list({id(v): v for v in variables}.values())


def is_random_state(variable):
    """Tell whether a variable is the state of a `SeedGenerator`.

    Keras gives all of them one name, and a dtype that the backend chooses.
    """
    like = _some_random_state()
    return (variable.name, variable.dtype) == (like.name, like.dtype)


@functools.cache
def _some_random_state():
    return keras.random.SeedGenerator(0).state
