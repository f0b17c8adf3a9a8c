# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Vocabulary-parallel losses under the names and with the arguments that PyTorch runtimes use.

They are colobridge.torch's functions. What holds for all of them, and how each differs from its original: docs/guides/rl.md.
Groups are torch process groups, DeviceMeshes of one dim, colobridge.Comms, or None."""
from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .compat_hf import ChunkedLogProbFunction, fuse_lm_head
from .compat_packed import Places, context_of, own_index, with_context
from .errors import ArgumentError, FailedError
from .torch.calls import eager
from .torch.head import Head, Named, read
from .torch.linear import Linear, LinearLoss, prepare
from .torch.logprob import outputs
from .torch.losses import logprob_at, topk_logprob
from .torch.ranks import alone, size_and_rank, telling
from .torch.sampling import dropped, kept, vocabulary
from .torch.support import Support
from .torch.tensors import stream_of
from .torch.types import Group, Reduction

__all__ = ['ChunkedDistributedEntropy', 'ChunkedDistributedGatherLogprob', 'ChunkedDistributedLogprob',
           'ChunkedDistributedLogprobWithSampling', 'ChunkedLogProbFunction', 'DistributedLogprob', 'DistributedLogprobWithSampling',
           'FusedLinearChunkedDistributedLogprob', 'chunked_cross_entropy_loss',
           'from_parallel_hidden_to_entropy_packed_sequences',
           'from_parallel_hidden_to_logprobs', 'from_parallel_hidden_to_logprobs_packed_sequences',
           'from_parallel_logits_to_logprobs', 'from_parallel_logits_to_logprobs_packed_sequences',
           'from_parallel_logits_to_logprobs_packed_sequences_nemo_rl', 'fuse_lm_head', 'linear_cross_entropy',
           'set_tensor_parallel_group', 'vocab_parallel_cross_entropy', 'vocab_parallel_entropy',
           'vocab_parallel_entropy_packed_sequences', 'vocab_parallel_entropy_weighted_sum',
           'vocab_parallel_log_probs_from_logits']

_NONE_IGNORED = -2**63  # no token has this number
_tensor_parallel: list[Any] = []


def set_tensor_parallel_group(group: Group | None) -> None:
    """Sets the group of vocab_parallel_entropy(), vocab_parallel_cross_entropy() and those that call them, if tp_group is None.

    Args:
        group: the ranks that share the vocabulary; None: no others.
    """
    _tensor_parallel[:] = [group]


def _tp(group: Any, what: str) -> Any:
    if group is not None:
        return group
    if not _tensor_parallel:
        raise FailedError("%s: tp_group is None; pass the tensor-parallel group, or set one by "
                          "colobridge.compat.set_tensor_parallel_group()" % what)
    return _tensor_parallel[0]


def _f32(t: Any) -> Any:
    return t.to(torch.float32)


@eager
def _logp(logits: Any, target: Any, start: int, end: int, group: Any, chunk: int | None,
          inference_only: bool, what: str, support: Any = None) -> Any:
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        return _f32(outputs(what, logits, target, ('logp',), tp_group=group, start=int(start), end=int(end),
                            lenient_targets=True, ignore_index=_NONE_IGNORED, chunk_size=int(chunk or 0), support=support)[0])


class DistributedLogprob:
    """Log-probabilities of targets under logits whose columns are shards of the vocabulary."""

    @staticmethod
    def apply(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, vocab_start_index: int, vocab_end_index: int,
              group: Group | None, inference_only: bool = False) -> torch.Tensor:
        """Columns are [vocab_start_index, vocab_end_index).

        Args:
            vocab_parallel_logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
            target: [...], global ids of an integer dtype, the same on all ranks of the group.
            vocab_start_index: the id of this rank's first column.
            vocab_end_index: the id behind that of its last column.
            group: the ranks that share the vocabulary; None: no others.
            inference_only: nothing is kept for a backward.

        Returns:
            logp [...], f32; 0 of a target that no rank holds, whose gradient is -p.

        Raises:
            ValueError: shapes, dtypes, devices, options.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed, or a group was destroyed.
            TimeoutError: a rank did not come.
        """
        return _logp(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, None,
                     inference_only, 'DistributedLogprob')


class ChunkedDistributedLogprob:
    """DistributedLogprob with chunk_size tokens at a time. One all-gather, however many chunks."""

    @staticmethod
    def apply(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, vocab_start_index: int, vocab_end_index: int,
              chunk_size: int, tp_group: Group | None, inference_only: bool = False) -> torch.Tensor:
        """As DistributedLogprob.apply().

        Args:
            vocab_parallel_logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
            target: [...], global ids of an integer dtype, the same on all ranks of the group.
            vocab_start_index: the id of this rank's first column.
            vocab_end_index: the id behind that of its last column.
            chunk_size: tokens at a time; bounds workspace, and changes no bit.
            tp_group: the ranks that share the vocabulary; None: no others.
            inference_only: nothing is kept for a backward.

        Returns:
            logp [...], f32.

        Raises:
            ValueError: shapes, dtypes, devices, options.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed, or a group was destroyed.
            TimeoutError: a rank did not come.
        """
        return _logp(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group,
                     chunk_size, inference_only, 'ChunkedDistributedLogprob')


class ChunkedDistributedGatherLogprob:
    """Log-probabilities of several ids of each token, those of a teacher's top k, say."""

    @staticmethod
    @eager
    def apply(vocab_parallel_logits: torch.Tensor, global_indices: torch.Tensor, vocab_start_index: int, vocab_end_index: int,
              chunk_size: int, tp_group: Group | None, inference_only: bool = False) -> torch.Tensor:
        """One read of the logits for 256 ids of a token.

        Args:
            vocab_parallel_logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
            global_indices: [..., k], global ids of an integer dtype.
            vocab_start_index: the id of this rank's first column.
            vocab_end_index: the id behind that of its last column.
            chunk_size: has no effect, because nothing is of the size of the logits.
            tp_group: the ranks that share the vocabulary; None: no others.
            inference_only: nothing is kept for a backward.

        Returns:
            logp [..., k], f32. An id that no rank holds has logp 0 and no gradient.

        Raises:
            ValueError: shapes, dtypes, devices, options.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed, or a group was destroyed.
            TimeoutError: a rank did not come.
        """
        what, start, end = 'ChunkedDistributedGatherLogprob', int(vocab_start_index), int(vocab_end_index)
        vocab = vocabulary(what, vocab_parallel_logits.shape[-1], vocab_parallel_logits.device, start, end, tp_group)
        ids = global_indices.masked_fill((global_indices < 0) | (global_indices >= vocab), -1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return _f32(torch.cat([logprob_at(vocab_parallel_logits, some, tp_group=tp_group, vocab=(start, vocab),
                                              ignore_index=-1) for some in ids.split(256, -1)], -1))


class ChunkedDistributedEntropy:
    """The entropy with the opposite sign, as the original has it."""

    @staticmethod
    @eager
    def apply(vocab_parallel_logits: torch.Tensor, chunk_size: int, tp_group: Group | None, inference_only: bool = False) -> torch.Tensor:
        """Sum of p log p.

        Args:
            vocab_parallel_logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
            chunk_size: tokens at a time; bounds workspace, and changes no bit.
            tp_group: the ranks that share the vocabulary; None: no others.
            inference_only: nothing is kept for a backward.

        Returns:
            Minus the entropy [...], in nats, f32.

        Raises:
            ValueError: shapes, dtypes, devices, options.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed, or a group was destroyed.
            TimeoutError: a rank did not come.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return -_f32(_entropy(vocab_parallel_logits, tp_group, chunk_size, 'ChunkedDistributedEntropy'))


class DistributedLogprobWithSampling:
    """DistributedLogprob over the ids that top_k and top_p keep."""

    @staticmethod
    def apply(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: Group | None, top_k: int | None, top_p: float,
              inference_only: bool = False) -> torch.Tensor:
        """As from_parallel_logits_to_logprobs() has it with sampling_params; shards are equal, in rank order.

        Args:
            vocab_parallel_logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
            target: [...], global ids of an integer dtype, the same on all ranks of the group.
            tp_group: the ranks that share the vocabulary; None: no others.
            top_k: how many of the likeliest ids are kept; None, -1 or 0: all.
            top_p: in (0, 1], of the mass; None: 1.
            inference_only: nothing is kept for a backward.

        Returns:
            logp [...], f32; -inf of a target that is not kept.

        Raises:
            ValueError: top_k < -1, or top_p outside of (0, 1]; shapes, dtypes, devices.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed, or a group was destroyed.
            TimeoutError: a rank did not come.
        """
        return _sampled_evenly(vocab_parallel_logits, target, tp_group, top_k, top_p, None, inference_only,
                               'DistributedLogprobWithSampling')


class ChunkedDistributedLogprobWithSampling:
    """DistributedLogprobWithSampling with chunk_size tokens at a time."""

    @staticmethod
    def apply(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: Group | None, top_k: int | None, top_p: float,
              chunk_size: int, inference_only: bool = False) -> torch.Tensor:
        """As DistributedLogprobWithSampling.apply().

        Args:
            vocab_parallel_logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
            target: [...], global ids of an integer dtype, the same on all ranks of the group.
            tp_group: the ranks that share the vocabulary; None: no others.
            top_k: how many of the likeliest ids are kept; None, -1 or 0: all.
            top_p: in (0, 1], of the mass; None: 1.
            chunk_size: tokens at a time; bounds workspace, and changes no bit.
            inference_only: nothing is kept for a backward.

        Returns:
            logp [...], f32; -inf of a target that is not kept.

        Raises:
            ValueError: top_k < -1, or top_p outside of (0, 1]; shapes, dtypes, devices.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed, or a group was destroyed.
            TimeoutError: a rank did not come.
        """
        return _sampled_evenly(vocab_parallel_logits, target, tp_group, top_k, top_p, chunk_size, inference_only,
                               'ChunkedDistributedLogprobWithSampling')


# ---- context parallelism ----

def _shifted(what: str, source: Any, target: Any, cp_group: Any, logp_of: Callable[[Any], Any],
             pre_rolled: bool = False) -> Any:
    """logp [B, S - 1] of a dense batch. source: logits or hidden [B, S' / cp, ..]; logp_of(targets of its
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
    logp = logp_of(target)
    if cp > 1:  # one gather for the batch: sequence after sequence
        starts = torch.arange(batch + 1, device=target.device) * count
        logp = with_context(logp.reshape(-1), starts, batch * count, comm, True)
    return logp.reshape(batch, count)[:, :seq - 1]


def _packed(what: str, source: Any, target: Any, cu: Any, width: int, cp_group: Any,
            attention_mask: Any, sub_seq_lengths: Any, logp_of: Callable[[Any], Any], add: bool = False,
            pre_rolled: bool = False) -> Any:
    """logp [rows, width - 1] of packed sequences; add: gradients over cp. Otherwise as _shifted()."""
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
    logp = logp_of(rolled.unsqueeze(0)).reshape(-1)
    return places.scatter(with_context(logp, cu, count, comm, add) if cp > 1 else logp)


@eager
def from_parallel_logits_to_logprobs(vocab_parallel_logits: torch.Tensor, target: torch.Tensor, vocab_start_index: int,
                                     vocab_end_index: int, tp_group: Group | None,
                                     inference_only: bool = False, cp_group: Group | None = None,
                                     chunk_size: int | None = None, sampling_params: Any = None,
                                     target_is_pre_rolled: bool = False) -> torch.Tensor:
    """Log-probabilities of the next tokens of a dense batch.

    In backward gradients are added over cp, as in the original: every cp rank is expected to have computed the loss of its own
    part only.

    Args:
        vocab_parallel_logits: [B, S', Vl], or with cp_group [B, S' / cp, Vl], zigzag, with S' divisible by 2 cp; S' >= S is
            padded. f64, f32, bf16 or f16.
        target: [B, S], global ids of an integer dtype, the same on all ranks; it is shifted here, unless target_is_pre_rolled.
        vocab_start_index: the id of this rank's first column.
        vocab_end_index: the id behind that of its last column.
        tp_group: the ranks that share the vocabulary; None: no others.
        inference_only: nothing is kept for a backward.
        cp_group: the context ranks; None: no others.
        chunk_size: tokens at a time; bounds workspace, and changes no bit. None: chosen.
        sampling_params: None, or an object with top_k (None, -1 or 0: all ids) and top_p (None: 1): logp is then over the ids
            that these keep (docs/guides/rl.md#top-k-and-top-p). The caller has applied its temperature to the logits.
        target_is_pre_rolled: target has the next token of each already.

    Returns:
        logp [B, S - 1], f32, the same on all cp ranks.

    Raises:
        ValueError: top_k < -1, or top_p outside of (0, 1]; shapes, dtypes, devices.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'from_parallel_logits_to_logprobs'
    return _shifted(what, vocab_parallel_logits, target, cp_group, lambda own: _sampled(
        vocab_parallel_logits, own, vocab_start_index, vocab_end_index, tp_group, chunk_size, inference_only, what,
        sampling_params), target_is_pre_rolled)


@eager
def from_parallel_logits_to_logprobs_packed_sequences(
        vocab_parallel_logits: torch.Tensor, target: torch.Tensor, cu_seqlens_padded: torch.Tensor, unpacked_seqlen: int,
        vocab_start_index: int, vocab_end_index: int, group: Group | None, inference_only: bool = False,
        cp_group: Group | None = None, chunk_size: int | None = None, attention_mask: torch.Tensor | None = None,
        sub_seq_lengths: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
    """Log-probabilities of the next tokens of packed sequences. SkyRL's.

    In backward each cp rank takes its own part of the gradient, without a sum, as in the original: every cp rank is expected to
    have computed the whole loss.

    Args:
        vocab_parallel_logits: [1, T / cp, Vl]; f64, f32, bf16 or f16.
        target: [1, T], global ids of an integer dtype, the same on all ranks.
        cu_seqlens_padded: [sequences + 1], integers: sequence j is cu_seqlens_padded[j] .. [j + 1], zigzag over cp each.
        unpacked_seqlen: columns of a row of the batch, one more than those of the result.
        vocab_start_index: the id of this rank's first column.
        vocab_end_index: the id behind that of its last column.
        group: the ranks that share the vocabulary; None: no others.
        inference_only: nothing is kept for a backward.
        cp_group: the context ranks; None: no others.
        chunk_size: tokens at a time; bounds workspace, and changes no bit. None: chosen.
        attention_mask: [B, unpacked_seqlen], bools or integers: where the tokens of sequence j go in row j (and how many they
            are). None: from column 0.
        sub_seq_lengths: row j holds several sequences of these lengths, and cu_seqlens_padded counts them all; each starts
            where the padded one before it ends, and attention_mask has no effect, as in the original. None: a row is a
            sequence.

    Returns:
        logp [B, unpacked_seqlen - 1], f32, the same on all cp ranks; 0 where there is no next token.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'from_parallel_logits_to_logprobs_packed_sequences'
    return _packed(what, vocab_parallel_logits, target, cu_seqlens_padded, unpacked_seqlen, cp_group,
                   attention_mask, sub_seq_lengths, lambda own: _logp(
                       vocab_parallel_logits, own, vocab_start_index, vocab_end_index, group, chunk_size,
                       inference_only, what))


@eager
def from_parallel_logits_to_logprobs_packed_sequences_nemo_rl(
        vocab_parallel_logits: torch.Tensor, target: torch.Tensor, cu_seqlens_padded: torch.Tensor, unpacked_seqlen: int,
        vocab_start_index: int, vocab_end_index: int, group: Group | None, inference_only: bool = False,
        cp_group: Group | None = None, chunk_size: int | None = None, sampling_params: Any = None,
        target_is_pre_rolled: bool = False) -> torch.Tensor:
    """Log-probabilities of the next tokens of packed sequences: NeMo-RL's function of that name without _nemo_rl.

    In backward gradients are added over cp: every cp rank is expected to have computed the loss of its own part only.

    Args:
        vocab_parallel_logits: [1, T / cp, Vl]; f64, f32, bf16 or f16.
        target: [1, T], global ids of an integer dtype; with target_is_pre_rolled also [1, T / cp].
        cu_seqlens_padded: [sequences + 1], integers: sequence j is cu_seqlens_padded[j] .. [j + 1], zigzag over cp each.
        unpacked_seqlen: columns of a row of the batch, one more than those of the result.
        vocab_start_index: the id of this rank's first column.
        vocab_end_index: the id behind that of its last column.
        group: the ranks that share the vocabulary; None: no others.
        inference_only: nothing is kept for a backward.
        cp_group: the context ranks; None: no others.
        chunk_size: tokens at a time; bounds workspace, and changes no bit. None: chosen.
        sampling_params: as in from_parallel_logits_to_logprobs().
        target_is_pre_rolled: target has the next token of each already, [1, T / cp] those of this rank's part, as the logits
            are cut, or [1, T] all of them.

    Returns:
        logp [sequences, unpacked_seqlen - 1], f32, the same on all cp ranks; 0 where there is no next token.

    Raises:
        ValueError: top_k < -1, or top_p outside of (0, 1]; shapes, dtypes, devices.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'from_parallel_logits_to_logprobs_packed_sequences'
    return _packed(what, vocab_parallel_logits, target, cu_seqlens_padded, unpacked_seqlen, cp_group,
                   None, None, lambda own: _sampled(
                       vocab_parallel_logits, own, vocab_start_index, vocab_end_index, group, chunk_size,
                       inference_only, what, sampling_params), True, target_is_pre_rolled)


def _sampled(logits: Any, target: Any, start: int, end: int, group: Any, chunk: int | None,
             inference_only: bool, what: str, params: Any) -> Any:
    """_logp() over the ids that sampling parameters keep"""
    top_k, top_p = getattr(params, 'top_k', None), getattr(params, 'top_p', None)
    top_k, top_p = 0 if top_k in (None, -1) else int(top_k), 1.0 if top_p is None else float(top_p)
    if top_k < 0 or not 0 < top_p <= 1:
        raise ArgumentError("%s: sampling_params has top_k %d and top_p %g, expected top_k >= 1 (None, -1 or 0: all "
                            "ids) and 0 < top_p <= 1 (None: 1)" % (what, top_k, top_p))
    if not top_k and top_p == 1:
        return _logp(logits, target, start, end, group, chunk, inference_only, what)
    if target.shape != logits.shape[:-1]:
        raise ArgumentError("%s: target is %s, expected %s, the logits' shape without the last axis"
                            % (what, list(target.shape), list(logits.shape[:-1])))
    first, end = int(start), int(end)
    vocab = vocabulary(what, logits.shape[-1], logits.device, first, end, group)
    if not 0 < top_k <= min(256, vocab):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            among = kept(what, logits[..., :end - first], target, first, vocab, group, top_k, top_p, int(chunk or 0))
            return _logp(among, target, first, end, group, chunk, inference_only, what)
    with torch.no_grad():
        best = topk_logprob(logits, top_k, tp_group=group, vocab=(first, vocab))
        ids = best.ids.masked_fill(dropped(best.logp, top_p), -1)
        lost = ~(ids == target.unsqueeze(-1)).any(-1) & (target >= 0) & (target < vocab)
    # Without a target the list alone has the gradient, that of its softmax. A row of NaN has no list: NaN.
    logp = _logp(logits, target.masked_fill(lost, -1), first, end, group, chunk, inference_only, what, Support(ids))
    return logp + torch.zeros_like(logp).masked_fill(lost, -float('inf'))


@eager
def _sampled_evenly(logits: Any, target: Any, group: Any, top_k: int | None, top_p: float, chunk: int | None,
                    inference_only: bool, what: str) -> Any:
    start = size_and_rank(group, what)[1] * logits.shape[-1]
    return _sampled(logits, target, start, start + logits.shape[-1], group, chunk, inference_only, what,
                    types.SimpleNamespace(top_k=top_k, top_p=top_p))


# ---- straight from hidden states ----

_WEIGHT = 'FusedLinearChunkedDistributedLogprob', 'linear_cross_entropy'  # have a weight, others an lm_head_weight


def _rows(weight: Any) -> int:
    """Of this rank's shard, which a parameter of DeepSpeed's ZeRO-3 has elsewhere"""
    return getattr(weight, 'ds_shape', weight.shape)[0]


def _equal_shards(what: str, weight: Any, group: Any) -> tuple[int | None, int | None]:
    """Where this rank's columns begin and end; None: a DTensor says it."""
    if hasattr(weight, 'placements'):
        return None, None
    rows = _rows(weight)
    start = size_and_rank(group, what)[1] * rows
    return start, start + rows


def _from_hidden(what: str, hidden: Any, weight: Any, target: Any, start: int | None, end: int | None, group: Any,
                 chunk: int | None, inference_only: bool, temperature: float, entropy: bool = False) -> Any:
    """logp (and entropy) of hidden [.., H]; gradients of hidden are this rank's part"""
    names = ('logp',) + ('entropy',) * entropy
    vocab = None
    if start is not None and end is not None:
        start, placed = int(start), hasattr(weight, 'placements')
        vocab = start, None if placed else vocabulary(what, _rows(weight), hidden.device, start, int(end), group)
    named = Named(what, weight='weight' if what in _WEIGHT else 'lm_head_weight')
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        out = Linear.apply(*prepare(
            named, hidden.to(weight.dtype), read(named, Head(weight, tp_group=group, vocab=vocab, d_hidden='partial'), None),
            target, names, 'logprob', None,
            (float(temperature), _NONE_IGNORED, int(chunk or 0), True),
            ('temperature', 'ignore_index', 'chunk_size', 'lenient_targets')))
    return tuple(_f32(t) for t in out) if entropy else _f32(out[0])


class FusedLinearChunkedDistributedLogprob:
    """Log-probabilities of targets under the logits hidden x weight^T, which never exist as a whole."""

    @staticmethod
    @eager
    def apply(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, vocab_start_index: int, vocab_end_index: int, chunk_size: int,
              tp_group: Group | None, inference_only: bool = False) -> torch.Tensor:
        """The gradient of hidden is this rank's part, which the caller sums over tp. Columns are [vocab_start_index,
        vocab_end_index).

        Args:
            hidden: [B, S, H], of a floating-point dtype; it is cast to weight's.
            weight: [Vl, H], this rank's rows; f64, f32, bf16 or f16. A DTensor, or a parameter of DeepSpeed's ZeRO-3.
            target: [B, S], global ids of an integer dtype, the same on all ranks of tp_group.
            vocab_start_index: the id of this rank's first column.
            vocab_end_index: the id behind that of its last column.
            chunk_size: tokens a chunk.
            tp_group: the ranks that share the vocabulary; None: no others.
            inference_only: nothing is kept for a backward.

        Returns:
            logp [B, S], f32; 0 of a target that no rank holds.

        Raises:
            ValueError: shapes, dtypes, devices, options.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed, or a group was destroyed.
            TimeoutError: a rank did not come.
        """
        return _from_hidden('FusedLinearChunkedDistributedLogprob', hidden, weight, target, vocab_start_index,
                            vocab_end_index, tp_group, chunk_size, inference_only, 1.0)


@eager
def from_parallel_hidden_to_logprobs(hidden: torch.Tensor, lm_head_weight: torch.Tensor, target: torch.Tensor, vocab_start_index: int,
                                     vocab_end_index: int, tp_group: Group | None, inference_only: bool = False,
                                     cp_group: Group | None = None, chunk_size: int | None = None,
                                     temperature: float = 1.0, fused_backend: str = 'torch') -> torch.Tensor:
    """from_parallel_logits_to_logprobs() of hidden x lm_head_weight^T / temperature, whose logits never exist as a whole.

    The gradient of hidden is this rank's part, which the caller sums over tp.

    Args:
        hidden: [B, S' / cp, H], of a floating-point dtype; it is cast to lm_head_weight's.
        lm_head_weight: [Vl, H], this rank's rows; f64, f32, bf16 or f16. A DTensor, or a parameter of DeepSpeed's ZeRO-3.
        target: [B, S], global ids of an integer dtype, the same on all ranks; it is shifted here.
        vocab_start_index: the id of this rank's first column.
        vocab_end_index: the id behind that of its last column.
        tp_group: the ranks that share the vocabulary; None: no others.
        inference_only: nothing is kept for a backward.
        cp_group: as in from_parallel_logits_to_logprobs().
        chunk_size: tokens at a time, whose logits exist then. None: chosen.
        temperature: > 0.
        fused_backend: for the original; has no effect.

    Returns:
        logp [B, S - 1], f32, the same on all cp ranks.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'from_parallel_hidden_to_logprobs'
    return _shifted(what, hidden, target, cp_group, lambda own: _from_hidden(
        what, hidden, lm_head_weight, own, vocab_start_index, vocab_end_index, tp_group, chunk_size, inference_only,
        temperature))


@eager
def from_parallel_hidden_to_logprobs_packed_sequences(
        hidden: torch.Tensor, lm_head_weight: torch.Tensor, target: torch.Tensor, cu_seqlens_padded: torch.Tensor, unpacked_seqlen: int,
        vocab_start_index: int, vocab_end_index: int, group: Group | None, inference_only: bool = False,
        cp_group: Group | None = None, chunk_size: int | None = None, attention_mask: torch.Tensor | None = None,
        sub_seq_lengths: Sequence[Sequence[int]] | None = None, temperature: float = 1.0,
        fused_backend: str = 'torch') -> torch.Tensor:
    """from_parallel_logits_to_logprobs_packed_sequences() of hidden states, as from_parallel_hidden_to_logprobs() has it.

    Args:
        hidden: [1, T / cp, H], of a floating-point dtype; it is cast to lm_head_weight's.
        lm_head_weight: as in from_parallel_hidden_to_logprobs().
        target: [1, T], global ids of an integer dtype, the same on all ranks.
        cu_seqlens_padded: [sequences + 1], integers: sequence j is cu_seqlens_padded[j] .. [j + 1], zigzag over cp each.
        unpacked_seqlen: columns of a row of the batch, one more than those of the result.
        vocab_start_index: the id of this rank's first column.
        vocab_end_index: the id behind that of its last column.
        group: the ranks that share the vocabulary; None: no others.
        inference_only: nothing is kept for a backward.
        cp_group: the context ranks; None: no others.
        chunk_size: tokens at a time, whose logits exist then. None: chosen.
        attention_mask: as in from_parallel_logits_to_logprobs_packed_sequences().
        sub_seq_lengths: as in from_parallel_logits_to_logprobs_packed_sequences().
        temperature: > 0.
        fused_backend: for the original; has no effect.

    Returns:
        logp [B, unpacked_seqlen - 1], f32, the same on all cp ranks; 0 where there is no next token.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'from_parallel_hidden_to_logprobs_packed_sequences'
    return _packed(what, hidden, target, cu_seqlens_padded, unpacked_seqlen, cp_group, attention_mask,
                   sub_seq_lengths, lambda own: _from_hidden(
                       what, hidden, lm_head_weight, own, vocab_start_index, vocab_end_index, group, chunk_size,
                       inference_only, temperature))


@eager
def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0, reduction: Reduction = 'none',
                         dist_process_group: Group | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's log-probabilities and entropy of hidden states.

    The gradient of hidden is this rank's part, which the caller sums over tp, as in the original.

    Args:
        hidden: [..., H], of a floating-point dtype; it is cast to weight's.
        weight: [Vl, H], this rank's rows; f64, f32, bf16 or f16. A DTensor, which says which rows it has, or a parameter of
            DeepSpeed's ZeRO-3; shards are equal, in rank order, but for a DTensor.
        labels: [...], global ids of an integer dtype, the same on all ranks of dist_process_group.
        temperature: > 0.
        reduction: of the log-probabilities: "none", "sum" or "mean".
        dist_process_group: the ranks that share the vocabulary; None: no others.

    Returns:
        (logprobs, entropy), both [T] and f32; with reduction "sum" or "mean" the former is []. A label outside of the
        vocabulary has the log-probability 0.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'linear_cross_entropy'
    if reduction not in ('none', 'sum', 'mean'):
        raise ArgumentError("%s: reduction is %r, expected 'none', 'sum' or 'mean'" % (what, reduction))
    logp, entropy = _from_hidden(what, hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1),
                                 *_equal_shards(what, weight, dist_process_group), dist_process_group, None, False, temperature,
                                 True)
    return (logp if reduction == 'none' else logp.sum() if reduction == 'sum' else logp.mean()), entropy


# ---- entropy, cross entropy ----

@eager
def vocab_parallel_entropy(vocab_parallel_logits: torch.Tensor, chunk_size: int | None = None,
                           chunk_memory_mb: int = 512, tp_group: Group | None = None) -> torch.Tensor:
    """Entropy of logits whose columns are shards of the vocabulary; differentiable.

    Args:
        vocab_parallel_logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
        chunk_size: tokens at a time; bounds workspace, and changes no bit. None: chosen.
        chunk_memory_mb: > 0; has no effect, because nothing of the size of the logits is made.
        tp_group: the ranks that share the vocabulary; None: those of set_tensor_parallel_group().

    Returns:
        The entropy [...], in nats, in the logits' dtype as in the original; colobridge.torch.logprob(entropy=True) returns it
        in f32.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: tp_group is None, and none was set; another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'vocab_parallel_entropy'
    return _entropy(vocab_parallel_logits, _tp(tp_group, what), chunk_size, what, chunk_memory_mb).to(
        vocab_parallel_logits.dtype)


@eager
def _entropy(logits: Any, group: Any, chunk: int | None, what: str, chunk_memory_mb: int = 1) -> Any:
    if chunk_memory_mb <= 0:
        raise ArgumentError("%s: chunk_memory_mb is %s, expected a number above 0" % (what, chunk_memory_mb))
    target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return outputs(what, logits, target, ('entropy',), tp_group=group, ignore_index=_NONE_IGNORED,
                   chunk_size=int(chunk or 0))[0]


@eager
def vocab_parallel_entropy_weighted_sum(vocab_parallel_logits: torch.Tensor, weights: torch.Tensor, chunk_size: int | None = None,
                                        chunk_memory_mb: int = 512, tp_group: Group | None = None) -> torch.Tensor:
    """Sum of vocab_parallel_entropy() times weights.

    Args:
        vocab_parallel_logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
        weights: [...], of any dtype that multiplies the entropy; tokens whose weight is 0 count as 0.
        chunk_size: tokens at a time; bounds workspace, and changes no bit. None: chosen.
        chunk_memory_mb: > 0; has no effect, because nothing of the size of the logits is made.
        tp_group: the ranks that share the vocabulary; None: those of set_tensor_parallel_group().

    Returns:
        The sum [], of this rank's tokens.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: tp_group is None, and none was set; another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return (vocab_parallel_entropy(vocab_parallel_logits, chunk_size, chunk_memory_mb, tp_group) * weights).sum()


@eager
def vocab_parallel_entropy_packed_sequences(
        vocab_parallel_logits: torch.Tensor, cu_seqlens_padded: torch.Tensor, unpacked_seqlen: int, num_actions: int,
        attention_mask: torch.Tensor | None, loss_mask: torch.Tensor | None, cp_group: Group | None,
        sub_seq_lengths: Sequence[Sequence[int]] | None = None, chunk_size: int | None = None,
        chunk_memory_mb: int = 512, tp_group: Group | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean entropy over the actions of packed sequences.

    Actions are the last num_actions columns of [B, unpacked_seqlen - 1].

    Args:
        vocab_parallel_logits: [1, T / cp, Vl]; f64, f32, bf16 or f16.
        cu_seqlens_padded: [sequences + 1], integers: sequence j is cu_seqlens_padded[j] .. [j + 1], zigzag over cp each.
        unpacked_seqlen: columns of a row of the batch, one more than those of the result.
        num_actions: columns.
        attention_mask: as in from_parallel_logits_to_logprobs_packed_sequences().
        loss_mask: [B, num_actions], weights of the actions; None: 1.
        cp_group: the context ranks; None: no others.
        sub_seq_lengths: as in from_parallel_logits_to_logprobs_packed_sequences().
        chunk_size: tokens at a time; bounds workspace, and changes no bit. None: chosen.
        chunk_memory_mb: > 0; has no effect, because nothing of the size of the logits is made.
        tp_group: the ranks that share the vocabulary; None: those of set_tensor_parallel_group().

    Returns:
        (the mean over the actions of all cp ranks, without a gradient; this rank's part of it, with one), both [].

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: tp_group is None, and none was set; another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    tp_group = _tp(tp_group, 'vocab_parallel_entropy_packed_sequences')
    return _entropy_of_actions(
        vocab_parallel_logits, cu_seqlens_padded, unpacked_seqlen, num_actions, attention_mask, loss_mask, cp_group,
        sub_seq_lengths, lambda: vocab_parallel_entropy(vocab_parallel_logits, chunk_size, chunk_memory_mb, tp_group),
        tp_group)


@eager
def from_parallel_hidden_to_entropy_packed_sequences(
        hidden: torch.Tensor, lm_head_weight: torch.Tensor, cu_seqlens_padded: torch.Tensor, unpacked_seqlen: int, num_actions: int,
        attention_mask: torch.Tensor | None, loss_mask: torch.Tensor | None, cp_group: Group | None, tp_group: Group | None,
        sub_seq_lengths: Sequence[Sequence[int]] | None = None, chunk_size: int | None = None,
        temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """vocab_parallel_entropy_packed_sequences() of hidden x lm_head_weight^T / temperature.

    Args:
        hidden: [1, T / cp, H], of a floating-point dtype; it is cast to lm_head_weight's.
        lm_head_weight: [Vl, H], this rank's rows; f64, f32, bf16 or f16. A DTensor, which says which rows it has, or a
            parameter of DeepSpeed's ZeRO-3; shards are equal, in rank order, but for a DTensor.
        cu_seqlens_padded: [sequences + 1], integers: sequence j is cu_seqlens_padded[j] .. [j + 1], zigzag over cp each.
        unpacked_seqlen: columns of a row of the batch, one more than those of the result.
        num_actions: as in vocab_parallel_entropy_packed_sequences().
        attention_mask: as in from_parallel_logits_to_logprobs_packed_sequences().
        loss_mask: as in vocab_parallel_entropy_packed_sequences().
        cp_group: the context ranks; None: no others.
        tp_group: the ranks that share the vocabulary; None: no others.
        sub_seq_lengths: as in from_parallel_logits_to_logprobs_packed_sequences().
        chunk_size: tokens at a time, whose logits exist then. None: chosen.
        temperature: > 0.

    Returns:
        Two means [] as there. Unlike the original the second one has a gradient.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'from_parallel_hidden_to_entropy_packed_sequences'
    columns = _equal_shards(what, lm_head_weight, tp_group)
    target = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    return _entropy_of_actions(
        hidden, cu_seqlens_padded, unpacked_seqlen, num_actions, attention_mask, loss_mask, cp_group, sub_seq_lengths,
        lambda: _from_hidden(what, hidden, lm_head_weight, target, *columns, tp_group, chunk_size, False, temperature, True)[1],
        tp_group)


@eager
def _entropy_of_actions(source: Any, cu: Any, width: int, num_actions: int, attention_mask: Any, loss_mask: Any,
                        cp_group: Any, sub_seq_lengths: Any, entropy: Callable[[], Any], tp_group: Any
                        ) -> tuple[Any, Any]:
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


@eager
def vocab_parallel_log_probs_from_logits(logits: torch.Tensor, labels: torch.Tensor, tp_group: Group | None = None) -> torch.Tensor:
    """verl's log-probabilities of labels under logits whose columns are shards of the vocabulary.

    Args:
        logits: [..., Vl], this rank's columns; f64, f32, bf16 or f16.
        labels: [...], global ids of an integer dtype, the same on all ranks of tp_group.
        tp_group: as in vocab_parallel_entropy().

    Returns:
        The log-probabilities [...], f32; of a label that no rank holds as vocab_parallel_cross_entropy() has it.

    Raises:
        ValueError: shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: tp_group is None, and none was set; another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return -vocab_parallel_cross_entropy(logits, labels, tp_group=tp_group)


@eager
def vocab_parallel_cross_entropy(vocab_parallel_logits: torch.Tensor, target: torch.Tensor,
                                 label_smoothing: float = 0.0, tp_group: Group | None = None, *,
                                 local_smoothing: bool = False) -> torch.Tensor:
    """Megatron's cross entropy of targets under logits whose columns are shards of the vocabulary.

    Smoothing is e V / (V - 1) with the global V.

    Args:
        vocab_parallel_logits: [s, b, Vl], this rank's columns; f64, f32, bf16 or f16.
        target: [s, b], global ids of an integer dtype, the same on all ranks of tp_group.
        label_smoothing: e in [0, 1].
        tp_group: as in vocab_parallel_entropy().
        local_smoothing: as in the original, each rank smooths over its own n columns: e n / (n - 1), and the mean of their
            log-probabilities. The ranks' losses differ then.

    Returns:
        The loss [s, b], f32. A target that no rank holds has no term of its own: its loss is log Sum (smoothed as the others),
        its gradient p.

    Raises:
        ValueError: local_smoothing with n < 2; shapes, dtypes, devices, options.
        MismatchError: ranks disagree.
        RuntimeError: tp_group is None, and none was set; another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return _cross_entropy(vocab_parallel_logits, target, _tp(tp_group, 'vocab_parallel_cross_entropy'),
                          label_smoothing, local_smoothing)


@eager
def _cross_entropy(logits: Any, target: Any, group: Any, smoothing: float, local_smoothing: bool) -> Any:
    return _f32(outputs('vocab_parallel_cross_entropy', logits, target, ('loss',), tp_group=group,
                        label_smoothing=float(smoothing), megatron_smoothing=True, local_smoothing=bool(local_smoothing),
                        lenient_targets=True, ignore_index=_NONE_IGNORED)[0])


# ---- the head and its loss, chunk by chunk ----

_CHUNKED = Named('chunked_cross_entropy_loss', hidden='hidden_states', weight='lm_head_weight', bias='lm_head_bias', target='labels')


@eager
def chunked_cross_entropy_loss(hidden_states: torch.Tensor, lm_head_weight: torch.Tensor, chunk_size: int,
                               labels: torch.Tensor | None = None, shift_labels: torch.Tensor | None = None,
                               num_items_in_batch: float | torch.Tensor | None = None, logit_scale: float = 1.0,
                               final_logit_softcapping: float | None = None,
                               lm_head_bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """TRL's loss from hidden states, for chunk_size tokens at a time: logits of two chunks are all there is of them.

    linear_nll()'s loss, whose gradients are made in forward and scaled in backward. Backward through entropy_sum makes logits a
    second time; backward through loss alone does not.

    Args:
        hidden_states: [B, S, H], of a floating-point dtype; it is cast to lm_head_weight's.
        lm_head_weight: [V, H]; f64, f32, bf16 or f16.
        chunk_size: tokens, >= 1.
        labels: [B, S], ids of an integer dtype, which are shifted here. -100 is ignored and takes part in the products only to
            fill up a sixteenth of the tokens.
        shift_labels: [B, S], ids that are taken as they are, and override labels.
        num_items_in_batch: what divides the sum of the losses: a number or a tensor, also one below 1; None: n_valid.
        logit_scale: factor of the logits, before the cap.
        final_logit_softcapping: the soft cap; None: no cap.
        lm_head_bias: [V] or None.

    Returns:
        (loss, n_correct, entropy_sum, n_valid), each []. loss: sum / num_items_in_batch, by default 0 without a token.
        n_correct: how many targets are the likeliest id. entropy_sum: in nats. n_valid: how many tokens count, an integer. The
        first three are f32. loss and entropy_sum are differentiable in hidden_states, weight and bias, those that ask for it.

    Raises:
        ValueError: a label outside of [0, V) and not -100 (one wait for the GPU), chunk_size < 1, neither labels nor
            shift_labels; shapes, dtypes, devices.
    """
    what, hidden = _CHUNKED, hidden_states
    if labels is None and shift_labels is None:
        raise ArgumentError("chunked_cross_entropy_loss: At least one of labels and shift_labels is needed: found "
                            "neither; pass one")
    if chunk_size < 1:
        raise ArgumentError("chunked_cross_entropy_loss: chunk_size is %d, expected >= 1" % chunk_size)
    if shift_labels is None:
        hidden, shift_labels = hidden[..., :-1, :], cast(torch.Tensor, labels)[..., 1:]
    assert shift_labels is not None
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
        what, hidden.to(lm_head_weight.dtype), read(what, Head(lm_head_weight, lm_head_bias, d_hidden='partial', max_valid=most), None),
        shift_labels, ('loss', 'n_valid', 'entropy', 'correct'), 'logprob', 'sums',
        (float(logit_scale), float(final_logit_softcapping or 0.0), -100, int(chunk_size)),
        ('scale', 'softcap', 'ignore_index', 'chunk_size'))
    den = None
    if num_items_in_batch is not None:
        device = tensors[0].device
        den = num_items_in_batch.to(device, torch.float64) if isinstance(num_items_in_batch, torch.Tensor) \
            else torch.full((), float(num_items_in_batch), dtype=torch.float64, device=device)
    side: list[Any] = []
    loss, entropy_sum = LinearLoss.apply(*tensors, (den, alone(), True, side, None, True, None, None), o)
    _, _, n_valid, _, right = side
    return _f32(loss), _f32(right.sum()), _f32(entropy_sum), n_valid
