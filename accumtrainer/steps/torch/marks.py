"""Where branches and loops begin and end in what is recorded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from accumtrainer.keras_api.types import Tensor

IF, ELSE, LOOP, END = range(4)
"""Before which part of a branch or loop a mark stands."""


def _mark(tensor: torch.Tensor, part: int) -> None:
    raise AssertionError(f"a mark is not run: {tensor}, {part}")


def _item(stacked: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"what a loop goes through is not run: {stacked}")


def _collect(result: torch.Tensor, length: int) -> torch.Tensor:
    raise AssertionError(f"what a loop makes is not run: {result}, {length}")


def _define(function: Callable, fake: Callable) -> Any:
    name = f"accumtrainer::{function.__name__[1:]}"
    operation = torch.library.custom_op(name, function, mutates_args=())
    operation.register_fake(fake)
    return getattr(torch.ops.accumtrainer, function.__name__[1:]).default


MARK = _define(_mark, lambda tensor, part: None)
"""Ends what runs in a row. The tensor decides between the ways of a branch, or
has an element for every turn of a loop."""

ITEM = _define(_item, lambda stacked: torch.empty_like(stacked[0]))
"""What is the next one of the items, in every turn of a loop."""

COLLECT = _define(
    _collect, lambda result, length: result.new_empty([length, *result.shape])
)
"""The results of all turns, after a loop."""

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
