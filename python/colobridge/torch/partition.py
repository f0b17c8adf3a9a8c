# SPDX-License-Identifier: Apache-2.0
"""Shards along the sequence as autograd functions, and next-token targets; docs/concepts/layouts.md."""
from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from ..partition import Partition
from .calls import eager
from .functions import Function
from .tensors import checked


def _dim(t: Any, dim: int, what: str) -> int:
    checked(t, what)
    if not -t.dim() <= dim < t.dim():
        raise ArgumentError("%s has %d dims, and none is dim %d" % (what, t.dim(), dim))
    return dim % t.dim()


@Function
def Along(ctx: Any, x: Any, partition: Partition, dim: int, back: bool) -> Any:
    """(x, partition, dim, back) -> its shard, or back, a tensor whose shard is x. Each is the other's adjoint, so that
    gradients of gradients need nothing more."""
    ctx.of = partition, dim, not back
    count = partition.positions if back else len(partition)
    y = x.new_empty([count if a == dim else n for a, n in enumerate(x.shape)])
    (partition.unshard if back else partition.shard)(x, dim, y)
    return y


@Along.differentiable
def _(ctx: Any, d_y: Any) -> Any:
    return Along.apply(d_y, *ctx.of), None, None, None


@eager
def shard(x: torch.Tensor, partition: Partition, dim: int = 1) -> torch.Tensor:
    """This rank's positions of @x along @dim, a new tensor; @x is the whole, with any strides, and is not
    saved. Backward is unshard(): zero where other ranks' positions are, so gradients of @x add up over
    ranks. Runs on the current stream. ValueError: a shape, dtype or device that does not fit."""
    return Along.apply(x, partition, _dim(x, dim, 'x'), False)


@eager
def unshard(y: torch.Tensor, partition: Partition, dim: int = 1) -> torch.Tensor:
    """A tensor of all positions along @dim with this rank's, @y, at their places and zeros elsewhere;
    the sum over ranks is the whole. Backward is shard()."""
    return Along.apply(y, partition, _dim(y, dim, 'y'), True)


@eager
def next_token(tokens: torch.Tensor, partition: Partition, last: int = -100) -> torch.Tensor:
    """Targets of whole int64 sequences [..., positions], a new tensor: the next token, and @last at the end
    of each sequence, or of each segment of a packed one. Shard them afterwards, not before."""
    checked(tokens, 'tokens')
    targets = tokens.new_empty(tokens.shape)
    partition.next_token(tokens, targets, last)
    return targets
