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
    """This rank's positions of a tensor. Backward is unshard(): zero where other ranks' positions are, so gradients of x add up
    over ranks. Runs on the current stream.

    Args:
        x: the whole, with any strides; it is not saved.
        partition: which positions this rank has.
        dim: of the positions.

    Returns:
        A new tensor.

    Raises:
        ValueError: a shape, dtype or device that does not fit.

    Example:
        >>> import colobridge as cb, colobridge.torch as ct, torch
        >>> ct.shard(torch.arange(8), cb.Partition(8, cp=2, cp_rank=1), dim=0)
        tensor([2, 3, 4, 5])
    """
    return Along.apply(x, partition, _dim(x, dim, 'x'), False)


@eager
def unshard(y: torch.Tensor, partition: Partition, dim: int = 1) -> torch.Tensor:
    """A tensor of all positions with this rank's at their places and zeros elsewhere; the sum over ranks is the whole. Backward is
    shard().

    Args:
        y: this rank's positions.
        partition: which positions this rank has.
        dim: of the positions.

    Returns:
        A new tensor.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    return Along.apply(y, partition, _dim(y, dim, 'y'), True)


@eager
def next_token(tokens: torch.Tensor, partition: Partition, last: int = -100) -> torch.Tensor:
    """Targets of whole sequences: the next token. Shard them afterwards, not before.

    Args:
        tokens: [..., positions], int64.
        partition: whose segments, if it is of packed sequences, end as sequences do.
        last: the target at the end of each sequence or segment.

    Returns:
        A new tensor like tokens.

    Raises:
        ValueError: a shape, dtype or device that does not fit.

    Example:
        >>> import colobridge as cb, colobridge.torch as ct, torch
        >>> ct.next_token(torch.tensor([[5, 6, 7, 8]]), cb.Partition(4))
        tensor([[   6,    7,    8, -100]])
    """
    checked(tokens, 'tokens')
    targets = tokens.new_empty(tokens.shape)
    partition.next_token(tokens, targets, last)
    return targets
