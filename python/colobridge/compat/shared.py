# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What drop-ins of several projects are made of: the options of colobridge.torch under which their formulas hold."""
from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError, FailedError
from ..torch.calls import eager
from ..torch.head import Head, Named, read
from ..torch.linear import Linear, prepare
from ..torch.logprob import outputs
from ..torch.losses import topk_logprob
from ..torch.ranks import size_and_rank, telling
from ..torch.sampling import dropped, kept, vocabulary
from ..torch.support import Support
from ..torch.tensors import stream_of
from ..torch.types import Group
from .packed import Places, context_of, own_index, with_context

NONE_IGNORED = -2**63  # no token has this number
_tensor_parallel: list[Any] = []


def set_tensor_parallel_group(group: Group | None) -> None:
    """Sets the group of vocab_parallel_entropy(), vocab_parallel_cross_entropy() and those that call them, if tp_group is None.

    Args:
        group: the ranks that share the vocabulary; None: no others.
    """
    _tensor_parallel[:] = [group]


def tp_of(group: Any, what: str) -> Any:
    if group is not None:
        return group
    if not _tensor_parallel:
        raise FailedError("%s: tp_group is None; pass the tensor-parallel group, or set one by "
                          "colobridge.compat.set_tensor_parallel_group()" % what)
    return _tensor_parallel[0]


def f32(t: Any) -> Any:
    return t.to(torch.float32)


def local(t: Any) -> Any:
    """This rank's part of a DTensor, or the tensor that it is"""
    return t.to_local() if hasattr(t, 'placements') else t


@eager
def logp_of(logits: Any, target: Any, start: int, end: int, group: Any, chunk: int | None,
            inference_only: bool, what: str, support: Any = None, vocab: int | None = None) -> Any:
    """vocab: V, of whom knows it; else ranks are asked"""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        return f32(outputs(what, logits, target, ('logp',), tp_group=group, start=int(start), end=int(end), vocab=vocab,
                           lenient_targets=True, ignore_index=NONE_IGNORED, chunk_size=int(chunk or 0), support=support)[0])


# ---- context parallelism ----

def shifted(what: str, source: Any, target: Any, cp_group: Any, of_targets: Callable[[Any], Any],
            pre_rolled: bool = False) -> Any:
    """logp [B, S - 1] of a dense batch. source: logits or hidden [B, S' / cp, ..]; of_targets(targets of its
    elements) are theirs."""
    cp, rank, comm = context_of(cp_group, source.device)
    batch, seq = target.shape if target.dim() == 2 else (-1, -1)
    count = source.shape[1] * cp if source.dim() == 3 else -1
    if batch < 0 or source.shape[0] != batch or count < seq or (cp > 1 and count % (2 * cp)):
        raise ArgumentError("%s: logits are %s and target is %s on cp=%d, expected [B, S / cp, Vl] and [B, S], S "
                            "divisible by 2 cp" % (what, list(source.shape), list(target.shape), cp))
    target = target if pre_rolled else target.roll(-1, dims=-1)
    if count > seq:
        target = torch.nn.functional.pad(target, (0, count - seq), value=0)
    cu = torch.tensor([0, count], device=target.device)
    if cp > 1:
        target = target[:, own_index(cu, cp, rank, count)]
    logp = of_targets(target)
    if cp > 1:  # one gather for the batch: sequence after sequence
        starts = torch.arange(batch + 1, device=target.device) * count
        logp = with_context(logp.reshape(-1), starts, batch * count, comm, True)
    return logp.reshape(batch, count)[:, :seq - 1]


def packed_logp(what: str, source: Any, target: Any, cu: Any, width: int, cp_group: Any,
                attention_mask: Any, sub_seq_lengths: Any, of_targets: Callable[[Any], Any], add: bool = False,
                pre_rolled: bool = False) -> Any:
    """logp [rows, width - 1] of packed sequences; add: gradients over cp. Otherwise as shifted()."""
    cp, rank, comm = context_of(cp_group, source.device)
    target = target.reshape(-1)
    given, device = len(target), source.device
    count = given * cp if pre_rolled and source.shape[1:2] == (given,) else given  # [1, T / cp], or [1, T]
    if source.dim() != 3 or source.shape[0] != 1 or source.shape[1] * cp != count:
        raise ArgumentError("%s: logits are %s and target has %d tokens on cp=%d, expected [1, T / cp, Vl] and [1, T]"
                            % (what, list(source.shape), count, cp))
    cu = cu.to(device=device, dtype=torch.int64)
    places = Places(cu, count, width, attention_mask, sub_seq_lengths)
    rolled = target if pre_rolled else target[places.after]
    if given != source.shape[1]:
        rolled = rolled[own_index(cu, cp, rank, count)]
    logp = of_targets(rolled.unsqueeze(0)).reshape(-1)
    return places.scatter(with_context(logp, cu, count, comm, add) if cp > 1 else logp)


# ---- top-k and top-p ----

def sampled(logits: Any, target: Any, start: int, end: int, group: Any, chunk: int | None,
            inference_only: bool, what: str, params: Any, vocab: int | None = None) -> Any:
    """logp_of() over the ids that sampling parameters keep"""
    top_k, top_p = getattr(params, 'top_k', None), getattr(params, 'top_p', None)
    top_k, top_p = 0 if top_k in (None, -1) else int(top_k), 1.0 if top_p is None else float(top_p)
    if top_k < 0 or not 0 < top_p <= 1:
        raise ArgumentError("%s: sampling_params has top_k %d and top_p %g, expected top_k >= 1 (None, -1 or 0: all "
                            "ids) and 0 < top_p <= 1 (None: 1)" % (what, top_k, top_p))
    if not top_k and top_p == 1:
        return logp_of(logits, target, start, end, group, chunk, inference_only, what, vocab=vocab)
    if target.shape != logits.shape[:-1]:
        raise ArgumentError("%s: target is %s, expected %s, the logits' shape without the last axis"
                            % (what, list(target.shape), list(logits.shape[:-1])))
    first, end = int(start), int(end)
    vocab = vocab or vocabulary(what, logits.shape[-1], logits.device, first, end, group)
    if not 0 < top_k <= min(256, vocab):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            among = kept(what, logits[..., :end - first], target, first, vocab, group, top_k, top_p, int(chunk or 0))
            return logp_of(among, target, first, end, group, chunk, inference_only, what, vocab=vocab)
    with torch.no_grad():
        best = topk_logprob(logits, top_k, tp_group=group, vocab=(first, vocab))
        ids = best.ids.masked_fill(dropped(best.logp, top_p), -1)
        lost = ~(ids == target.unsqueeze(-1)).any(-1) & (target >= 0) & (target < vocab)
    # Without a target the list alone has the gradient, that of its softmax. A row of NaN has no list: NaN.
    logp = logp_of(logits, target.masked_fill(lost, -1), first, end, group, chunk, inference_only, what, Support(ids), vocab)
    return logp + torch.zeros_like(logp).masked_fill(lost, -float('inf'))


@eager
def sampled_evenly(logits: Any, target: Any, group: Any, top_k: int | None, top_p: float, chunk: int | None,
                   inference_only: bool, what: str) -> Any:
    start = size_and_rank(group, what)[1] * logits.shape[-1]
    return sampled(logits, target, start, start + logits.shape[-1], group, chunk, inference_only, what,
                   types.SimpleNamespace(top_k=top_k, top_p=top_p))


# ---- straight from hidden states ----

_WEIGHT = 'FusedLinearChunkedDistributedLogprob', 'linear_cross_entropy'  # have a weight, others an lm_head_weight


def rows_of_head(weight: Any) -> int:
    """Of this rank's shard, which a parameter of DeepSpeed's ZeRO-3 has elsewhere"""
    return getattr(weight, 'ds_shape', weight.shape)[0]


def equal_shards(what: str, weight: Any, group: Any) -> tuple[int | None, int | None]:
    """Where this rank's columns begin and end; None: a DTensor says it."""
    if hasattr(weight, 'placements'):
        return None, None
    rows = rows_of_head(weight)
    start = size_and_rank(group, what)[1] * rows
    return start, start + rows


def from_hidden(what: str, hidden: Any, weight: Any, target: Any, start: int | None, end: int | None, group: Any,
                chunk: int | None, inference_only: bool, temperature: float, entropy: bool = False) -> Any:
    """logp (and entropy) of hidden [.., H]; gradients of hidden are this rank's part"""
    names = ('logp',) + ('entropy',) * entropy
    vocab = None
    if start is not None and end is not None:
        start, placed = int(start), hasattr(weight, 'placements')
        vocab = start, None if placed else vocabulary(what, rows_of_head(weight), hidden.device, start, int(end), group)
    named = Named(what, weight='weight' if what in _WEIGHT else 'lm_head_weight')
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        out = Linear.apply(*prepare(
            named, hidden.to(weight.dtype), read(named, Head(weight, tp_group=group, vocab=vocab, d_hidden='partial'), None),
            target, names, 'logprob', None,
            (float(temperature), NONE_IGNORED, int(chunk or 0), True),
            ('temperature', 'ignore_index', 'chunk_size', 'lenient_targets')))
    return tuple(f32(t) for t in out) if entropy else f32(out[0])


# ---- entropy ----

@eager
def entropy_of(logits: Any, group: Any, chunk: int | None, what: str, chunk_memory_mb: int = 1) -> Any:
    if chunk_memory_mb <= 0:
        raise ArgumentError("%s: chunk_memory_mb is %s, expected a number above 0" % (what, chunk_memory_mb))
    target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return outputs(what, logits, target, ('entropy',), tp_group=group, ignore_index=NONE_IGNORED,
                   chunk_size=int(chunk or 0))[0]


@eager
def entropy_of_actions(source: Any, cu: Any, width: int, num_actions: int, attention_mask: Any, loss_mask: Any,
                       cp_group: Any, sub_seq_lengths: Any, entropy: Callable[[], Any], tp_group: Any) -> tuple[Any, Any]:
    """tp_group: of entropy(), which hears of an error here"""
    cp, rank, comm = context_of(cp_group, source.device)
    count, device = source.shape[-2] * cp, source.device
    cu = cu.to(device=device, dtype=torch.int64)
    places = Places(cu, count, width, attention_mask, sub_seq_lengths)
    actions = torch.zeros(places.rows, width - 1, dtype=torch.float64, device=device)
    actions[:, -num_actions:] = 1 if loss_mask is None else loss_mask.to(actions)
    weights = places.gather(actions)
    if cp > 1:
        weights = weights[own_index(cu, cp, rank, count)]
    h = entropy().reshape(-1)
    mine = (h * weights).sum()
    sums = torch.stack([mine.detach(), weights.sum()])
    if cp > 1:
        with telling(comm):
            comm.all_reduce(sums, stream=stream_of(device))
    total = sums[1].clamp(min=1)
    return (sums[0] / total).to(h.dtype), (mine / total).to(h.dtype)
