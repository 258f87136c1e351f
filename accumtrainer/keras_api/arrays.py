"""Tensors of the device, as arrays of the host."""

import numpy as np

from accumtrainer.keras_api import BACKEND, keras, ops
from accumtrainer.keras_api.types import Tensor


def to_array(tensor: Tensor) -> np.ndarray:
    """Make an array of a tensor, which may share its memory.

    NumPy itself reads no tensor of PyTorch that lies on an accelerator, and
    none in bfloat16.

    Args:
        tensor: of the backend, or an array.
    """
    if BACKEND == "torch" and ops.is_tensor(tensor):
        if keras.backend.standardize_dtype(tensor.dtype) == "bfloat16":
            return ops.convert_to_numpy(tensor)
        return tensor.numpy(force=True)
    return np.asarray(tensor)
