# SPDX-License-Identifier: Apache-2.0
"""Which ids of sharded logits a sampler with top-k and top-p draws from: docs/compat.md#top-k-and-top-p."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ..comm import Comm
from .logprob import _control, shard
from .ranks import comm_of, telling
from .tensors import stream_of

LISTED = 4096  # a top_k up to here is found by lists
_SUMS = 32  # of a digit, so that neighbours, whose digits are often equal, add to different ones
_ELEMENTS = 1 << 24  # logits of a rank that are searched together, about: bounds workspace


def masses(x: Any, largest: Any, count: int) -> Any:
    """exp(x - largest), which add up to less than 2^63, as integers: sums are exact in any order"""
    return ((x.double() - largest).exp() * 2.0 ** (62 - count.bit_length())).nan_to_num().long()


def enough(top_p: float, total: Any) -> Any:
    """The least mass of the ids that are kept"""
    import torch
    return torch.minimum((total.double() * top_p).ceil().long(), total).clamp(min=1)


def vocabulary(what: str, logits: Any, start: int, end: int, group: Any) -> int:
    """V of logits [..., n] with the ids start .. end - 1"""
    comm = comm_of(group, logits.device, what + ': tp_group')
    with telling(comm):
        return shard(comm, _control(group, comm), logits.shape[-1], start, end, None)[1]


def kept(what: str, logits: Any, start: int, vocab: int, group: Any, top_k: int, top_p: float, chunk: int) -> Any:
    """Mask of the logits [..., n] whose first column has the id start: the top_k (0: all) largest, and of these the
    fewest largest that have top_p of their mass. A row with NaN or +inf, or nothing but -inf, keeps all. chunk (0:
    any): tokens that are searched together; it changes no bit, as the number of ranks does not."""
    import torch
    comm = comm_of(group, logits.device, what + ': tp_group')
    with telling(comm):
        rows = logits.detach().flatten(0, -2)
        count, columns = rows.shape
        top = rows.amax(1).double() if columns else rows.new_full((count,), -math.inf, dtype=torch.float64)
        told = _gather(torch.cat([top, top.new_tensor([start])]), comm)  # [W, T + 1]
        largest, lower = told[:, :-1].amax(0).unsqueeze(1), told[:, -1] < start
        mask = (~largest.isfinite()).repeat(1, columns)
        listed = 0 < top_k <= LISTED
        gathered = comm.size * min(top_k, vocab) if listed else _SUMS * 256  # or added up, of a token
        step = max(1, min(chunk or count, _ELEMENTS // max(gathered, vocab // comm.size)))
        for i in range(0, count, step):
            x = rows[i:i + step] + 0  # -0 equals 0
            top = largest[i:i + step]
            if listed:
                mask[i:i + step] |= _listed(x, min(top_k, vocab), top_p, top, vocab, lower, comm)
                continue
            keep = torch.ones_like(x, dtype=torch.bool)
            if top_k:
                keep = _largest(x, keep.long(), lambda total: total.clamp(max=top_k), lower, comm)
            if top_p < 1:
                mass = masses(x, top, vocab)
                keep = _largest(x, mass * keep if top_k else mass, functools.partial(enough, top_p), lower, comm)
            mask[i:i + step] |= keep
        return mask.view(logits.shape)


def _listed(rows: Any, top_k: int, top_p: float, largest: Any, vocab: int, lower: Any, comm: Comm) -> Any:
    """Mask of what kept() keeps, from a list of the top_k largest logits of all ranks: what has the mass is found in
    it, and of the ids those that are larger than its last one, or equal and early enough."""
    import torch
    if not rows.is_cuda:  # where topk() does not know all dtypes
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    best = rows.new_full((len(rows), top_k), -math.inf)
    columns = min(top_k, rows.shape[1])
    best[:, :columns] = rows.topk(columns, 1)[0]
    if comm.size > 1:
        best = _gather(best, comm).transpose(0, 1).flatten(1).topk(top_k, 1)[0]
    count = torch.full_like(largest, top_k, dtype=torch.int64)
    if top_p < 1:
        mass = masses(best, largest, vocab)
        count = (mass.cumsum(1) - mass < enough(top_p, mass.sum(1, keepdim=True))).sum(1, keepdim=True)
    last = best.gather(1, count - 1)
    equal = rows == last
    parts = _gather(equal.sum(1, keepdim=True), comm)  # [W, T, 1]
    before = (best > last).sum(1, keepdim=True) + (parts * lower[:, None, None]).sum(0)
    return (rows > last) | equal & (before + equal.cumsum(1) <= count)


def _largest(rows: Any, mass: Any, need: Callable[[Any], Any], lower: Any, comm: Comm) -> Any:
    """Mask of the fewest largest logits, of equal ones those with the lowest ids, that have need(total) of the mass
    together. lower: the ranks with lower ids. The smallest of them is found 8 bits at a time, the highest first: a
    histogram and a gather each."""
    import torch
    bits = 8 * rows.element_size()
    key = rows.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[bits])
    key = key ^ (key >> bits - 1 | -2 ** (bits - 1))  # in the order of the logits, without a sign
    digits = key.view(torch.uint8).view(*rows.shape, bits // 8).unbind(-1)[::-1]
    spread = torch.arange(rows.shape[1], device=rows.device) % _SUMS * 256
    none, above, wanted = mass.new_zeros(len(rows), _SUMS * 256), 0, None
    larger, equal = torch.zeros_like(rows, dtype=torch.bool), torch.ones_like(rows, dtype=torch.bool)
    for digit in digits:
        sums = none.scatter_add(1, digit + spread, mass).view(-1, _SUMS, 256)
        parts = _gather(sums.sum(1), comm)  # [W, T, 256]
        each = parts.sum(0)
        reach = above + each.flip(1).cumsum(1).flip(1)  # the mass of a digit and of those above
        wanted = need(reach[:, :1]) if wanted is None else wanted
        found = ((reach >= wanted).sum(1, keepdim=True) - 1).clamp(min=0)
        above = (reach - each).gather(1, found)
        least = found.to(torch.uint8)
        larger |= equal & (digit > least)
        equal &= digit == least
        mass = mass * equal
    before = above + (parts.gather(2, found.expand(len(parts), -1, 1)) * lower[:, None, None]).sum(0) \
        + mass.cumsum(1) - mass
    return larger | equal & (before < wanted)


def _gather(mine: Any, comm: Comm) -> Any:
    """Of every rank: [W, ..]"""
    import torch
    if comm.size == 1:
        return mine[None]
    out = torch.empty(comm.size, *mine.shape, dtype=mine.dtype, device=mine.device)
    comm.all_gather(mine, out, stream=stream_of(mine.device))
    return out
