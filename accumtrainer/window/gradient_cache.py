"""Losses that couple the examples of a window, one micro-batch at a time.

A loss over all embeddings of a window, `L(e₁ … eₖ)`, is no sum over
micro-batches, but by the chain rule its gradient is one:

    ∇L = Σᵢ (∂L/∂eᵢ) · ∇eᵢ

Gradient caching (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch
Size under Memory Limited Setup", arXiv:2101.06983) embeds every micro-batch
without taking gradients, differentiates the loss by the embeddings, and then
embeds each micro-batch again, now with gradients, of which `∂L/∂eᵢ` says how
much each counts:

    embeddings = [embed(batch) for batch in window]
    cotangents = differentiate(window_loss, embeddings)
    for batch, cotangent in zip(window, cotangents):
        sums += differentiate(sum(cotangent * embed(batch)))

The random state is put back in between, so that both passes draw the same
numbers. What the loss uses beside embeddings, such as a learned temperature,
gets its gradient when the loss is differentiated.
"""

from typing import Any

from accumtrainer.data.batches import Batch
from accumtrainer.keras_api import is_overwritten, keras, ops, tree
from accumtrainer.keras_api.types import Nest, Tensor
from accumtrainer.window.hooks import Info, collect_logs
from accumtrainer.window.losses import WeightedLoss
from accumtrainer.window.parts import WindowParts


class GradientCache:
    """Embeds, differentiates the window's loss, and embeds again.

    Args:
        parts: whose hooks have `embed` and `window_loss`.
    """

    def __init__(self, parts: WindowParts):
        self._hooks: Any = parts.hooks  # a WindowLossTrainer
        self._state = parts.state
        self._backend = parts.backend

    def dtypes(self, batch: Batch, info: Info) -> Nest:
        """Find out the dtypes of what `embed` returns, by tracing it."""
        return tree.map_structure(
            lambda leaf: (
                None
                if leaf is None
                else keras.backend.standardize_dtype(leaf.dtype)
            ),
            self.embed(batch, info),
        )

    def embed(self, batch: Batch, info: Info) -> Nest:
        """Embed a micro-batch without taking gradients.

        Args:
            batch: tensors `[m, ...]`, after `on_micro_batch`.
            info: as hooks get it.

        Returns:
            Pair: nest of tensors `[m, ...]`, float32, and the `Batch` without
            its inputs.
        """
        with collect_logs(self._hooks):
            embeddings = in_float32(self._hooks.embed(batch, info))
        return embeddings, batch._replace(x=None)

    def differentiate_loss(
        self, embeddings: Nest, batch: Batch, info: Info
    ) -> tuple[Tensor, Nest, list[Tensor | None], dict[str, Any]]:
        """Differentiate the loss of a window by its embeddings.

        Args:
            embeddings: nest of tensors `[n, ...]`, float32, of n samples.
            batch: the n samples without their inputs.
            info: without an `index`.

        Returns:
            Tuple: the loss, a scalar, float32; the gradients, like the
            embeddings; those by the trainable variables, `None` where the loss
            itself does not use one; and what was logged.
        """
        scale = self._state.loss_scale.value

        def objective(*leaves: Tensor) -> tuple[Tensor, Nest]:
            nest = tree.pack_sequence_as(embeddings, list(leaves))
            with collect_logs(self._hooks) as logs:
                loss = self._hooks.window_loss(nest, batch, info)
            loss = ops.cast(loss, "float32")
            return loss * scale, (loss, logs)

        variables = self._hooks.model.trainable_variables
        leaves = tree.flatten(embeddings)
        assigned = [*map(is_overwritten, variables), *[False] * len(leaves)]
        (loss, logs), gradients = self._backend.value_and_grad(
            objective, variables, leaves
        )
        gradients = [
            None
            if g is None
            else ops.cast(g, "float32") / (1.0 if is_assigned else scale)
            for g, is_assigned in zip(gradients, assigned, strict=True)
        ]
        direct, cotangents = (
            gradients[: len(variables)],
            gradients[len(variables) :],
        )
        cotangents = [
            ops.zeros_like(leaf) if g is None else g
            for leaf, g in zip(leaves, cotangents, strict=True)
        ]
        cotangents = tree.pack_sequence_as(embeddings, cotangents)
        return loss, cotangents, direct, logs

    def replay(
        self, batch: Batch, info: Info, cotangents: Nest, loss: Tensor
    ) -> WeightedLoss:
        """Embed a micro-batch again, as a loss with the right gradient.

        Args:
            batch: tensors `[m, ...]`, after `on_micro_batch`.
            info: as hooks get it.
            cotangents: nest of tensors `[m, ...]`, from `differentiate_loss`.
            loss: of the window, a scalar.

        Returns:
            The micro-batch's share of the window's loss: a sum, whose
            gradient is the micro-batch's part of `∇L`.
        """
        embeddings = in_float32(self._hooks.embed(batch, info))
        pulled = sum(
            ops.sum(cotangent * embedding)
            for cotangent, embedding in zip(
                tree.flatten(cotangents), tree.flatten(embeddings), strict=True
            )
        )
        share = loss / ops.cast(info.micro_batches, "float32")
        return WeightedLoss(
            share + (pulled - ops.stop_gradient(pulled)),
            None,
            self._hooks.outputs_of(embeddings),
        )


def in_float32(embeddings: Nest) -> Nest:
    """Cast embeddings, whatever the model computes in."""
    return tree.map_structure(lambda v: ops.cast(v, "float32"), embeddings)


def join(parts: list[Nest]) -> Nest:
    """Join tensors `[m, ...]` of micro-batches, whose m may differ."""
    return tree.map_structure(
        lambda *leaves: (
            None if leaves[0] is None else ops.concatenate(leaves, axis=0)
        ),
        *parts,
    )


def split(joined: Nest, parts: list[Nest]) -> list[Nest]:
    """Undo `join`, in the sizes of what was joined."""
    pieces = []
    begin = 0
    for part in parts:
        end = begin + ops.shape(tree.flatten(part)[0])[0]
        pieces.append(
            tree.map_structure(lambda leaf: leaf[begin:end], joined)  # noqa: B023, used at once
        )
        begin = end
    return pieces


def join_rows(stacked: Nest) -> Nest:
    """Join equal micro-batches: `[k, m, ...]` to `[k * m, ...]`."""
    return tree.map_structure(
        lambda leaf: (
            None if leaf is None else ops.reshape(leaf, (-1, *leaf.shape[2:]))
        ),
        stacked,
    )


def split_rows(joined: Nest, stacked: Nest) -> Nest:
    """Undo `join_rows`, in the shapes of `stacked`."""
    return tree.map_structure(
        lambda leaf, like: ops.reshape(leaf, ops.shape(like)), joined, stacked
    )
