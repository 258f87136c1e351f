"""How the loss scale moves from window to window.

Micikevicius et al. 2018, "Mixed Precision Training", section 3.2: scale the
loss up so that float16 gradients do not vanish, halve the scale when they
overflow, grow it again after many windows without overflow. The scale stays
between the floor and the ceiling of `LossScale`, which keeps a run of bad
windows from driving it to zero and a run of good ones to infinity.
"""

from accumtrainer.keras_api import ops


def next_scale(scale, good_windows, is_finite, options):
    """Move the loss scale after one window.

    Args:
        scale: scalar tensor, float32, unitless.
        good_windows: scalar tensor, int32, finite windows since the scale
            last moved.
        is_finite: scalar tensor, bool, whether this window's gradient was.
        options: `LossScale`.

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
