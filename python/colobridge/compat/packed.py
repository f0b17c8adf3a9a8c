# SPDX-License-Identifier: Apache-2.0
"""Tokens of packed sequences, and of context ranks, as the runtimes lay them out."""
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentError
from ..torch.functions import Function
from ..torch.ranks import comm_of, telling
from ..torch.tensors import stream_of


def own_index(cu: Any, cp: int, rank: int, count: int) -> Any:
    """Global positions [count / cp] of a cp rank: zigzag in each padded segment cu[j] .. cu[j + 1]."""
    local = cu // cp
    i = torch.arange(count // cp, device=cu.device)
    j = torch.searchsorted(local[1:].contiguous(), i, right=True).clamp(max=len(cu) - 2)
    half = (local[j + 1] - local[j]) // 2
    x = i - local[j]
    off = torch.where(x < half, rank, 2 * (cp - 1) - rank) if cp > 1 else torch.zeros_like(x)
    return x + local[j] * cp + half * off


@Function
def _GatherContext(ctx: Any, part: Any, order: Any, comm: Any, add: bool) -> Any:
    """[n / cp, ..] of every cp rank -> [n, ..] in global order. Backward takes this rank's part of the
    gradient, added over cp first where @add."""
    ctx.order, ctx.comm, ctx.add, ctx.count = order, comm, add, len(part)
    parts = torch.empty(len(part) * comm.size, *part.shape[1:], dtype=part.dtype, device=part.device)
    with telling(comm):
        comm.all_gather(part.contiguous(), parts, stream=stream_of(part.device))
    whole = torch.empty_like(parts)
    whole[order] = parts
    return whole


@_GatherContext.adjoint
def _(ctx: Any, d_whole: Any) -> Any:
    d_whole = d_whole.contiguous()
    if ctx.add:
        d_whole = d_whole.clone()
        with telling(ctx.comm):
            ctx.comm.all_reduce(d_whole, stream=stream_of(d_whole.device))
    mine = ctx.order[ctx.comm.rank * ctx.count:(ctx.comm.rank + 1) * ctx.count]
    return d_whole[mine], None, None, None


def context_of(group: Any, device: Any) -> tuple[int, int, Any]:
    """(size, rank, communicator) of a context-parallel group; None: no such parallelism."""
    if group is None:
        return 1, 0, None
    comm = comm_of(group, device, 'cp_group')
    return comm.size, comm.rank, comm


def with_context(logp: Any, cu: Any, count: int, comm: Any, add: bool) -> Any:
    """[count, ..] in global order from this rank's [count / cp, ..]."""
    order = torch.cat([own_index(cu, comm.size, rank, count) for rank in range(comm.size)])
    return _GatherContext.apply(logp, order, comm, add)


class Places:
    """Where the tokens of packed sequences go in [rows, width + 1], and width where they have no target."""

    def __init__(self, cu: Any, count: int, width: int, attention_mask: Any,
                 sub_seq_lengths: Sequence[Sequence[int]] | None):
        device = cu.device
        t = torch.arange(count, device=device)
        found = torch.searchsorted(cu[1:].contiguous(), t, right=True)
        j = found.clamp(max=len(cu) - 2)  # beyond the last sequence: padding, dropped below
        self.after = torch.where(t + 1 < cu[j + 1], t + 1, cu[j]).clamp(max=count - 1)  # the next token
        x, length = t - cu[j], cu[j + 1] - cu[j]
        row, first, rows = j, torch.zeros_like(j), len(cu) - 1
        if sub_seq_lengths is not None:
            attention_mask = None  # the original does not read it
            flat: list[tuple[int, int, int]] = []  # its row, the row's first sequence, its tokens
            for r, lengths in enumerate(sub_seq_lengths):
                opening = len(flat)
                flat += [(r, opening, n) for n in lengths]
            if len(flat) != len(cu) - 1:
                raise ArgumentError("sub_seq_lengths names %d sequences, cu_seqlens_padded %d"
                                    % (len(flat), len(cu) - 1))
            table = torch.tensor(flat, device=device)
            row, opened, length = table[j].unbind(1)
            first = cu[j] - cu[opened]
            rows = len(sub_seq_lengths)
        column = first + x
        if attention_mask is not None:
            mask = attention_mask.to(device=device, dtype=torch.bool)
            if tuple(mask.shape) != (rows, width):
                raise ArgumentError("attention_mask is %s, expected [%d, %d]"
                                    % (list(mask.shape), rows, width))
            order = torch.where(mask, mask.cumsum(1) - 1, width)
            place = torch.full((rows, width + 1), width, device=device)
            place.scatter_(1, order, torch.arange(width, device=device).expand(rows, width))
            length = mask.sum(1)[row]
            column = place[row, column.clamp(max=width)]
        wanted = (found < len(cu) - 1) & (x < length - 1) & (column < width - 1)
        self.rows, self.width, self.index = rows, width, row * (width + 1) + torch.where(wanted, column, width)

    def scatter(self, logp: Any) -> Any:
        """[rows, width - 1] of [count]; 0 where there is nothing"""
        out = torch.zeros(self.rows * (self.width + 1), dtype=logp.dtype, device=logp.device)
        return out.index_add(0, self.index, logp).reshape(self.rows, -1)[:, :self.width - 1]

    def gather(self, values: Any) -> Any:
        """[count] of [rows, width - 1]; 0 where there is nothing"""
        return torch.nn.functional.pad(values, (0, 2)).reshape(-1)[self.index]
