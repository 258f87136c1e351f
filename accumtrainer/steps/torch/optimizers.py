"""Optimizers of Keras that keep one of PyTorch, which finds no gradients."""

import torch

from accumtrainer import errors
from accumtrainer.keras_api import given_rate, optimizers_of
from accumtrainer.keras_api.types import Model
from accumtrainer.steps.torch.looks import opened_of
from accumtrainer.steps.torch.scopes import innermost, was_given


class RefusedError(ValueError):
    """What cannot be trained, recorded or not."""


def refuse_optimizers_of_torch(model: Model | None) -> None:
    """Refuse an optimizer of Keras that has one of PyTorch do its work.

    Args:
        model: what is trained.

    Raises:
        RefusedError: that reads gradients of the model's variables where
            nobody puts them.
    """
    optimizer = getattr(model, "optimizer", None)
    if model is None or optimizer is None:
        return
    scope = innermost()
    known = set()
    for variable in model.trainable_variables:
        original = scope.original(variable)
        value = variable.value if original is None else original
        known.add(value.untyped_storage())
    for one in optimizers_of(optimizer)[1]:
        # Of one that is there for its rate no gradients are expected.
        rate = given_rate(getattr(one, "inner_optimizer", one))
        for inner in opened_of([one], torch.optim.Optimizer, rate):
            tensors = [t for g in inner.param_groups for t in g["params"]]
            if any(
                t.untyped_storage() in known or was_given(t) for t in tensors
            ):
                message = errors.OPTIMIZER_OF_TORCH.format(
                    optimizer=type(one).__name__, inner=type(inner).__name__
                )
                raise RefusedError(message)
