"""The sum of the squares of a large tensor, read from memory once."""

import torch

from accumtrainer.keras_api.types import Tensor

ROW = 4_096
"""How many squares are added up in a row, before rows are.

In one row, PyTorch's norm of 17 million numbers errs by a thousandth.
"""

MANY = 2**18
"""From how many numbers on rows are faster, on a CPU."""


def sum_in_rows(tensor: Tensor) -> Tensor:
    """Add up the squares of a tensor, row by row.

    Squares that are made to be added up go through memory twice more. In which
    order they are added does not matter, so rows are those of the memory.

    Args:
        tensor: float32.

    Returns:
        Scalar, float32.
    """
    outermost_first = sorted(
        range(tensor.dim()), key=tensor.stride, reverse=True
    )
    flat = tensor.permute(outermost_first).reshape(-1)
    count = flat.numel() // ROW * ROW
    norms = torch.linalg.vector_norm(flat[:count].reshape(-1, ROW), dim=1)
    rest = flat[count:]
    return torch.sum(torch.square(norms)) + torch.sum(torch.square(rest))
