"""How large the gradients of an update are, and how they are kept small.

A Keras optimizer clips by a fixed bound. Adaptive gradient clipping instead
bounds the gradient of every unit by a fraction of the unit's own weights.
"""

import math
from collections.abc import Callable

from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Tensor
from accumtrainer.window.backend import WindowBackend, dtype_of_sum

FEW = 4_096
"""Numbers of a gradient that are squared together with those of others.

What runs for each alone takes longer to compile and to start than they do.
"""

SHRINK = 2.0**-80
"""What makes the square of any number finite, and rounds none that matters.

A quotient by the largest gradient would not do: XLA multiplies by its inverse,
and that of more than 8.5e37 is zero.
"""


def adaptive_clip(
    gradients: list,
    variables: list,
    *,
    clipping: float = 0.01,
    eps: float = 1e-3,
) -> list:
    """Bound each unit's gradient by a fraction of the norm of its weights.

    This is adaptive gradient clipping (Brock et al. 2021, arXiv:2102.06171,
    equation 3). With W the weights of a unit, G their gradient and norms of
    Frobenius,

        G <- G * min(1, clipping * max(|W|, eps) / |G|)

    A unit is what one output of a kernel is computed with: a slice along the
    last axis, as in the kernels of `Dense` and of the convolutions. Biases,
    gains and other tensors of one axis longer than 1 are one unit each. Of
    kernels with several axes of outputs, such as those of attention's
    queries, all that share the last index are one unit.

    Its place is `Trainer.on_apply`, where the gradients are those of the
    whole update:

        def on_apply(self, gradients, info):
            return adaptive_clip(gradients, self.model.trainable_variables)

    The paper leaves out the last layer of a classifier, and found smaller
    values of `clipping` better for larger batches.

    Args:
        gradients: list of tensors, one per variable.
        variables: list of Keras variables or tensors.
        clipping: above 0, the fraction.
        eps: above 0, least norm of weights to assume, so that units that begin
            at zero can move.

    Returns:
        List of tensors, float32, of the same shapes. Gradients that are not
        finite stay so.

    Raises:
        ValueError: `clipping` or `eps` is not above 0.

    Examples:
        >>> kernel = [[1.0, 0.0], [0.0, 0.0]]
        >>> gradient = [[3.0, 0.0], [4.0, 0.0]]
        >>> (clipped,) = adaptive_clip([gradient], [kernel], clipping=0.5)
        >>> ops.convert_to_numpy(clipped).round(3).tolist()
        [[0.3, 0.0], [0.4, 0.0]]
    """
    for name, value in {"clipping": clipping, "eps": eps}.items():
        if not value > 0:
            raise ValueError(
                f"{name} must be above 0. Received: {name}={value!r}. Use for "
                "example adaptive_clip(gradients, variables, clipping=0.01)."
            )
    return [
        _clip_units(
            ops.cast(ops.convert_to_tensor(gradient), "float32"),
            ops.cast(ops.convert_to_tensor(variable), "float32"),
            clipping,
            eps,
        )
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _clip_units(
    gradient: Tensor, weights: Tensor, clipping: float, eps: float
) -> Tensor:
    most = clipping * ops.maximum(_unit_norms(weights), eps)
    norms = _unit_norms(gradient)
    # Where the norm is not above the bound, this divides the bound by itself.
    clipped = gradient * (most / ops.maximum(norms, most))
    # Of a finite gradient above 1.8e19 the square is infinite.
    small = SHRINK * gradient
    again = small * ops.divide_no_nan(most, _unit_norms(small))
    return ops.where(ops.isinf(norms), again, clipped)


def _unit_norms(tensor: Tensor) -> Tensor:
    """Compute the norm of each unit, in a shape that broadcasts."""
    is_one_unit = sum(size > 1 for size in tensor.shape) <= 1
    axes = None if is_one_unit else tuple(range(len(tensor.shape) - 1))
    return ops.sqrt(ops.sum(ops.square(tensor), axis=axes, keepdims=True))


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Add up the squares of a tensor."""
    return ops.sum(ops.square(gradient))


def global_norm(
    gradients: list[Tensor],
    sum_of_squares: Callable[[Tensor], Tensor] = sum_of_squares,
) -> Tensor:
    """Compute the norm of all gradients together.

    Args:
        gradients: float32.
        sum_of_squares: function of one of them, a scalar tensor, float32.

    Returns:
        Scalar, float32.
    """
    if not gradients:
        return ops.zeros((), "float32")
    gradients = list(map(_real, gradients))
    few = [ops.reshape(g, [-1]) for g in gradients if _has_few(g)]
    if len(few) > 1:
        many = [gradient for gradient in gradients if not _has_few(gradient)]
        gradients = [*many, ops.concatenate(few)]
    squares = list(map(sum_of_squares, gradients))
    return ops.sqrt(sum(squares[1:], start=squares[0]))


def finite_norm(
    gradients: list[Tensor], backend: WindowBackend
) -> tuple[Tensor, Tensor]:
    """Compute a global norm, and find out whether all gradients are finite.

    The squares of finite gradients may be infinite: from 1.8e19 on. Only where
    the norm is not finite the gradients are looked at again.

    Args:
        gradients: float32.

    Returns:
        Pair of scalar tensors: the norm, float32, and a bool.
    """
    gradients = [g for g in gradients if 0 not in g.shape]
    norm = global_norm(gradients, backend.sum_of_squares)
    if not gradients:
        return norm, ops.isfinite(norm)

    def look_again() -> list[Tensor]:
        # Shrunk, the squares of any finite gradients have a finite sum.
        shrunk = global_norm([SHRINK * g for g in gradients])
        return [shrunk / SHRINK, ops.isfinite(shrunk)]

    is_finite = ops.isfinite(norm)
    norm, is_finite = backend.rarely(
        ops.logical_not(is_finite), look_again, [norm, is_finite]
    )
    return norm, is_finite


def _real(gradient: Tensor) -> Tensor:
    """Put the parts of complex numbers side by side."""
    if dtype_of_sum(gradient) == "float32":
        return gradient
    return ops.stack([ops.real(gradient), ops.imag(gradient)])


def _has_few(gradient: Tensor) -> bool:
    # Of rows of an embedding TensorFlow may not know how many there are.
    return None not in gradient.shape and math.prod(gradient.shape) <= FEW
