"""How results of operations on a batch are computed, seen as they run."""

import weakref
from typing import Any

import optree
import torch

from accumtrainer.keras_api.types import Nest
from accumtrainer.steps.torch.schemas import arguments_changed_by


class Recipes:
    """Watches operations, and knows of memory what was written to it.

    Args:
        batch: nest of tensors, all of it from which something is computed.
    """

    def __init__(self, batch: Nest):
        self._known: weakref.WeakKeyDictionary[Any, int | None] = (
            weakref.WeakKeyDictionary()
        )
        for tensor in _tensors_in(batch):
            self._known[tensor.untyped_storage()] = None

    def watch(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what an operation of PyTorch has made, or changed."""
        arguments: Any = (args, kwargs)
        leaves = optree.tree_leaves(arguments, none_is_leaf=True)
        given = [self.of(leaf) for leaf in leaves]
        recipe = None if None in given else hash((str(function), *given))
        read = {t.untyped_storage() for t in _tensors_in(leaves)}
        for tensor in _tensors_in(arguments_changed_by(function, args, kwargs)):
            self._known[tensor.untyped_storage()] = recipe
        for place, tensor in enumerate(_tensors_in(result)):
            if tensor.untyped_storage() not in read:  # it is no view
                made = None if recipe is None else hash((recipe, place))
                self._known[tensor.untyped_storage()] = made

    def of(self, leaf: Any) -> int | None:
        """Tell how what an operation is given, or a result, was computed."""
        if not isinstance(leaf, torch.Tensor):
            is_generator = isinstance(leaf, torch.Generator)
            return hash("generator" if is_generator else str(leaf))
        storage = leaf.untyped_storage()
        if storage in self._known:
            recipe = self._known[storage]
        else:  # Constants are told apart by shape, and numbers by their value.
            recipe = hash(str(leaf.item()) if leaf.numel() == 1 else "")
        if recipe is None:
            return None
        lies = leaf.shape, leaf.stride(), leaf.storage_offset()
        return hash((recipe, *lies))


def _tensors_in(nest: Nest) -> list[Any]:
    leaves = optree.tree_leaves(nest)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
