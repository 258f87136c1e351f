"""A Trainer for losses that couple the examples of a whole window."""

from typing import Any

from accumtrainer import errors
from accumtrainer.config import Accumulation
from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import compiled_arguments, keras, overrides
from accumtrainer.keras_api.types import Nest
from accumtrainer.trainer import Trainer
from accumtrainer.window.gradient_cache import in_float32
from accumtrainer.window.hooks import Info
from accumtrainer.window.losses import WeightedLoss, count_samples, shape_of


class WindowLossTrainer(Trainer):
    """Train with a loss over the embeddings of all examples of an update.

    A loss that compares examples with each other, such as a triplet loss over
    the hardest examples or a contrastive loss over the negatives of a batch,
    is not what plain accumulation makes of it, where every micro-batch only
    sees itself. Here a window's embeddings are computed first, without
    gradients; then the loss and its gradient by them; then the embeddings
    again, micro-batch by micro-batch, with gradients (gradient caching, Gao
    et al. 2021, arXiv:2101.06983; see `accumtrainer.window.gradient_cache`).
    The update is that of the big batch, the activations in memory are those of
    one micro-batch, and the price is a second forward pass.

    Override `window_loss`, and `embed` where it is not just the model's
    output. `accumtrainer.window_losses` has some to choose from.

    Args:
        model: `keras.Model`.
        optimizer: as for `Trainer`.
        **options: those of `Trainer`. There is no `loss` and nothing that
            belongs to it, since `window_loss` replaces it. `metrics` are
            given the embeddings as predictions; they need the `embed` that is
            there.

    Raises:
        ValueError: an argument has no place here.
        TypeError: the class has no `window_loss`.

    Examples:
        >>> import numpy as np
        >>> from accumtrainer import Accumulation
        >>> from accumtrainer.keras_api import keras
        >>> from accumtrainer.window_losses import batch_hard_triplet_loss
        >>> class TripletTrainer(WindowLossTrainer):
        ...     def window_loss(self, embeddings, batch, info):
        ...         return batch_hard_triplet_loss(embeddings, batch.y)
        >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
        >>> trainer = TripletTrainer(
        ...     model, optimizer="sgd",
        ...     accumulation=Accumulation(micro_batch_size=1))
        >>> x, y = np.eye(3)[[0, 0, 1, 1]], np.array([0, 0, 1, 1])
        >>> history = trainer.fit(x, y, batch_size=4, verbose=0)
        >>> trainer.progress.updates
        1
    """

    has_window_loss = True

    def __init__(self, model: Any, optimizer: Any = None, **options: Any):
        _check_options(type(self), options)
        super().__init__(model, optimizer, **options)
        embeds = type(self).embed is not WindowLossTrainer.embed
        if embeds and _has_metrics(model):
            raise ValueError(
                "metrics must be left out where embed is overridden. Received: "
                "a model with metrics. Log what matters in window_loss, with "
                "self.log."
            )
        self._embeds_by_model = not embeds

    def embed(self, batch: Batch, info: Info) -> Any:
        """Embed the examples of a micro-batch; override what is not enough.

        In training it runs twice for every micro-batch, with the same random
        numbers.

        Args:
            batch: `Batch(x, y, sample_weight)` of tensors.
            info: `info.training` is a Python bool.

        Returns:
            Nest of tensors of floats whose first axis is that of the batch.
        """
        mode = self._context.mode(training=info.training)
        return self.model(batch.x, **mode)

    def window_loss(self, embeddings: Any, batch: Batch, info: Info) -> Any:
        """Compute the loss of all examples of a window; to be overridden.

        Args:
            embeddings: what `embed` returns, joined, cast to float32.
            batch: `Batch` of the same examples, as `on_micro_batch` has left
                it. `batch.x` is `None` so that it need not be kept: what the
                loss wants of it, `embed` has to return.
            info: `Info` without `index` and `is_last`.

        Returns:
            Scalar tensor.
        """
        # Never reached: a class without its own is refused when it is made.
        raise NotImplementedError

    def compute_loss(self, batch: Batch, info: Info) -> WeightedLoss:
        """Compute the loss of examples that are alone in their window."""
        embeddings = in_float32(self.embed(batch, info))
        loss = self.window_loss(embeddings, batch._replace(x=None), info)
        if shape_of(loss):
            raise ValueError(
                "window_loss must return a scalar. Received: shape "
                f"{shape_of(loss)}. Average it, or sum it."
            )
        return WeightedLoss(
            loss,
            None if info.training else count_samples(batch.x),
            self.outputs_of(embeddings),
            is_uniform=True,
        )

    def outputs_of(self, embeddings: Nest) -> Nest:
        """Return what compiled metrics are given, `None` for nothing."""
        return embeddings if self._embeds_by_model else None


def _has_metrics(model: keras.Model) -> bool:
    arguments = compiled_arguments(model)
    is_given = any(arguments[k] for k in ("metrics", "weighted_metrics"))
    return is_given or overrides(model, "compute_metrics")


def _check_options(
    trainer_type: type[WindowLossTrainer], options: dict[str, Any]
) -> None:
    if trainer_type.window_loss is WindowLossTrainer.window_loss:
        raise TypeError(
            "window_loss must be overridden. Received: "
            f"{trainer_type.__name__} without one. Define "
            "window_loss(self, embeddings, batch, info) in it, for example "
            "with a loss of accumtrainer.window_losses."
        )
    for name in ("loss", "loss_weights", "denominator", "weighted_metrics"):
        if options.get(name) is not None:
            raise ValueError(
                errors.NOT_WITH_A_WINDOW_LOSS.format(
                    name=name, value=options[name]
                )
            )
    combine = Accumulation.of(options.get("accumulation", 1)).combine
    if combine != "exact":
        raise ValueError(
            "combine must be 'exact' for a WindowLossTrainer. Received: "
            f"combine={combine!r}. Leave it out; a loss over the whole window "
            "is no mean of anything."
        )
