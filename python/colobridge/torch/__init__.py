# SPDX-License-Identifier: Apache-2.0
"""PyTorch: bridge, shards and losses as autograd functions on the current stream. docs/guides/pytorch.md.

Tensors live on the host or on CUDA devices, and are borrowed: neither inputs nor gradients are copied, unless a function
says so.
"""
from .bridge import Bridge, PackedBridge, RaggedBridge, bridge
from .chunks import over_chunks
from .cross_entropy import cross_entropy, linear_cross_entropy
from .halo import halo
from .head import Head
from .linear import linear_logprob, linear_nll
from .linear_distill import linear_distill, reshard_head
from .losses import Distilled, TopK, Weighted, distill, entropy, logprob_at, topk_distill, topk_logprob, weighted_sum
from .logprob import logprob
from .modules import CrossEntropyLoss, LinearCrossEntropyLoss
from .nll import GroupedLoss, Loss, nll
from .partition import next_token, shard, unshard
from .ranks import comm_of, comm_of_ranks, group_ranks, shutdown
from .relayout import relayout
from .sequence import Sequence
from .support import Support
from .ticket import Ticket
from .tower import EncoderParallel, plan_towers
from .tower_plan import TowerPlan
from .types import Group

__all__ = ['Bridge', 'CrossEntropyLoss', 'Distilled', 'EncoderParallel', 'Group', 'GroupedLoss', 'Head', 'LinearCrossEntropyLoss', 'Loss', 'PackedBridge', 'RaggedBridge', 'Sequence', 'Support', 'Ticket', 'TopK', 'TowerPlan', 'Weighted', 'bridge', 'comm_of', 'comm_of_ranks',
           'cross_entropy', 'distill', 'entropy', 'group_ranks', 'halo', 'linear_cross_entropy', 'linear_distill', 'linear_logprob', 'linear_nll', 'logprob', 'logprob_at',
           'next_token', 'nll', 'over_chunks', 'plan_towers', 'relayout', 'reshard_head', 'shard', 'shutdown', 'topk_distill', 'topk_logprob', 'unshard', 'weighted_sum']
