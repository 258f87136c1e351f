"""How much of the gradient is noise, and so how large an update pays."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from accumtrainer import Callback, Every, Progress
from accumtrainer.callbacks.arguments import require_every

MOST_UNREAD = 64
"""Updates whose numbers may stay on the device."""


class GradientNoiseScale(Callback):
    """Measure beyond which size of an update more accumulation stops paying.

    The micro-batches of an update are samples of its gradient. From how much
    they differ follows the simple noise scale of McCandlish et al. 2018
    (arXiv:1812.06162), tr(S)/|G|^2, with G the true gradient and S the
    covariance of one sample's. An update of that many samples makes half the
    progress of one with the true gradient; beyond it, more samples buy less
    and less. Written into the logs, where loggers, the progress bar and
    `History` find them, are

    - `gradient_noise_scale`, in samples; infinite while nothing but noise is
      seen;
    - `gradient_cosine`, how well two micro-batches of an update agree, from
      -1 to 1.

    At the end of a training it prints in one sentence what follows, unless
    `fit` is silent, and keeps it as `summary`.

    How it is computed: micro-batch i, of n_i samples and with the gradient
    g_i, has the share a_i of its update's gradient, G_big = sum a_i g_i. Then
    E|g_i|^2 = |G|^2 + tr(S)/n_i, and two means of squares,

        small = sum a_i |g_i|^2,  with B_small = 1 / sum(a_i / n_i)
        big   = |G_big|^2,        with B_big = 1 / sum(a_i^2 / n_i)

    give the estimates of the paper's appendix A.1, which are unbiased:

        |G|^2 = (B_big big - B_small small) / (B_big - B_small)
        tr(S) = (small - big) / (1/B_small - 1/B_big)

    Equal micro-batches of n samples have B_small = n and B_big = k n. The
    cosine follows from the same norms, as big - sum |a_i g_i|^2 is the sum of
    the products of any two micro-batches' gradients:

        (big - sum |a_i g_i|^2) / ((sum |a_i g_i|)^2 - sum |a_i g_i|^2)

    the mean of their cosines, each by the product of both norms. All four
    sums are averaged over updates before one is divided by another; updates
    with fewer than two micro-batches, and skipped ones, are left out.

    The shares are the weights of the micro-batches, in plain means and sums
    (`Accumulation(combine=)`) equal ones. It is taken for granted that the
    samples of an update are independent and that a micro-batch is as noisy as
    its number of samples says, which is rough where weights or masks differ
    much between samples. An `on_accumulate` that changes gradients is
    included; `on_apply` and clipping are not.

    It costs one more reading of every micro-batch's gradient. The numbers are
    fetched from the device when `every` says so, and at the end of epochs.

    Args:
        every: how often to take the numbers; default 10 updates.
        decay: at least 0 and below 1: by how much an update counts less than
            the next in the averages.

    Raises:
        TypeError: `every` is no `Every`.
        ValueError: `decay` is out of range.

    Attributes:
        summary: str, what a training has shown, `""` before it has ended.

    Examples:
        >>> noise_scale = GradientNoiseScale(decay=0.95)
        >>> noise_scale.every
        Every(n=10, unit='updates')
    """

    has_state = True
    looks_at_model = False
    needs_trainer = True
    needs_gradient_norms = True

    def __init__(self, *, every: Every | None = None, decay: float = 0.99):
        super().__init__()
        every = Every(10, "updates") if every is None else every
        require_every("every", every, "Use for example Every(10, 'updates').")
        if not 0 <= decay < 1:
            raise ValueError(
                "decay must be at least 0 and below 1. Received: "
                f"decay={decay!r}. Use 0.99 to average over about a hundred "
                "updates."
            )
        self.every = every
        self.decay = decay
        self.summary = ""
        self._is_open = False
        self._begin()

    def _begin(self) -> None:
        self._unread: list[Any] = []
        self._sums = np.zeros(len(SUMS))
        self._shown = self._sums
        self._since = Progress()

    def on_train_begin(self, logs: Any = None) -> None:
        if self.trainer.replicas > 1:
            raise ValueError(
                "GradientNoiseScale must watch a Trainer of one replica. "
                f"Received: {self.trainer.replicas} replicas, whose gradients "
                "are not measured apart. Leave the callback out."
            )
        self._begin()
        self._since = self.trainer.progress
        self._has_trained = False
        self._is_open = True
        self.summary = ""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        trainer = self.trainer
        self._has_trained = True
        self._unread.append(
            (
                trainer.last_window.sizes,
                trainer.window_logs,
                trainer.micro_batch_logs,
            )
        )
        if len(self._unread) > MOST_UNREAD:
            self._read(MOST_UNREAD // 2)
        if trainer.is_due(self.every, self._since):
            self._read()
            self._shown, self._since = self._sums, trainer.progress
        logs.update(_numbers(self._shown))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._read()
        logs.update(_numbers(self._sums))

    def on_train_end(self, logs: Any = None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._read()
        if not self.may_write or not self._has_trained:
            return
        if not self._sums[-1]:
            warnings.warn(
                "GradientNoiseScale has measured nothing. It needs updates of "
                "at least two micro-batches: use for example "
                "Trainer(accumulation=2).",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self.summary = _summarize(self._sums)
        if self.params.get("verbose"):
            print(self.summary)

    def get_state(self) -> dict[str, Any]:
        self._read()
        return {
            "sums": self._sums.tolist(),
            "shown": self._shown.tolist(),
            "since": self._since.as_dict(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._sums = np.array(state["sums"])
        self._shown = np.array(state["shown"])
        self._since = Progress.from_dict(state["since"])

    def _read(self, count: int | None = None) -> None:
        """Fetch the numbers of updates that have run, the oldest first."""
        unread = self._unread[:count]
        self._unread = self._unread[len(unread) :]
        for sizes, window, micro_batches in unread:
            if not window["applied"]:
                continue
            sums = measure_noise(
                sizes,
                window["gradient_norm"],
                micro_batches,
                combine=self.trainer.accumulation.combine,
            )
            if sums is not None:
                new = np.array([*sums, sum(sizes), 1.0])
                self._sums = self.decay * self._sums + (1 - self.decay) * new


SUMS = ("square", "noise", "products", "norms", "samples", "updates")
"""What is averaged; the last stands for the weight that all of them have."""


def measure_noise(
    sizes: Sequence[int] | np.ndarray,
    window_norm: float,
    micro_batches: Any,
    *,
    combine: str = "exact",
) -> tuple[float, ...] | None:
    """Estimate the noise of one update's gradient; see the class.

    Args:
        sizes: samples of each micro-batch.
        window_norm: norm of the update's gradient.
        micro_batches: dict with `weight`, `gradient_norm` and
            `gradient_weight` of each micro-batch, arrays `[k]`.
        combine: as in `Accumulation`.

    Returns:
        Estimates of |G|^2 and tr(S), then the numerator and the denominator
        of the cosine; `None` where fewer than two micro-batches count.

    Examples:
        >>> logs = {"weight": [4, 4], "gradient_norm": [3, 4]}
        >>> logs["gradient_weight"] = [4, 4]
        >>> measure_noise([4, 4], 2.5, logs)
        (0.0, 50.0, 0.0, 6.0)
    """
    sizes = np.asarray(sizes, "float64")
    names = ("weight", "gradient_norm", "gradient_weight")
    weights, norms, factors = (
        np.asarray(micro_batches[name], "float64") for name in names
    )
    if combine != "exact":
        weights = np.ones_like(weights)
    if combine == "sum":
        window_norm = window_norm / len(sizes)
    parts = norms * factors / factors.sum()
    counts = weights > 0
    if np.count_nonzero(counts) < 2:
        return None
    sizes, parts = sizes[counts], parts[counts]
    shares = weights[counts] / weights.sum()
    small, small_size = np.sum(parts**2 / shares), 1 / np.sum(shares / sizes)
    big, big_size = window_norm**2, 1 / np.sum(shares**2 / sizes)
    own = np.sum(parts**2)
    sums = (
        (big_size * big - small_size * small) / (big_size - small_size),
        (small - big) / (1 / small_size - 1 / big_size),
        big - own,
        np.sum(parts) ** 2 - own,
    )
    return tuple(map(float, sums)) if np.isfinite(sums).all() else None


def _numbers(sums: np.ndarray) -> dict[str, float]:
    """Divide averages, `{name: float}`; the weight they share cancels."""
    square, noise, products, norms, _, updates = sums.tolist()
    if not updates:
        return {}
    numbers = {
        "gradient_noise_scale": noise / square if square > 0 else math.inf
    }
    return numbers | ({"gradient_cosine": products / norms} if norms else {})


def _summarize(sums: np.ndarray) -> str:
    scale = _numbers(sums)["gradient_noise_scale"]
    samples = f"{sums[-2] / sums[-1]:,.0f} samples"
    if math.isinf(scale):
        return (
            "More accumulation pays for as far as can be seen: the gradient "
            f"of an update, of {samples}, is nearly all noise."
        )
    scale = max(scale, 1.0)
    rounded = round(scale, 1 - math.floor(math.log10(scale)))
    return (
        f"Beyond about {rounded:,.0f} samples per update more accumulation "
        f"stops paying; the last updates had {samples}."
    )
