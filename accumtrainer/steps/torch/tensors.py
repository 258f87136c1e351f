"""Arrays of the host, as tensors of PyTorch, and how these are computed."""

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from accumtrainer.keras_api import ops
from accumtrainer.keras_api.types import Tensor


def to_tensor(leaf: Any) -> Tensor:
    """Make a tensor of an array, which shares its memory where it can."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if not isinstance(leaf, np.ndarray) or not _can_share(leaf):
        return ops.convert_to_tensor(leaf)
    return torch.from_numpy(leaf).to(default_device())


def _can_share(array: np.ndarray) -> bool:
    # PyTorch computes little with unsigned integers, and warns where memory
    # is not to be written to.
    is_known = array.dtype.kind in "ifb" or array.dtype == np.uint8
    return is_known and array.dtype.isnative and array.flags.writeable


@functools.cache
def default_device() -> torch.device:
    """Return the device on which Keras puts tensors."""
    return ops.zeros(()).device


def autocast_dtype() -> torch.dtype | None:
    """Return what `torch.autocast` casts to around this, if anything."""
    kind = default_device().type
    is_on = torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_on else None


def without_autocast() -> AbstractContextManager:
    """Make a scope in which `torch.autocast` casts nothing."""
    if autocast_dtype() is None:
        return contextlib.nullcontext()
    return torch.autocast(default_device().type, enabled=False)
