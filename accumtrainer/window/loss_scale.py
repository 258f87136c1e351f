"""How the loss scale moves from window to window.

Micikevicius et al. 2018, "Mixed Precision Training", section 3.2: scale the
loss up so that float16 gradients do not vanish, halve the scale when they
overflow, grow it again after many windows without overflow. The scale stays
between the floor and the ceiling of `LossScale`, which keeps a run of bad
windows from driving it to zero and a run of good ones to infinity.
"""

from accumtrainer.config import LossScale
from accumtrainer.keras_api import flatten_layers, ops
from accumtrainer.keras_api.types import Model, Tensor


def restored_scale(
    scale: float, options: LossScale | None, *, was_scaled: bool
) -> float:
    """Choose the loss scale to go on with, where options may have changed.

    Args:
        scale: the scale that was saved.
        options: `LossScale` now, or `None` where the loss is not scaled.
        was_scaled: whether it was scaled when that was saved.

    Returns:
        float: the saved scale, as near as the options let it be.

    Examples:
        >>> from accumtrainer.config import LossScale
        >>> restored_scale(4096.0, LossScale(maximum=1024.0, initial=2.0),
        ...                was_scaled=True)
        1024.0
    """
    if options is None:
        return 1.0
    if not was_scaled:
        return options.initial
    return min(max(scale, options.minimum), options.maximum)


def next_scale(
    scale: Tensor, good_windows: Tensor, is_finite: Tensor, options: LossScale
) -> tuple[Tensor, Tensor]:
    """Move the loss scale after one window.

    Args:
        scale: scalar, float32, unitless.
        good_windows: scalar, int32, finite windows since the scale last moved.
        is_finite: scalar, bool, whether this window's gradient was.

    Returns:
        Pair of scalar tensors: the new scale and the new `good_windows`.
    """
    good_windows = good_windows + 1
    should_grow = good_windows >= options.growth_interval
    grown = ops.minimum(scale * options.factor, options.maximum)
    shrunk = ops.maximum(scale / options.factor, options.minimum)
    kept = ops.where(should_grow, grown, scale)
    is_counting = ops.logical_and(is_finite, ops.logical_not(should_grow))
    return (
        ops.where(is_finite, kept, shrunk),
        ops.where(is_counting, good_windows, ops.zeros_like(good_windows)),
    )


def computes_in_float16(model: Model) -> bool:
    """Whether a layer of a model computes in float16."""
    return any(
        layer.compute_dtype == "float16" for layer in flatten_layers(model)
    )
