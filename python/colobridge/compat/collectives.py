# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Sums and gathers over a group with the gradients that runtimes expect of them: what a rank's loss is of is one of two things,
a part of the loss of all (gradients are summed) or the same on all ranks (each takes its own)."""
from typing import Any

import torch

from ..torch.functions import Function, saved_tensors
from ..torch.ranks import comm_of, size_and_rank, telling
from ..torch.tensors import stream_of


def comm_or_none(group: Any, device: Any, what: str) -> Any:
    """The communicator of a group; None: it has one rank, and needs none."""
    return None if group is None or size_and_rank(group, what)[0] == 1 else comm_of(group, device, what)


def summed(x: Any, comm: Any) -> Any:
    """A new tensor, x added up over the ranks"""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    with telling(comm):
        comm.all_reduce(out, stream=stream_of(out.device))
    return out


@Function
def Sum(ctx: Any, x: Any, comm: Any) -> Any:
    """Over the ranks, whose gradients are the same: each takes its own."""
    return summed(x, comm)


@Sum.adjoint
def _(ctx: Any, g: Any) -> Any:
    return g, None


@Function
def LogSoftmax(ctx: Any, x: Any, temperature: float, comm: Any) -> Any:
    """(columns [.., n] of each rank, a number, communicator or None) -> log_softmax(x / temperature) over the columns of all ranks,
    f32. Each rank makes something of its own of its columns: gradients are summed."""
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    most = y.amax(-1, keepdim=True)
    if comm is not None:
        with telling(comm):
            comm.all_reduce(most, op='max', stream=stream_of(most.device))
    # Differences of large logits are exact, and the logarithm of the sum is small: neither is added to a large number.
    y = (y - most) / temperature
    sums = y.exp().sum(-1, keepdim=True)
    y = (y - (sums if comm is None else summed(sums, comm)).log()).to(torch.float32)
    ctx.of = temperature, comm, x.dtype
    ctx.save_for_backward(y)
    return y


@LogSoftmax.backward
def _(ctx: Any, g: Any) -> Any:
    temperature, comm, dtype = ctx.of
    y, = saved_tensors(ctx, 'vocab_parallel_log_softmax')
    sums = g.sum(-1, keepdim=True)
    sums = sums if comm is None else summed(sums, comm)
    return ((g - y.exp() * sums) / temperature).to(dtype), None, None


@Function
def Columns(ctx: Any, x: Any, comm: Any) -> Any:
    """[.., n] of each rank -> [.., ranks n], in rank order; of the gradient, the same on all ranks, each takes its own."""
    ctx.comm, ctx.n = comm, x.shape[-1]
    parts = torch.empty(comm.size, *x.shape, dtype=x.dtype, device=x.device)
    with telling(comm):
        comm.all_gather(x.contiguous(), parts, stream=stream_of(x.device))
    return parts.movedim(0, -2).reshape(*x.shape[:-1], -1)


@Columns.adjoint
def _(ctx: Any, g: Any) -> Any:
    return g[..., ctx.comm.rank * ctx.n:(ctx.comm.rank + 1) * ctx.n].contiguous(), None
