# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel losses under the names and with the arguments that PyTorch runtimes use: a module for each project.

They are colobridge.torch's functions. What holds for all of them, and how each differs from its original: docs/guides/rl.md.
Groups are torch process groups, DeviceMeshes of one dim, colobridge.Comms, or None."""
from .megatron import vocab_parallel_cross_entropy
from .nemo_rl import (
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    ChunkedDistributedLogprobWithSampling,
    DistributedLogprob,
    DistributedLogprobWithSampling,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences_nemo_rl)
from .shared import set_tensor_parallel_group
from .skyrl import (
    FusedLinearChunkedDistributedLogprob,
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
           'ChunkedDistributedLogprobWithSampling', 'ChunkedLogProbFunction', 'DistributedLogprob',
           'DistributedLogprobWithSampling', 'FusedLinearChunkedDistributedLogprob', 'chunked_cross_entropy_loss',
           'from_parallel_hidden_to_entropy_packed_sequences', 'from_parallel_hidden_to_logprobs',
           'from_parallel_hidden_to_logprobs_packed_sequences', 'from_parallel_logits_to_logprobs',
           'from_parallel_logits_to_logprobs_packed_sequences',
           'from_parallel_logits_to_logprobs_packed_sequences_nemo_rl', 'fuse_lm_head', 'linear_cross_entropy',
           'set_tensor_parallel_group', 'vocab_parallel_cross_entropy', 'vocab_parallel_entropy',
           'vocab_parallel_entropy_packed_sequences', 'vocab_parallel_entropy_weighted_sum',
           'vocab_parallel_log_probs_from_logits']
