"""How results of operations on a batch are computed, seen as they run."""

import ctypes
import weakref
from typing import Any

import optree
import torch

from accumtrainer.keras_api.types import Nest
from accumtrainer.steps.torch.schemas import arguments_changed_by
from accumtrainer.window.backend import MAX_COMPARED, Recipe, recipe_of

MADE_BY_SHAPE = {
    *("ones_like", "zeros_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
}
"""Operations that read nothing of their first argument but how it lies."""


class Recipes:
    """Watches operations, and knows of memory what was written to it.

    Args:
        batch: nest of tensors, all of it from which something is computed.
    """

    def __init__(self, batch: Nest):
        self._known: weakref.WeakKeyDictionary[Any, Recipe] = (
            weakref.WeakKeyDictionary()
        )
        for tensor in _tensors_in(batch):
            self._known[tensor.untyped_storage()] = None

    def watch(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what an operation of PyTorch has made, or changed."""
        arguments: Any = (args, kwargs)
        leaves = optree.tree_leaves(arguments, none_is_leaf=True)
        parts = [str(function)]
        read_from = leaves
        if _name_of(function) in MADE_BY_SHAPE:
            parts += [str((result.shape, result.dtype))]
            read_from = leaves[1:]
        recipe = recipe_of(parts, [self.of(leaf) for leaf in read_from])
        read = {t.untyped_storage() for t in _tensors_in(leaves)}
        for tensor in _tensors_in(arguments_changed_by(function, args, kwargs)):
            self._known[tensor.untyped_storage()] = recipe
        for place, tensor in enumerate(_tensors_in(result)):
            if tensor.untyped_storage() not in read:  # it is no view
                made = recipe_of((place,), [recipe])
                self._known[tensor.untyped_storage()] = made

    def of(self, leaf: Any) -> Recipe:
        """Tell how what an operation is given, or a result, was computed."""
        if not isinstance(leaf, torch.Tensor):
            is_generator = isinstance(leaf, torch.Generator)
            return hash("generator" if is_generator else str(leaf))
        storage = leaf.untyped_storage()
        if storage in self._known:
            recipe = self._known[storage]
        else:  # Constants are told apart by numbers, and large ones by shape.
            recipe = hash((str(leaf.dtype), _bytes_of(leaf)))
        lies = leaf.shape, leaf.stride(), leaf.storage_offset()
        return recipe_of(lies, [recipe])


def _bytes_of(tensor: Any) -> bytes:
    """Read the numbers of a tensor, if it is not large."""
    if tensor.numel() > MAX_COMPARED:
        return b""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    # To ask for an array would count as a layer's asking.
    return ctypes.string_at(flat.data_ptr(), flat.numel())


def _name_of(function: Any) -> str:
    packet = getattr(function, "overloadpacket", None)
    return getattr(packet, "__name__", "")


def _tensors_in(nest: Nest) -> list[Any]:
    leaves = optree.tree_leaves(nest)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
