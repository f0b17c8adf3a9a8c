# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""SkyRL's losses over vocabulary shards and context ranks, and those that it has of verl."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentError
from ..torch.calls import eager
from ..torch.losses import distill
from ..torch.types import Group
from .packed import context_of, with_context
from .shared import entropy_of, entropy_of_actions, equal_shards, f32, from_hidden, logp_of, packed_logp, shifted, tp_of


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
    return packed_logp(what, vocab_parallel_logits, target, cu_seqlens_padded, unpacked_seqlen, cp_group,
                       attention_mask, sub_seq_lengths, lambda own: logp_of(
                           vocab_parallel_logits, own, vocab_start_index, vocab_end_index, group, chunk_size,
                           inference_only, what))


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
        return from_hidden('FusedLinearChunkedDistributedLogprob', hidden, weight, target, vocab_start_index,
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
    return shifted(what, hidden, target, cp_group, lambda own: from_hidden(
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
    return packed_logp(what, hidden, target, cu_seqlens_padded, unpacked_seqlen, cp_group, attention_mask,
                       sub_seq_lengths, lambda own: from_hidden(
                           what, hidden, lm_head_weight, own, vocab_start_index, vocab_end_index, group, chunk_size,
                           inference_only, temperature))


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
    return entropy_of(vocab_parallel_logits, tp_of(tp_group, what), chunk_size, what, chunk_memory_mb).to(
        vocab_parallel_logits.dtype)


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
    tp_group = tp_of(tp_group, 'vocab_parallel_entropy_packed_sequences')
    return entropy_of_actions(
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
    columns = equal_shards(what, lm_head_weight, tp_group)
    target = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    return entropy_of_actions(
        hidden, cu_seqlens_padded, unpacked_seqlen, num_actions, attention_mask, loss_mask, cp_group, sub_seq_lengths,
        lambda: from_hidden(what, hidden, lm_head_weight, target, *columns, tp_group, chunk_size, False, temperature, True)[1],
        tp_group)


@eager
def allgather_cp_sharded_packed_tensor(tensor: torch.Tensor, cu_seqlens_padded: torch.Tensor, cp_group: Group | None) -> torch.Tensor:
    """The whole of packed sequences, each of which is zigzag over cp.

    In backward each cp rank takes its own part of the gradient, without a sum: every cp rank is expected to have computed the
    whole loss.

    Args:
        tensor: [T / cp, ...], or [1, T / cp, ...].
        cu_seqlens_padded: [sequences + 1], integers: sequence j is cu_seqlens_padded[j] .. [j + 1] of T, divisible by 2 cp each.
        cp_group: the context ranks; None: no others.

    Returns:
        [T, ...], or [1, T, ...], the same on all cp ranks.

    Raises:
        ValueError: T / cp rows are expected.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    cp, _, comm = context_of(cp_group, tensor.device)
    if cp == 1:
        return tensor
    flat = tensor.dim() > 1 and tensor.shape[0] == 1
    rows = tensor[0] if flat else tensor
    cu = cu_seqlens_padded.to(device=tensor.device, dtype=torch.int64)
    count = len(rows) * cp
    if cu.is_cuda is False and int(cu[-1]) != count:
        raise ArgumentError("allgather_cp_sharded_packed_tensor: tensor is %s and cu_seqlens_padded ends with %d on cp=%d, expected T / cp "
                            "rows" % (list(tensor.shape), int(cu[-1]), cp))
    whole = with_context(rows, cu, count, comm, False)
    return whole.unsqueeze(0) if flat else whole


def _masked_mean(values: Any, mask: Any, factor: Any) -> Any:
    """Of tokens that count; divided by the factor, if there is one; by 1 at least, as the original"""
    weights = mask.to(values.dtype)
    total = weights.sum() if factor is None else factor
    return (values * weights).sum() / (total.clamp(min=1.0) if isinstance(total, torch.Tensor) else max(total, 1.0))


def _refuse_teacher(what: str, student: Any, teacher: Any, mask: Any) -> None:
    if teacher.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("%s: teacher_logits require grad, expected a constant; pass them detached" % what)
    if student.shape != teacher.shape or mask.shape != student.shape[:-1]:
        raise ArgumentError("%s: student_logits are %s, teacher_logits %s and mask %s, expected [..., Vl], the same, and [...]" % (
            what, list(student.shape), list(teacher.shape), list(mask.shape)))


def _of_mask(student: Any, teacher: Any, mask: Any, factor: Any, group: Any) -> Any:
    """Mean cross entropy; rows that the mask leaves out may hold anything."""
    return _masked_mean(f32(distill(student, teacher, tp_group=group, mask=mask != 0).ce), mask, factor)


@eager
def draft_soft_ce(student_logits: torch.Tensor, teacher_logits: torch.Tensor, mask: torch.Tensor,
                  global_normalization_factor: float | torch.Tensor | None = None, vocab_parallel_group: Group | None = None,
                  chunk_size: int | None = None) -> torch.Tensor:
    """Cross entropy of a draft against its teacher, minus the sum of q log p, over the tokens of a mask.

    Args:
        student_logits: [..., Vl], this rank's columns, as many on each rank, in rank order; f64, f32, bf16 or f16.
        teacher_logits: [..., Vl], of the same ids, detached.
        mask: [...], what each token counts.
        global_normalization_factor: what the sum is divided by; None: the sum of the mask. Either is 1 at least.
        vocab_parallel_group: the ranks that share the vocabulary; None: no others.
        chunk_size: has no effect, because nothing is of the size of the logits.

    Returns:
        [], f32, differentiable in student_logits.

    Raises:
        ValueError: a teacher that requires grad; shapes, dtypes, devices.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    _refuse_teacher('draft_soft_ce', student_logits, teacher_logits, mask)
    return _of_mask(student_logits, teacher_logits, mask, global_normalization_factor, vocab_parallel_group)


@eager
def draft_soft_ce_topk(student_logits: torch.Tensor, teacher_logits: torch.Tensor, mask: torch.Tensor, k: int,
                       global_normalization_factor: float | torch.Tensor | None = None, vocab_parallel_group: Group | None = None,
                       roll_shift: int = 0) -> torch.Tensor:
    """draft_soft_ce() over the union of each shard's k ids that are the teacher's likeliest, over which both are normalised.

    Args:
        student_logits: as in draft_soft_ce().
        teacher_logits: as in draft_soft_ce().
        mask: as in draft_soft_ce().
        k: ids of each rank's columns; more than Vl: all.
        global_normalization_factor: as in draft_soft_ce().
        vocab_parallel_group: as in draft_soft_ce().
        roll_shift: the teacher of position t is that of t + roll_shift of [B, S, ..], around its end, which the mask leaves out:
            of a depth of multi-token prediction. The k ids are rolled, not the logits.

    Returns:
        As draft_soft_ce().

    Raises:
        ValueError: as draft_soft_ce(); k below 1; a roll_shift of tensors without an axis of positions.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'draft_soft_ce_topk'
    _refuse_teacher(what, student_logits, teacher_logits, mask)
    if k < 1 or roll_shift and student_logits.dim() < 3:
        raise ArgumentError("%s: k is %s and roll_shift %s with student_logits %s, expected 1 or more, and [B, S, Vl] to roll" % (
            what, k, roll_shift, list(student_logits.shape)))
    best, ids = teacher_logits.topk(min(k, student_logits.shape[-1]), -1)  # columns that are the vocabulary of the softmax
    if roll_shift:
        best, ids = (t.roll(-roll_shift, 1) for t in (best, ids))
    return _of_mask(student_logits.gather(-1, ids), best, mask, global_normalization_factor, vocab_parallel_group)
