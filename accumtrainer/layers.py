"""Layers whose state moves once per update, not once per micro-batch."""

import abc
import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from accumtrainer.keras_api import (
    check_feature,
    flatten_layers,
    keras,
    ops,
)
from accumtrainer.keras_api.types import Layer, Model, Tensor, Variable


class WindowLayer(abc.ABC):
    """A layer that is told about windows.

    The layers of a model that are one are called for the micro-batches of a
    window inside `micro_batch`, and told by `after_apply` when its update has
    been made. What they write into their weights in a window that is skipped
    is put back. Both methods are traced into the compiled step.
    """

    @abc.abstractmethod
    def micro_batch(self, is_first: Tensor) -> AbstractContextManager:
        """Make a context manager around the passes of one micro-batch.

        Args:
            is_first: scalar, bool, whether a window begins with it.
        """

    @abc.abstractmethod
    def after_apply(self) -> None:
        """Act after an applied update, before `Trainer.after_apply`."""

    @property
    def window_weights(self) -> Sequence:
        """Weights that hold a window, and that `merge` puts together.

        Whatever else replicas move is averaged.
        """
        return ()

    def merge(self, rows: list) -> None:
        """Assign to the window's weights what all replicas saw together.

        Args:
            rows: list of tensors `[replicas, ...]`, one per weight.
        """
        # Not abstract: never called for a layer that lists no weights.
        raise NotImplementedError(
            f"{type(self).__name__} must define merge, as it has window_weights"
        )


@keras.saving.register_keras_serializable(package="accumtrainer")
class AccumulatedBatchNormalization(
    WindowLayer, keras.layers.BatchNormalization
):
    """Normalize micro-batches, and move the averages once per update.

    In training every micro-batch is normalized by its own mean and variance,
    as `keras.layers.BatchNormalization` does. Its moving averages, however,
    move with every micro-batch, k times as fast as the update's one batch
    would move them, and towards the variance within micro-batches, which is
    too small by that of their means. Here they move once per applied update,
    towards mean and variance of all its samples together,

        mean = sum n_i mean_i / n
        variance = sum n_i (variance_i + (mean_i - mean)^2) / n

    with n_i the values that micro-batch i has per channel, masked ones left
    out. Frozen, with one micro-batch per update, and outside of accumtrainer,
    in plain `Model.fit` as in `layer(x, training=True)`, it is the plain
    layer.

    Its weights are those of the plain layer, and three more that hold the
    sums of the last window.

    Args:
        *args: as for `keras.layers.BatchNormalization`.
        **options: as for `keras.layers.BatchNormalization`, but for
            `synchronized` and `renorm`.

    Raises:
        ValueError: an option has no meaning here.

    Examples:
        >>> layer = AccumulatedBatchNormalization(momentum=0.9)
        >>> layer.build([None, 3])
        >>> [weight.name for weight in layer.weights[-3:]]
        ['window_count', 'window_mean', 'window_variance']
    """

    def __init__(self, *args: Any, **options: Any):
        check_feature("statistics")
        for name in ("synchronized", "renorm"):
            if options.get(name):
                raise ValueError(
                    f"{name} must be left out of AccumulatedBatchNormalization."
                    f" Received: {name}={options[name]!r}. Use "
                    "keras.layers.BatchNormalization for it."
                )
        super().__init__(*args, **options)
        self._is_in_window = False

    def build(self, input_shape: Any) -> None:
        """Create the weights."""
        super().build(input_shape)
        channels = (input_shape[self.axis],)
        self.window_count, self.window_mean, self.window_variance = (
            self.add_weight(
                shape=shape,
                name=f"window_{name}",
                initializer="zeros",
                dtype="float32",
                trainable=False,
                autocast=False,
            )
            for name, shape in (
                ("count", ()),
                ("mean", channels),
                ("variance", channels),
            )
        )

    def call(
        self,
        inputs: Tensor,
        training: bool | None = None,
        mask: Tensor | None = None,
    ) -> Any:
        """Normalize a batch."""
        # Sums of half precision overflow.
        if keras.backend.standardize_dtype(inputs.dtype) != "float64":
            inputs = ops.cast(inputs, "float32")
        if training and self.trainable:
            mean, variance, count = _moments(inputs, self.axis, mask)
            if self._is_in_window:
                self._add(mean, variance, count)
            else:
                moving_mean = self._moved(self.moving_mean, mean)
                self.moving_mean.assign(moving_mean)
                moving_variance = self._moved(self.moving_variance, variance)
                self.moving_variance.assign(moving_variance)
        else:
            mean, variance = self.moving_mean, self.moving_variance
        return ops.cast(
            self._normalize(inputs, mean, variance), self.compute_dtype
        )

    @contextlib.contextmanager
    def micro_batch(self, is_first: Tensor) -> Iterator[None]:
        """Take what is seen inside as a part of a window."""
        for weight in self.window_weights:
            zeros = ops.zeros_like(weight.value)
            weight.assign(ops.where(is_first, zeros, weight.value))
        self._is_in_window = True
        try:
            yield
        finally:
            self._is_in_window = False

    def after_apply(self) -> None:
        """Move the averages towards those of the window."""
        if not self.built:
            return
        is_empty = ops.equal(self.window_count.value, 0)
        for average, pooled in (
            (self.moving_mean, self.window_mean),
            (self.moving_variance, self.window_variance),
        ):
            moved = ops.cast(self._moved(average, pooled.value), average.dtype)
            average.assign(ops.where(is_empty, average.value, moved))

    @property
    def window_weights(self) -> Sequence:
        """Weights that hold a window, and that `merge` puts together."""
        if not self.built:  # as is a layer that a model has and never calls
            return ()
        return self.window_count, self.window_mean, self.window_variance

    def merge(self, rows: list) -> None:
        """Pool the moments of all replicas."""
        for weight in self.window_weights:
            weight.assign(ops.zeros_like(weight.value))
        counts, means, variances = rows
        for index in range(counts.shape[0]):
            self._add(means[index], variances[index], counts[index])

    def _add(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Pool moments with those of the window so far.

        The means are added by their difference, since a difference of large
        sums of squares would lose the variance.
        """
        mean, variance = (ops.cast(v, "float32") for v in (mean, variance))
        total = self.window_count.value + count
        fraction = ops.divide_no_nan(count, total)
        before = self.window_mean.value
        step = mean - before
        self.window_variance.assign(
            self.window_variance.value * (1 - fraction)
            + variance * fraction
            + ops.square(step) * fraction * (1 - fraction)
        )
        self.window_mean.assign(before * (1 - fraction) + mean * fraction)
        self.window_count.assign(total)

    def _moved(self, average: Tensor, value: Tensor) -> Tensor:
        """Compute where an average is after one step towards a value."""
        old = ops.cast(average, value.dtype)
        return old * self.momentum + value * (1.0 - self.momentum)

    def _normalize(
        self, inputs: Tensor, mean: Tensor, variance: Tensor
    ) -> Tensor:
        """Scale and shift, in the order of operations that Keras uses."""
        shape = [1] * len(inputs.shape)
        shape[self.axis] = -1

        def spread(value: Tensor) -> Tensor:
            return ops.reshape(ops.cast(value, inputs.dtype), shape)

        factor = ops.rsqrt(spread(variance) + self.epsilon)
        if self.scale:
            factor = factor * spread(self.gamma)
        offset = -spread(mean) * factor
        if self.center:
            offset = offset + spread(self.beta)
        return inputs * factor + offset


def _moments(
    inputs: Tensor, axis: int, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute mean and variance per channel, and of how many values.

    Args:
        inputs: tensor, float32 or float64.
        axis: the axis of channels.
        mask: tensor of the shape of `inputs` without its last axis, or
            `None`.

    Returns:
        Two tensors `(channels,)`, and a scalar tensor, float32.
    """
    axes = list(range(len(inputs.shape)))
    del axes[axis]
    channels = inputs.shape[axis]
    if mask is None:
        mean = ops.mean(inputs, axis=axes, keepdims=True)
        # Not by `ops.moments`, which on PyTorch takes the square of the mean
        # from the mean of the squares, and loses the digits they share.
        variance = ops.mean(ops.square(inputs - mean), axis=axes)
        count = ops.cast(ops.size(inputs), "float32") / channels
        return ops.reshape(mean, [-1]), variance, count
    weights = ops.cast(ops.expand_dims(mask, -1), inputs.dtype)
    weights = ops.broadcast_to(weights, ops.shape(inputs))
    is_seen = weights > 0
    counts = ops.sum(weights, axis=axes, keepdims=True)
    mean = ops.divide_no_nan(
        ops.sum(ops.where(is_seen, inputs, 0), axis=axes, keepdims=True), counts
    )
    squares = ops.square(ops.where(is_seen, inputs - mean, 0))
    variance = ops.divide_no_nan(
        ops.sum(squares, axis=axes, keepdims=True), counts
    )
    count = ops.cast(ops.sum(weights), "float32") / channels
    return ops.reshape(mean, [-1]), ops.reshape(variance, [-1]), count


def plain_batch_normalizations(model: Model) -> list[Layer]:
    """List the layers of a model whose averages move per micro-batch.

    Returns:
        List of `keras.layers.BatchNormalization` that are not frozen.
    """
    return [
        layer
        for layer in flatten_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and not isinstance(layer, WindowLayer)
        and layer.trainable
    ]


def describe_layer(layer: Layer) -> str:
    """Name a layer and its class, as messages do.

    Examples:
        >>> describe_layer(keras.layers.Dense(1, name="head"))
        'head (Dense)'
    """
    return f"{layer.name} ({type(layer).__name__})"


def owners_of(
    model: Model, variables: list[Variable]
) -> dict[Layer, list[Variable]]:
    """Find the layers that own some variables of a model.

    Returns:
        Dict from each layer to a list of those that are its own, not that of
        a layer inside it. What is no layer's is left out.
    """
    wanted = {id(variable): variable for variable in variables}
    owners: dict[int, Any] = {}
    for layer in flatten_layers(model):  # parents first
        for variable in layer.variables:
            if id(variable) in wanted:
                owners[id(variable)] = layer
    found: dict[Layer, list[Variable]] = {}
    for key, layer in owners.items():
        found.setdefault(layer, []).append(wanted[key])
    return found


@contextlib.contextmanager
def computing_in(model: Model, dtype: str) -> Iterator[None]:
    """Have all layers of a model compute in some dtype, whatever theirs is.

    Their variables stay as they are.
    """
    layers = flatten_layers(model)
    before = [layer.dtype_policy for layer in layers]
    # Into a map of policies, that layers may share, Keras writes another.
    maps = [
        (policy, dict(policy))
        for policy in {id(policy): policy for policy in before}.values()
        if isinstance(policy, MutableMapping)
    ]
    try:
        for layer in layers:
            layer.dtype_policy = dtype
        yield
    finally:
        for layer, policy in zip(layers, before, strict=True):
            if layer.dtype_policy is not policy:
                layer.dtype_policy = policy
        for policy, entries in maps:
            policy.clear()
            policy.update(entries)


def accumulate_statistics(model: Model) -> Model:
    """Put `AccumulatedBatchNormalization` in the place of the plain layers.

    Args:
        model: `keras.Model`, functional or `Sequential`, as are the models in
            it that have such layers. It is left as it is.

    Returns:
        New model, not compiled, with copies of the weights.

    Raises:
        ValueError: a layer is where it cannot be replaced.

    Examples:
        >>> plain = keras.Sequential(
        ...     [keras.Input([3]), keras.layers.BatchNormalization()]
        ... )
        >>> model = accumulate_statistics(plain)
        >>> type(model.layers[0]).__name__
        'AccumulatedBatchNormalization'
        >>> type(restore_plain_statistics(model).layers[0]).__name__
        'BatchNormalization'
    """
    return _exchange(
        model,
        keras.layers.BatchNormalization,
        AccumulatedBatchNormalization,
    )


def restore_plain_statistics(model: Model) -> Model:
    """Put the plain layers in the place of `AccumulatedBatchNormalization`.

    Args:
        model: as for `accumulate_statistics`, whose inverse this is.

    Returns:
        New model, not compiled, with copies of the weights.

    Raises:
        ValueError: a layer is where it cannot be replaced.
    """
    return _exchange(
        model,
        AccumulatedBatchNormalization,
        keras.layers.BatchNormalization,
    )


def _exchange(model: Model, old: type, new: type) -> Model:
    exchanged = _clone(model, old, new)
    left = _layers_of(exchanged, old)
    if left:
        raise ValueError(
            f"model must have its {old.__name__} layers where "
            "keras.models.clone_model finds them. Received: "
            f"{left[0].name!r} inside another layer. Make that layer with "
            f"{new.__name__} instead."
        )
    pairs = zip(_lasting(exchanged), _lasting(model), strict=True)
    for weight, source in pairs:
        # On JAX an array that two weights share is lost when one is trained.
        weight.assign(ops.copy(source.value))
    return exchanged


def _clone(model: Model, old: Any, new: Any) -> Model:
    def clone_layer(layer: Layer) -> Layer:
        if type(layer) is old:
            return new.from_config(layer.get_config())
        if isinstance(layer, keras.Model) and _layers_of(layer, old):
            return _clone(layer, old, new)
        return type(layer).from_config(layer.get_config())

    return keras.models.clone_model(model, clone_function=clone_layer)


def _layers_of(model: Model, cls: type) -> list[Layer]:
    return [layer for layer in flatten_layers(model) if type(layer) is cls]


def _lasting(model: Model) -> list[Variable]:
    """List the weights of a model but for the sums of windows."""
    sums = {
        id(weight)
        for layer in _layers_of(model, AccumulatedBatchNormalization)
        for weight in layer.weights[-3:]
    }
    return [weight for weight in model.weights if id(weight) not in sums]
