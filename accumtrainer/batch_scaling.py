"""How settings of an optimizer follow the size of its updates, pure."""


def beta_for_batch(beta, *, batch_size, reference):
    """Keep the half-life of a moving average, counted in samples.

    Adam's average of squared gradients forgets by `beta_2` at every update.
    With larger updates the same factor averages over more samples. The one
    that forgets half after as many samples as before is

        beta ** (batch_size / reference)

    (Marek et al. 2025, arXiv:2507.07101, for the second moment of Adam.)

    Args:
        beta: float, at least 0 and below 1, good for updates of `reference`
            samples.
        batch_size: samples, or tokens, per update: all micro-batches.
        reference: the same for `beta`.

    Returns:
        float, at least 0 and below 1.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> beta_for_batch(0.999, batch_size=256, reference=32)
        0.992
        >>> beta_for_batch(0.95, batch_size=1, reference=512)
        0.9999
    """
    if not 0 <= beta < 1:
        raise ValueError(
            f"beta must be at least 0 and below 1. Received: beta={beta!r}. "
            "Use for example 0.999, the beta_2 of Adam."
        )
    for name, size in {
        "batch_size": batch_size,
        "reference": reference,
    }.items():
        if not size > 0:
            raise ValueError(
                f"{name} must be above 0. Received: {name}={size!r}. Count "
                "the samples of one update."
            )
    return float(beta ** (batch_size / reference))
