# SPDX-License-Identifier: Apache-2.0
"""Any loss of logits straight from hidden states, a chunk of tokens at a time."""
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError
from . import ranks as groups
from .head import autocast
from .lazy import torch
from .ready import integer
from .tensors import Function, eager, said, saved_tensors, stream_of


def _rows_of(hidden: Any, step: int) -> list[slice]:
    return [slice(i, i + step) for i in range(0, max(len(hidden), 1), step)]  # also of no tokens


@Function
def OverChunks(ctx: Any, hidden: Any, weight: Any, bias: Any, fn: Any, step: int, comm: Any, add: bool) -> Any:
    """(hidden [T, H], weight, bias, fn, tokens a chunk, communicator, does it sum d_hidden?) -> fn's outputs
    [T, ..]. Logits are made again in backward, under the autocast of forward."""
    parts = []
    for rows in _rows_of(hidden, step):
        out = fn(torch.nn.functional.linear(hidden[rows], weight, bias), rows)
        parts.append(out if isinstance(out, tuple) else (out,))
    ctx.save_for_backward(hidden, weight, bias)
    ctx.fn, ctx.step, ctx.comm, ctx.add = fn, step, comm, add
    ctx.product = autocast(hidden.device.type)
    ctx.set_materialize_grads(False)
    out = tuple(torch.cat(each) for each in zip(*parts))
    ctx.mark_non_differentiable(*(t for t in out if not t.is_floating_point()))
    return out


@OverChunks.backward
def _(ctx: Any, *upstream: Any) -> Any:
    hidden, weight, bias = saved_tensors(ctx, 'over_chunks: hidden, weight or bias')
    need = ctx.needs_input_grad
    real = torch.float64 if weight.dtype == torch.float64 else torch.float32
    d_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if need[0] else None
    d_weight = torch.zeros_like(weight, dtype=real) if need[1] else None
    d_bias = torch.zeros_like(bias, dtype=real) if need[2] else None
    with groups.telling(ctx.comm), torch.autocast(hidden.device.type, dtype=ctx.product,
                                                  enabled=ctx.product is not None):
        for rows in _rows_of(hidden, ctx.step):
            h = hidden[rows]
            with torch.enable_grad():
                z = torch.nn.functional.linear(h, weight, bias).detach().requires_grad_()
                out = ctx.fn(z, rows)
                out = out if isinstance(out, tuple) else (out,)
                used = [(o, g[rows]) for o, g in zip(out, upstream) if g is not None and o.requires_grad]
            d = torch.autograd.grad([o for o, _ in used], z, [g for _, g in used])[0] if used \
                else torch.zeros_like(z)
            if d_hidden is not None:
                d_hidden[rows] = d @ weight
            if d_weight is not None:
                d_weight += d.t() @ h
            if d_bias is not None:
                d_bias += d.sum(0, dtype=real)
        if d_hidden is not None and ctx.add:
            ctx.comm.all_reduce(d_hidden, stream=stream_of(d_hidden.device))
    return (d_hidden, None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype), None, None, None, None)


@eager
def over_chunks(fn: Callable[[Any, slice], Any], hidden: Any, weight: Any, bias: Any = None, *,
                chunk_size: int = 2048, tp_group: Any = None, d_hidden: str = 'all_reduce') -> Any:
    """fn's outputs for the logits hidden [..., H] x weight [Vl, H]^T + bias [Vl], of which one chunk of tokens exists
    at a time; backward makes them again. For losses that linear_logprob() does not have: docs/python.md#other-losses.

    fn(logits [n, Vl], rows) returns a tensor [n, ..] or a tuple of them, numbers per token; rows is the slice
    of the T tokens that the chunk has, and a token's outputs depend on its logits only. They come back as [..., ..].
    tp_group: ranks that share the vocabulary; over it the gradient of hidden is "all_reduce": the sum, on every
    rank, or "partial": this rank's part. All ranks have the same tokens and chunk_size. fn's collectives run for
    each chunk, in forward and again in backward, both under the autocast of forward. Gradients of weight and bias are
    added up in fp32 (fp64 of fp64).
    """
    if d_hidden not in ('all_reduce', 'partial') or integer('chunk_size', chunk_size) < 1:
        raise ArgumentError("over_chunks: d_hidden is %r and chunk_size %s, expected 'all_reduce' or 'partial' and "
                            "a number above 0" % (d_hidden, chunk_size))
    given = hidden, weight, bias
    h, w, b = (tuple(t.shape) if isinstance(t, torch.Tensor) and t.layout is torch.strided else () for t in given)
    if not h or len(w) != 2 or h[-1] != w[1] or bias is not None and b != w[:1]:
        raise ArgumentError("over_chunks: hidden is %s and weight %s, expected [..., H] and [Vl, H]; bias is %s, expected "
                            "[Vl] or None" % tuple(said(t, '%(shape)s') for t in given))
    if autocast(hidden.device.type) is None and {hidden.dtype, weight.dtype} != {getattr(bias, 'dtype', weight.dtype)}:
        raise ArgumentError("over_chunks: hidden is of %s, weight of %s and bias of %s, expected one dtype"
                            % (hidden.dtype, weight.dtype, getattr(bias, 'dtype', None)))
    comm = groups.comm_of(tp_group, hidden.device, 'over_chunks: tp_group')
    shape = hidden.shape[:-1]
    out = OverChunks.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, fn, chunk_size, comm,
                           d_hidden == 'all_reduce' and comm.size > 1)
    first, *others = (t.reshape(shape + t.shape[1:]) for t in out)
    return (first, *others) if others else first
