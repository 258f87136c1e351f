"""Where branches begin and end in what is recorded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from accumtrainer.keras_api.types import Tensor

IF, ELSE, END = range(3)
"""Before which part of a branch a mark stands."""


def _mark(predicate: torch.Tensor, part: int) -> None:
    raise AssertionError(f"a mark is not run: {predicate}, {part}")


_operation = torch.library.custom_op(
    "accumtrainer::mark", _mark, mutates_args=()
)
_operation.register_fake(lambda predicate, part: None)
MARK = torch.ops.accumtrainer.mark.default
fx.node.has_side_effect(MARK)


def record_branch(
    predicate: Tensor, on_true: Callable[[], Any], on_false: Callable[[], Any]
) -> None:
    """Record two functions that change tensors, one of which is to run."""
    MARK(predicate, IF)
    on_true()
    MARK(predicate, ELSE)
    on_false()
    MARK(predicate, END)
