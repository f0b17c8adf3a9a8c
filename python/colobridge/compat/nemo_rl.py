# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""NeMo-RL's nemo_rl.distributed.model_utils, of which SkyRL has some, too."""
from __future__ import annotations

from typing import Any

import torch

from ..torch.calls import eager
from ..torch.losses import logprob_at
from ..torch.sampling import vocabulary
from ..torch.types import Group
from .shared import entropy_of, f32, logp_of, packed_logp, sampled, sampled_evenly, shifted


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
