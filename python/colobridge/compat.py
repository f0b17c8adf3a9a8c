# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel losses under the names and with the arguments that PyTorch runtimes use.

They are colobridge.torch's functions: one read of the logits and one all-gather forward, one read and
one write backward, nothing of the size of the logits besides their gradient. Where the originals differ
from docs/logprob.md they are followed, and it is said here. logp and losses are f32.

Groups are torch process groups, colobridge.Comm, or None where the original takes None. A target that
no rank holds (-100 included) gives logp 0 and the gradient -p, unless a function says otherwise.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

from .errors import ArgumentError, FailedError

_NONE_IGNORED = -2**63  # no token has this number
_tensor_parallel: list[Any] = []


def set_tensor_parallel_group(group: Any) -> None:
    """The group of vocab_parallel_entropy() and vocab_parallel_cross_entropy() where tp_group is None."""
    _tensor_parallel[:] = [group]


def _tp(group: Any, what: str) -> Any:
    if group is not None:
        return group
    if not _tensor_parallel:
        raise FailedError("%s: tp_group is None; pass the tensor-parallel group, or set one by "
                          "colobridge.compat.set_tensor_parallel_group()" % what)
    return _tensor_parallel[0]


def _told(error: Exception, device: Any, *groups: Any) -> Exception:
    from .torch.ranks import told
    return told(error, device, *groups)


def _f32(t: Any) -> Any:
    import torch
    return t.to(torch.float32)


def _eager(fn: Any) -> Any:
    from .torch.tensors import eager
    return eager(fn)


@_eager
def _logp(logits: Any, target: Any, start: int, end: int, group: Any, chunk: int | None,
          inference_only: bool, what: str) -> Any:
    import torch

    from .torch.logprob import outputs
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        return _f32(outputs(what, logits, target, ('logp',), tp_group=group, vocab_start=int(start),
                            vocab_end=int(end), lenient_targets=True,
                            ignore_index=_NONE_IGNORED, chunk_size=int(chunk or 0))[0])


class DistributedLogprob:
    """logp [...] of target [...] under logits [..., Vl]; columns are [vocab_start_index,
    vocab_end_index)."""

    @staticmethod
    def apply(vocab_parallel_logits: Any, target: Any, vocab_start_index: int, vocab_end_index: int,
              group: Any, inference_only: bool = False) -> Any:
        """inference_only: nothing is kept for a backward."""
        return _logp(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, None,
                     inference_only, 'DistributedLogprob')


class ChunkedDistributedLogprob:
    """The same with chunk_size tokens at a time: bounds workspace, changes no bit. One all-gather,
    however many chunks."""

    @staticmethod
    def apply(vocab_parallel_logits: Any, target: Any, vocab_start_index: int, vocab_end_index: int,
              chunk_size: int, tp_group: Any, inference_only: bool = False) -> Any:
        """inference_only: nothing is kept for a backward."""
        return _logp(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group,
                     chunk_size, inference_only, 'ChunkedDistributedLogprob')


# ---- context parallelism ----

def _own_index(cu: Any, cp: int, rank: int, count: int) -> Any:
    """Global positions [count / cp] of a cp rank: zigzag in each padded segment cu[j] .. cu[j + 1]."""
    import torch
    local = cu // cp
    i = torch.arange(count // cp, device=cu.device)
    j = torch.searchsorted(local[1:].contiguous(), i, right=True).clamp(max=len(cu) - 2)
    half = (local[j + 1] - local[j]) // 2
    x = i - local[j]
    off = torch.where(x < half, rank, 2 * (cp - 1) - rank) if cp > 1 else torch.zeros_like(x)
    return x + local[j] * cp + half * off


@functools.lru_cache(maxsize=None)
def _gather_function() -> Any:
    import torch

    from .torch.ranks import telling
    from .torch.tensors import stream_of

    class GatherContext(torch.autograd.Function):
        """[n / cp] of every cp rank -> [n] in global order. Backward takes this rank's part of the
        gradient, added over cp first where @add."""

        @staticmethod
        def forward(ctx: Any, part: Any, order: Any, comm: Any, add: bool) -> Any:
            ctx.order, ctx.comm, ctx.add, ctx.count = order, comm, add, len(part)
            parts = torch.empty(len(part) * comm.size, dtype=part.dtype, device=part.device)
            with telling(comm):
                comm.all_gather(part.contiguous(), parts, stream=stream_of(part.device))
            whole = torch.empty_like(parts)
            whole[order] = parts
            return whole

        @staticmethod
        def backward(ctx: Any, d_whole: Any) -> Any:
            d_whole = d_whole.contiguous()
            if ctx.add:
                d_whole = d_whole.clone()
                with telling(ctx.comm):
                    ctx.comm.all_reduce(d_whole, stream=stream_of(d_whole.device))
            mine = ctx.order[ctx.comm.rank * ctx.count:(ctx.comm.rank + 1) * ctx.count]
            return d_whole[mine], None, None, None

    return GatherContext


def _cp(group: Any, device: Any) -> tuple[int, int, Any]:
    """(size, rank, communicator) of a context-parallel group; None: no such parallelism."""
    if group is None:
        return 1, 0, None
    from .torch.ranks import comm_of
    comm = comm_of(group, device, 'cp_group')
    return comm.size, comm.rank, comm


def _with_context(logp: Any, cu: Any, count: int, comm: Any, add: bool) -> Any:
    """[count] in global order from this rank's [count / cp]."""
    import torch
    order = torch.cat([_own_index(cu, comm.size, rank, count) for rank in range(comm.size)])
    return _gather_function().apply(logp, order, comm, add)


@_eager
def from_parallel_logits_to_logprobs(vocab_parallel_logits: Any, target: Any, vocab_start_index: int,
                                     vocab_end_index: int, tp_group: Any,
                                     inference_only: bool = False, cp_group: Any = None,
                                     chunk_size: int | None = None) -> Any:
    """logp [B, S - 1] of the next tokens: target [B, S] is shifted here. Logits [B, S', Vl], or with
    cp_group [B, S' / cp, Vl], zigzag; S' >= S is padded. In backward gradients are added over cp, as in
    the original: every cp rank is expected to have computed the loss of its own part only."""
    import torch
    logits = vocab_parallel_logits
    cp, rank, comm = _cp(cp_group, logits.device)
    batch, seq = target.shape if target.dim() == 2 else (-1, -1)
    count = logits.shape[1] * cp if logits.dim() == 3 else -1
    if batch < 0 or logits.shape[0] != batch or count < seq or (cp > 1 and count % (2 * cp)):
        raise _told(ArgumentError("from_parallel_logits_to_logprobs: logits are %s and target is %s on "
                                  "cp=%d, expected [B, S / cp, Vl] and [B, S], S divisible by 2 cp"
                                  % (list(logits.shape), list(target.shape), cp)),
                    logits.device, tp_group, cp_group)
    target = target.roll(-1, dims=-1)
    if count > seq:
        target = torch.nn.functional.pad(target, (0, count - seq), value=0)
    cu = torch.tensor([0, count], device=target.device)
    if cp > 1:
        target = target[:, _own_index(cu, cp, rank, count)]
    logp = _logp(logits, target, vocab_start_index, vocab_end_index, tp_group, chunk_size,
                 inference_only, 'from_parallel_logits_to_logprobs')
    if cp > 1:  # one gather for the batch: sequence after sequence
        starts = torch.arange(batch + 1, device=target.device) * count
        logp = _with_context(logp.reshape(-1), starts, batch * count, comm, True)
    return logp.reshape(batch, count)[:, :seq - 1]


@_eager
def from_parallel_logits_to_logprobs_packed_sequences(
        vocab_parallel_logits: Any, target: Any, cu_seqlens_padded: Any, unpacked_seqlen: int,
        vocab_start_index: int, vocab_end_index: int, group: Any, inference_only: bool = False,
        cp_group: Any = None, chunk_size: int | None = None, attention_mask: Any = None,
        sub_seq_lengths: Sequence[Sequence[int]] | None = None) -> Any:
    """logp [B, unpacked_seqlen - 1] of the next tokens of packed sequences; 0 where there is none.

    Logits [1, T / cp, Vl], target [1, T]; sequence j is cu_seqlens_padded[j] .. [j + 1], zigzag over cp
    each. attention_mask [B, unpacked_seqlen]: where the tokens of sequence j go in row j (and how many
    they are), else from column 0. sub_seq_lengths: row j holds several sequences of these lengths, and
    cu_seqlens_padded counts them all; each starts where the padded one before it ends, or in the columns
    that attention_mask has for it. In backward each cp rank takes its own part of the gradient, without a
    sum, as in the original: every cp rank is expected to have computed the whole loss.
    """
    import torch
    logits = vocab_parallel_logits
    cp, rank, comm = _cp(cp_group, logits.device)
    target = target.reshape(-1)
    count, device = len(target), logits.device
    if logits.dim() != 3 or logits.shape[0] != 1 or logits.shape[1] * cp != count:
        raise _told(ArgumentError("from_parallel_logits_to_logprobs_packed_sequences: logits are %s and "
                                  "target has %d tokens on cp=%d, expected [1, T / cp, Vl] and [1, T]"
                                  % (list(logits.shape), count, cp)), device, group, cp_group)
    cu = cu_seqlens_padded.to(device=device, dtype=torch.int64)
    t = torch.arange(count, device=device)
    found = torch.searchsorted(cu[1:].contiguous(), t, right=True)
    j = found.clamp(max=len(cu) - 2)  # beyond the last sequence: padding, dropped below
    after = torch.where(t + 1 < cu[j + 1], t + 1, cu[j])
    rolled = target[after.clamp(max=count - 1)]
    if cp > 1:
        rolled = rolled[_own_index(cu, cp, rank, count)]
    logp = _logp(logits, rolled.unsqueeze(0), vocab_start_index, vocab_end_index, group, chunk_size,
                 inference_only, 'from_parallel_logits_to_logprobs_packed_sequences').reshape(-1)
    if cp > 1:
        logp = _with_context(logp, cu, count, comm, False)
    # Where each goes: row, column; a column past the last for those that are not asked for.
    width = unpacked_seqlen
    x, length = t - cu[j], cu[j + 1] - cu[j]
    row, first, rows = j, torch.zeros_like(j), len(cu) - 1
    if sub_seq_lengths is not None:
        flat: list[tuple[int, int, int, int]] = []  # of each sequence: row, the row's first sequence, tokens of the row before it, its own
        for r, lengths in enumerate(sub_seq_lengths):
            opening = len(flat)
            flat += [(r, opening, sum(lengths[:k]), n) for k, n in enumerate(lengths)]
        if len(flat) != len(cu) - 1:
            raise ArgumentError("sub_seq_lengths names %d sequences, cu_seqlens_padded %d"
                                % (len(flat), len(cu) - 1))
        table = torch.tensor(flat, device=device)
        row, opened, before, length = table[j].unbind(1)
        first = cu[j] - cu[opened] if attention_mask is None else before
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
        if sub_seq_lengths is None:
            length = mask.sum(1)[row]
        column = place[row, column.clamp(max=width)]
    wanted = (found < len(cu) - 1) & (x < length - 1) & (column < width - 1)
    column = torch.where(wanted, column, width)
    out = torch.zeros(rows * (width + 1), dtype=logp.dtype, device=device)
    return out.index_add(0, row * (width + 1) + column, logp).reshape(rows, width + 1)[:, :width - 1]


# ---- entropy, cross entropy ----

@_eager
def vocab_parallel_entropy(vocab_parallel_logits: Any, chunk_size: int | None = None,
                           chunk_memory_mb: int = 512, tp_group: Any = None) -> Any:
    """Entropy [...] of logits [..., Vl], differentiable, in the logits' dtype as in the original;
    colobridge.torch.logprob(entropy=True) returns it in f32. chunk_memory_mb is checked and has no effect:
    nothing of the size of the logits is made."""
    import torch

    from .torch.logprob import outputs
    logits, what = vocab_parallel_logits, 'vocab_parallel_entropy'
    group = _tp(tp_group, what)
    if chunk_memory_mb <= 0:
        raise _told(ArgumentError("%s: chunk_memory_mb is %s, expected a number above 0"
                                  % (what, chunk_memory_mb)), logits.device, group)
    target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return outputs(what, logits, target, ('entropy',), tp_group=group, ignore_index=_NONE_IGNORED,
                   chunk_size=int(chunk_size or 0))[0].to(logits.dtype)


@_eager
def vocab_parallel_cross_entropy(vocab_parallel_logits: Any, target: Any,
                                 label_smoothing: float = 0.0, tp_group: Any = None, *,
                                 local_smoothing: bool = False) -> Any:
    """Cross entropy [s, b] of target [s, b] under logits [s, b, Vl]. Smoothing is e V / (V - 1) with
    the global V. A target that no rank holds has no term of its own: the loss is log Sum (smoothed as
    the others), its gradient p.

    local_smoothing: as in the original, each rank smooths over its own n columns: e n / (n - 1), and the
    mean of their log-probabilities. The ranks' losses differ then. ValueError: n < 2.
    """
    from .torch.logprob import outputs
    return _f32(outputs('vocab_parallel_cross_entropy', vocab_parallel_logits, target, ('loss',),
                        tp_group=_tp(tp_group, 'vocab_parallel_cross_entropy'),
                        label_smoothing=float(label_smoothing),
                        megatron_smoothing=True, local_smoothing=bool(local_smoothing),
                        lenient_targets=True, ignore_index=_NONE_IGNORED)[0])


# ---- the head and its loss, chunk by chunk ----

@_eager
def chunked_cross_entropy_loss(hidden_states: Any, lm_head_weight: Any, chunk_size: int,
                               labels: Any = None, shift_labels: Any = None,
                               num_items_in_batch: Any = None, logit_scale: float = 1.0,
                               final_logit_softcapping: float | None = None,
                               lm_head_bias: Any = None) -> tuple[Any, Any, Any, Any]:
    """(loss, n_correct, entropy_sum, n_valid) of hidden_states [B, S, H] @ lm_head_weight [V, H].T, for
    chunk_size tokens at a time: logits of two chunks are all there is of them. linear_nll()'s loss, whose
    gradients are made in forward and scaled in backward.

    labels [B, S] are shifted here. shift_labels [B, S] are taken as they are, and override labels. -100 is
    ignored and takes part in the products only to fill up a sixteenth of the tokens. loss: sum /
    num_items_in_batch (a number or a tensor, also one below 1; default: n_valid, and 0 without a token).
    loss, n_correct and entropy_sum are f32. loss and entropy_sum are differentiable in hidden_states,
    weight and bias, those that ask for it. Backward through entropy_sum makes logits a second time;
    backward through loss alone does not. ValueError: another label outside of [0, V) (one wait for the
    GPU), chunk_size < 1, neither labels nor shift_labels.
    """
    import torch

    from .torch.linear import Of, functions, prepare
    from .torch.ranks import alone
    what, hidden = 'chunked_cross_entropy_loss', hidden_states
    if labels is None and shift_labels is None:
        raise ArgumentError("chunked_cross_entropy_loss: At least one of labels and shift_labels is needed: found "
                            "neither; pass one")
    if chunk_size < 1:
        raise ArgumentError("chunked_cross_entropy_loss: chunk_size is %d, expected >= 1" % chunk_size)
    if shift_labels is None:
        hidden, shift_labels = hidden[..., :-1, :], cast(Any, labels)[..., 1:]
    if hidden.shape[:-1] != shift_labels.shape:
        raise ArgumentError("chunked_cross_entropy_loss: labels are %s, expected %s"
                            % (list(shift_labels.shape), list(hidden.shape[:-1])))
    counted, outside = shift_labels != -100, (shift_labels < 0) | (shift_labels >= lm_head_weight.shape[0])
    valid, bad = torch.stack([counted.sum(), (counted & outside).sum()]).tolist()
    if bad:
        raise ArgumentError("chunked_cross_entropy_loss: %d labels are outside of [0, %d) and not -100"
                            % (bad, lm_head_weight.shape[0]))
    step = max(1, -(-shift_labels.numel() // 16))  # few sizes, for few plans
    most = min(shift_labels.numel(), -(-valid // step) * step) or None
    *tensors, o = prepare(
        what, hidden.to(lm_head_weight.dtype), lm_head_weight, lm_head_bias, shift_labels,
        ('loss', 'n_valid', 'entropy', 'correct'), None, None, None, False,
        (None, None, None), ('logprob', 'partial', 0, most, None, 'sums'),
        (float(logit_scale), float(final_logit_softcapping or 0.0), int(chunk_size)),
        ('scale', 'softcap', 'chunk_size'))
    den = None
    if num_items_in_batch is not None:
        at = tensors[0].device
        den = num_items_in_batch.to(at, torch.float64) if isinstance(num_items_in_batch, torch.Tensor) \
            else torch.full((), float(num_items_in_batch), dtype=torch.float64, device=at)
    side: list[Any] = []
    loss, entropy_sum = functions()[1].apply(*tensors, Of(den, alone(), True, side, entropy=True), o)
    _, _, n_valid, _, right = side
    return _f32(loss), _f32(right.sum()), _f32(entropy_sum), n_valid
