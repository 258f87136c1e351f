"""Losses over all examples of a window, for `WindowLossTrainer`.

Pure functions of embeddings `[n, d]`, float32, in `keras.ops`. The mean is
over anchors (over triplets where it says so), and nothing is a loss where
there is nothing to compare with.
"""

from typing import Literal

from accumtrainer.keras_api import keras, ops
from accumtrainer.keras_api.types import Tensor

# Below this, a distance counts as zero: its square root has no gradient.
SMALLEST_SQUARE = 1e-16

# Added to what a softmax must not look at.
FAR_BELOW = -1e30


def batch_hard_triplet_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float | Literal["soft"] = 0.2,
    squared: bool = False,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """Compare each example's farthest friend with its nearest stranger.

    The batch-hard loss of Hermans et al. 2017, "In Defense of the Triplet
    Loss for Person Re-Identification" (arXiv:1703.07737), equation 5. Anchors
    without a friend (another example of their label) or without a stranger
    are left out of the mean.

    Args:
        embeddings: `[n, d]`, float32.
        labels: `[n]` or `[n, 1]`, ints.
        margin: float by which strangers should be farther than friends, or
            `"soft"` for a softplus instead of a hinge.
        squared: whether distances are squared Euclidean ones.
        sample_weight: `[n]`, weights of the anchors, or `None`.

    Returns:
        Scalar, float32.

    Examples:
        >>> import numpy as np
        >>> points = np.array([[0.0], [1.0], [3.0]], "float32")
        >>> float(batch_hard_triplet_loss(points, np.array([0, 0, 1]),
        ...                               margin=2.0))
        0.5
    """
    distances = pairwise_distances(embeddings, squared=squared)
    friends, strangers = _friends_and_strangers(labels)
    farthest = ops.max(ops.where(friends, distances, -1.0), axis=1)
    nearest = ops.min(ops.where(strangers, distances, -FAR_BELOW), axis=1)
    is_anchor = ops.logical_and(
        ops.any(friends, axis=1), ops.any(strangers, axis=1)
    )
    # What is no anchor must not overflow on its way to being left out.
    difference = ops.where(is_anchor, farthest - nearest, 0.0)
    losses = _hinge(difference, margin)
    return _weighted_mean(losses, is_anchor, sample_weight)


def batch_all_triplet_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float | Literal["soft"] = 0.2,
    squared: bool = False,
) -> Tensor:
    """Compare every friend of each example with every stranger.

    The batch-all loss of Hermans et al. 2017 (arXiv:1703.07737), equation 6,
    as the mean over the triplets that are not satisfied yet: those of zero
    loss would drown the others. With `margin="soft"` none is ever zero, and
    all count. Takes memory for n³ numbers.

    Args:
        embeddings: `[n, d]`, float32.
        labels: `[n]` or `[n, 1]`, ints.
        margin: float by which strangers should be farther than friends, or
            `"soft"` for a softplus instead of a hinge.
        squared: whether distances are squared Euclidean ones.

    Returns:
        Scalar, float32.

    Examples:
        >>> import numpy as np
        >>> points = np.array([[0.0], [1.0], [3.0]], "float32")
        >>> float(batch_all_triplet_loss(points, np.array([0, 0, 1]),
        ...                              margin=2.5))
        1.0
    """
    distances = pairwise_distances(embeddings, squared=squared)
    friends, strangers = _friends_and_strangers(labels)
    losses = _hinge(distances[:, :, None] - distances[:, None, :], margin)
    counts = ops.logical_and(friends[:, :, None], strangers[:, None, :])
    counts = ops.logical_and(counts, losses > 0)
    return _weighted_mean(losses, counts, None)


def info_nce_loss(
    queries: Tensor,
    keys: Tensor,
    *,
    temperature: float | Tensor = 0.07,
    symmetric: bool = False,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """Find each query's own key among the keys of all.

    InfoNCE with in-batch negatives: van den Oord et al. 2018
    (arXiv:1807.03748), equation 4, on cosine similarities. With `symmetric`
    the mean of that and of finding each key's own query: the loss of CLIP,
    Radford et al. 2021 (arXiv:2103.00020), figure 3.

    Args:
        queries: `[n, d]`, float32.
        keys: `[n, d]`, float32; the i-th belongs to the i-th query.
        temperature: float, or a scalar tensor such as a learned one.
        sample_weight: `[n]`, weights of the pairs, or `None`.

    Returns:
        Scalar, float32.

    Examples:
        >>> import numpy as np
        >>> pairs = np.eye(2, dtype="float32")
        >>> float(info_nce_loss(pairs, pairs, temperature=1.0))
        0.3132617
    """
    logits = ops.matmul(_normalized(queries), ops.transpose(_normalized(keys)))
    logits = logits / temperature
    losses = _own_among_all(logits)
    if symmetric:
        losses = (losses + _own_among_all(ops.transpose(logits))) / 2
    return _weighted_mean(losses, None, sample_weight)


def nt_xent_loss(
    first: Tensor, second: Tensor, *, temperature: float | Tensor = 0.5
) -> Tensor:
    """Find each view's other view among all views.

    The normalized temperature-scaled cross-entropy of SimCLR: Chen et al.
    2020 (arXiv:2002.05709), equation 1 and algorithm 1.

    Args:
        first: `[n, d]`, float32, one view of each example.
        second: `[n, d]`, float32, the other view of each.
        temperature: float, or a scalar tensor such as a learned one.

    Returns:
        Scalar, float32, the mean over all 2n views.

    Examples:
        >>> import numpy as np
        >>> views = np.eye(2, dtype="float32")
        >>> float(nt_xent_loss(views, views, temperature=1.0))
        0.5514447
    """
    first, second = _normalized(first), _normalized(second)
    across = ops.matmul(first, ops.transpose(second)) / temperature
    itself = ops.eye(ops.shape(first)[0], dtype="bool")

    def losses(own: Tensor, across: Tensor) -> Tensor:
        within = ops.matmul(own, ops.transpose(own)) / temperature
        within = ops.where(itself, FAR_BELOW, within)
        logits = ops.concatenate([across, within], axis=1)
        return ops.logsumexp(logits, axis=1) - ops.diagonal(across)

    return ops.mean(
        (losses(first, across) + losses(second, ops.transpose(across))) / 2
    )


def supervised_contrastive_loss(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 0.1,
) -> Tensor:
    """Find each example's friends, those of its label, among all others.

    Khosla et al. 2020, "Supervised Contrastive Learning" (arXiv:2004.11362),
    equation 2, with the embeddings normalized. Anchors without a friend are
    left out of the mean.

    Args:
        embeddings: `[n, d]`, float32.
        labels: `[n]` or `[n, 1]`, ints.
        temperature: float, or a scalar tensor such as a learned one.

    Returns:
        Scalar, float32, the mean over anchors.

    Examples:
        >>> import numpy as np
        >>> points = np.array([[1, 0], [1, 0], [0, 1]], "float32")
        >>> float(supervised_contrastive_loss(
        ...     points, np.array([0, 0, 1]), temperature=1.0))
        0.3132617
    """
    embeddings = _normalized(embeddings)
    friends, _ = _friends_and_strangers(labels)
    logits = ops.matmul(embeddings, ops.transpose(embeddings)) / temperature
    itself = ops.eye(ops.shape(embeddings)[0], dtype="bool")
    among = ops.logsumexp(ops.where(itself, FAR_BELOW, logits), axis=1)
    missed = ops.where(friends, among[:, None] - logits, 0.0)
    counts = ops.sum(ops.cast(friends, "float32"), axis=1)
    losses = ops.divide_no_nan(ops.sum(missed, axis=1), counts)
    return _weighted_mean(losses, counts > 0, None)


def pairwise_distances(embeddings: Tensor, *, squared: bool = False) -> Tensor:
    """Compute the Euclidean distances between all embeddings.

    Args:
        embeddings: `[n, d]`, float32.
        squared: whether to leave the square root out.

    Returns:
        `[n, n]`, float32. Where a distance is zero its gradient is zero too,
        not infinite.
    """
    products = ops.matmul(embeddings, ops.transpose(embeddings))
    squares = ops.sum(ops.square(embeddings), axis=1)
    squares = squares[:, None] - 2 * products + squares[None, :]
    is_zero = squares <= SMALLEST_SQUARE
    squares = ops.where(is_zero, 0.0, squares)
    if squared:
        return squares
    # The root of one where it does not matter, for a finite gradient.
    roots = ops.sqrt(ops.where(is_zero, 1.0, squares))
    return ops.where(is_zero, 0.0, roots)


def _friends_and_strangers(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Tell which pairs share a label, without each with itself, or do not."""
    labels = ops.reshape(labels, [-1])
    alike = ops.equal(labels[:, None], labels[None, :])
    itself = ops.eye(ops.shape(labels)[0], dtype="bool")
    friends = ops.logical_and(alike, ops.logical_not(itself))
    return friends, ops.logical_not(alike)


def _hinge(difference: Tensor, margin: float | Literal["soft"]) -> Tensor:
    if margin == "soft":
        return ops.softplus(difference)
    return ops.relu(difference + margin)


def _normalized(embeddings: Tensor) -> Tensor:
    # Where one is zero, the derivative of its length is NaN.
    squares = ops.sum(ops.square(embeddings), axis=-1, keepdims=True)
    least = keras.config.epsilon() ** 2
    return ops.multiply(embeddings, ops.rsqrt(ops.maximum(squares, least)))


def _own_among_all(logits: Tensor) -> Tensor:
    return ops.logsumexp(logits, axis=1) - ops.diagonal(logits)


def _weighted_mean(
    losses: Tensor, counts: Tensor | None, sample_weight: Tensor | None
) -> Tensor:
    weights = ops.ones_like(losses)
    if counts is not None:
        weights = ops.cast(counts, "float32")
    if sample_weight is not None:
        sample_weight = ops.reshape(sample_weight, [-1])
        weights = weights * ops.cast(sample_weight, "float32")
    return ops.divide_no_nan(ops.sum(losses * weights), ops.sum(weights))
