# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel losses under the names and with the arguments that PyTorch runtimes use: a module for each project.

They are colobridge.torch's functions. What holds for all of them, and how each differs from its original: docs/guides/rl.md.
Groups are torch process groups, DeviceMeshes of one dim, colobridge.Comms, or None."""
from .liger import CrossEntropyOutput, LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from .megatron import fused_vocab_parallel_cross_entropy, vocab_parallel_cross_entropy
from .nemo_rl import (
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    ChunkedDistributedLogprobWithSampling,
    DistributedCrossEntropy,
    DistributedLogprob,
    DistributedLogprobWithSampling,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences_nemo_rl,
    get_distillation_topk_logprobs_from_logits,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits)
from .nemo_rl_groups import (
    allgather_cp_sharded_tensor,
    cp_load_balanced_to_contiguous,
    cp_shift_next,
    distributed_vocab_topk,
    group_all_reduce_sum,
    group_all_reduce_sum_with_grad,
    vocab_parallel_argmax,
    vocab_parallel_full_log_softmax,
    vocab_parallel_gather_columns,
    vocab_parallel_log_softmax)
from .shared import set_tensor_parallel_group
from .skyrl import (
    FusedLinearChunkedDistributedLogprob,
    allgather_cp_sharded_packed_tensor,
    draft_soft_ce,
    draft_soft_ce_topk,
    from_parallel_hidden_to_entropy_packed_sequences,
    from_parallel_hidden_to_logprobs,
    from_parallel_hidden_to_logprobs_packed_sequences,
    from_parallel_logits_to_logprobs_packed_sequences,
    vocab_parallel_entropy,
    vocab_parallel_entropy_packed_sequences,
    vocab_parallel_entropy_weighted_sum)
from .transformers import fuse_lm_head
from .trl import ChunkedLogProbFunction, chunked_cross_entropy_loss
from .verl import linear_cross_entropy, vocab_parallel_log_probs_from_logits

__all__ = ['ChunkedDistributedEntropy', 'ChunkedDistributedGatherLogprob', 'ChunkedDistributedLogprob',
           'ChunkedDistributedLogprobWithSampling', 'ChunkedLogProbFunction', 'CrossEntropyOutput',
           'DistributedCrossEntropy', 'DistributedLogprob', 'DistributedLogprobWithSampling',
           'FusedLinearChunkedDistributedLogprob', 'LigerCrossEntropyLoss', 'LigerFusedLinearCrossEntropyLoss',
           'allgather_cp_sharded_packed_tensor', 'allgather_cp_sharded_tensor', 'chunked_cross_entropy_loss',
           'cp_load_balanced_to_contiguous', 'cp_shift_next', 'distributed_vocab_topk', 'draft_soft_ce',
           'draft_soft_ce_topk', 'from_parallel_hidden_to_entropy_packed_sequences', 'from_parallel_hidden_to_logprobs',
           'from_parallel_hidden_to_logprobs_packed_sequences', 'from_parallel_logits_to_logprobs',
           'from_parallel_logits_to_logprobs_packed_sequences',
           'from_parallel_logits_to_logprobs_packed_sequences_nemo_rl', 'fuse_lm_head',
           'fused_vocab_parallel_cross_entropy', 'get_distillation_topk_logprobs_from_logits',
           'get_logprobs_from_vocab_parallel_logits', 'get_next_token_logprobs_from_logits', 'group_all_reduce_sum',
           'group_all_reduce_sum_with_grad', 'linear_cross_entropy', 'set_tensor_parallel_group',
           'vocab_parallel_argmax', 'vocab_parallel_cross_entropy', 'vocab_parallel_entropy',
           'vocab_parallel_entropy_packed_sequences', 'vocab_parallel_entropy_weighted_sum',
           'vocab_parallel_full_log_softmax', 'vocab_parallel_gather_columns', 'vocab_parallel_log_probs_from_logits',
           'vocab_parallel_log_softmax']
