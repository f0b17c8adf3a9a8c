# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""NeMo-RL's nemo_rl.distributed.model_utils, of which SkyRL has some, too."""
from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from ..torch.calls import eager
from ..torch.losses import distill, logprob_at
from ..torch.ranks import comm_of
from ..torch.sampling import vocabulary
from ..torch.tensors import said
from ..torch.types import Group
from .collectives import Columns
from .nemo_rl_groups import allgather_cp_sharded_tensor, logits_at
from .packed import context_of, own_index
from .shared import entropy_of, f32, local, logp_of, packed_logp, sampled, sampled_evenly, shifted


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
        return logp_of(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, group, None,
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
        return logp_of(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group,
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
            return f32(torch.cat([logprob_at(vocab_parallel_logits, some, tp_group=tp_group, vocab=(start, vocab),
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
            return -f32(entropy_of(vocab_parallel_logits, tp_group, chunk_size, 'ChunkedDistributedEntropy'))


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
        return sampled_evenly(vocab_parallel_logits, target, tp_group, top_k, top_p, None, inference_only,
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
        return sampled_evenly(vocab_parallel_logits, target, tp_group, top_k, top_p, chunk_size, inference_only,
                              'ChunkedDistributedLogprobWithSampling')


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
    return shifted(what, vocab_parallel_logits, target, cp_group, lambda own: sampled(
        vocab_parallel_logits, own, vocab_start_index, vocab_end_index, tp_group, chunk_size, inference_only, what,
        sampling_params), target_is_pre_rolled)


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
    return packed_logp(what, vocab_parallel_logits, target, cu_seqlens_padded, unpacked_seqlen, cp_group,
                       None, None, lambda own: sampled(
                           vocab_parallel_logits, own, vocab_start_index, vocab_end_index, group, chunk_size,
                           inference_only, what, sampling_params), True, target_is_pre_rolled)


# ---- log-probabilities of whole batches ----

def get_logprobs_from_vocab_parallel_logits(vocab_parallel_logits: torch.Tensor, input_ids: torch.Tensor, seq_index: torch.Tensor | None = None,
                                            chunk_size: int | None = None, sampling_params: Any = None) -> torch.Tensor:
    """Log-probabilities of the next tokens, of logits that are a DTensor over a mesh with a dim "tp".

    Args:
        vocab_parallel_logits: [B, S, V], a DTensor whose last axis is sharded over "tp", and S over "cp", if input_ids is.
        input_ids: [B, S], global ids, which are shifted here; a plain tensor, or a DTensor with Shard(1) over a mesh dim "cp".
        seq_index: [S], with a "cp" of several ranks: the positions that these hold, rank after rank, as PyTorch's context_parallel()
            leaves it: each position once.
        chunk_size: tokens at a time; bounds workspace, and changes no bit. None: chosen.
        sampling_params: as in from_parallel_logits_to_logprobs().

    Returns:
        logp [B, S - 1], f32, in the order of positions, the same on all cp ranks, of which each takes its own part of the gradient.

    Raises:
        ValueError: no DTensor, a mesh without "tp"; a seq_index without input_ids over "cp", or none with them; shapes, dtypes, devices.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'get_logprobs_from_vocab_parallel_logits'
    mesh = getattr(vocab_parallel_logits, 'device_mesh', None)
    if mesh is None or 'tp' not in (mesh.mesh_dim_names or ()):
        raise ArgumentError("%s: vocab_parallel_logits are %s, expected a DTensor over a mesh with a dim \"tp\"" % (
            what, said(vocab_parallel_logits) if mesh is None else 'a DTensor over a mesh of dims %s' % (mesh.mesh_dim_names,)))
    logits, group = local(vocab_parallel_logits), mesh['tp'] if mesh.ndim > 1 else mesh
    vocab = vocab_parallel_logits.shape[-1]
    start = min(group.get_local_rank() * -(-vocab // group.size()), vocab)  # Shard() has even parts but for the last ones
    ids, context = local(input_ids), None
    given: Any = input_ids
    if hasattr(given, 'placements'):
        of = given.device_mesh
        for i, placement in enumerate(given.placements):
            name = (of.mesh_dim_names or ('',) * of.ndim)[i]
            if of.size(i) > 1 and (placement.is_shard(1) if name == 'cp' else placement.is_replicate()):
                context = of[name] if name == 'cp' and of.ndim > 1 else of if name == 'cp' else context
            elif of.size(i) > 1 and not (name != 'cp' and placement.is_shard(0)):
                raise ArgumentError("%s: input_ids are a DTensor with %r over the mesh dim '%s', expected Shard(1) over \"cp\", else Replicate() "
                                    "or Shard(0)" % (what, placement, name))
    if (seq_index is None) != (context is None):
        raise ArgumentError("%s: seq_index is %s and input_ids are %s, expected both or neither: the positions of tokens, and ids that are a "
                            "DTensor with Shard(1) over a mesh dim \"cp\" of several ranks" % (
                                what, 'None' if seq_index is None else 'given', said(ids)))
    if context is not None:
        return _of_context(logits, ids, seq_index, start, vocab, group, context, chunk_size, sampling_params)
    return _of_batch(logits, ids, start, vocab, group, chunk_size, sampling_params)


@eager
def _of_batch(logits: Any, ids: Any, start: int, vocab: int, group: Any, chunk: Any, params: Any) -> Any:
    what = 'get_logprobs_from_vocab_parallel_logits'
    return shifted(what, logits, ids, None, lambda own: sampled(
        logits, own, start, start + logits.shape[-1], group, chunk, not torch.is_grad_enabled(), what, params, vocab))


@eager
def _of_context(logits: Any, ids: Any, positions: Any, start: int, vocab: int, tp_group: Any, cp_group: Any, chunk: Any, params: Any) -> Any:
    """positions: of all tokens, cp rank after cp rank"""
    what = 'get_logprobs_from_vocab_parallel_logits'
    comm = comm_of(cp_group, logits.device, what + ': cp')
    each, count = ids.shape[-1], ids.shape[-1] * comm.size
    order = positions.to(device=ids.device, dtype=torch.int64)
    if order.shape != (count,) or ids.shape != logits.shape[:-1] or \
            not order.is_cuda and not torch.equal(order.sort()[0], torch.arange(count)):
        raise ArgumentError("%s: seq_index is %s, input_ids are %s and logits %s here on cp=%d, expected [%d] with each position once, and [B, S / cp] "
                            "and [B, S / cp, V / tp]" % (what, list(order.shape), list(ids.shape), list(logits.shape), comm.size, count))
    places = order.argsort()
    whole = Columns.apply(ids, comm)[:, places].roll(-1, 1)  # in the order of positions
    own = whole[:, order[comm.rank * each:(comm.rank + 1) * each]]
    logp = sampled(logits, own, start, start + logits.shape[-1], tp_group, chunk, not torch.is_grad_enabled(), what, params, vocab)
    return Columns.apply(logp, comm)[:, places][:, :-1]


def get_next_token_logprobs_from_logits(input_ids: torch.Tensor, next_token_logits: torch.Tensor, seq_index: torch.Tensor | None = None,
                                        vocab_parallel_rank: int | None = None, vocab_parallel_group: Group | None = None,
                                        context_parallel_group: Group | None = None, sampling_params: Any = None,
                                        chunk_size: int | None = None) -> torch.Tensor:
    """Log-probabilities of the next tokens of a dense batch, of logits as a whole, as shards, or as a DTensor.

    Args:
        input_ids: [B, S], global ids, which are shifted here.
        next_token_logits: [B, S', Vl] with a vocab_parallel_group, as from_parallel_logits_to_logprobs() has them; else a DTensor, as
            get_logprobs_from_vocab_parallel_logits() has it, or [B, S, V].
        seq_index: of a DTensor over "cp", as there.
        vocab_parallel_rank: this rank's number among those that share the vocabulary; shards are equal.
        vocab_parallel_group: the ranks that share the vocabulary; None: see next_token_logits.
        context_parallel_group: the context ranks, of shards; None: no others.
        sampling_params: as in from_parallel_logits_to_logprobs().
        chunk_size: tokens at a time; bounds workspace, and changes no bit. None: chosen.

    Returns:
        logp [B, S - 1], f32.

    Raises:
        ValueError: a group without vocab_parallel_rank; as the functions named.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    what = 'get_next_token_logprobs_from_logits'
    if vocab_parallel_group is None:
        if context_parallel_group is not None:
            raise ArgumentError("%s: context_parallel_group is given and vocab_parallel_group is None, expected both" % what)
        if hasattr(next_token_logits, 'placements'):
            return get_logprobs_from_vocab_parallel_logits(next_token_logits, input_ids, seq_index, chunk_size, sampling_params)
        return from_parallel_logits_to_logprobs(next_token_logits, input_ids, 0, next_token_logits.shape[-1], None, False, None, chunk_size,
                                                sampling_params)
    if vocab_parallel_rank is None:
        raise ArgumentError("%s: vocab_parallel_group is given and vocab_parallel_rank is None, expected this rank's number in it" % what)
    width = next_token_logits.shape[-1]
    return from_parallel_logits_to_logprobs(
        next_token_logits, input_ids, vocab_parallel_rank * width, (vocab_parallel_rank + 1) * width, vocab_parallel_group, False,
        context_parallel_group, chunk_size, sampling_params)[:, :input_ids.shape[1] - 1]


def get_distillation_topk_logprobs_from_logits(
        student_logits: torch.Tensor, teacher_topk_logits: torch.Tensor, teacher_topk_indices: torch.Tensor, zero_outside_topk: bool,
        calculate_entropy: bool, vocab_parallel_rank: int | None = None, vocab_parallel_group: Group | None = None,
        context_parallel_group: Group | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of a student and a teacher at the teacher's k likeliest ids, of all positions but the last.

    Args:
        student_logits: [B, S' / cp, Vl], zigzag over cp, S' >= S divisible by 2 cp; this rank's columns, as many on each rank, in
            rank order. Of a DTensor its local part.
        teacher_topk_logits: [B, S, k].
        teacher_topk_indices: [B, S, k], ids in [0, V), the same on all ranks.
        zero_outside_topk: the student's log-probabilities are those over the vocabulary; else over the k ids alone.
        calculate_entropy: with zero_outside_topk, also of all ids.
        vocab_parallel_rank: has no effect: the group says it.
        vocab_parallel_group: the ranks that share the vocabulary; None: no others.
        context_parallel_group: the context ranks; None: no others. Gradients are added over them.

    Returns:
        (the student's log-probabilities [B, S - 1, k], f32, with a gradient; the teacher's, over the k ids; the sum of p log p over the
        vocabulary [B, S - 1], which is minus the entropy, or None).

    Raises:
        ValueError: shapes, dtypes, devices.
        MismatchError: ranks disagree.
        RuntimeError: another rank failed, or a group was destroyed.
        TimeoutError: a rank did not come.
    """
    return _topk_logprobs(local(student_logits), teacher_topk_logits, teacher_topk_indices, zero_outside_topk, calculate_entropy,
                          vocab_parallel_group, context_parallel_group)


@eager
def _topk_logprobs(student_logits: Any, teacher_topk_logits: Any, teacher_topk_indices: Any, zero_outside_topk: bool, calculate_entropy: bool,
                   vocab_parallel_group: Any, context_parallel_group: Any) -> Any:
    what = 'get_distillation_topk_logprobs_from_logits'
    ids, device = teacher_topk_indices.long(), student_logits.device
    cp, rank, _ = context_of(context_parallel_group, device)
    count, length = student_logits.shape[1] * cp, ids.shape[1]
    if ids.shape != teacher_topk_logits.shape or ids.dim() != 3 or count < length or cp > 1 and count % (2 * cp):
        raise ArgumentError("%s: student_logits are %s, teacher_topk_logits %s and teacher_topk_indices %s on cp=%d, expected [B, S' / cp, Vl], "
                            "[B, S, k] and [B, S, k], S' >= S divisible by 2 cp" % (
                                what, list(student_logits.shape), list(teacher_topk_logits.shape), list(ids.shape), cp))
    ids = torch.nn.functional.pad(ids, (0, 0, 0, count - length))
    if cp > 1:
        ids = ids[:, own_index(torch.tensor([0, count], device=device), cp, rank, count)]
    found: list[Any] = [None, None]
    if zero_outside_topk:
        found[0] = f32(torch.cat([logprob_at(student_logits, some, tp_group=vocab_parallel_group) for some in ids.split(256, -1)], -1))
        if calculate_entropy:
            found[1] = -f32(entropy_of(student_logits, vocab_parallel_group, None, what))
    else:
        found[0] = torch.log_softmax(logits_at(what + ': vocab_parallel_group', student_logits, ids, vocab_parallel_group), -1)
    logp, sums = (None if t is None else allgather_cp_sharded_tensor(t, context_parallel_group)[:, :length - 1] for t in found)
    assert logp is not None
    return logp, torch.log_softmax(f32(teacher_topk_logits), -1)[:, :-1], sums


class DistributedCrossEntropy:
    """Cross entropy against a teacher whose logits are sharded like the student's."""

    @staticmethod
    @eager
    def apply(student_logits: torch.Tensor, target_logits: torch.Tensor, group: Group | None, inference_only: bool = False) -> torch.Tensor:
        """Minus the sum of softmax(target) log softmax(student).

        Args:
            student_logits: [..., Vl], this rank's columns, as many on each rank, in rank order; f64, f32, bf16 or f16.
            target_logits: [..., Vl], of the same ids; no gradient.
            group: the ranks that share the vocabulary; None: no others.
            inference_only: nothing is kept for a backward.

        Returns:
            [...], f32, differentiable in student_logits.

        Raises:
            ValueError: shapes, dtypes, devices.
            MismatchError: ranks disagree.
            RuntimeError: another rank failed, or a group was destroyed.
            TimeoutError: a rank did not come.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            return f32(distill(student_logits, target_logits.detach(), tp_group=group).ce)
