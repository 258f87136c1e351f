"""Batch normalization as PyTorch does it, written into a graph.

PyTorch adds up one row after another, which loses digits where there are many.
So sums over many rows are made of those of blocks of rows, which lie beside
each other as if they were channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt, prod
from operator import getitem
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

MEAN, SUM = aten.mean.dim, aten.sum.dim_IntList
ADD, SUBTRACT, MULTIPLY = aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor
SCALE = aten.mul.Scalar

MANY_ROWS = 2048
"""From so many on what is added up one by one loses digits that matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What normalizes, by the names in `normalization.py`.

    Args:
        x: the activations.
        mean: their mean.
        variance: their variance.
        root: one by the standard deviation.
        gamma: the scale.
        beta: the offset.
        deviation: `x - mean`, which becomes the result in place.
        multiply: the operation that multiplies it.
        add: the one that adds the offset.
        saved: the copy of the deviation, if there are derivatives.
    """

    x: fx.Node
    mean: fx.Node
    variance: fx.Node
    root: fx.Node
    gamma: fx.Node
    beta: fx.Node
    deviation: fx.Node
    multiply: fx.Node
    add: fx.Node
    saved: Sequence[fx.Node]

    @property
    def axes(self) -> Any:
        """Over which it is normalized."""
        return self.mean.args[1]

    @property
    def epsilon(self) -> Any:
        """What is added to the variance."""
        return self.root.args[1]


@dataclass(frozen=True, slots=True)
class Backward:
    """What the derivatives are computed from, and the derivatives.

    Args:
        first: the operation that reads the cotangents first.
        cotangents: of the result.
        made: by x, gamma and beta; `None` for those that are not needed.
        others: what is added to that by x, from where else x is read.
    """

    first: fx.Node
    cotangents: fx.Node
    made: Sequence[fx.Node | None]
    others: Sequence[Any]


def _blocks(count: int) -> int:
    """Choose how many blocks many rows are divided into, if they can be.

    As many as each then has rows, or fewer.
    """
    if count < MANY_ROWS:
        return 1
    return max(n for n in range(1, isqrt(count) + 1) if count % n == 0)


class Writer:
    """Writes PyTorch's operations.

    Args:
        graph: gets them.
        forward: what they stand for.
    """

    def __init__(self, graph: fx.Graph, forward: Forward):
        self._graph = graph
        self._forward = forward
        shape = forward.x.meta["val"].shape
        (axis,) = set(range(len(shape))) - {
            axis % len(shape) for axis in forward.axes
        }
        # Channels are second for PyTorch, and last where nothing follows.
        matrix = [prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])]
        self._matrix = matrix if matrix[2] > 1 else matrix[:2]
        self._row = [shape[axis]]
        rows = self._matrix[0]
        self._blocks = 1 if len(self._matrix) > 2 else _blocks(rows)
        self._block = [rows // self._blocks, self._blocks * shape[axis]]

    def write_forward(self) -> fx.Node:
        """Write what normalizes, and return the result."""
        forward = self._forward
        with self._graph.inserting_before(forward.mean):
            rows = self._rows = self._shape(forward.x, self._matrix)
            self._mean, self._variance = self._write_moments(rows)
            for old, new in zip(
                (forward.mean, forward.variance),
                (self._mean, self._variance),
                strict=True,
            ):
                self._put(new, old)
        with self._graph.inserting_before(forward.add.next):
            whole = self._call(
                aten.native_batch_norm.default,
                rows,
                self._shape(forward.gamma, self._row),
                self._shape(forward.beta, self._row),
                self._mean,
                self._variance,
                False,
                0.0,
                forward.epsilon,
            )
            for node in (forward.add, forward.multiply):
                self._graph.erase_node(node)
            return self._put(self._item(whole, 0), forward.deviation)

    def _write_moments(self, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Write mean and variance of each channel."""
        if self._blocks == 1:
            return self._moments_of(rows)
        shape = [self._blocks, *self._row]
        means, within = (
            self._shape(node, shape)
            for node in self._moments_of(self._shape(rows, self._block))
        )
        mean = self._call(MEAN, means, [0])
        away = self._call(SUBTRACT, means, mean)
        between = self._call(MULTIPLY, away, away)
        variance = self._call(ADD, within, between)
        return mean, self._call(MEAN, variance, [0])

    def _moments_of(self, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
        moments = self._call(
            aten.batch_norm_update_stats.default, rows, None, None, 0.0
        )
        return self._item(moments, 0), self._item(moments, 1)

    def write_backward(self, backward: Backward) -> None:
        """Write what derivatives there are."""
        needed = [node is not None for node in backward.made]
        with self._graph.inserting_before(backward.first):
            cotangents = self._shape(backward.cotangents, self._matrix)
            if self._blocks > 1:
                values = self._write_block_derivatives(cotangents, needed)
            else:
                values = self._write_derivatives(cotangents, needed)
        for index, node in enumerate(backward.made):
            if node is None:
                continue
            with self._graph.inserting_before(node):
                value = values[index]
                for other in () if index else backward.others:
                    value = self._shape(value, list(node.meta["val"].shape))
                    value = self._call(ADD, value, other)
                self._put(value, node)

    def _write_derivatives(
        self, cotangents: fx.Node, needed: list[bool]
    ) -> list[Any]:
        forward = self._forward
        whole = self._call(
            aten.native_batch_norm_backward.default,
            cotangents,
            self._rows,
            self._shape(forward.gamma, self._row),
            None,
            None,
            self._mean,
            self._shape(forward.root, self._row),
            True,
            forward.epsilon,
            needed,
        )
        return [
            self._item(whole, i) if is_needed else None
            for i, is_needed in enumerate(needed)
        ]

    def _write_block_derivatives(
        self, cotangents: fx.Node, needed: list[bool]
    ) -> list[Any]:
        """Write derivatives by sums of blocks, as the moments.

        With `n` rows, by x they are

            root * gamma * (c - by_beta / n - (x - mean) * root * by_gamma / n)
        """
        forward, call = self._forward, self._call
        gamma, root = (
            self._shape(node, self._row)
            for node in (forward.gamma, forward.root)
        )
        sums = call(
            aten.native_batch_norm_backward.default,
            self._shape(cotangents, self._block),
            self._shape(self._rows, self._block),
            None,
            self._for_each_block(self._mean),
            self._for_each_block(self._variance),
            None,
            None,
            False,
            forward.epsilon,
            [False, True, True],
        )
        shape = [self._blocks, *self._row]
        by_gamma, by_beta = (
            call(SUM, self._shape(self._item(sums, i), shape), [0])
            for i in (1, 2)
        )
        by_x = None
        if needed[0]:
            factor = call(MULTIPLY, root, gamma)
            negative = call(SCALE, factor, -1 / self._matrix[0])
            slope = call(MULTIPLY, call(MULTIPLY, negative, root), by_gamma)
            start = call(
                SUBTRACT,
                call(MULTIPLY, negative, by_beta),
                call(MULTIPLY, slope, self._mean),
            )
            line = call(aten.addcmul.default, start, self._rows, slope)
            by_x = call(aten.addcmul_.default, line, cotangents, factor)
        return [by_x, by_gamma, by_beta]

    def _for_each_block(self, row: fx.Node) -> fx.Node:
        """Repeat what there is of each channel for every block."""
        return self._call(aten.repeat.default, row, [self._blocks])

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self._graph.call_function(target, args)
        given = fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*given)
        return node

    def _item(self, items: fx.Node, index: int) -> fx.Node:
        return self._call(getitem, items, index)

    def _shape(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """Give a value another shape, from where it first had one."""
        while node.target is aten.reshape.default:
            node = node.args[0]
        if list(node.meta["val"].shape) == shape:
            return node
        return self._call(aten.reshape.default, node, shape)

    def _put(self, new: fx.Node, old: fx.Node) -> fx.Node:
        """Put a value in the place of another."""
        new = self._shape(new, list(old.meta["val"].shape))
        old.replace_all_uses_with(
            new, delete_user_cb=lambda user: user not in self._forward.saved
        )
        return new
