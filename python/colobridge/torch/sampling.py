# SPDX-License-Identifier: Apache-2.0
"""Which ids of sharded logits a sampler with top-k and top-p draws from: docs/concepts/loss.md."""
import math
from typing import Any

import torch

from .._lib import call, size_of
from ..comm import Comm
from .functions import Function
from .logprob import config_of, shard
from .ranks import comm_of, telling
from .ready import reserved
from .tensors import checked, stream_of

_WORKSPACE = 1 << 26  # bytes, about: 32,768 tokens of one rank


def dropped(logp: Any, top_p: float) -> Any:
    """Which ids of log-probabilities [.., k], the largest first, top_p does not keep, or have no mass at all"""
    if top_p == 1:  # keeps an id whose mass rounds to 0, too
        return logp == -math.inf
    # Integers that add up to less than 2^63: sums are exact in any order.
    mass = ((logp.double() - logp[..., :1]).exp() * 2.0 ** (62 - logp.shape[-1].bit_length())).nan_to_num().long()
    total = mass.sum(-1, keepdim=True)
    return mass.cumsum(-1) - mass >= torch.minimum((total.double() * top_p).ceil().long(), total).clamp(min=1)


def vocabulary(what: str, columns: int, device: Any, start: int, end: int, group: Any) -> int:
    """V of a shard of so many columns, which have the ids start .. end - 1"""
    comm = comm_of(group, device, what + ': tp_group')
    with telling(comm):
        return shard(comm, group, columns, start, end, None)[1]


def kept(what: str, logits: Any, target: Any, start: int, vocab: int, group: Any, top_k: int, top_p: float,
         chunk: int) -> Any:
    """A copy of logits [..., n], whose first column has the id start, in which ids that top_k (0: all) and top_p
    do not keep are -inf, for log-probabilities of target [...], whose gradient goes through but for targets that
    are not kept: other ids that are not kept have none. chunk (0: any): tokens that are searched together; it
    changes no bit, as the number of ranks does not."""
    comm = comm_of(group, logits.device, what + ': tp_group')
    return _Kept.apply(logits, comm, target, start, vocab, top_k, top_p, chunk, torch.is_grad_enabled())


@Function
def _Kept(ctx: Any, logits: Any, comm: Comm, target: Any, start: int, vocab: int, top_k: int, top_p: float,
          chunk: int, grad: bool) -> Any:
    """kept() of a communicator, and is a backward to be prepared?"""
    with telling(comm):
        rows = logits.flatten(0, -2)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        config = config_of('top_k and top_p', 'sampling', start, vocab, top_k=top_k, top_p=top_p)
        dtype, count = checked(rows, 'logits').dtype, len(rows)
        each = size_of('colo_sampling_workspace_size', config, dtype, 1 << 10, comm.size)
        step = max(1, min(chunk or count, count, (_WORKSPACE << 10) // each))
        most = size_of('colo_sampling_workspace_size', config, dtype, step, comm.size)
        workspace = reserved(most, rows.device)
        for i in range(0, max(count, 1), step):
            call('colo_sampling_keep', config, checked(rows[i:i + step], 'logits'), checked(out[i:i + step], 'out'),
                 comm.handle, workspace[1], stream_of(rows.device))
    out = out.view(logits.shape)
    if grad and ctx.needs_input_grad[0] and out.shape[-1]:
        column = (target.long() - start).unsqueeze(-1)
        here = column.clamp(0, out.shape[-1] - 1)
        ctx.save_for_backward(here, (here == column) & (out.gather(-1, here) == -math.inf))
    return out


@_Kept.backward
def _(ctx: Any, d_out: Any) -> Any:
    if ctx.saved_tensors:
        here, lost = ctx.saved_tensors
        d_out.scatter_(-1, here, d_out.gather(-1, here).masked_fill(lost, 0))  # logprob's, which no other reads
    return d_out, *(None,) * 8
